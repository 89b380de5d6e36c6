"""A minimal causal-video rollout: attention blocks that write dict caches by extents, with sink and rolling window.

Written as public causal video models write theirs, knowing nothing of workspaces: the judge of whether a workspace
serves where a main cache did.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, WIDTH = 2, 4
HIDDEN = HEADS * WIDTH


def empty_cache(num_blocks: int = 3, rows: int = 2, slots: int = 12, dtype=torch.float64) -> list[dict]:
    """Preallocated blocks; slots that nobody wrote hold NaN."""
    return [
        {
            "k": torch.full((rows, slots, HEADS, WIDTH), torch.nan, dtype=dtype),
            "v": torch.full((rows, slots, HEADS, WIDTH), torch.nan, dtype=dtype),
            "global_end_index": torch.zeros(1, dtype=torch.long),
            "local_end_index": torch.zeros(1, dtype=torch.long),
        }
        for _ in range(num_blocks)
    ]


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary embedding of x (B, T, heads, width) at global positions start, start + 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + x.shape[1], dtype=x.dtype)[:, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class VideoBlock(nn.Module):
    """Attention of a chunk to the sink and the newest tokens of the cache, `window` in all, the chunk included.

    Inside a chunk there is no causality.
    """

    def __init__(self, window: int | None = None, sink: int = 0, freeze_kv: bool = False, dtype=torch.float64):
        super().__init__()
        self.window, self.sink = window, sink
        self.q, self.kv, self.out = (
            nn.Linear(HIDDEN, n, bias=False, dtype=dtype) for n in (HIDDEN, 2 * HIDDEN, HIDDEN)
        )
        self.kv.requires_grad_(not freeze_kv)

    def forward(self, x: Tensor, cache: dict) -> Tensor:
        start = int(cache["global_end_index"]) if "start" not in cache else cache["start"]
        q = rotate(self.q(x).unflatten(-1, (HEADS, WIDTH)), start)
        k, v = self.kv(x).unflatten(-1, (2, HEADS, WIDTH)).unbind(2)
        local_end = self.write(cache, rotate(k, start), v, start + x.shape[1])
        seen: slice | list[int] = slice(0, local_end)
        if self.window is not None and local_end > self.window:
            seen = [*range(self.sink), *range(local_end - (self.window - self.sink), local_end)]
        keys, values = (cache[name][:, seen].transpose(1, 2) for name in ("k", "v"))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def write(self, cache: dict, k: Tensor, v: Tensor, current_end: int) -> int:
        """Write a chunk that ends at global token `current_end`; a full buffer rolls, but keeps its sink."""
        global_end, local_end = int(cache["global_end_index"]), int(cache["local_end_index"])
        new_end, slots = local_end + current_end - global_end, cache["k"].shape[1]
        if new_end > slots and self.window is not None:
            evicted = new_end - slots
            for name in ("k", "v"):
                cache[name][:, self.sink : local_end - evicted] = cache[name][
                    :, self.sink + evicted : local_end
                ].clone()
            new_end = slots
        for name, new in (("k", k), ("v", v)):
            cache[name][:, new_end - new.shape[1] : new_end] = new
        cache["global_end_index"].fill_(current_end)
        cache["local_end_index"].fill_(new_end)
        return new_end


class StaticBlock(VideoBlock):
    """The same with shapes that do not depend on extents: for compiled rollouts on a workspace of fixed capacity."""

    def forward(self, x: Tensor, cache: dict) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH))
        k, v = self.kv(x).unflatten(-1, (2, HEADS, WIDTH)).unbind(2)
        slot = torch.arange(cache["k"].shape[1])
        rank = slot - cache["local_end_index"]
        new = ((rank >= 0) & (rank < x.shape[1]))[None, :, None, None]
        index = rank.clamp(0, x.shape[1] - 1)
        for name, fresh in (("k", k), ("v", v)):
            cache[name].copy_(torch.where(new, fresh[:, index], cache[name]))
        mask = rank < x.shape[1]
        keys, values = (cache[name].transpose(1, 2) for name in ("k", "v"))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask.expand(x.shape[1], -1)
        )
        cache["global_end_index"].add_(x.shape[1])
        cache["local_end_index"].add_(x.shape[1])
        return x + self.out(attended.transpose(1, 2).flatten(2))


def make_blocks(num_blocks: int = 3, seed: int = 0, kind=VideoBlock, **options) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(kind(**options) for _ in range(num_blocks))


def run(blocks, caches, x: Tensor) -> Tensor:
    """One pass of a chunk x (B, T, HIDDEN) over blocks and their caches; rewriting a chunk is idempotent."""
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, cache)
    return x


def full_pass(blocks, caches: list[dict], x: Tensor, start: int) -> Tensor:
    """The writer of the main cache: chunk x at global token `start`, which it may have written before."""
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, {**cache, "start": start})
    return x


def chunk(tokens: int = 3, seed: int = 0, rows: int = 2, dtype=torch.float64) -> Tensor:
    return torch.randn(rows, tokens, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(seed))
