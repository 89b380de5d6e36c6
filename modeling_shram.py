"""SHRAM decoder-only language model: norm, MLP, decoder layer, base model, and its heads.

Shapes: B rows, T tokens in this call, N tokens so far, D hidden, H local heads, L routed heads, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

# every sibling is named here: for a local folder, loaders copy only what this file imports
from .attention_shram import AttentionStats, ShramHybridLayer, TokenRows, balance
from .cache_parts_shram import MoSRAHCache  # noqa: F401
from .cache_shram import ShramCache
from .configuration_shram import ShramConfig
from .device_plan_shram import find_kernels  # noqa: F401
from .plans_shram import apply_linear, by_row_blocks, wide_dtype

logger = logging.get_logger(__name__)

# Version differences of Transformers, all of them:
# - 5.24 renamed the cache argument and output field (`past_key_values` before);
CACHE_KEY = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# - up to 5.3 `generate` passes `cache_position`, which nothing here needs;
IGNORED_KEYWORDS = {"cache_position"}
# - 5.3.0 forgets the tied weights of remote code: `ShramPreTrainedModel.mark_tied_weights_as_initialized`;
# - length queries of cache layers were renamed in 5.13: `ShramLayerCache.get_max_length`, `get_max_cache_shape`.


# ---------------------------------------------------------------------------------------------------- borders


def refuse_unknown(keywords: dict) -> None:
    unknown = sorted(keywords.keys() - IGNORED_KEYWORDS)
    if unknown:
        raise TypeError(f"SHRAM's forward got unexpected keyword arguments: {', '.join(unknown)}")


def pick_cache(cache, past_key_values):
    """The one cache among its two names.

    Raises:
        ValueError: two different caches were passed.
        TypeError: it is not a ShramCache.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("Pass the cache once, as `cache` or as `past_key_values`, not both.")
    cache = past_key_values if cache is None else cache
    if cache is not None and not getattr(cache, "is_shram_cache", False):
        raise TypeError(f"SHRAM needs a ShramCache, got {type(cache).__name__}.")
    return cache


def check_integers(name: str, values, shape: str, num_dims: int) -> None:
    if not torch.is_tensor(values):
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {type(values).__name__}")
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    if values.ndim != num_dims or not whole:
        raise ValueError(f"{name} must be integers of shape {shape}, got {values.dtype} of {tuple(values.shape)}")


def check_range(name: str, values: Tensor, low: int, high: int) -> None:
    """Raise for values outside [low, high), on a CPU: on an accelerator the look would stall the queue."""
    if values.device.type != "cpu" or torch.compiler.is_compiling() or not values.numel():
        return
    smallest, largest = (int(x) for x in torch.aminmax(values))
    if smallest < low or largest >= high:
        raise ValueError(f"{name} must lie in [{low}, {high}), got {smallest if smallest < low else largest}")


