"""Slow doubles of the kernels of `device_plan_shram`, in any dtype, for a CPU.

They are operators of their own: traces and dispatch modes see one call, not the loop inside. Rows behind the last
group, which the real kernels leave uninitialised, come back as NaN, in gradients too.
"""

from itertools import pairwise

import torch
from torch import Tensor

from shram.device_plan_shram import Kernels


def unwritten(shape, like: Tensor) -> Tensor:
    return like.new_full(shape, torch.nan)


def group_slices(bounds: Tensor) -> list[slice]:
    assert bounds.dtype == torch.int32 and bounds.is_contiguous()
    ends = bounds.tolist()
    assert ends == sorted(ends)
    return [slice(*pair) for pair in pairwise(ends)]


def head_slices(offs: Tensor) -> list[slice]:
    return group_slices(torch.cat([offs.new_zeros(1), offs]))


# ---------------------------------------------------------------------------------------------------- grouped_mm


@torch.library.custom_op("shram_stand_in::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(P, M), (L, M, N), (L,) to (P, N)."""
    assert offs.is_contiguous() and len(offs) == len(weight)
    out = unwritten((len(rows), weight.shape[2]), rows)
    for part, matrix in zip(head_slices(offs), weight, strict=True):
        out[part] = rows[part] @ matrix
    return out


@torch.library.custom_op("shram_stand_in::grouped_outer", mutates_args=())
def grouped_outer(rows: Tensor, grad: Tensor, offs: Tensor) -> Tensor:
    """(P, M), (P, N), (L,) to (L, M, N)."""
    return torch.stack([rows[part].T @ grad[part] for part in head_slices(offs)])


@grouped_product.register_fake
def _(rows, weight, offs):
    return rows.new_empty(rows.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(rows, grad, offs):
    return rows.new_empty(len(offs), rows.shape[1], grad.shape[1])


def save_product(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def grouped_product_backward(ctx, grad):
    rows, weight, offs = ctx.saved_tensors
    return grouped_product(grad, weight.mT, offs), grouped_outer(rows, grad, offs), None


grouped_product.register_autograd(grouped_product_backward, setup_context=save_product)


def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
    return grouped_product(mat_a, mat_b, offs)


# ---------------------------------------------------------------------------------------------------- varlen_attn


def causal_probs(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(n, n) of one sequence q, k (n, A)."""
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return (q @ k.T * scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)


@torch.library.custom_op("shram_stand_in::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """(P, 1, A) each, to (P, 1, A)."""
    out = unwritten(q.shape, q)
    for part in group_slices(bounds):
        assert part.stop - part.start <= longest
        out[part, 0] = causal_probs(q[part, 0], k[part, 0], scale) @ v[part, 0]
    return out


@torch.library.custom_op("shram_stand_in::attention_gradients", mutates_args=())
def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = unwritten(q.shape, q), unwritten(k.shape, k), unwritten(v.shape, v)
    for part in group_slices(bounds):
        g, query, key, value = (x[part, 0] for x in (grad, q, k, v))
        probs = causal_probs(query, key, scale)
        grad_probs = g @ value.T
        grad_scores = probs * (grad_probs - (grad_probs * probs).sum(dim=-1, keepdim=True)) * scale
        for out, found in zip(grads, (grad_scores @ key, grad_scores.T @ query, probs.T @ g), strict=True):
            out[part, 0] = found
    return grads


@attention.register_fake
def _(q, k, v, bounds, longest, scale):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@attention_gradients.register_fake
def _(grad, q, k, v, bounds, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def save_attention(ctx, inputs, output) -> None:
    *tensors, _, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def attention_backward(ctx, grad):
    return *attention_gradients(grad, *ctx.saved_tensors, ctx.scale), None, None, None


attention.register_autograd(attention_backward, setup_context=save_attention)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size) -> Tensor:
    assert cu_seq_q is cu_seq_k and max_q == max_k and window_size == (-1, 0)
    return attention(query, key, value, cu_seq_q, max_q, scale)


STAND_INS = Kernels(grouped_mm, varlen_attn)
