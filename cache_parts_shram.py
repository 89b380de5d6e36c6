"""The two parts of a layer's cache: a sliding window, and the routed heads' histories.

Shapes: B rows, T tokens in this call, H local heads, L routed heads, A head width, W window, C slots of one routed
head (fixed policy), R retained window entries, S slots of one row (growing policy), P entries: one per real token and
head it chose, G groups: the (row, head) pairs that got an entry.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plans_shram import Entries, ranks_in_chunk

# A growing slab gives each head this share of free slots when it moves, and at least this many.
GROWTH_SHARE = 8
GROWTH_SLOTS = 16


class Tail(NamedTuple):
    """What a commit does to the provisional tokens, those in places from `start` on: the ones before `limit` stay.

    limit: int, or (B, 1) int64. end, new_end: tokens seen before and after, padding included. num_dropped: the most any
    row loses. shift: (B, 1) places by which each row moves left, so that rows of unequal length leave no gap, or None.
    """

    start: int
    end: int
    limit: int | Tensor
    new_end: int
    num_dropped: int
    shift: Tensor | None = None

    def on(self, device) -> "Tail":
        """The same for a layer on another device."""
        return self._replace(
            limit=self.limit.to(device) if torch.is_tensor(self.limit) else self.limit,
            shift=None if self.shift is None else self.shift.to(device),
        )

    def move(self, positions: Tensor, shift: Tensor) -> Tensor:
        return torch.where(positions >= self.start, positions - shift, positions).to(positions.dtype)


def plan_tail(n: int | Tensor, start: int, end: int, row_ends: Tensor) -> Tail:
    """Keep the first n tokens of each row's tail; row_ends (B,): the place behind each row's last committed token.

    A tensor of n costs one host read; then the longest row tells how many tokens the cache has seen.

    Raises:
        ValueError: n is not one number, or one a row, in [0, end - start].
    """
    rule = f"n must be one integer, or one for each of {len(row_ends)} rows, in [0, {end - start}]"
    if not torch.is_tensor(n):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= end - start:
            raise ValueError(f"{rule} (the provisional tokens), got {n!r}")
        return Tail(start, end, start + n, start + n, end - start - n)
    if n.shape != row_ends.shape or n.dtype != torch.int64:
        raise ValueError(f"{rule}, got {n.dtype} of shape {tuple(n.shape)}")
    n = n.to(row_ends.device)
    ends = (n.amin(), n.amax(), (row_ends + n).amax(), (start - row_ends).amax())
    low, high, longest, most_shift = torch.stack(ends).tolist()
    if low < 0 or high > end - start:
        raise ValueError(f"{rule} (the provisional tokens), got {n.tolist()}")
    shift = (start - row_ends)[:, None] if most_shift else None
    return Tail(start, end, (start + n)[:, None], longest, end - start - low, shift)


class Provisional:
    """Tokens that came since past recording began or the last commit are provisional until the next."""

    def plan_commit(self, n: int | Tensor) -> Tail:
        raise NotImplementedError

    def commit_tail(self, tail: Tail) -> None:
        raise NotImplementedError

    def commit(self, n: int | Tensor) -> None:
        """Keep the first n provisional tokens and drop the rest.

        Args:
            n: one number, or (B,) int64: every row accepts its own; shorter rows are as if those tokens never came.
        Raises:
            ValueError: n lies outside [0, provisional tokens].
            RuntimeError: past recording was not on all the while. In both cases nothing was changed.
        """
        self.commit_tail(self.plan_commit(n))

    def discard(self) -> None:
        """Drop all provisional tokens."""
        self.commit(0)


class RowState(Provisional):
    """State whose tensors all have the batch row first, so that every lifecycle call is one loop that forgets none."""

    row_tensors: tuple[str, ...]
    other_state: tuple[str, ...]
    keys: Tensor
    device: torch.device | None = None
    num_committed = 0  # tokens in front of the provisional tail, padding included

    @property
    def is_empty(self) -> bool:
        raise NotImplementedError

    def allocate(self, batch_size: int, device, dtype) -> None:
        """Make the state of an empty cache."""
        raise NotImplementedError

    def map_rows(self, change) -> None:
        for name in self.row_tensors:
            setattr(self, name, change(getattr(self, name)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self.map_rows(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_rows(lambda state: state[indices.to(state.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda state: state.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self.map_rows(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.map_rows(lambda state: state.to(self.device, non_blocking=True))

    def snapshot(self) -> dict:
        """References that `restore` puts back to undo later writes; copies nothing, since writes touch no live entry.

        Valid until a crop, commit or reset: writes that follow these reuse slots that were live at the snapshot.
        """
        return {name: getattr(self, name) for name in (*self.row_tensors, *self.other_state)}

    def restore(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(getattr(self, name).nbytes for name in self.row_tensors)

    @property
    def holds_inference_tensors(self) -> bool:
        return any(getattr(self, name).is_inference() for name in self.row_tensors)

    def adopt(self, num_rows: int, new: Tensor) -> None:
        """Take rows, dtype and device from the first write; refuse other rows later."""
        keys = self.keys
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled() and self.holds_inference_tensors:
            self.map_rows(torch.clone)  # what inference mode has made nobody else may write
        rows_held, kind_held = keys.shape[0], (keys.dtype, keys.device)
        if (rows_held, *kind_held) == (num_rows, new.dtype, new.device):
            return
        if self.is_empty:
            self.allocate(num_rows, new.device, new.dtype)
        elif rows_held != num_rows:
            raise ValueError(f"the cache holds batch_size={rows_held} rows, got {num_rows} rows")
        else:
            self.map_rows(lambda state: state.to(new.device, new.dtype if state.is_floating_point() else None))


class LocalSlidingWindowLayerCache(RowState):
    """The last W - 1 real tokens of each row, for the local path of one layer.

    State: `keys`, `values` (B, H, R, A), right-aligned, R = max(W - 1, 1), more while past is recorded; they are the
    last R slots before `_end` of `_keys`, `_values`, which may have spare slots behind; `alive` (B, R) bool, what lies
    under False is never read; `positions` (B, R) int64, place of the entry in its row, padding counted;
    `num_real_tokens` (B,) int64 and `num_tokens` int, tokens seen without and with padding; `_num_sure` int, never more
    than the live entries of any row, known without a look at `alive`; `_is_borrowed`: another cache reads the storage.
    """

    row_tensors = ("_keys", "_values", "alive", "positions", "num_real_tokens")
    other_state = ("_end", "_is_borrowed", "num_tokens", "_num_sure", "num_committed")

    def __init__(self, sliding_window, num_heads, head_dim, batch_size, device, *, dtype=None):
        self.sliding_window, self.num_heads, self.head_dim = sliding_window, num_heads, head_dim
        self.num_window_slots = max(sliding_window - 1, 1)
        self.num_spare_slots = max(sliding_window // 4, GROWTH_SLOTS)
        self.record_past = False
        self.allocate(batch_size, device, dtype)

    def allocate(self, batch_size, device, dtype) -> None:
        num_slots = self.num_window_slots
        shape = (batch_size, self.num_heads, num_slots, self.head_dim)
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self._end, self._is_borrowed = num_slots, False
        self.device = self._keys.device
        self.alive = torch.zeros(batch_size, num_slots, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=device)
        self.num_real_tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_tokens = self._num_sure = self.num_committed = 0

    @property
    def keys(self) -> Tensor:
        return self._keys[:, :, self._end - self.alive.shape[1] : self._end]

    @property
    def values(self) -> Tensor:
        return self._values[:, :, self._end - self.alive.shape[1] : self._end]

    @property
    def window_positions(self) -> Tensor:
        """(B, W-1) places in their rows of the entries that the next chunk attends to, padding counted."""
        return self.positions[:, self.positions.shape[1] - (self.sliding_window - 1) :]

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0

    @property
    def is_full(self) -> bool:
        """Whether every slot is known to be alive; a compiled program never knows."""
        return not torch.compiler.is_compiling() and self._num_sure >= self.alive.shape[1]

    def get_seq_length(self) -> int:
        """Tokens seen since the last reset, padding included."""
        return self.num_tokens

    def update(
        self, keys: Tensor, values: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add a chunk and return what it attends to: the W - 1 entries before it, then the chunk as given.

        Args:
            keys, values: (B, H, T, A).
            mask: (B, T) bool, True for real tokens; None when all are.
            positions: (B, T) int64 place of each token in its row, padding counted; None continues the count.
        Returns:
            keys, values (B, H, W-1+T, A), and alive (B, W-1+T) bool.
        """
        self.adopt(keys.shape[0], keys)
        num_rows, num_new = keys.shape[0], keys.shape[2]
        if positions is None:
            positions = torch.arange(self.num_tokens, self.num_tokens + num_new, device=keys.device)
            positions = positions.expand(num_rows, -1)
        alive = self.alive.new_ones(num_rows, num_new) if mask is None else mask.bool()
        first = self.alive.shape[1] - (self.sliding_window - 1)
        past_keys, past_values = self.keys, self.values
        if not self.is_full:
            # dead slots may hold anything, and even masked, 0 * nan is nan
            dead = ~self.alive[:, None, :, None]
            past_keys, past_values = past_keys.masked_fill(dead, 0), past_values.masked_fill(dead, 0)
        keys = torch.cat([past_keys, keys], dim=2)
        values = torch.cat([past_values, values], dim=2)
        seen = torch.cat([self.alive, alive], dim=1)
        positions = torch.cat([self.positions, positions], dim=1)
        num_kept = seen.shape[1] if self.record_past else self.num_window_slots
        self._retain(keys.detach(), values.detach(), seen, positions, num_kept, in_order=mask is None)
        self._count(num_new, mask)
        return keys[:, :, first:], values[:, :, first:], seen[:, first:]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """`update` for a short chunk of real tokens, in place; None where that cannot be.

        It cannot where the chunk is long, where a graph or a compiled program may hold what is stored, and where rows
        hold entries in unequal number. Returns keys, values (B, H, n+T, A), n <= W - 1: those alive. They are views of
        the state, to be read at once.
        """
        num_new, num_slots = keys.shape[2], self.alive.shape[1]
        # all slots, or all tokens there ever were
        is_even = self._num_sure >= min(self.num_tokens, num_slots)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not is_even or num_new > self.num_spare_slots:
            return None
        self.adopt(keys.shape[0], keys)
        if self._is_borrowed or self._end + num_new > self._keys.shape[2]:
            self._make_room(num_slots + num_new + self.num_spare_slots)
        first_seen = self._end - min(self._num_sure, self.sliding_window - 1)
        self._keys[:, :, self._end : self._end + num_new] = keys
        self._values[:, :, self._end : self._end + num_new] = values
        self._end += num_new
        num_kept = num_slots + num_new if self.record_past else self.num_window_slots
        self.positions = torch.cat([self.positions, positions], dim=1)[:, -num_kept:]
        if num_kept != num_slots or self._num_sure < num_slots:  # else all are alive, before and after
            self.alive = F.pad(self.alive, (0, num_new), value=True)[:, -num_kept:]
        self._count(num_new)
        return self._keys[:, :, first_seen : self._end], self._values[:, :, first_seen : self._end]

    def _count(self, num_new: int, mask: Tensor | None = None) -> None:
        """Count tokens that were just stored; mask as `update`."""
        self.num_real_tokens = self.num_real_tokens + (num_new if mask is None else mask.sum(dim=1))
        self.num_tokens += num_new
        self._num_sure = min(self._num_sure + (num_new if mask is None else 0), self.alive.shape[1])

    def _count_dropped(self, num_dropped: int, num_tokens: int) -> None:
        """Settle on num_tokens after any row lost up to num_dropped and all were trimmed to the window."""
        self._num_sure = min(max(0, self._num_sure - num_dropped), self.num_window_slots)
        self.num_tokens = self.num_committed = num_tokens

    def _make_room(self, num_slots: int) -> None:
        """Move what is retained to the front of storage of its own."""
        state = self.keys, self.values
        shape = (*self._keys.shape[:2], num_slots, self.head_dim)
        self._keys, self._values = self._keys.new_empty(shape), self._values.new_empty(shape)
        self._end, self._is_borrowed = self.alive.shape[1], False
        self._keys[:, :, : self._end], self._values[:, :, : self._end] = state

    def _retain(self, keys, values, alive, positions, num_kept, in_order) -> None:
        """Keep the last `num_kept` live entries of every row, right-aligned, in storage of their own."""
        self._end, self._is_borrowed = num_kept, False
        if in_order:
            first = alive.shape[1] - num_kept
            self._keys, self._values = keys[:, :, first:].clone(), values[:, :, first:].clone()
            self.alive, self.positions = alive[:, first:].clone(), positions[:, first:].clone()
            return
        order = alive.int().argsort(dim=1, stable=True)[:, alive.shape[1] - num_kept :]
        index = order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        self._keys, self._values = keys.gather(2, index), values.gather(2, index)
        self.alive, self.positions = alive.gather(1, order), positions.gather(1, order)

    def crop_to(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens; trims a recorded past to the window.

        Raises:
            RuntimeError: entries that the shorter window needs are gone; nothing was changed.
        """
        kept = self.alive & (self.positions < num_tokens)
        num_real_tokens = self.num_real_tokens - (self.alive.sum(dim=1) - kept.sum(dim=1))
        num_left = kept.sum(dim=1)
        # with none left, older dropped tokens may have been real or padding: that is known only if none was evicted
        known = (num_left > 0) | (self.alive.sum(dim=1) == self.num_real_tokens)
        enough = num_left >= num_real_tokens.clamp(max=self.sliding_window - 1)
        if not bool((known & enough).all()):
            raise RuntimeError(
                f"cannot crop the cache from {self.num_tokens} to {num_tokens} tokens: the sliding window has dropped "
                "entries it would need; call activate_past_recording() before the forward to be rolled back"
            )
        self._retain(self.keys, self.values, kept, self.positions, self.num_window_slots, in_order=False)
        self.num_real_tokens = num_real_tokens
        self._count_dropped(self.num_tokens - num_tokens, num_tokens)

    def fork(self) -> "LocalSlidingWindowLayerCache":
        """Scratch that borrows this history until it writes; valid until this cache drops tokens."""
        scratch = copy.copy(self)
        scratch._is_borrowed, scratch.record_past, scratch.num_committed = True, True, self.extent()[0]
        return scratch

    def extent(self) -> tuple[int, int]:
        """Committed tokens, padding included, and how many of them are retained."""
        total = self.num_committed if self.record_past else self.num_tokens
        return total, min(total, self.sliding_window - 1)

    def plan_commit(self, n: int | Tensor) -> Tail:
        start = self.extent()[0]
        ends = (self.positions + 1).where(self.alive & (self.positions < start), 0).amax(dim=1)
        return plan_tail(n, start, self.num_tokens, ends)

    def commit_tail(self, tail: Tail) -> None:
        num_kept, num_slots, tail = self.num_window_slots, self.alive.shape[1], tail.on(self.alive.device)
        if num_slots < num_kept + tail.end - tail.start:
            raise RuntimeError(
                f"cannot drop any of the last {tail.end - tail.start} tokens: the window did not record its past; "
                "call activate_past_recording() before the forward to be rolled back"
            )
        if not torch.is_tensor(tail.limit) and self.is_full:
            self._end -= tail.num_dropped
            kept = slice(num_slots - tail.num_dropped - num_kept, num_slots - tail.num_dropped)
            self.alive, self.positions = self.alive[:, kept], self.positions[:, kept]
            self.num_real_tokens = self.num_real_tokens - tail.num_dropped
        else:
            kept = self.alive & (self.positions < tail.limit)
            self.num_real_tokens = self.num_real_tokens - (self.alive.sum(dim=1) - kept.sum(dim=1))
            positions = self.positions if tail.shift is None else tail.move(self.positions, tail.shift)
            self._retain(self.keys, self.values, kept, positions, num_kept, in_order=False)
        self._count_dropped(tail.num_dropped, tail.new_end)

    def reset(self) -> None:
        self.allocate(self._keys.shape[0], self._keys.device, self._keys.dtype)


class MoSRAHCache(RowState):
    """Append-only keys and values of every (row, head) of the routed path of one layer.

    State: `keys`, `values`: one slab of slots per row, (B, L, C, A) under the fixed policy and (B, S, A) under the
    growing one; `token_positions` of the same slots, int32, place of the entry's token in its row, padding counted;
    `offsets`, `capacities`, `counts` (B, L) int64: a head owns the slots offset to offset + capacity of its row, the
    first `count` of them live, in token order. What lies beyond a count is never read.
    """

    row_tensors = ("keys", "values", "token_positions", "offsets", "capacities", "counts")
    other_state = ("_num_free", "_num_since", "num_committed")

    def __init__(
        self,
        num_mosrah_heads,
        head_dim,
        batch_size,
        device,
        mosrah_cache_length,
        *,
        dtype=None,
        growing=False,
        layer_idx=0,
    ):
        self.num_mosrah_heads, self.head_dim = num_mosrah_heads, head_dim
        self.mosrah_cache_length = mosrah_cache_length
        self.growing, self.layer_idx = growing, layer_idx
        self._full_message = f"the fixed routed cache of layer {layer_idx} is full"
        self.allocate(batch_size, device, dtype)

    def allocate(self, batch_size, device, dtype) -> None:
        num_slots = 0 if self.growing else self.mosrah_cache_length
        shape = (0,) if self.growing else (self.num_mosrah_heads, num_slots)
        self.keys = torch.zeros(batch_size, *shape, self.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.device = self.keys.device
        self.token_positions = torch.zeros(batch_size, *shape, device=device, dtype=torch.int32)
        self.counts = torch.zeros(batch_size, self.num_mosrah_heads, dtype=torch.int64, device=device)
        self.capacities = torch.full_like(self.counts, num_slots)
        self.offsets = self.capacities.cumsum(dim=1) - self.capacities
        # kept on the host, so that most appends need not look: free slots of the fullest head at the last look, and
        # tokens since then, each of which may have taken one of them
        self._num_free, self._num_since = num_slots, 0

    @property
    def is_empty(self) -> bool:
        return not bool(self.counts.any())

    @property
    def num_row_slots(self) -> int:
        return self.token_positions[:1].numel()

    def get_heads_lengths(self) -> Tensor:
        """Entries of every head, (B, L) int64: a value, not a view."""
        return self.counts.clone()

    def history(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """A copy of one head's live keys and values, each (n, A)."""
        first = row * self.num_row_slots + int(self.offsets[row, head])
        live = slice(first, first + int(self.counts[row, head]))
        return self.keys.view(-1, self.head_dim)[live].clone(), self.values.view(-1, self.head_dim)[live].clone()

    def update(self, keys: Tensor, values: Tensor, packing, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append the chunk's entries and return where its groups find all their keys.

        Args:
            keys, values: (P, A) in the order of `packing` (see `plans_shram.Packing`).
            positions: (P,) place of each entry's token in its row, padding counted.
        Returns:
            keys, values (slots, A), and each group's first slot and number of slots, (G,) int64. Entries that carry a
            gradient are composed with the history out of place; otherwise the slab itself is read.
        Raises:
            ValueError: a head of a fixed cache has too few slots; nothing was changed.
        """
        self.adopt(packing.num_rows, keys)
        composed = None
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            composed = self._compose(keys, values, packing)
        self._reserve(packing.group_flat, packing.group_length, packing.num_tokens)
        first_slots, history = self.slots_of(packing)
        slots = (first_slots + history).index_select(0, packing.group) + packing.rank
        flat_keys, flat_values = self._write(slots, keys.detach(), values.detach(), positions)
        self.counts = self.counts.view(-1).index_add(0, packing.group_flat, packing.group_length).view_as(self.counts)
        if composed is not None:
            return composed
        return flat_keys, flat_values, first_slots, history + packing.group_length

    def place(self, heads: Tensor, like: Tensor) -> Entries:
        """Where the entries of heads (B, T, K) go, for which there is room then.

        Raises:
            ValueError: a head of a fixed cache has too few slots; nothing was changed.
        """
        num_rows, num_tokens, num_selected = heads.shape
        self.adopt(num_rows, like)
        row = None
        head_of_row = heads.flatten()
        if num_rows > 1:
            row = torch.arange(num_rows, device=heads.device).repeat_interleave(num_tokens * num_selected)
            head_of_row = row * self.num_mosrah_heads + head_of_row
        self._reserve(head_of_row, None, num_tokens)
        first_slots, rank = self._slots_of(head_of_row, row)
        if num_tokens > 1:
            rank = rank + ranks_in_chunk(heads, self.num_mosrah_heads)
        return Entries(head_of_row, first_slots, first_slots + rank, rank + 1)

    def append(self, keys: Tensor, values: Tensor, entries: Entries, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys, values (P, A) of tokens at positions (B, T); returns all keys and values (slots, A)."""
        positions = positions[..., None].expand(*positions.shape, len(keys) // positions.numel()).flatten()
        flat = self._write(entries.slots, keys, values, positions)
        counts = self.counts.view(-1).scatter_reduce(0, entries.head_of_row, entries.num_keys, "amax")
        self.counts = counts.view_as(self.counts)
        return flat

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fill slots (P,), counted through all rows, and return all keys and values (slots, A)."""
        flat_keys, flat_values = self.keys.view(-1, self.head_dim), self.values.view(-1, self.head_dim)
        self.token_positions.view(-1).index_copy_(0, slots, positions.to(torch.int32))
        return flat_keys.index_copy_(0, slots, keys), flat_values.index_copy_(0, slots, values)

    def update_static(self, keys: Tensor, values: Tensor, num_new: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a fixed cache out of place, by static shapes; returns its keys and values (B, L, C, A).

        keys, values, positions: (B, L, T, A) and (B, L, T), of which head l of row b appends the first num_new (B, L).
        A head that overflows stops the program with a RuntimeError: a compiled graph cannot look ahead.
        """
        if self.growing:
            raise ValueError("a growing ShramCache cannot be compiled; use new_cache(batch_size, growing=False)")
        torch._assert_async((self.counts + num_new <= self.mosrah_cache_length).all(), self._full_message)
        rank = torch.arange(self.mosrah_cache_length, device=keys.device) - self.counts[..., None]
        incoming = (rank >= 0) & (rank < num_new[..., None])
        source = rank.clamp(0, keys.shape[2] - 1)

        def compose(stored: Tensor, new: Tensor) -> Tensor:
            index = source.view(*source.shape, *[1] * (new.ndim - 3)).expand(*source.shape, *new.shape[3:])
            flag = (slice(None),) * 3 + (None,) * (new.ndim - 3)
            # dead slots become zero: even masked, nan would spread
            return torch.where(incoming[flag], new.gather(2, index), stored.where((rank < 0)[flag], 0))

        composed = compose(self.keys, keys), compose(self.values, values)
        self.keys, self.values = (state.detach() for state in composed)
        self.token_positions = compose(self.token_positions, positions.to(torch.int32))
        self.counts = self.counts + num_new
        self._num_free = self._num_since = 0  # unknown here: an eager append must look
        return composed

    def slots_of(self, packing) -> tuple[Tensor, Tensor]:
        """First slot (in all rows' slots) and live entries of every group, each (G,) int64."""
        return self._slots_of(packing.group_flat, packing.group_row)

    def _slots_of(self, head_of_row: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same of the heads at (n,) indices into flat (B, L), in rows (n,); row None: in the only one."""
        first_slots, counts = (x.view(-1).index_select(0, head_of_row) for x in (self.offsets, self.counts))
        return first_slots if row is None else row * self.num_row_slots + first_slots, counts

    def _compose(self, keys, values, packing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """History and chunk of every group, one after the other, in new storage through which gradients flow."""
        stored, history = self.slots_of(packing)
        lengths = history + packing.group_length
        first_slots = lengths.cumsum(0) - lengths
        group = torch.arange(len(lengths), device=keys.device).repeat_interleave(lengths)
        rank = torch.arange(len(group), device=keys.device) - first_slots[group]
        new = self.keys.view(-1, self.head_dim).shape[0] + packing.group_start - history
        source = torch.where(rank < history[group], stored[group], new[group]) + rank
        keys = torch.cat([self.keys.view(-1, self.head_dim), keys]).index_select(0, source)
        values = torch.cat([self.values.view(-1, self.head_dim), values]).index_select(0, source)
        return keys, values, first_slots, lengths

    def _reserve(self, where: Tensor, num_incoming: Tensor | None, most: int) -> None:
        """Make room for new entries of some heads, at most `most` each, or refuse before anything is written.

        where: (n,) indices into flat (B, L); num_incoming: (n,), None for one each.
        """
        if self._num_since + most > self._num_free:
            num_incoming = torch.ones_like(where) if num_incoming is None else num_incoming
            need = self.counts.view(-1).index_add(0, where, num_incoming).view_as(self.counts)
            if bool((need > self.capacities).any()):
                if not self.growing:
                    self._refuse(need)
                self._move(need)
            self._num_free, self._num_since = self._look(), 0
        self._num_since += most

    def _look(self) -> int:
        """Free slots of the fullest head; a host read."""
        return int((self.capacities - self.counts).amin()) if self.counts.numel() else 0

    def _refuse(self, need: Tensor) -> None:
        row, head = divmod(int((need - self.capacities).argmax()), self.num_mosrah_heads)
        raise ValueError(
            f"{self._full_message}: head {head} has capacity "
            f"{int(self.capacities[row, head])} and would need {int(need[row, head])} (row {row}); raise "
            "mosrah_overallocation_factor or use the growing cache"
        )

    def _move(self, need: Tensor) -> None:
        """Give every head room for `need` (B, L) entries and a share to grow, and move the live entries there."""
        capacities = need + (need // GROWTH_SHARE).clamp(min=GROWTH_SLOTS)
        ends = capacities.cumsum(dim=1)
        offsets = ends - capacities
        slots = torch.arange(int(ends[:, -1].amax()), device=need.device).expand(need.shape[0], -1).contiguous()
        head = torch.searchsorted(ends, slots, right=True).clamp(max=self.num_mosrah_heads - 1)
        rank = slots - offsets.gather(1, head)
        live = rank < self.counts.gather(1, head)
        source = (self.offsets.gather(1, head) + rank).where(live, 0)
        if self.num_row_slots:
            first = torch.arange(len(need), device=need.device)[:, None] * self.num_row_slots
            for name in ("keys", "values", "token_positions"):
                stored = getattr(self, name)
                moved = stored.flatten(0, 1).index_select(0, (first + source).flatten())
                setattr(self, name, moved.view(*slots.shape, *stored.shape[2:]))
        else:
            self.keys = self.keys.new_zeros(*slots.shape, self.head_dim)
            self.values = self.values.new_zeros(*slots.shape, self.head_dim)
            self.token_positions = self.token_positions.new_zeros(slots.shape)
        self.capacities, self.offsets = capacities, offsets

    def crop_to(self, num_tokens: int) -> None:
        """Forget the entries of all but the first `num_tokens` tokens of every row."""
        places, live = self.newest(int(self.counts.amax()) if self.counts.numel() else 0)
        self.counts = (live & (places < num_tokens)).sum(dim=-1)
        self.num_committed = num_tokens

    def fork(self) -> "MoSRAHCache":
        """Scratch that borrows this history and writes on a copy; valid until this cache drops tokens."""
        scratch = MoSRAHScratch.__new__(MoSRAHScratch)
        vars(scratch).update(vars(self))
        scratch.lent = self.keys
        return scratch

    def newest(self, width: int) -> tuple[Tensor, Tensor]:
        """Places (B, L, width) of each head's last entries, newest first, and which of them exist."""
        rank = self.counts[..., None] - 1 - torch.arange(width, device=self.counts.device)
        live = rank >= 0
        slots = (self.offsets[..., None] + rank).where(live, 0).flatten(1)
        return self.token_positions.flatten(1).gather(1, slots).view_as(live), live

    def extent(self) -> tuple[int, int]:
        """Tokens up to the last that has an entry, padding included, all of them resident; a host read."""
        if not self.num_row_slots or not self.counts.numel():
            return 0, 0
        places, live = self.newest(1)
        total = int(places.where(live, -1).amax()) + 1
        return total, total

    def plan_commit(self, n: int | Tensor) -> Tail:
        start, end = self.num_committed, self.extent()[0]
        ends = self.counts.new_zeros(self.counts.shape[0])
        if end:
            places, live = self.newest(int(self.counts.amax()))
            ends = (places.long() + 1).where(live & (places < start), 0).amax(dim=(1, 2))
        return plan_tail(n, start, max(start, end), ends)

    def commit_tail(self, tail: Tail) -> None:
        self.num_committed = tail.new_end
        if not self.num_row_slots:
            return
        tail = tail.on(self.counts.device)
        places, live = self.newest(tail.end - tail.start)  # a head has one entry a token at most
        limit = tail.limit[..., None] if torch.is_tensor(tail.limit) else tail.limit
        self.counts = self.counts - (live & (places >= limit)).sum(dim=-1)
        if tail.shift is not None:
            moved = tail.move(self.token_positions.flatten(1), tail.shift)
            self.token_positions = moved.view_as(self.token_positions)
        if not torch.is_tensor(tail.limit):
            # no row keeps any of these tokens, and those from before the last look only free slots
            self._num_since = max(0, self._num_since - tail.num_dropped)

    def reset(self) -> None:
        self.num_committed = 0
        self.counts = torch.zeros_like(self.counts)
        self._num_free, self._num_since = self._look(), 0


class MoSRAHScratch(MoSRAHCache):
    """What `MoSRAHCache.fork` makes: the lent slab is never written, so no reader's tensor ever changes."""

    lent: Tensor

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is self.lent:
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self.token_positions = self.token_positions.clone()
        return super()._write(slots, keys, values, positions)


__all__ = ["LocalSlidingWindowLayerCache", "MoSRAHCache", "Provisional", "Tail"]