def check_inputs(input_ids, inputs_embeds, config) -> tuple[int, int, torch.device]:
    """Rows, tokens and device of a call's input, or a ValueError that says what is wrong with it."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
    if input_ids is None:
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            shape = tuple(inputs_embeds.shape)
            raise ValueError(f"inputs_embeds must have shape (rows, tokens, {config.hidden_size}), got {shape}")
        source = inputs_embeds
    else:
        check_integers("input_ids", input_ids, "(rows, tokens)", 2)
        source = input_ids
    num_rows, num_tokens = source.shape[:2]
    if num_rows == 0 or num_tokens == 0:
        raise ValueError(f"The input must hold at least one row and one token, got shape {tuple(source.shape)}")
    if input_ids is not None:
        check_range("input_ids", input_ids, 0, config.vocab_size)
    return num_rows, num_tokens, source.device


def check_cache_room(cache, num_rows: int, num_tokens: int, config) -> None:
    num_past = 0 if cache is None else cache.get_seq_length()
    if num_past and cache.inference_sequence_length != config.inference_sequence_length:
        raise ValueError(
            f"The cache holds keys for inference_sequence_length={cache.inference_sequence_length}, which is now "
            f"{config.inference_sequence_length}: begin with a new cache"
        )
    if num_past and cache.batch_size != num_rows:
        raise ValueError(f"The cache holds batch_size={cache.batch_size} rows, the input has {num_rows}")
    if num_past + num_tokens > config.inference_sequence_length:
        raise ValueError(
            f"The cache serves inference_sequence_length={config.inference_sequence_length} tokens, but this call "
            f"would make {num_past + num_tokens}; see ShramConfig.set_inference_context"
        )


def real_tokens(attention_mask: Tensor | None, num_rows: int, num_tokens: int, num_past: int) -> Tensor | None:
    """(B, T) bool of this call's tokens, or None when all are real."""
    if attention_mask is None:
        return None
    widths = (num_tokens, num_past + num_tokens)
    if not torch.is_tensor(attention_mask) or attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape) if torch.is_tensor(attention_mask) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must have shape (rows, tokens): SHRAM builds its own masks; got {shape}")
    if attention_mask.shape[0] != num_rows or attention_mask.shape[1] not in widths:
        wanted = " or ".join(f"({num_rows}, {width})" for width in widths)
        raise ValueError(
            f"attention_mask must cover the new tokens, or past and new tokens: shape {wanted}, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - num_tokens :]
    if mask.is_floating_point() and not torch.compiler.is_compiling() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("attention_mask must hold 1 for real tokens and 0 for padding: it is not added to scores")
    mask = mask.bool()
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


# ---------------------------------------------------------------------------------------------------- layout


class Layout(NamedTuple):
    """How the layers' left-justified rows relate to the caller's: flat indices both ways, None where they agree."""

    rows: TokenRows
    take: Tensor | None
    give_back: Tensor | None
    is_packed: bool = False

    def justify(self, x: Tensor) -> Tensor:
        return x if self.take is None else x.flatten(0, 1)[self.take]

    def restore(self, x: Tensor) -> Tensor:
        """Bring (rows', tokens', ...) of the layers back to the caller's (B, T, ...)."""
        return x if self.give_back is None else x.flatten(0, 1)[self.give_back]

    def restore_maps(self, maps: Tensor) -> Tensor:
        """The same for attention maps (rows', heads, tokens', N), whose keys are the caller's already."""
        return self.restore(maps.transpose(1, 2)).transpose(1, 2)


def lay_out(mask, position_ids, num_rows, num_tokens, device, cache=None) -> Layout:
    """Left-justify the real tokens of every row; give every packed document (positions that restart) its own row.

    Raises:
        ValueError: `position_ids` have a wrong shape, or restart while a cache is in use.
    """
    num_past = 0 if cache is None else cache.get_seq_length()
    index = torch.arange(num_past, num_past + num_tokens, device=device).expand(num_rows, -1)
    may_restart = position_ids is not None and num_tokens > 1
    if position_ids is None:
        position_ids = running_count(mask, index, cache, num_past)
    else:
        check_integers("position_ids", position_ids, "(rows, tokens)", 2)
        check_range("position_ids", position_ids, 0, 2**31)
    if position_ids.shape[0] not in (1, num_rows) or position_ids.shape[1] != num_tokens:
        raise ValueError(f"position_ids must have shape ({num_rows}, {num_tokens}), got {tuple(position_ids.shape)}")
    positions = position_ids.to(device).expand(num_rows, -1)
    take = give_back = None
    if mask is not None:
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        mask, positions, index = mask.gather(1, order), positions.gather(1, order), index.gather(1, order)
        offsets = torch.arange(num_rows, device=device)[:, None] * num_tokens
        take, give_back = order + offsets, order.argsort(dim=1) + offsets
    layout = Layout(TokenRows(mask, positions, index, num_past + num_tokens), take, give_back)
    if not may_restart:
        return layout
    restart = positions[:, 1:] <= positions[:, :-1]
    restart = restart if mask is None else restart & mask[:, 1:]
    if cache is not None and num_past:
        first = positions[:, 0] < cache.num_real_tokens.to(device)
        restart = restart | (first if mask is None else first & mask[:, 0])[:, None]
    if torch.compiler.is_compiling():
        torch._assert_async(~restart.any(), "position_ids restart inside a row (packed documents), do not compile")
        return layout
    if not bool(restart.any()):
        return layout
    if cache is not None:
        raise ValueError("position_ids restart inside a row (packed documents), which a cache cannot serve")
    return split_documents(layout, F.pad(restart, (1, 0)))


def running_count(mask, index, cache, num_past) -> Tensor:
    """Default positions: the count of real tokens before each one, continued over the cache."""
    before = cache.num_real_tokens.to(index.device)[:, None] if num_past else 0
    count = index - num_past if mask is None else (mask.cumsum(dim=1) - 1).clamp(min=0)
    return count + before


def split_documents(layout: Layout, restart: Tensor) -> Layout:
    """Move every document of a packed row to a row of its own."""
    rows, device = layout.rows, restart.device
    num_rows, num_tokens = restart.shape
    mask = torch.ones_like(restart) if rows.mask is None else rows.mask
    document = restart.cumsum(dim=1) + torch.arange(num_rows, device=device)[:, None] * num_tokens
    _, row, lengths = document[mask].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(row), device=device) - (lengths.cumsum(0) - lengths)[row]
    place = row * int(lengths.max()) + rank
    source = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64, device=device)
    source.view(-1)[place] = mask.flatten().nonzero().flatten()
    new_mask = torch.zeros_like(source, dtype=torch.bool)
    new_mask.view(-1)[place] = True
    back = torch.zeros_like(document)
    back[mask] = place
    new_rows = TokenRows(new_mask, rows.positions.flatten()[source], rows.index.flatten()[source], rows.num_keys)
    take = source if layout.take is None else layout.take.flatten()[source]
    give_back = back if layout.give_back is None else back.flatten()[layout.give_back]
    return Layout(new_rows, take, give_back, is_packed=True)


