"""Predictor rollout workspaces: scratch K/V of selected layers beside a committed history.

A small Predictor takes steps P1..Pn over the current chunk; each writes K/V, and all of it is thrown away. Invariant:
P-steps read history and write only scratch; only the Full pass commits; scratch dies with the chunk.

    history        committed clean context (video diffusion)       verified prefix (speculative decoding)
    current chunk  block of frames being denoised                  draft block
    P-step         Predictor denoise step                          draft or refinement step
    Full pass      clean timestep-zero pass, rewrites the cache    target verification pass, accepted tokens join it

Two kinds of history: dict caches, a mapping per block with `k`, `v` (B, N, heads, width) and the token counts
`global_end_index` (ever written) and `local_end_index` (write head in the buffer), which are copied; and layers with
`fork()`, such as those of a `ShramCache`, which are borrowed read-only.
"""

import copy
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXTENTS = ("global_end_index", "local_end_index")
STORED = ("k", "v")
PINNED = {"pinned_start": -1, "pinned_len": 0}  # of LongLive 2


class Extent(NamedTuple):
    """Tokens of a layer's committed history, and how many of them its buffer still holds."""

    total: int
    resident: int


# ---------------------------------------------------------------------------------------------------- borders


def whole_number(name: str, value) -> int:
    """`value` as an int; neither bools nor floats nor None pass for one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def check_counts(history_tokens, current_tokens) -> tuple[int, int]:
    history_tokens = whole_number("history_tokens", history_tokens)
    current_tokens = whole_number("current_tokens", current_tokens)
    if history_tokens < 0:
        raise ValueError(f"Invalid history/current token count: history_tokens must be >= 0, got {history_tokens}")
    if current_tokens <= 0:
        raise ValueError(f"Invalid history/current token count: current_tokens must be > 0, got {current_tokens}")
    return history_tokens, current_tokens


def check_ids(ids, num_layers: int) -> tuple[int, ...]:
    ids = tuple(whole_number("source_layers", i) for i in ids)
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise ValueError(f"source_layers must be one or more distinct ids >= 0, got {ids}")
    for i in ids:
        if i >= num_layers:
            raise IndexError(f"source_layers names block {i}, but the cache has {num_layers} blocks")
    return ids


def one_name(source_layers, source_block_ids):
    """The layer ids under their name or the older one."""
    if (source_layers is None) == (source_block_ids is None):
        raise TypeError("pass the layer ids once, as source_layers or as source_block_ids")
    return source_block_ids if source_layers is None else source_layers


def check_options(window, sink_tokens, capacity) -> tuple[int | None, int, int | None]:
    sink_tokens = whole_number("sink_tokens", sink_tokens)
    window = None if window is None else whole_number("window", window)
    if sink_tokens < 0 or (window is not None and window < max(sink_tokens, 1)):
        raise ValueError(f"window must be >= sink_tokens >= 0 and > 0, got window={window}, sink_tokens={sink_tokens}")
    return window, sink_tokens, None if capacity is None else whole_number("capacity", capacity)


def check_block(block: Mapping, name: str) -> None:
    missing = [key for key in (*STORED, *EXTENTS) if key not in block]
    if missing:
        raise TypeError(f"{name} lacks {', '.join(missing)}: a dict cache needs {', '.join((*STORED, *EXTENTS))}")
    for key in EXTENTS:
        extent = block[key]
        if not torch.is_tensor(extent):
            whole_number(f"{key} of {name}", extent)
        elif extent.is_floating_point() or extent.is_complex() or extent.dtype == torch.bool or not extent.numel():
            raise TypeError(f"{key} of {name} must hold integers, got {extent.dtype} of shape {tuple(extent.shape)}")


# ---------------------------------------------------------------------------------------------------- extents


def layers_of(cache) -> Sequence:
    """The layers of a cache object, or the sequence of blocks itself."""
    return getattr(cache, "layers", cache)


def read_extents(layers: Sequence, names: Sequence[str]) -> list[Extent]:
    """Committed extents of all layers by one host read at most; shapes [1], [B] with equal entries, and ints serve."""
    blocks = [(layer, name) for layer, name in zip(layers, names, strict=True) if isinstance(layer, Mapping)]
    for block, name in blocks:
        check_block(block, name)
    held = [block[key].detach().reshape(-1) for block, _ in blocks for key in EXTENTS if torch.is_tensor(block[key])]
    ends = [torch.stack((e.amin(), e.amax())) for e in held]
    read = iter(torch.stack([e.to(ends[0].device) for e in ends]).tolist() if ends else ())

    def value_of(block: Mapping, key: str, name: str) -> int:
        if not torch.is_tensor(block[key]):
            return operator.index(block[key])
        low, high = next(read)
        if low != high:
            raise ValueError(f"{key} of {name} must be equal in all rows, got values from {low} to {high}")
        return low

    return [
        Extent(*(value_of(layer, key, name) for key in EXTENTS)) if isinstance(layer, Mapping) else Extent(*own(layer))
        for layer, name in zip(layers, names, strict=True)
    ]


def own(layer) -> tuple[int, int]:
    if not hasattr(layer, "extent"):
        raise TypeError(f"a layer must be a mapping or have extent() and fork(), got {type(layer).__name__}")
    return layer.extent()


def common_total(extents: Sequence[Extent]) -> int:
    totals = sorted({extent.total for extent in extents})
    if len(totals) > 1:
        raise ValueError(f"pass history_tokens: the source layers have committed different numbers of tokens, {totals}")
    return totals[0]


@singledispatch
def committed_extent(layer) -> Extent:
    """Committed and resident tokens of one layer; of a dict cache block this is a host read."""
    return Extent(*own(layer))


@committed_extent.register
def _(layer: Mapping) -> Extent:
    return read_extents([layer], ["the block"])[0]


def resident_history(extent: Extent, history_tokens: int, name: str, sink_tokens: int = 0) -> int:
    """Slots of the buffer that hold history; the tokens after it lie at the end, whatever was evicted before.

    Raises:
        RuntimeError: the cache is shorter than the history, or has evicted its newest part.
    """
    if extent.total < history_tokens:
        raise RuntimeError(
            f"ends before committed history: {name} holds {extent.total} tokens, history_tokens={history_tokens}"
        )
    resident = extent.resident - (extent.total - history_tokens)
    rolled = extent.resident < extent.total
    if resident < 0 or (rolled and resident < min(sink_tokens, history_tokens)):
        raise RuntimeError(
            f"committed history was evicted: {name} keeps {extent.resident} of {extent.total} tokens, "
            f"nothing of the first {history_tokens}"
        )
    return resident


# ---------------------------------------------------------------------------------------------------- scratch


def plain_zeros(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros that may be trained on later, even when made in inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


def copy_slots(stored: Tensor, kept: Sequence[slice], num_slots: int) -> Tensor:
    """A leaf (B, num_slots, ...) that begins with the kept slots, bit for bit, and is zero behind them."""
    new = plain_zeros((stored.shape[0], num_slots, *stored.shape[2:]), stored)
    end = 0
    with torch.no_grad():
        for part in kept:
            piece = stored.detach()[:, part]
            new[:, end : end + piece.shape[1]].copy_(piece)
            end += piece.shape[1]
    return new


def kept_slots(layer: Mapping, extent: Extent, name, history_tokens, current_tokens, window, sink_tokens, capacity):
    """Slots of a block's buffer to copy: its history, or of that the sink and the newest, as the Full pass sees it.

    Raises:
        RuntimeError, ValueError, TypeError: the block cannot serve what is asked; nothing was allocated.
    """
    resident = resident_history(extent, history_tokens, name, sink_tokens)
    for key in STORED:
        if not torch.is_tensor(layer[key]) or layer[key].ndim < 2:
            raise TypeError(f"{key} of {name} must be a tensor (rows, tokens, ...), got {type(layer[key]).__name__}")
        if layer[key].shape[1] < extent.resident:
            slots = layer[key].shape[1]
            raise ValueError(f"local_end_index of {name} is {extent.resident}, but its {key} has {slots} slots")
    num_kept = resident if window is None else min(resident, window)
    if capacity is not None and capacity < num_kept + current_tokens:
        need = num_kept + current_tokens
        raise ValueError(f"capacity must be at least {need} (history and current chunk of {name}), got {capacity}")
    if num_kept == resident:
        return [slice(0, resident)]
    return [slice(0, sink_tokens), slice(resident - (window - sink_tokens), resident)]


def num_slots(kept: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in kept)


@singledispatch
def fork_layer(
    layer, *, history_tokens, current_tokens, window=None, sink_tokens=0, capacity=None, extent=None, name="the layer"
):
    """Scratch of the layer's kind that holds its first `history_tokens` and room for `current_tokens`.

    Args:
        window, sink_tokens: of a dict cache, copy only the first `sink_tokens` and the newest, `window` in all.
        capacity: of a dict cache, slots to allocate instead of history and current chunk.
        extent: what `committed_extent(layer)` would read.
    """
    if window is not None or sink_tokens or capacity is not None:
        raise ValueError("window, sink_tokens and capacity are for dict caches; this layer manages its own room")
    history_tokens, current_tokens = check_counts(history_tokens, current_tokens)
    extent = committed_extent(layer) if extent is None else extent
    resident_history(Extent(extent.total, extent.total), history_tokens, name)
    scratch = layer.fork()
    if history_tokens < scratch.get_seq_length():
        scratch.crop(history_tokens) if history_tokens else scratch.reset()
    return scratch


@fork_layer.register
def _(
    layer: Mapping,
    *,
    history_tokens,
    current_tokens,
    window=None,
    sink_tokens=0,
    capacity=None,
    extent=None,
    name="the block",
):
    history_tokens, current_tokens = check_counts(history_tokens, current_tokens)
    window, sink_tokens, capacity = check_options(window, sink_tokens, capacity)
    extent = committed_extent(layer) if extent is None else extent
    kept = kept_slots(layer, extent, name, history_tokens, current_tokens, window, sink_tokens, capacity)
    room = num_slots(kept) + current_tokens if capacity is None else capacity
    scratch = {key: copy_slots(layer[key], kept, room) for key in STORED}
    for key, value in zip(EXTENTS, (history_tokens, num_slots(kept)), strict=True):
        scratch[key] = plain_zeros((1,), scratch["k"], torch.long).fill_(value)
    return scratch


def is_shared(stored: Tensor) -> bool:
    """Whether anything else holds the tensor's memory: an autograd graph that saved it, or a view of it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = stored.untyped_storage()  # one holder more beside `stored`
    return count is None or count(storage._cdata) > 2


