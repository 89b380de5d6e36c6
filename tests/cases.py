"""Drawn models and inputs for the parity tests, the one tolerance table, and small ways to look inside a forward."""

from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shram import attention_shram, plans_shram
from shram.configuration_shram import ShramConfig
from shram.modeling_shram import ShramForCausalLM
from tests.support import tiny_config, wide_model

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
IMPLEMENTATIONS = ("sdpa", "sdpa for long inputs", "eager")
ROUTINGS = ("spread", "collapsed", "one head empty", "tied")


def assert_near(actual: Tensor, expected: Tensor, message: str = "", dtype: torch.dtype | None = None) -> None:
    """Equal shapes, and values equal to the tolerance of `dtype` (default: that of the actual tensor).

    In 16 bits one rounding of the largest value already outweighs small ones: there the scale is the largest.
    """
    dtype = dtype or actual.dtype
    bound = TOLERANCE[dtype]
    scale = expected.abs().max().item() if dtype.itemsize == 2 and expected.numel() else 1.0
    torch.testing.assert_close(
        actual,
        expected,
        rtol=bound if dtype.itemsize > 2 else 0.0,
        atol=bound * scale,
        check_dtype=False,
        msg=lambda text: f"{message}\n{text}",
    )


def draw_ids(rows: int, tokens: int, seed: int = 0, vocab_size: int = 64) -> Tensor:
    return torch.randint(vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def set_routing(model: ShramForCausalLM, routing: str) -> ShramForCausalLM:
    """Send tokens where the name says; a tied router scores all heads alike, so the lower heads win."""
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.self_attn.mosrah.router
            if routing == "collapsed":
                router.expert_bias[-1] = 100
            elif routing == "one head empty":
                router.expert_bias[0] = -100
            elif routing == "tied":
                router.weight.zero_()
                router.expert_bias.zero_()
    return model


def keep_path(model: ShramForCausalLM, path: str) -> ShramForCausalLM:
    """Silence the other attention path by zeroing its output projection; "both" changes nothing."""
    with torch.no_grad():
        for layer in model.model.layers:
            if path == "local":
                layer.self_attn.mosrah.out_proj.zero_()
            elif path == "routed":
                layer.self_attn.local.o_proj.weight.zero_()
    return model


@contextmanager
def chosen_implementation(name: str):
    """The library's name of one of IMPLEMENTATIONS, tiny inputs taking the way of long ones where it says so."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "sdpa for long inputs":
            for limit in ("MAX_PADDED_SCORES", "MAX_GATHERED_KEYS", "FEW_TOKENS"):
                patch.setattr(plans_shram, limit, 0)
            for block, size in (("QUERY_BLOCK", 3), ("TOKEN_BLOCK", 4), ("ROW_BLOCK", 5), ("ROTATED_BLOCK", 32)):
                patch.setattr(plans_shram, block, size)
            patch.setattr(attention_shram, "LOCAL_BLOCK", 6)
            patch.setattr(attention_shram, "WINDOWS_A_BLOCK", 0)
        yield name.split()[0]


class Case(NamedTuple):
    config: ShramConfig
    routing: str
    ids: Tensor  # (B, T)
    mask: Tensor | None  # (B, T)
    seed: int

    def model(self, path: str = "both", implementation: str = "sdpa") -> ShramForCausalLM:
        model = set_routing(wide_model(self.config, self.seed, torch.float64), self.routing)
        model.set_attn_implementation(implementation)
        return keep_path(model, path)

    @property
    def real(self) -> Tensor:
        return torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask.bool()


@st.composite
def masks(draw, rows: int, tokens: int) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "left", "right", "gapped"]))
    if kind == "none":
        return None
    if kind == "gapped":
        bits = st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)
        return torch.tensor(draw(bits)).view(rows, tokens).long()
    lengths = torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)))
    right = (torch.arange(tokens) < lengths[:, None]).long()
    return right if kind == "right" else right.flip(1)


@st.composite
def configs(draw, **overrides) -> ShramConfig:
    num_heads = draw(st.integers(1, 7))
    fields = {
        "hidden_size": draw(st.sampled_from([7, 16, 24])),
        "intermediate_size": 11,
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_sliding_window_heads": draw(st.integers(1, 3)),
        "window_size": draw(st.integers(1, 5)),
        "num_mosrah_heads": num_heads,
        "num_selected_heads": draw(st.integers(1, num_heads)),
        "head_dim": draw(st.sampled_from([2, 4, 6, 8])),
        "rope_mode": draw(st.sampled_from(["main_sequence", "semantic_sequence"])),
        "inference_sequence_length": draw(st.sampled_from([32, 45, 128])),
    }
    return tiny_config(**{**fields, **overrides})


@st.composite
def cases(draw, max_tokens: int = 17, **overrides) -> Case:
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, max_tokens))
    seed = draw(st.integers(0, 2**20))
    routing = draw(st.sampled_from(ROUTINGS))
    return Case(draw(configs(**overrides)), routing, draw_ids(rows, tokens, seed), draw(masks(rows, tokens)), seed)


def feed(model, ids: Tensor, mask: Tensor | None = None, chunks: list[int] | None = None, cache=None):
    """Run `ids` through a cache in chunks, the mask covering all tokens so far: logits of every token, and the cache.

    A given cache may hold tokens already; then the mask covers those too.
    """
    cache = model.new_cache() if cache is None else cache
    past = cache.get_seq_length()
    logits, start = [], 0
    for size in chunks or [ids.shape[1]]:
        seen = None if mask is None else mask[:, : past + start + size]
        chunk = ids[:, start : start + size]
        logits.append(model(chunk, attention_mask=seen, cache=cache, use_cache=True).logits)
        start += size
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1), cache


def row_contents(cache, row: int) -> list[Tensor]:
    """Everything a cache holds of one row, as copies: the window, the real tokens seen, every head's history."""
    found = []
    for layer in cache.layers:
        window, heads = layer.sliding_window_cache, layer.mosrah_cache
        kept = window.alive[row].nonzero()[:, 0]
        kept = kept[max(0, len(kept) - (window.sliding_window - 1)) :]
        found += [window.keys[row][:, kept], window.values[row][:, kept], window.positions[row, kept]]
        found += [window.num_real_tokens[row].clone(), heads.get_heads_lengths()[row]]
        for head in range(heads.get_heads_lengths().shape[1]):
            found += heads.history(row, head)
    return found


def contents(cache) -> list[Tensor]:
    num_rows = cache.layers[0].mosrah_cache.get_heads_lengths().shape[0]
    lengths = [torch.tensor(layer.get_seq_length()) for layer in cache.layers]
    return lengths + [tensor for row in range(num_rows) for tensor in row_contents(cache, row)]


def poison(cache) -> None:
    """Fill every slot that holds nothing with NaN, in both parts of every layer."""
    for layer in cache.layers:
        window, heads = layer.sliding_window_cache, layer.mosrah_cache
        for stored in (window.keys, window.values):
            stored.masked_fill_(~window.alive[:, None, :, None], torch.nan)
        for stored in (window._keys, window._values):
            stored[:, :, : window._end - window.alive.shape[1]] = torch.nan
            stored[:, :, window._end :] = torch.nan
        for stored in (heads.keys, heads.values):
            slots = stored.view(len(stored), stored[:1, ..., 0].numel(), stored.shape[-1])
            dead = torch.ones(slots.shape[:2], dtype=torch.bool)
            for row, head in torch.cartesian_prod(*map(torch.arange, heads.counts.shape)).tolist():
                first = heads.offsets[row, head]
                dead[row, first : first + heads.counts[row, head]] = False
            slots.masked_fill_(dead[:, :, None], torch.nan)