# ---------------------------------------------------------------------------------------------------- layers


class ShramRMSNorm(nn.RMSNorm):
    """The library's, by blocks of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return by_row_blocks(super().forward, x)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; the backward pass computes the silu anew instead of keeping it."""

    def product(gate, up):
        return F.silu(gate) * up

    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return product(gate, up)
    return checkpoint(product, gate, up, use_reentrant=False, preserve_rng_state=False)


class ShramMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_linear(x, self.gate_proj, self.up_proj)
        return apply_linear(gated(gate, up), self.down_proj)[0]


class ShramDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = ShramRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ShramHybridLayer(config)
        self.post_attention_layernorm = ShramRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = ShramMLP(config)

    def forward(self, hidden_states: Tensor, tokens: TokenRows, layer_cache=None, output_attentions: bool = False):
        attended, stats = self.self_attn(self.input_layernorm(hidden_states), tokens, layer_cache, output_attentions)
        rows = hidden_states, attended
        if torch.is_grad_enabled():  # then blocks save no memory here: autograd keeps them
            hidden_states = self.finish(*rows)
        else:
            hidden_states = by_row_blocks(self.finish, *rows, inside=(self.post_attention_layernorm, self.mlp))
        return hidden_states, *stats  # flat: reentrant checkpointing sees no tensor inside another tuple

    def finish(self, hidden_states: Tensor, attended: Tensor) -> Tensor:
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + by_row_blocks(self.mlp, normed, inside=(self.mlp,))


# ---------------------------------------------------------------------------------------------------- model


@dataclass
class ShramModelOutputWithPast(BaseModelOutputWithPast):
    """Standard fields, and: load_balance_loss, max_vio, scalars; on request router_logits, a (B, T, L) per layer, and
    routed_attentions, a (B, L, T, N) per layer beside `attentions`, the local path's (B, H, T, N)."""

    load_balance_loss: Tensor | None = None
    max_vio: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None
    routed_attentions: tuple[Tensor, ...] | None = None


