"""Execution plan of the routed path for CUDA: static shapes, nothing the host must read, no padding between groups.

Shapes: B rows, T tokens in this call, D hidden, L routed heads, K heads chosen per token, A head width; P = B*T*K
entries, one per token and head it chose, those of padding behind all others; G = L*B groups, the (head, row) pairs,
empty ones included.

Neither kernel reads or writes the rows behind the last group: what stands there is garbage, in values and in
gradients. No step mixes it with other rows, and `without_padding` stops it at the border: in the sum over a token's
entries, which is also the gradient of x, and in the gradient of the weights.

Chunks and tokens on a warm cache are left to `plans_shram`: a growing cache makes the host look at its room in any
case, and its slabs lie by row and then head, not in the order of the entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .plans_shram import wide_dtype

# ---------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernels:
    """The two kernels of this plan, called as torch's own are."""

    grouped_mm: Callable
    varlen_attn: Callable


def find_kernels() -> Kernels | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
        from torch.nn.functional import grouped_mm
    except ImportError:
        return None
    return Kernels(grouped_mm, varlen_attn)


KERNELS: Any = find_kernels()

# Both kernels want strides of whole 16 bytes: so many elements of 16 bits.
ALIGNMENT = 8
MAX_HEAD_DIM = 256  # of flash attention
MAX_GROUPS = 65535  # flash attention counts sequences in a grid dimension of this size
MAX_HEADS = 1023  # of grouped_mm
# Flash attention starts here. Below 9.0 torch's grouped_mm is a loop over heads that reads its offsets on the host.
MIN_CAPABILITY = (8, 0)


def device_plan_available(x: Tensor, config, training: bool) -> bool:
    """Whether this plan serves x (B, T, D); where not, the caller takes another one."""
    return KERNELS is not None and has_kernels_for(x) and fits_kernels(x.shape[0], config, training)


def has_kernels_for(x: Tensor) -> bool:
    if x.device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices cuda too
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    device = torch.cuda.get_device_properties(x.device)
    return dtype == torch.bfloat16 and (device.major, device.minor) >= MIN_CAPABILITY


def fits_kernels(num_rows: int, config, training: bool) -> bool:
    return (
        config._attn_implementation != "eager"
        and not (training and config.attention_dropout)
        and config.hidden_size % ALIGNMENT == 0
        and config.head_dim % ALIGNMENT == 0
        and config.head_dim <= MAX_HEAD_DIM
        and config.num_mosrah_heads <= MAX_HEADS
        and config.num_mosrah_heads * num_rows <= MAX_GROUPS
    )


# ---------------------------------------------------------------------------------------------------- order


@dataclass
class EntryOrder:
    """The entries sorted by head, then row, then token, padding last: a `Packing` of static shapes.

    choice: (P,) int64, index of the entry into the flat (B, T, K) choices; place: (P,) int64, its inverse.
    token: (P,) int64, its flat (B, T) token; group: (P,) int32, head * B + row, or G for padding.
    bounds: (G + 1,) int32, group g has the entries from bounds[g] to bounds[g + 1].
    real: (B*T, 1) bool, which tokens are no padding; None when none is.
    """

    choice: Tensor
    place: Tensor
    token: Tensor
    group: Tensor
    bounds: Tensor
    real: Tensor | None
    num_rows: int
    num_tokens: int

    @property
    def head_ends(self) -> Tensor:
        """(L,) int32, where the entries of every head end."""
        return self.bounds[self.num_rows :: self.num_rows].contiguous()

    @property
    def rank(self) -> Tensor:
        """(P,) place of every entry in its group."""
        return torch.arange(self.group.shape[0], device=self.group.device) - self.bounds[self.group]

    @property
    def group_row(self) -> Tensor:
        return torch.arange(len(self.bounds) - 1, device=self.bounds.device) % self.num_rows

    @property
    def group_flat(self) -> Tensor:
        """(G,) index of the group into flat (B, L)."""
        group = torch.arange(len(self.bounds) - 1, device=self.bounds.device)
        num_heads = len(group) // self.num_rows
        return self.group_row * num_heads + group // self.num_rows

    @property
    def group_length(self) -> Tensor:
        return self.bounds.diff().long()