@singledispatch
def rewind(scratch, home, keep_tokens: int) -> None:
    """Put scratch back to its history and the first `keep_tokens` of the current chunk."""
    history_tokens, state = home
    if keep_tokens == 0:
        scratch.restore(state)
    elif scratch.get_seq_length() != history_tokens + keep_tokens:
        scratch.crop(history_tokens + keep_tokens)


@rewind.register
def _(scratch: MutableMapping, home, keep_tokens: int) -> None:
    history_tokens, resident = home
    kept = resident + keep_tokens
    with torch.no_grad():
        for key in STORED:
            stored = scratch[key]
            # a graph may have saved it for backward, also when it does not require grad: zeroing would corrupt that
            if stored.requires_grad or is_shared(stored):
                scratch[key] = copy_slots(stored, [slice(0, kept)], stored.shape[1])
            else:
                stored[:, kept:].zero_()
        for key, value in zip(EXTENTS, (history_tokens + keep_tokens, kept), strict=True):
            set_extent(scratch, key, value)


def set_extent(block: MutableMapping, key: str, value: int) -> None:
    """In place, so that captured graphs see it; inference tensors and plain ints are replaced."""
    extent = block[key]
    if not torch.is_tensor(extent):
        block[key] = value
    elif extent.is_inference() and not torch.is_inference_mode_enabled():
        block[key] = plain_zeros(extent.shape, extent).fill_(value)
    else:
        extent.fill_(value)