@dataclass
class ShramCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Standard fields, and those of `ShramModelOutputWithPast`."""

    load_balance_loss: Tensor | None = None
    max_vio: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None
    routed_attentions: tuple[Tensor, ...] | None = None


class ShramPreTrainedModel(PreTrainedModel):
    config_class = ShramConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ShramDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache", "layer_cache"]
    _keep_in_fp32_modules_strict = ["router"]
    _supports_sdpa = True
    _supports_context_parallel = False

    def __init__(self, config, *args, **kwargs):
        config.check_rules()  # again: `from_pretrained` sets overriding keywords past the constructor
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        # only through nn.init's attributes: the library swaps these for versions that spare loaded weights
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("bias", "expert_bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:  # norms
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    def mark_tied_weights_as_initialized(self, *args, **kwargs) -> None:
        """Flag tied parameters as loaded; the library's own body of 5.3.0 leaves them on the meta device."""
        for name in self.all_tied_weights_keys:
            self.get_parameter(name)._is_hf_initialized = True  # pyrefly: ignore[missing-attribute]

    def new_cache(self, batch_size=None, **kwargs) -> ShramCache:
        """A `ShramCache` of this model; keywords as its constructor's."""
        # offloaded weights lie on the meta device: then the cache follows its first write
        device = None if self.device.type == "meta" else self.device
        return ShramCache(self.config, batch_size, device, dtype=self.dtype, **kwargs)

    def predictor_workspace(self, cache, *, source_layers, current_tokens: int, history_tokens: int | None = None):
        """Scratch layers over `cache` in which a Predictor's steps write; see `rollout_shram.PredictorWorkspace`."""
        # here, not above: nobody who only loads the model needs it, yet loading and saving must carry the file
        from .rollout_shram import PredictorWorkspace

        return PredictorWorkspace(
            pick_cache(cache, None),
            source_layers=source_layers,
            current_tokens=current_tokens,
            history_tokens=history_tokens,
        )


class ShramModel(ShramPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ShramDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = ShramRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        cache=None,
        **kwargs,
    ) -> ShramModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids, inputs_embeds: (B, T) or (B, T, D), exactly one of them.
            attention_mask: (B, T) or (B, past + T), 1 for real tokens, which may lie anywhere; None: all are real.
            position_ids: (B, T); None counts real tokens. Where they restart inside a row, a new document begins that
                sees nothing of the one before; such rows are not cached.
            cache, past_key_values: a `ShramCache`, under either name.
            use_cache: None follows the config, but never makes a cache in training.

        Raises:
            ValueError: an argument breaks its rule, named with its value; the cache is unchanged.
            TypeError: unknown keyword, or a cache that is not a `ShramCache`.
        """
        refuse_unknown(kwargs)
        output_attentions, output_hidden_states = self.output_flags(output_attentions, output_hidden_states)
        num_rows, num_tokens, device = check_inputs(input_ids, inputs_embeds, self.config)
        caching = self.may_cache(use_cache, cache := pick_cache(cache, past_key_values))
        cache = cache if caching else None
        if caching:
            check_cache_room(cache, num_rows, num_tokens, self.config)
        num_past = 0 if cache is None else cache.get_seq_length()
        mask = real_tokens(attention_mask, num_rows, num_tokens, num_past)
        mask = None if mask is None else mask.to(device)
        layout = lay_out(mask, position_ids, num_rows, num_tokens, device, cache)
        if cache is None and caching and not layout.is_packed:
            cache = self.new_cache()
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = layout.justify(hidden_states)
        rows = layout.rows.with_rotary(self.config, hidden_states.dtype)
        undo = (lambda: None) if cache is None else partial(cache.restore, cache.snapshot())
        try:
            hidden_states, all_hidden, stats = self.run_layers(
                hidden_states, rows, cache, output_attentions, output_hidden_states
            )
        except BaseException:
            undo()
            raise
        hidden_states = layout.restore(self.norm(hidden_states))
        load_balance_loss, max_vio = balance(stats, rows.mask)
        local_maps = routed_maps = None
        if output_attentions:
            local_maps = tuple(layout.restore_maps(s.local_attentions) for s in stats)
            routed_maps = tuple(layout.restore_maps(s.routed_attentions) for s in stats)
        return ShramModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=(*(layout.restore(h) for h in all_hidden), hidden_states) if output_hidden_states else None,
            attentions=local_maps,
            load_balance_loss=load_balance_loss,
            max_vio=max_vio,
            router_logits=tuple(layout.restore(s.router_logits) for s in stats) if output_router_logits else None,
            routed_attentions=routed_maps,
            **{CACHE_KEY: cache},
        )

    def run_layers(self, hidden_states, rows: TokenRows, cache, output_attentions, output_hidden_states):
        """Hidden states after the last layer, those before each layer if asked for, and each layer's stats."""
        all_hidden, stats = [], []
        for i, layer in zip(range(self.config.num_hidden_layers), self.layers, strict=False):
            if output_hidden_states:
                all_hidden.append(hidden_states)
            layer_cache = None if cache is None else cache.layers[i]
            hidden_states, *layer_stats = layer(
                hidden_states, tokens=rows, layer_cache=layer_cache, output_attentions=output_attentions
            )
            stats.append(AttentionStats(*layer_stats))
        return hidden_states, all_hidden, stats

    def output_flags(self, output_attentions, output_hidden_states) -> tuple[bool, bool]:
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError(
                'output_attentions needs attn_implementation="eager", '
                f"got attn_implementation={self.config._attn_implementation!r}"
            )
        if output_attentions and torch.compiler.is_compiling():
            raise ValueError("output_attentions is not available in a compiled model")
        return bool(output_attentions), bool(output_hidden_states)

    def may_cache(self, use_cache: bool | None, cache) -> bool:
        """Whether this call writes a cache: the caller's, or, outside training, a new one."""
        # with checkpointing the backward pass runs the layers again and would write twice
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and (use_cache or cache is not None):
            logger.warning_once("use_cache=True is incompatible with gradient checkpointing: nothing is cached.")
        if use_cache is False or checkpointing:
            if cache is not None and cache.get_seq_length():
                reason = "use_cache=False" if use_cache is False else "gradient checkpointing"
                raise ValueError(f"{reason} would ignore the {cache.get_seq_length()} tokens of the cache passed")
            return False
        wanted = self.config.use_cache if use_cache is None else use_cache
        return cache is not None or (wanted and not self.training)