def sort_entries(heads: Tensor, mask: Tensor | None, num_heads: int) -> EntryOrder:
    """Sort the chosen heads (B, T, K); mask (B, T) bool, None when every token is real."""
    num_rows, num_tokens, num_selected = heads.shape
    num_groups, device = num_heads * num_rows, heads.device
    key = heads * num_rows + torch.arange(num_rows, device=device)[:, None, None]
    key = key if mask is None else key.where(mask[..., None], num_groups)
    # stable: entries of a group must keep token order, causality relies on it
    group, choice = key.flatten().int().sort(stable=True)
    bounds = torch.searchsorted(group, torch.arange(num_groups + 1, dtype=torch.int32, device=device), out_int32=True)
    return EntryOrder(
        choice=choice,
        place=torch.empty_like(choice).scatter(0, choice, torch.arange(choice.shape[0], device=device)),
        token=choice // num_selected,
        group=group,
        bounds=bounds,
        real=None if mask is None else mask.flatten()[:, None],
        num_rows=num_rows,
        num_tokens=num_tokens,
    )


# ---------------------------------------------------------------------------------------------------- entries


def without_padding(rows: Tensor, real: Tensor | None) -> Tensor:
    """Zero the rows of padding; unlike a product with zero this stops NaN, in values and in gradients."""
    return rows if real is None else rows.where(real, 0)


class Spread(torch.autograd.Function):
    """x (B*T, D) to the entries (P, D). Its gradient is `Collect`: a gather and a sum, without atomics."""

    @staticmethod
    def forward(ctx, x, token, place, real):
        ctx.save_for_backward(token, place, real)
        ctx.num_tokens, ctx.dtype = x.shape[0], x.dtype
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        # torch sums 16 bits in float32 and rounds once
        return Collect.apply(grad, *ctx.saved_tensors, ctx.num_tokens, ctx.dtype), None, None, None


class Collect(torch.autograd.Function):
    """Sum the K entries of every real token: rows (P, D) to (B*T, D) in `dtype`. Its gradient is `Spread`."""

    @staticmethod
    def forward(ctx, rows, token, place, real, num_tokens, dtype):
        ctx.save_for_backward(token, place, real)
        ctx.dtype = rows.dtype
        by_token = rows.index_select(0, place).unflatten(0, (num_tokens, -1))
        return without_padding(by_token.sum(dim=1, dtype=dtype), real)

    @staticmethod
    def backward(ctx, grad):
        return Spread.apply(grad.to(ctx.dtype), *ctx.saved_tensors), None, None, None, None, None


def mix_weights(weights: Tensor, order: EntryOrder) -> Tensor:
    """(P, 1) of the choices' weights (B, T, K)."""
    return without_padding(weights.flatten(0, 1), order.real).flatten().index_select(0, order.choice)[:, None]


# ---------------------------------------------------------------------------------------------------- plan


def project_entries(x: Tensor, weight: Tensor, order: EntryOrder) -> Tensor:
    """Project tokens for their heads: x (B*T, D), weight (L, D, 3A); returns (P, 3A).

    Keeps the (P, D) gathered rows for the backward pass, K times the size of x.
    """
    return KERNELS.grouped_mm(Spread.apply(x, order.token, order.place, order.real), weight, offs=order.head_ends)


def attend_entries(q: Tensor, k: Tensor, v: Tensor, order: EntryOrder, scale: float) -> Tensor:
    """Causal attention inside every group: (P, A) each."""
    # the longest group is known to the host only as T: blocks behind a group's end return at once
    longest = order.num_tokens
    one_head = (x[:, None] for x in (q, k, v))
    attended = KERNELS.varlen_attn(
        *one_head, order.bounds, order.bounds, longest, longest, scale=scale, window_size=(-1, 0)
    )
    return attended[:, 0]


def combine_entries(attended: Tensor, weight: Tensor, weights: Tensor, order: EntryOrder) -> Tensor:
    """Sum over each token's heads of its weight * (attended @ weight): (P, A), (L, A, D), (B, T, K); (B*T, D) wide."""
    # mixed before the product: width A, not D, is what the backward pass must keep
    mixed = (attended * mix_weights(weights, order)).to(weight.dtype)
    rows = KERNELS.grouped_mm(mixed, weight, offs=order.head_ends)
    num_tokens, wide = order.num_rows * order.num_tokens, wide_dtype(weight.dtype)
    return Collect.apply(rows, order.token, order.place, order.real, num_tokens, wide)


def store_entries(cache, k: Tensor, v: Tensor, order: EntryOrder, index: Tensor) -> None:
    """Write this call's entries to a routed cache; index (B, T): place of each token in its row.

    Here the host does wait: for the number of real entries where there is padding, and for the cache's room.
    """
    if order.real is not None:
        num_real = int(order.bounds[-1])
        order = replace(order, token=order.token[:num_real], group=order.group[:num_real])
        k, v = k[:num_real], v[:num_real]
    cache.update(k.detach(), v.detach(), order, index.flatten().index_select(0, order.token))
