"""Attention of SHRAM: rotary positions, the local path, the router, the routed path (MoSRAH) and the sum of both.

Shapes: B rows, T tokens in this call, N tokens so far, D hidden, H local heads, L routed heads, K heads chosen per
token, A head width, W window, P entries and G groups (see `plans_shram`). Tokens arrive left-justified: in every row
the real ones first, in order.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .device_plan_shram import (
    EntryOrder,
    attend_entries,
    combine_entries,
    device_plan_available,
    project_entries,
    sort_entries,
    store_entries,
)
from .plans_shram import (
    EntryAngles,
    Packing,
    apply_linear,
    apply_rotary,
    attend_few,
    attend_padded,
    attend_routed,
    attend_static,
    autocast,
    chosen_first,
    combine,
    combine_few,
    combine_static,
    fits_few,
    is_watched,
    pack,
    project,
    project_few,
    rotate,
    softmax_attention,
    wide_dtype,
)

# ---------------------------------------------------------------------------------------------------- positions


def rotary_frequencies(head_dim: int, base: float) -> tuple[float, ...]:
    """Angle per position of each rotary pair, base^(-2i/A), in radians."""
    return tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2))


def yarn_frequencies(config) -> tuple[float, ...]:
    """Rotary frequencies of the routed path, stretched by YaRN (arXiv 2309.00071, section 3.2)."""
    frequencies, scale = rotary_frequencies(config.head_dim, config.mosrah_rope_theta), config.yarn_scale
    length, alpha, beta = config.training_sequence_length, config.yarn_alpha, config.yarn_beta
    num_turns = [length * theta / (2 * math.pi) for theta in frequencies]
    keeps = [min(max((turns - alpha) / (beta - alpha), 0.0), 1.0) for turns in num_turns]
    return tuple((1 - keep) * theta / scale + keep * theta for theta, keep in zip(frequencies, keeps, strict=True))


def yarn_logit_factor(config) -> float:
    """Factor of the routed path's attention logits under YaRN (arXiv 2309.00071, section 3.4)."""
    return (0.1 * math.log(config.yarn_scale) + 1) ** 2


def both_ways(frequencies: tuple[float, ...]) -> tuple[float, ...]:
    """The A frequencies of `apply_rotary`: the first of each pair takes the sine with the opposite sign."""
    return (*(-theta for theta in frequencies), *frequencies)


class RotaryConstants(NamedTuple):
    """frequencies: of both paths, A each, as `apply_rotary` takes them. routed_scale: of the routed path's logits."""

    frequencies: tuple[float, ...]
    routed_scale: float

    @classmethod
    def of(cls, config) -> "RotaryConstants":
        local = rotary_frequencies(config.head_dim, config.local_rope_theta)
        frequencies = both_ways(local) + both_ways(yarn_frequencies(config))
        return cls(frequencies, yarn_logit_factor(config) / math.sqrt(config.head_dim))


ROTARY_FIELDS = (
    *("head_dim", "local_rope_theta", "mosrah_rope_theta", "yarn_alpha", "yarn_beta"),
    *("training_sequence_length", "inference_sequence_length"),
)
KEPT_CONSTANTS: dict[tuple, RotaryConstants] = {}