# ---------------------------------------------------------------------------------------------------- stale check


def fingerprint(layer) -> list[tuple[Any, int | None]]:
    """The tensors and numbers of a layer with the tensors' versions: no host read, and any write changes it."""
    states: list = [
        {key: layer[key] for key in (*STORED, *EXTENTS)} if isinstance(layer, Mapping) else layer.snapshot()
    ]
    found = []
    while states:
        state = states.pop()
        if isinstance(state, dict):
            for x in state.values():
                found.append((x, x._version if isinstance(x, Tensor) and not x.is_inference() else None))
        else:
            states.extend(state)
    return found


def same(before: Sequence, after: Sequence) -> bool:
    return len(before) == len(after) and all(
        version == now and (x is y or (not isinstance(x, Tensor) and x == y))
        for (x, version), (y, now) in zip(before, after, strict=True)
    )


# ---------------------------------------------------------------------------------------------------- workspace


class PredictorWorkspace(dict):
    """Scratch layers by source layer id, of the source's kind; what P-steps write here never reaches the source.

        with PredictorWorkspace(cache, source_layers=(1, 4), current_tokens=5) as workspace:
            for p in workspace.steps(3):
                logits, feature = predictor(chunk, feature, workspace)
        target = model(chunk_ids, past_key_values=cache)  # the Full pass, the only writer of `cache`

    One backward over all steps is right: memory that a graph may have saved is left to it and replaced, not zeroed.
    So keep no tensor of a workspace across steps. A workspace has no cross-attention part: give Predictor blocks with
    text projections of their own a cross cache of their own; with guidance, open one workspace per branch.

    Args:
        source: a sequence of dict cache blocks, or a cache whose `layers` have `fork()`.
        source_layers: ids of the layers to open (older name `source_block_ids`).
        current_tokens: the longest chunk a step may write.
        history_tokens: tokens of committed history; None: all that the layers have committed.
        window, sink_tokens: of dict caches, history as the Full pass sees it: the first `sink_tokens` and the newest.
        capacity: of dict caches, slots to allocate: a fixed number keeps shapes the same from chunk to chunk.
    """

    is_predictor_workspace = True

    def __init__(
        self,
        source,
        *,
        source_layers: Sequence[int] | None = None,
        current_tokens: int,
        history_tokens: int | None = None,
        window: int | None = None,
        sink_tokens: int = 0,
        capacity: int | None = None,
        source_block_ids: Sequence[int] | None = None,
    ):
        super().__init__()
        history, self.current_tokens = check_counts(0 if history_tokens is None else history_tokens, current_tokens)
        layers = layers_of(source)
        ids = check_ids(one_name(source_layers, source_block_ids), len(layers))
        names = [f"block {i}" for i in ids]
        chosen = [layers[i] for i in ids]
        extents = read_extents(chosen, names)
        self.history_tokens = common_total(extents) if history_tokens is None else history
        options = check_options(window, sink_tokens, capacity)
        counts = {"history_tokens": self.history_tokens, "current_tokens": self.current_tokens}
        counts |= dict(zip(("window", "sink_tokens", "capacity"), options, strict=True))
        kept = {}
        for i, layer, extent, name in zip(ids, chosen, extents, names, strict=True):  # all, before the first allocates
            if isinstance(layer, Mapping):
                kept[i] = num_slots(kept_slots(layer, extent, name, **counts))
            else:
                resident_history(Extent(extent.total, extent.total), self.history_tokens, name)
        self.step = -1
        self._closed, self._source, self._homes = False, source, {}
        for i, layer, extent, name in zip(ids, chosen, extents, names, strict=True):
            self[i] = scratch = fork_layer(layer, extent=extent, name=name, **counts)
            # what a rewind goes back to: the slots that hold history, or a state
            self._homes[i] = self.history_tokens, kept[i] if i in kept else scratch.snapshot()
        self._fingerprints = {i: fingerprint(layer) for i, layer in zip(ids, chosen, strict=True)}

    def __missing__(self, key):
        self._check_open()
        raise KeyError(key)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("workspace is closed: open a new one for the next chunk")

    def __enter__(self) -> "PredictorWorkspace":
        self._check_open()
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None and not self._closed:
                self.check_source()
        finally:
            self.release()

    def begin_step(self, *, tokens: int | None = None, keep_tokens: int = 0) -> "PredictorWorkspace":
        """Forget what the step before wrote and count the next one.

        Args:
            tokens: length of the chunk that the step will write; a block cannot be trusted to check it.
            keep_tokens: of the current chunk, tokens to keep, for drafts that grow token by token.
        """
        self._check_open()
        keep_tokens = whole_number("keep_tokens", keep_tokens)
        if not 0 <= keep_tokens < self.current_tokens:
            raise ValueError(f"keep_tokens must lie in [0, current_tokens={self.current_tokens}), got {keep_tokens}")
        tokens = 1 if tokens is None else whole_number("tokens", tokens)
        if not 1 <= tokens <= self.current_tokens - keep_tokens:
            raise ValueError(
                f"tokens must lie in [1, {self.current_tokens - keep_tokens}] (current_tokens={self.current_tokens}, "
                f"keep_tokens={keep_tokens}), got {tokens}"
            )
        self.check_source()
        self.rewind(keep_tokens)
        self.step += 1
        return self

    def rewind(self, keep_tokens: int = 0) -> None:
        self._check_open()
        for i, scratch in self.items():
            rewind(scratch, self._homes[i], keep_tokens)

    def steps(self, n: int) -> Iterator[int]:
        """P-steps 0 .. n-1, each on a rewound workspace."""
        for p in range(whole_number("n", n)):
            self.begin_step()
            yield p

    def as_cache(self):
        """The scratch layers in source order, as a cache of the source's class or a list of blocks."""
        self._check_open()
        if not hasattr(self._source, "layers"):
            return list(self.values())
        cache = copy.copy(self._source)
        cache.layers = list(self.values())
        return cache

    def check_source(self) -> None:
        """Raise RuntimeError if a source layer was written, reordered, moved or reset since the workspace opened."""
        self._check_open()
        layers = layers_of(self._source)
        changed = [i for i, before in self._fingerprints.items() if not same(before, fingerprint(layers[i]))]
        if changed:
            raise RuntimeError(f"the cache changed while a workspace was open on it: layers {changed}")

    def release(self) -> None:
        """Drop the scratch; later use raises RuntimeError."""
        self._closed = True
        self.clear()
        self._homes, self._fingerprints, self._source = {}, {}, None


