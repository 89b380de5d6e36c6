"""Caches of SHRAM: a sliding window and the routed heads' histories, one pair per decoder layer."""

import copy

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache_parts_shram import LocalSlidingWindowLayerCache, MoSRAHCache, Provisional, Tail


class Composite(Provisional):
    """Lifecycle calls that go to every part, so that none can be forgotten."""

    @property
    def parts(self) -> tuple:
        raise NotImplementedError

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        for part in self.parts:
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for part in self.parts:
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for part in self.parts:
            part.batch_select_indices(indices)

    def snapshot(self) -> list:
        """What `restore` needs to undo later writes; costs no copy."""
        return [part.snapshot() for part in self.parts]

    def restore(self, state: list) -> None:
        for part, part_state in zip(self.parts, state, strict=True):
            part.restore(part_state)

    def plan_commit(self, n: int | Tensor) -> Tail:
        return self.parts[0].plan_commit(n)

    def commit_tail(self, tail: Tail) -> None:
        for part in self.parts:
            part.commit_tail(tail)

    def extent(self) -> tuple[int, int]:
        """Committed tokens, padding included, and how many of them the window still holds."""
        return self.parts[0].extent()

    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(part.num_bytes() for part in self.parts)


class ShramLayerCache(Composite, CacheLayerMixin):
    """Window and routed caches of one decoder layer; each is updated by its own path, never together."""

    is_compileable = True
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, config, batch_size, device, *, dtype=None, growing=False, layer_idx=0, mosrah_cache_length=None, **kwargs
    ):
        super().__init__()
        self.sliding_window_cache = LocalSlidingWindowLayerCache(
            config.window_size, config.num_sliding_window_heads, config.head_dim, batch_size, device, dtype=dtype
        )
        self.mosrah_cache = MoSRAHCache(
            config.num_mosrah_heads,
            config.head_dim,
            batch_size,
            device,
            config.mosrah_cache_length if mosrah_cache_length is None else mosrah_cache_length,
            dtype=dtype,
            growing=growing,
            layer_idx=layer_idx,
        )
        self.inference_sequence_length = config.inference_sequence_length
        if growing:
            self.is_compileable = False

    @property
    def parts(self) -> tuple[LocalSlidingWindowLayerCache, MoSRAHCache]:
        """The window first: it alone may refuse a crop, and must do so before anything is written."""
        return self.sliding_window_cache, self.mosrah_cache

    @property
    def is_initialized(self) -> bool:
        return all(part.keys is not None for part in self.parts)

    @is_initialized.setter
    def is_initialized(self, value) -> None:
        """Ignored: the parts allocate when they are constructed."""

    @property
    def record_past(self) -> bool:
        return self.sliding_window_cache.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.sliding_window_cache.record_past = value

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop` or `commit`; what comes from here on is provisional."""
        self.record_past = True
        for part in self.parts:
            part.num_committed = self.get_seq_length()

    def fork(self) -> "ShramLayerCache":
        """Scratch with this layer's history, read-only, and the same interface; what it writes is its own."""
        scratch = copy.copy(self)
        scratch.sliding_window_cache, scratch.mosrah_cache = self.sliding_window_cache.fork(), self.mosrah_cache.fork()
        return scratch

    def lazy_initialization(self, key_states=None, value_states=None) -> None:
        """Nothing to do: the parts allocate when they are constructed."""

    def update(self, *args, **kwargs):
        raise NotImplementedError(
            "ShramLayerCache has no joint update: the paths write `sliding_window_cache` and `mosrah_cache` themselves"
        )

    def get_seq_length(self, *args) -> int:
        """Tokens seen since the last reset, padding included."""
        return self.sliding_window_cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.inference_sequence_length

    get_max_cache_shape = get_max_length  # its name up to Transformers 5.12

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.inference_sequence_length, 0

    def crop(self, n: int) -> None:
        """Keep the first n tokens (n > 0), take back the last -n (n < 0), or only trim a recorded past (n = 0).

        Raises:
            RuntimeError: the cache has not seen so many tokens, or its window no longer has what it would need.
        """
        n, num_tokens = int(n), self.get_seq_length()
        target = min(n, num_tokens) if n > 0 else num_tokens + n
        if target < 0:
            raise RuntimeError(f"cannot take back {-n} tokens: the cache has seen {num_tokens}")
        for part in self.parts:
            part.crop_to(target)

    def offload(self) -> None:
        for part in self.parts:
            part.offload()

    def prefetch(self) -> None:
        for part in self.parts:
            part.prefetch()


class ShramCache(Composite, Cache):
    """The cache of a SHRAM model: one `ShramLayerCache` per decoder layer.

    Args:
        config: the model's `ShramConfig`.
        batch_size, device, dtype: what to allocate for; an empty cache follows its first write instead.
        growing: slots of routed heads are added as needed (default); False allocates `mosrah_cache_length` a head.
        max_length: with `growing=False`, tokens to serve: no head needs more slots than that.
    """

    is_shram_cache = True  # a marker, since the loader may import this class twice

    def __init__(self, config, batch_size=None, device=None, *, dtype=None, growing=True, max_length=None):
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        slots = config.mosrah_cache_length if max_length is None else min(max_length, config.mosrah_cache_length)
        layers: list = [
            ShramLayerCache(
                config,
                batch_size or 0,
                device,
                dtype=dtype,
                growing=growing,
                layer_idx=layer_idx,
                mosrah_cache_length=slots,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)

    @property
    def parts(self) -> tuple[ShramLayerCache, ...]:
        return tuple(self.layers)  # pyrefly: ignore[bad-return]

    @property
    def inference_sequence_length(self) -> int:
        """The YaRN context that the stored keys were rotated for."""
        return self.parts[0].inference_sequence_length

    @property
    def batch_size(self) -> int:
        return self.parts[0].mosrah_cache.counts.shape[0]

    @property
    def num_real_tokens(self) -> Tensor:
        """Tokens seen without padding, (B,) int64."""
        return self.parts[0].sliding_window_cache.num_real_tokens.clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen since the last reset, padding included."""
        return self.parts[layer_idx].get_seq_length()

    def update(self, *args, **kwargs):
        raise NotImplementedError("ShramCache has no joint update: each path of a layer writes its own part")

    def crop(self, n: int) -> None:
        """Keep the first n tokens (n > 0), take back the last -n (n < 0), or only trim a recorded past (n = 0)."""
        for layer in self.parts:
            layer.crop(n)

    def fork(self) -> "ShramCache":
        """Scratch of all layers: a model may run on it as on this cache, which it never changes."""
        scratch = copy.copy(self)
        scratch.layers = [layer.fork() for layer in self.parts]
        return scratch

    def activate_past_recording(self) -> None:
        """Keep what leaves the windows until the next `crop`; valid before any forward that may be rolled back."""
        for layer in self.parts:
            layer.activate_past_recording()


__all__ = ["LocalSlidingWindowLayerCache", "MoSRAHCache", "ShramCache", "ShramLayerCache"]