def check_head_arguments(source, labels, logits_to_keep, config) -> None:
    """Refuse what would fail only behind the layers, when a cache has been written."""
    if labels is not None:
        check_integers("labels", labels, "(rows, tokens)", 2)
        if torch.is_tensor(source) and labels.shape != source.shape[:2]:
            raise ValueError(f"labels must have shape {tuple(source.shape[:2])}, got {tuple(labels.shape)}")
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            check_range("labels", labels[labels != -100], 0, config.vocab_size)
    if torch.is_tensor(logits_to_keep):
        check_integers("logits_to_keep", logits_to_keep, "(kept,)", 1)
        if torch.is_tensor(source) and source.ndim > 1:
            check_range("logits_to_keep", logits_to_keep, -source.shape[1], source.shape[1])
    elif logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0, got {logits_to_keep}")


def causal_lm_loss(logits: Tensor, labels: Tensor, num_items_in_batch=None) -> tuple[Tensor, Tensor | float]:
    """Next-token cross-entropy, labels shifted here, and the share of the batch's labels that this call holds.

    Args:
        logits: (B, T, V). labels: (B, T), -100 where nothing is to be predicted.
        num_items_in_batch: labels of the whole batch when this call is one of its parts; None: just these.
    """
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device, torch.int64)
    total = F.cross_entropy(logits.to(wide_dtype(logits.dtype)), labels, reduction="sum")
    num_labels = (labels != -100).sum()
    num_items = num_labels if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=logits.device)
    num_items = num_items.clamp(min=1)  # nothing to predict costs nothing
    return total / num_items, num_labels / num_items