# ---------------------------------------------------------------------------------------------------- the four names


def reset_main_caches(kv_cache, crossattn_cache) -> None:
    """Empty the caches for the next video: extents 0 in place, `is_init` False; stored K/V keep their bytes.

    `is_init` False means that the text K/V are computed anew at the next use; until then the old ones are held, without
    their autograd graph. All blocks are checked before the first is changed.
    """
    for i, block in enumerate(kv_cache):
        check_block(block, f"block {i}")
    crossattn_cache = list(crossattn_cache or ())
    for i, block in enumerate(crossattn_cache):
        if not isinstance(block, MutableMapping) or "is_init" not in block:
            raise TypeError(f"cross-attention block {i} must be a dict with is_init, got {type(block).__name__}")
    with torch.no_grad():
        for block in kv_cache:
            for key, value in {**dict.fromkeys(EXTENTS, 0), **PINNED}.items():
                if key in block:
                    set_extent(block, key, value)
    for block in crossattn_cache:
        block["is_init"] = False
        for key in STORED:
            if torch.is_tensor(block.get(key)) and block[key].requires_grad:
                block[key] = block[key].detach()


def build_predictor_workspace(
    main_cache, *, source_block_ids=None, history_tokens, current_tokens, source_layers=None, **options
) -> PredictorWorkspace:
    """A `PredictorWorkspace` over the first `history_tokens` of `main_cache`, which is not changed."""
    return PredictorWorkspace(
        main_cache,
        source_layers=source_layers,
        source_block_ids=source_block_ids,
        history_tokens=whole_number("history_tokens", history_tokens),
        current_tokens=current_tokens,
        **options,
    )