def rotary_constants(config) -> RotaryConstants:
    """`RotaryConstants.of`, kept between calls."""
    if torch.compiler.is_compiling():
        return RotaryConstants.of(config)
    values = vars(config)  # an attribute of a configuration costs a microsecond
    key = tuple(values[field] for field in ROTARY_FIELDS)
    constants = KEPT_CONSTANTS.get(key)
    if constants is None:
        if len(KEPT_CONSTANTS) >= 64:
            KEPT_CONSTANTS.clear()
        constants = KEPT_CONSTANTS[key] = RotaryConstants.of(config)
    return constants


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., A) of positions (...), computed in wide precision, returned in `dtype`."""
    angles = positions[..., None].to(frequencies.dtype) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass
class TokenRows:
    """What the layers know about the tokens of a call, left-justified.

    mask: (B, T) bool, or None when every token is real. positions: (B, T) int64, for rotary embedding.
    index: (B, T) int64, place of the token in its row as the caller counts, padding included.
    num_keys: tokens of a row so far, N, padding included.
    local_rotary, routed_rotary: cosines and sines of the positions, (B, 1, T, A) and (B, T, 1, 1, A), made once for
    all layers, as are routed_frequencies, YaRN's, and routed_scale, its factor of the logits over sqrt(A).
    is_eager: whether the configuration asks for plain attention.
    """

    mask: Tensor | None
    positions: Tensor
    index: Tensor
    num_keys: int
    local_rotary: tuple[Tensor, ...] = ()
    routed_rotary: tuple[Tensor, ...] = ()
    routed_frequencies: Any = None
    routed_scale: float = 1.0
    is_eager: bool = False

    def with_rotary(self, config, dtype: torch.dtype) -> "TokenRows":
        constants = rotary_constants(config)
        # no buffer, so that it survives meta initialisation and `.to(bfloat16)`; once a call, since a GPU's host waits
        frequencies = torch.tensor(constants.frequencies, dtype=wide_dtype(dtype), device=self.positions.device)
        tables = rotary_tables(self.positions, frequencies, dtype)
        local, routed = zip(*(table.chunk(2, dim=-1) for table in tables), strict=True)
        return replace(
            self,
            local_rotary=tuple(table[:, None] for table in local),
            routed_rotary=tuple(table[:, :, None, None] for table in routed),
            routed_frequencies=frequencies.chunk(2)[1],
            routed_scale=constants.routed_scale,
            is_eager=config._attn_implementation == "eager",
        )

    def span(self, first: int, last: int) -> "TokenRows":
        """Tokens first to last, as the local path sees them."""
        return replace(
            self,
            mask=None if self.mask is None else self.mask[:, first:last],
            index=self.index[:, first:last],
            local_rotary=tuple(table[:, :, first:last] for table in self.local_rotary),
        )

    def to(self, device, non_blocking: bool = False) -> "TokenRows":
        """What accelerate asks of an argument when layers lie on several devices."""

        def move(value):
            if isinstance(value, tuple):
                return tuple(move(part) for part in value)
            return value.to(device, non_blocking=non_blocking) if torch.is_tensor(value) else value

        return replace(self, **{field.name: move(getattr(self, field.name)) for field in fields(self)})


# ---------------------------------------------------------------------------------------------------- local path


def band(num_queries: int, num_keys: int, window: int, device) -> Tensor:
    """(T, n) bool: which of n keys, the last of them their own, T queries see: the W up to their own."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)
    return (distance >= 0) & (distance < window)


def band_mask(alive: Tensor, num_queries: int, window: int) -> Tensor:
    """(B, 1, T, n) bool: the band, as far as keys are alive, (B, n)."""
    return band(num_queries, alive.shape[1], window, alive.device) & alive[:, None, None, :]


def query_block(window: int) -> int:
    """Queries of one block of `blocked_window_attention`, which pays for more of them."""
    return max(window // 2, 32)


def blocked_window_attention(q: Tensor, k: Tensor, v: Tensor, alive: Tensor, window: int, dropout: float) -> Tensor:
    """Sliding-window attention at a cost linear in T: blocks of queries, each with the keys of its band.

    q: (B, H, T, A); k, v: (B, H, W-1+T, A); alive: (B, W-1+T). Returns (B, H, T, A).
    """
    num_queries, block = q.shape[2], query_block(window)
    padding = -num_queries % block
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        alive = F.pad(alive, (0, padding), value=True)
    span = block + window - 1
    q = q.unflatten(2, (-1, block))
    # overlapping views (B, H, blocks, span, A): no copy is made
    k, v = (x.unfold(2, span, block).transpose(-1, -2) for x in (k, v))
    alive = alive.unfold(1, span, block)
    mask = band_mask(alive.flatten(0, 1), block, window).unflatten(0, alive.shape[:2])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2).flatten(0, 1),
        k.transpose(1, 2).flatten(0, 1),
        v.transpose(1, 2).flatten(0, 1),
        attn_mask=mask.flatten(0, 1),
        dropout_p=dropout,
    )
    out = out.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :num_queries]