class ShramForCausalLM(ShramPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True

    def __init__(self, config):
        super().__init__(config)
        self.model = ShramModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cache=None,
        **kwargs,
    ) -> ShramCausalLMOutputWithPast:
        """Run the model; arguments as `ShramModel.forward`, and:

        Args:
            labels: (B, T), shifted inside; -100 is not predicted. In training the loss adds
                `load_balance_coef * load_balance_loss`; in eval it is the cross-entropy alone.
            logits_to_keep: how many last tokens get logits (0: all), or an index tensor of tokens.
            num_items_in_batch: labels in the whole batch, when gradients of several calls are accumulated.
        """
        check_head_arguments(input_ids if inputs_embeds is None else inputs_embeds, labels, logits_to_keep, self.config)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            cache=cache,
            return_dict=True,
            **kwargs,
        )
        kept = logits_to_keep
        if labels is not None or isinstance(kept, int):
            kept = slice(-kept, None) if labels is None and kept else slice(None)
        (logits,), loss = apply_linear(out.last_hidden_state[:, kept], self.lm_head), None
        if labels is not None:
            loss, share = causal_lm_loss(logits, labels, num_items_in_batch)
            if self.training:
                loss = loss + self.config.load_balance_coef * share * out.load_balance_loss
        return ShramCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            load_balance_loss=out.load_balance_loss,
            max_vio=out.max_vio,
            router_logits=out.router_logits,
            routed_attentions=out.routed_attentions,
            **{CACHE_KEY: getattr(out, CACHE_KEY)},
        )

    def load_predictor(self, path=None):
        """The Predictor that drafts for this model; see `predictor_shram.ShramPredictor.load`."""
        from .predictor_shram import ShramPredictor

        return ShramPredictor.load(self, path)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Put a `ShramCache` where the version's `generate` looks for it, or refuse what cannot work."""
        cache = pick_cache(model_kwargs.pop("cache", None), model_kwargs.pop("past_key_values", None))
        implementation = generation_config.cache_implementation
        longest = self.config.inference_sequence_length
        is_caching = cache is not None or generation_config.use_cache is not False
        if is_caching and max_cache_length > longest:
            raise ValueError(
                f"generate would feed {max_cache_length} tokens, more than inference_sequence_length={longest}; "
                "shorten max_new_tokens or the prompt, or call config.set_inference_context"
            )
        if cache is not None:
            if implementation is not None:
                raise ValueError("Pass either cache_implementation or a ShramCache, not both.")
            if generation_config.prefill_chunk_size is not None and cache.get_seq_length() > 0:
                raise ValueError("prefill_chunk_size cannot be combined with a ShramCache that already holds tokens.")
            cache._is_user_defined = True
        elif generation_config.use_cache is False:
            return
        elif implementation in (None, "dynamic", "dynamic_full"):
            cache = self.new_cache()
        elif implementation == "static":
            num_rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            cache = self.new_cache(num_rows, growing=False, max_length=max_cache_length)
        else:
            raise ValueError(
                f"cache_implementation={implementation!r} cannot hold routed heads: SHRAM generates with its own "
                "ShramCache; use None, 'dynamic' or 'static'"
            )
        if generation_mode == "assisted_generation" or getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[CACHE_KEY] = cache

    @staticmethod
    def create_masks_for_generate(config=None, inputs_embeds=None, attention_mask=None, *args, **kwargs):
        """Hand the 2-D mask through: the library would make it 4-D for a compileable cache."""
        return attention_mask

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError("SHRAM does not support continuous batching: its ShramCache is not a paged cache.")


class ShramForSequenceClassification(GenericForSequenceClassification, ShramPreTrainedModel):
    """The decoder with the library's sequence-classification head on the last token."""

    accepts_loss_kwargs = False

    def __init__(self, config):
        ShramPreTrainedModel.__init__(self, config)  # the generic one would load the base model by AutoModel
        self.num_labels = config.num_labels
        self.model = ShramModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class ShramForTokenClassification(GenericForTokenClassification, ShramPreTrainedModel):
    """The decoder with the library's token-classification head."""

    accepts_loss_kwargs = False

    def __init__(self, config):
        ShramPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = ShramModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.0)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


ShramModel.register_for_auto_class("AutoModel")
ShramForCausalLM.register_for_auto_class("AutoModelForCausalLM")
ShramForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
ShramForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "CACHE_KEY",
    "ShramCache",
    "ShramConfig",
    "ShramForCausalLM",
    "ShramForSequenceClassification",
    "ShramForTokenClassification",
    "ShramModel",
    "ShramPreTrainedModel",
]