def reset_predictor_workspace(workspace, *, history_tokens) -> None:
    """Rewind to the history the workspace was built on; `history_tokens` must be that of the build."""
    if not getattr(workspace, "is_predictor_workspace", False):
        raise TypeError(f"workspace must come from build_predictor_workspace, got {type(workspace).__name__}")
    given = whole_number("history_tokens", history_tokens)
    if given != workspace.history_tokens:
        raise ValueError(f"history_tokens must be {workspace.history_tokens}, as the workspace was built, got {given}")
    workspace.rewind()


def assert_clean_history_extent(kv_cache, *, expected_tokens) -> None:
    """Raise RuntimeError unless every layer has committed exactly `expected_tokens`, as far as its buffer holds them.

    Extents cannot prove that the K/V are clean: a noisy pass moves them just as the clean one does.
    """
    expected = whole_number("expected_tokens", expected_tokens)
    if expected < 0:
        raise ValueError(f"expected_tokens must be >= 0, got {expected}")
    layers = layers_of(kv_cache)
    extents = read_extents(layers, [f"block {i}" for i in range(len(layers))])
    bad = []
    for i, (layer, extent) in enumerate(zip(layers, extents, strict=True)):
        held = min(expected, layer["k"].shape[1]) if isinstance(layer, Mapping) else extent.resident
        if extent != (expected, held):
            bad.append(f"block {i} (global, local) = {tuple(extent)}, expected ({expected}, {held})")
    if bad:
        raise RuntimeError(f"expected committed clean history of {expected} tokens: {'; '.join(bad)}")


__all__ = [
    "Extent",
    "PredictorWorkspace",
    "assert_clean_history_extent",
    "build_predictor_workspace",
    "committed_extent",
    "fork_layer",
    "reset_main_caches",
    "reset_predictor_workspace",
]