# On a cache, so many tokens of all rows go through the local path at a time and stay in a processor's cache; a block
# pays for the window before it, so that it is at least so many windows long.
LOCAL_BLOCK = 2048
WINDOWS_A_BLOCK = 8


class SlidingWindowHeads(nn.Module):
    """Causal multi-head attention over the last W real tokens, the query's own included."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.window, self.head_dim = config.window_size, config.head_dim
        inner = config.num_sliding_window_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, tokens: TokenRows, cache=None, output_attentions: bool = False):
        """Return (B, T, D) and, when asked, the attention maps (B, H, T, N)."""
        size = max(LOCAL_BLOCK // len(x), WINDOWS_A_BLOCK * self.window, 1)
        if torch.compiler.is_compiling() or output_attentions or x.shape[1] <= size or not self.suits_blocks(x, cache):
            return self.transform(x, tokens, cache, output_attentions)
        spans = ((first, first + size) for first in range(0, x.shape[1], size))
        return torch.cat([self.transform(x[:, a:b], tokens.span(a, b), cache)[0] for a, b in spans], dim=1), None

    def suits_blocks(self, x: Tensor, cache) -> bool:
        """Whether a call may be split into shorter ones on the cache, as a caller would."""
        if cache is None or cache.record_past:  # a past that grows would be moved once a block
            return False
        return x.device.type == "cpu" and not torch.is_grad_enabled() and not is_watched(*self.children())

    def transform(self, x: Tensor, tokens: TokenRows, cache=None, output_attentions: bool = False):
        q, k, v = (
            projected.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for projected in apply_linear(x, self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (table.to(q.dtype) for table in tokens.local_rotary)
        # nothing else holds what is joined here, but autograd may
        turn = apply_rotary if torch.is_grad_enabled() or torch.compiler.is_compiling() else rotate
        q, k = turn(torch.cat([q, k], dim=1), cos, sin).chunk(2, dim=1)
        key_places = self.key_places(tokens, k, cache) if output_attentions else None  # before the cache is written
        k, v, alive = self.with_window(k, v, tokens, cache)
        out, probs = self.attend(q, k, v, alive, tokens.is_eager)
        maps = None
        if key_places is not None and probs is not None:
            maps = probs.new_zeros(*probs.shape[:3], tokens.num_keys)
            key_places = key_places[:, -probs.shape[3] :]
            maps = maps.scatter_add(3, key_places[:, None, None].expand_as(probs), probs)
        return apply_linear(out.transpose(1, 2).flatten(2), self.o_proj)[0], maps

    def with_window(self, k: Tensor, v: Tensor, tokens: TokenRows, cache) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, H, n+T, A) of n tokens before the chunk and the chunk, and which are alive.

        n = W - 1, or up to that where all are alive, for which the third is None.
        """
        num_before = self.window - 1
        if cache is not None and tokens.mask is None:
            appended = cache.append(k, v, tokens.index)
            return cache.update(k, v, None, tokens.index) if appended is None else (*appended, None)
        # padding of the chunk counts as alive: only padding sees it, and its softmax must not be empty
        alive = torch.ones_like(tokens.index, dtype=torch.bool)
        if cache is None:
            return F.pad(k, (0, 0, num_before, 0)), F.pad(v, (0, 0, num_before, 0)), F.pad(alive, (num_before, 0))
        k, v, seen = cache.update(k, v, tokens.mask, tokens.index)
        return k, v, torch.cat([seen[:, :num_before], alive], dim=1)

    def attend(self, q, k, v, alive: Tensor | None, is_eager: bool) -> tuple[Tensor, Tensor | None]:
        """q: (B, H, T, A); k, v: (B, H, n, A), the last T the chunk's; alive: (B, n), n = W-1+T, or None: all are."""
        dropout, num_queries = self.config.attention_dropout if self.training else 0.0, q.shape[2]
        if is_eager:
            alive = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if alive is None else alive
            return softmax_attention(q, k, v, band_mask(alive, num_queries, self.window), dropout=dropout)
        # blocks would fix the number of tokens in a graph
        if alive is not None and not torch.compiler.is_compiling() and num_queries > query_block(self.window):
            return blocked_window_attention(q, k, v, alive, self.window, dropout), None
        mask = None
        if alive is not None:
            mask = band_mask(alive, num_queries, self.window)
        elif num_queries > 1:
            mask = band(num_queries, k.shape[2], self.window, k.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None

    def key_places(self, tokens: TokenRows, k: Tensor, cache) -> Tensor:
        """(B, W-1+T) place in its row of every key that the chunk attends to."""
        if cache is None:
            return F.pad(tokens.index, (self.window - 1, 0))
        cache.adopt(k.shape[0], k)
        return torch.cat([cache.window_positions, tokens.index], dim=1)


# ---------------------------------------------------------------------------------------------------- routing


def load_balance(expert_bias: Tensor | None, frequencies: Tensor) -> Tensor:
    """Imbalance sum_l |f_l - 1/L| of head frequencies (..., L); its gradient is sign(f_l - 1/L) on the bias alone.

    Auxiliary-loss-free balancing (arXiv 2408.15664), expressed so that any optimizer applies it.
    """
    excess = frequencies.detach() - 1 / frequencies.shape[-1]
    if expert_bias is None or not (torch.is_grad_enabled() and expert_bias.requires_grad):
        return excess.abs().sum(dim=-1)
    # value 0, gradient sign(excess)
    pull = (expert_bias - expert_bias.detach()) * excess.sign()
    return (excess.abs() + pull).sum(dim=-1)


def head_load(heads: Tensor, mask: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Share of each layer's assignments (layers, B, T, K) of real tokens that went to each head, (layers, L)."""
    traffic = torch.ones_like(heads, dtype=dtype) if mask is None else mask[..., None].expand_as(heads).to(dtype)
    load = traffic.new_zeros(len(heads), num_heads).scatter_add(1, heads.flatten(1), traffic.flatten(1))
    if mask is None:
        return load / heads[0].numel()
    total = load.sum(dim=1, keepdim=True)
    return torch.where(total > 0, load / total.clamp(min=1), 1 / num_heads)  # without traffic nothing is uneven


class Routing(NamedTuple):
    """heads: (B, T, K) int64, distinct, best first. weights: (B, T, K) wide, summing to 1. logits: (B, T, L) wide.
    expert_bias: (L,), through which the load-balance loss reaches the router."""

    heads: Tensor
    weights: Tensor
    logits: Tensor
    expert_bias: Tensor


class Router(nn.Module):
    """Choose K of L heads for every token by the token alone; the bias steers the choice, never the mixture."""

    def __init__(self, config):
        super().__init__()
        self.num_selected_heads = config.num_selected_heads
        self.weight = nn.Parameter(torch.empty(config.num_mosrah_heads, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.empty(config.num_mosrah_heads))

    def forward(self, x: Tensor) -> Routing:
        wide = wide_dtype(x.dtype)
        # entering autocast costs as much as the product of one token
        off = (
            torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext()
        )
        with off:
            logits = F.linear(x.to(wide), self.weight.to(wide))
        # a stable sort, not topk: ties go to the lower index in every execution path
        order = (logits + self.expert_bias).sort(dim=-1, descending=True, stable=True).indices
        heads = order[..., : self.num_selected_heads]
        weights = logits.gather(-1, heads).softmax(dim=-1)
        if torch.is_grad_enabled() and self.expert_bias.requires_grad:
            # a gradient of zero, so that losses without the balance term leave no parameter unused
            weights = weights + 0 * self.expert_bias.sum()
        # a copy: reentrant checkpointing must not be handed a parameter as its output
        return Routing(heads, weights, logits, self.expert_bias.clone())


# ---------------------------------------------------------------------------------------------------- routed path


class MosrahHeads(nn.Module):
    """Mixture of sparse routed attention heads: each head attends over the tokens that chose it, and only those."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        num_heads, hidden, width = config.num_mosrah_heads, config.hidden_size, config.head_dim
        self.num_heads, self.num_selected_heads, self.head_dim = num_heads, config.num_selected_heads, width
        self.follows_tokens = config.rope_mode == "main_sequence"
        self.router = Router(config)
        self.qkv_proj = nn.Parameter(torch.empty(num_heads, hidden, 3 * width))
        self.out_proj = nn.Parameter(torch.empty(num_heads, width, hidden))

    def forward(self, x: Tensor, tokens: TokenRows, cache=None, output_attentions: bool = False):
        """Return (B, T, D), the routing, and, when asked, the attention maps (B, L, T, N)."""
        routing = self.router(x)
        if self.begins(x, tokens, cache) and device_plan_available(x, self.config, self.training):
            return self.forward_on_device(x, tokens, routing, cache).to(x.dtype), routing, None
        if torch.compiler.is_compiling():
            return self.forward_static(x, tokens, routing, cache).to(x.dtype), routing, None
        if cache is not None and self.takes_few(tokens):
            return self.forward_few(x, tokens, routing, cache).to(x.dtype), routing, None
        packing = pack(routing.heads, tokens.mask, self.num_heads)
        x_flat, qkv_weight, out_weight = autocast(x.flatten(0, 1), self.qkv_proj, self.out_proj)
        angles = self.entry_angles(tokens, packing, cache, x_flat.dtype)  # before the cache is written
        q, k, v = project(x_flat, qkv_weight, angles, packing)
        first_slots, num_keys = packing.group_start, packing.group_length
        if cache is not None:
            k, v, first_slots, num_keys = cache.update(
                k, v, packing, tokens.index.flatten().index_select(0, packing.token)
            )
        attended, probs = self.attend(q, k, v, packing, first_slots, num_keys, tokens)
        mix = routing.weights.flatten().index_select(0, packing.choice)
        y = combine(attended, out_weight, mix, packing)
        maps = self.scatter_maps(probs, tokens, packing, cache) if output_attentions else None
        return y.view_as(x).to(x.dtype), routing, maps

    def entry_angles(self, tokens: TokenRows, packing: Packing | EntryOrder, cache, dtype) -> EntryAngles:
        """Of the token's own position, or of its index in its head's sequence, continued over the cache."""
        tables, index = (table.flatten(0, 3) for table in tokens.routed_rotary), packing.token
        if not self.follows_tokens:
            rank, index = packing.rank, None
            if cache is not None and not cache.is_empty:
                rank = rank + cache.slots_of(packing)[1].to(rank.device)[packing.group]
            tables = rotary_tables(rank, tokens.routed_frequencies, tokens.routed_rotary[0].dtype)
        cos, sin = (table.to(dtype) for table in tables)
        return EntryAngles(cos, sin, index)

    def takes_few(self, tokens: TokenRows) -> bool:
        """Whether `forward_few` serves a call on a cache: short, without gradients, training, padding and maps."""
        if torch.is_grad_enabled() or self.training or tokens.mask is not None or tokens.is_eager:
            return False
        num_products = self.qkv_proj.shape[1] * self.qkv_proj.shape[2]
        num_rows, num_tokens = tokens.index.shape
        return fits_few(num_rows, num_tokens, self.num_selected_heads, tokens.num_keys, num_products)

    def forward_few(self, x: Tensor, tokens: TokenRows, routing: Routing, cache) -> Tensor:
        """The same for a short chunk on a cache: only the chosen heads' entries are touched, nothing is sorted."""
        heads = routing.heads.flatten()
        x_flat, qkv_weight, out_weight = autocast(x.flatten(0, 1), self.qkv_proj, self.out_proj)
        qkv = project_few(x_flat, qkv_weight, heads).view(*routing.heads.shape, 3, self.head_dim)
        entries = cache.place(routing.heads, qkv)
        cos, sin = tokens.routed_rotary
        if not self.follows_tokens:
            rank = entries.num_keys.view(*routing.heads.shape, 1) - 1
            cos, sin = rotary_tables(rank, tokens.routed_frequencies, cos.dtype)
        q, k = apply_rotary(qkv[..., :2, :], cos.to(qkv.dtype), sin.to(qkv.dtype)).flatten(0, 2).unbind(1)
        k, v = cache.append(k, qkv[..., 2, :].flatten(0, 2), entries, tokens.index)
        attended = attend_few(q, k, v, entries, tokens.routed_scale, is_one_each=routing.heads.shape[1] == 1)
        return combine_few(attended, out_weight, heads, routing.weights.flatten(0, 1)).view_as(x)

    def forward_static(self, x: Tensor, tokens: TokenRows, routing: Routing, cache) -> Tensor:
        """The same by shapes that depend on B and T alone, for `torch.compile` and `torch.export`.

        Every head is given all tokens, those that chose it first and in order, so that causality hides the others from
        them: L/K times the products of the packed plan, and causal attention over all T tokens in every head.
        """
        order, chosen = chosen_first(routing.heads, tokens.mask, self.num_heads)
        x_cast, qkv_weight, out_weight = autocast(x, self.qkv_proj, self.out_proj)
        qkv = torch.einsum("btd,lde->blte", x_cast, qkv_weight)
        qkv = qkv.gather(2, order[..., None].expand_as(qkv)).unflatten(-1, (3, self.head_dim))
        before = None if cache is None else cache.get_heads_lengths()
        cos, sin = self.static_rotary(tokens, order, before)
        q, k = apply_rotary(qkv[..., :2, :], cos.to(qkv.dtype), sin.to(qkv.dtype)).unbind(-2)
        v = qkv[..., 2, :]
        scale, dropout = tokens.routed_scale, self.config.attention_dropout if self.training else 0.0
        if cache is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, dropout_p=dropout)
        else:
            places = tokens.index[:, None].expand_as(order).gather(2, order)
            k, v = cache.update_static(k, v, chosen.sum(dim=1), places)
            attended = attend_static(q, k, v, before, scale, dropout)
        return combine_static(attended, out_weight, routing.heads, routing.weights, order)

    def begins(self, x: Tensor, tokens: TokenRows, cache) -> bool:
        """Whether this call's tokens are all there are; compiled, also whether no cache is to be written."""
        return cache is None or (tokens.num_keys == x.shape[1] and not torch.compiler.is_compiling())

    def forward_on_device(self, x: Tensor, tokens: TokenRows, routing: Routing, cache) -> Tensor:
        """The same by the kernels of `device_plan_shram`, over this call's tokens alone: the cache is only written."""
        order = sort_entries(routing.heads, tokens.mask, self.num_heads)
        x_flat, qkv_weight, out_weight = autocast(x.flatten(0, 1), self.qkv_proj, self.out_proj)
        qkv = project_entries(x_flat, qkv_weight, order).unflatten(-1, (3, self.head_dim))
        q, k = apply_rotary(qkv[:, :2], *self.entry_angles(tokens, order, None, qkv.dtype).of()).unbind(1)
        v = qkv[:, 2]
        if cache is not None:
            store_entries(cache, k, v, order, tokens.index)
        attended = attend_entries(q, k, v, order, tokens.routed_scale)
        return combine_entries(attended, out_weight, routing.weights, order).view_as(x)

    def static_rotary(self, tokens: TokenRows, order: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, L, T, 1, A) of every head's tokens in the given order."""
        if self.follows_tokens:
            positions = tokens.positions[:, None].expand_as(order).gather(2, order)
        else:
            positions = torch.arange(order.shape[2], device=order.device).expand_as(order)
            positions = positions if before is None else positions + before[..., None]
        return rotary_tables(positions[..., None], tokens.routed_frequencies, tokens.routed_rotary[0].dtype)

    def attend(self, q, k, v, packing: Packing, first_slots, num_keys, tokens: TokenRows):
        scale, dropout = tokens.routed_scale, self.config.attention_dropout if self.training else 0.0
        if len(q) == 0:  # a call of padding only
            return q, None
        if tokens.is_eager:
            return attend_padded(q, k, v, packing, first_slots, num_keys, scale, dropout, eager=True)
        return attend_routed(q, k, v, packing, first_slots, num_keys, scale, dropout), None

    def scatter_maps(self, probs, tokens: TokenRows, packing: Packing, cache) -> Tensor:
        """Spread the probabilities of the groups (G, 1, queries, keys) over (B, L, T, N); N counts padding too."""
        num_rows, num_tokens = tokens.index.shape
        maps = torch.zeros(num_rows, self.num_heads, num_tokens, tokens.num_keys, device=tokens.index.device)
        if probs is None:
            return maps
        if cache is None:
            places, first, num_keys = tokens.index.flatten()[packing.token], packing.group_start, packing.group_length
        else:
            places, (first, num_keys) = cache.token_positions.flatten().long(), cache.slots_of(packing)
        key_rank = torch.minimum(torch.arange(probs.shape[-1], device=first.device), num_keys[:, None] - 1)
        key_place = places[first[:, None] + key_rank]
        entry_probs = probs[packing.group, 0, packing.rank]
        spread = entry_probs.new_zeros(len(entry_probs), tokens.num_keys)
        spread = spread.scatter_add(1, key_place[packing.group], entry_probs)
        where = packing.group_row[packing.group], packing.head, packing.token % num_tokens
        return maps.to(spread.dtype).index_put(where, spread)


class AttentionStats(NamedTuple):
    """What a layer reports beside its result: (B, T, K), (L,), (B, T, L), and (B, H, T, N) and (B, L, T, N) or None."""

    heads: Tensor
    expert_bias: Tensor
    router_logits: Tensor
    local_attentions: Tensor | None
    routed_attentions: Tensor | None


class ShramHybridLayer(nn.Module):
    """H(x) = h_local(x) + h_sparse(x)."""

    def __init__(self, config):
        super().__init__()
        self.local = SlidingWindowHeads(config)
        self.mosrah = MosrahHeads(config)

    def forward(self, x: Tensor, tokens: TokenRows, layer_cache=None, output_attentions: bool = False):
        local_cache = None if layer_cache is None else layer_cache.sliding_window_cache
        routed_cache = None if layer_cache is None else layer_cache.mosrah_cache
        local, local_maps = self.local(x, tokens, local_cache, output_attentions)
        routed, routing, routed_maps = self.mosrah(x, tokens, routed_cache, output_attentions)
        stats = routing.heads, routing.expert_bias, routing.logits
        return local + routed, AttentionStats(*stats, local_maps, routed_maps)


def balance(stats: list[AttentionStats], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Load-balance loss, the mean over layers, and max_vio, the largest L * max_l(f_l) - 1; padding is not traffic."""
    device, num_heads = stats[0].heads.device, stats[0].router_logits.shape[-1]
    heads = torch.stack([s.heads.to(device) for s in stats])
    load = head_load(heads, mask, num_heads, stats[0].router_logits.dtype)
    bias = torch.stack([s.expert_bias.to(device) for s in stats]) if torch.is_grad_enabled() else None
    return load_balance(bias, load).mean(), num_heads * load.max() - 1


__all__ = ["AttentionStats", "ShramHybridLayer", "TokenRows", "balance"]
