"""Execution plans of the routed path: packing of the assignments, products by head, attention inside each head.

Shapes: B rows, T tokens in this call, D hidden, L routed heads, K heads chosen per token, A head width, P entries: one
per real token and head it chose, G groups: the (row, head) pairs that got an entry.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torch.nn.modules.module import _has_any_global_hook as has_global_hook
except ImportError:

    def has_global_hook() -> bool:
        """Unknown here: assume one."""
        return True


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles, router scores and norm statistics: float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale=None, dropout: float = 0.0):
    """Plain masked attention that also returns its probabilities (before dropout)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-1, -2)).to(wide_dtype(q.dtype)) * scale
    probs = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(q.dtype)
    return F.dropout(probs, dropout, training=dropout > 0) @ v, probs


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate the pairs (i, i + A/2) of x (..., A) by angles given as cos, sin (..., A); sin: (-s, s) for each pair."""
    return torch.addcmul(x.roll(x.shape[-1] // 2, -1) * sin, x, cos, out=out)


# So many elements are rotated at a time: few enough to stay in a processor's cache.
ROTATED_BLOCK = 2**16


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary` in place and in blocks along the tokens: x (..., T, A), cos, sin (..., T, A)."""
    if x.numel() <= ROTATED_BLOCK:
        return apply_rotary(x, cos, sin, out=x)
    size = max(1, ROTATED_BLOCK * x.shape[-2] // x.numel())
    for part, *angles in zip(*(tensor.split(size, dim=-2) for tensor in (x, cos, sin)), strict=True):
        apply_rotary(part, *angles, out=part)
    return x


# So many rows at a time stay in a processor's cache from one operation to the next.
ROW_BLOCK = 256


def is_watched(*modules: nn.Module) -> bool:
    """Whether a hook, or accelerate's, sits on one of the modules or inside: those must see whole tensors."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook"
    return any(getattr(inner, kind, None) for module in modules for inner in module.modules() for kind in kinds)


def by_row_blocks(function: Callable[..., Tensor], *tensors: Tensor, inside: tuple[nn.Module, ...] = ()) -> Tensor:
    """function(*tensors), a function of rows that keeps their width, tensors (..., D); `inside`: modules it calls."""
    x = tensors[0]
    stays_whole = torch.compiler.is_compiling() or not x.is_cpu or x.numel() <= ROW_BLOCK * x.shape[-1]
    if stays_whole or is_watched(*inside):
        return function(*tensors)
    blocks = zip(*(tensor.flatten(0, -2).split(ROW_BLOCK) for tensor in tensors), strict=True)
    return torch.cat([function(*rows) for rows in blocks]).view_as(x)


# MKL multiplies a weight that comes from memory by two columns in little more than half the time that it takes for one
# row, and by several columns faster than by as many rows, up to this number and these bytes, half a first-level cache.
FEW_COLUMNS = 8
FEW_COLUMNS_BYTES = 2**14
HAS_MKL = torch.backends.mkl.is_available()


def multiply_columns(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """x @ weight.T for each weight (E, D), the rows of x (..., D) taken as columns, a single one twice."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        twice = torch.cat((rows, rows))
        products = [F.linear(weight, twice).narrow_copy(1, 0, 1) for weight in weights]
    else:
        products = [F.linear(weight, rows).t().contiguous() for weight in weights]
    shapes = ((*x.shape[:-1], weight.shape[0]) for weight in weights)
    # detached: a view made without gradients could not be changed in place with them
    return [product.view(shape).detach() for product, shape in zip(products, shapes, strict=True)]


def takes_columns(x: Tensor) -> bool:
    """Whether x has few enough rows for `multiply_columns`, and nothing records or casts."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if not (HAS_MKL and x.is_cpu and x.itemsize >= 4):
        return False
    num_elements, width = x.numel(), x.shape[-1]
    return num_elements <= FEW_COLUMNS * width and max(num_elements, 2 * width) * x.itemsize <= FEW_COLUMNS_BYTES


def plain_weight(layer: nn.Linear) -> Tensor | None:
    """The weight, if to call the layer is to multiply by it, and nobody watches."""
    if type(layer) is not nn.Linear or layer.bias is not None:  # it may be an adapter's
        return None
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer) or has_global_hook():
        return None
    weight = layer.weight
    return weight if type(weight) is nn.Parameter else None  # a quantized one brings its own product


def apply_linear(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """layer(x) of each, faster for few rows on a CPU; no subclass, since libraries quantize nn.Linear's very type."""
    if takes_columns(x):
        weights = [weight for layer in layers if (weight := plain_weight(layer)) is not None]
        if len(weights) == len(layers):
            return multiply_columns(x, *weights)
    return [layer(x) for layer in layers]


# ---------------------------------------------------------------------------------------------------- packing


@dataclass
class Packing:
    """The assignments of a call, sorted by head, then row, then token: one entry per real token and chosen head.

    choice: (P,) int64, index of the entry into the flat (B, T, K) choices; token: (P,), its flat (B, T) token.
    group, rank: (P,), its group and its place there. group_row, group_head, group_start, group_length: (G,);
    group_flat: (G,), index of the group into flat (B, L).
    head_sizes: entries of each head, on the host. num_rows, num_tokens: B, T.
    """

    choice: Tensor
    token: Tensor
    group: Tensor
    rank: Tensor
    group_row: Tensor
    group_head: Tensor
    group_flat: Tensor
    group_start: Tensor
    group_length: Tensor
    head_sizes: list[int]
    num_rows: int
    num_tokens: int

    @property
    def head(self) -> Tensor:
        """(P,) the head of every entry."""
        return self.group_head[self.group]

    @cached_property
    def spans(self) -> list[tuple[int, slice]]:
        """Every head with its entries; on a CPU, block of tokens after block of tokens, each with all its heads."""
        num_heads, num_tokens = len(self.head_sizes), self.num_rows * self.num_tokens
        num_blocks = -(-num_tokens // TOKEN_BLOCK) if self.token.device.type == "cpu" else 1
        ends = list(accumulate(self.head_sizes))
        if num_blocks > 1:
            key = self.head * num_blocks + self.token // TOKEN_BLOCK  # ascends, as tokens do inside a head
            ends = torch.searchsorted(key, torch.arange(num_heads * num_blocks), right=True).tolist()
        starts = [0, *ends[:-1]]
        order = ((head, head * num_blocks + block) for block in range(num_blocks) for head in range(num_heads))
        return [(head, slice(starts[i], ends[i])) for head, i in order if ends[i] > starts[i]]

    def suits_all_heads(self, num_products: int) -> bool:
        return suits_all_heads(self.num_rows * self.num_tokens, num_products)


def pack(heads: Tensor, mask: Tensor | None, num_heads: int) -> Packing:
    """Sort the chosen heads (B, T, K) into groups; padding is never packed."""
    num_rows, num_tokens, num_selected = heads.shape
    rows = torch.arange(num_rows, device=heads.device)[:, None, None]
    key = heads * num_rows + rows
    if mask is not None:
        key = key.where(mask[..., None], num_heads * num_rows)
    # stable: entries of a group must keep token order, causality relies on it
    key, choice = key.flatten().sort(stable=True)
    if mask is not None:
        num_entries = int(mask.sum()) * num_selected
        key, choice = key[:num_entries], choice[:num_entries]
    group_key, group, group_length = key.unique_consecutive(return_inverse=True, return_counts=True)
    group_start = group_length.cumsum(0) - group_length
    group_head, group_row = group_key // num_rows, group_key % num_rows
    head_sizes = torch.zeros(num_heads, dtype=torch.int64, device=key.device).index_add_(0, group_head, group_length)
    return Packing(
        choice=choice,
        token=choice // num_selected,
        group=group,
        rank=torch.arange(len(key), device=key.device) - group_start[group],
        group_row=group_row,
        group_head=group_head,
        group_flat=group_row * num_heads + group_head,
        group_start=group_start,
        group_length=group_length,
        head_sizes=head_sizes.tolist(),
        num_rows=num_rows,
        num_tokens=num_tokens,
    )


# ---------------------------------------------------------------------------------------------------- projections

# Up to so many tokens, and to so many multiplications a head, one product for all heads costs less than a loop over
# those chosen: the second is about what a turn of the loop takes.
FEW_TOKENS = 64
FEW_PRODUCTS = 2**19
# The rows of so many tokens stay in a processor's cache while one head after the other reads them or adds to them.
TOKEN_BLOCK = 2048


def suits_all_heads(num_tokens: int, num_products: int) -> bool:
    """Whether to multiply for all heads at once; num_products: multiplications for one token in one head."""
    return num_tokens <= FEW_TOKENS and num_tokens * num_products <= FEW_PRODUCTS


class EntryAngles(NamedTuple):
    """Rotary tables cos, sin (n, A), and which of their rows each entry takes, (P,), or None: the one of its number."""

    cos: Tensor
    sin: Tensor
    index: Tensor | None

    def of(self, entries: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(p, 1, A) of some entries."""
        if self.index is None:
            return self.cos[entries, None], self.sin[entries, None]
        index = self.index[entries]
        return self.cos.index_select(0, index)[:, None], self.sin.index_select(0, index)[:, None]


def project(x: Tensor, weight: Tensor, angles: EntryAngles, packing: Packing) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and values of tokens for their heads, (P, A) each: x (B*T, D), weight (L, D, 3A)."""
    if not packing.suits_all_heads(weight.shape[1] * weight.shape[2]):
        entries = packing.token, packing.head_sizes, packing.spans
        return RoutedProjection.apply(x, weight, *angles, *entries).unflatten(-1, (3, -1)).unbind(1)
    qkv = torch.matmul(x, weight)[packing.head, packing.token].unflatten(-1, (3, -1))
    return *apply_rotary(qkv[:, :2], *angles.of()).unbind(1), qkv[:, 2]


def combine(attended: Tensor, weight: Tensor, mix: Tensor, packing: Packing) -> Tensor:
    """Sum over each token's heads of mix * (attended @ weight): (P, A), (L, A, D), (P,); returns (B*T, D) wide."""
    num_tokens = packing.num_rows * packing.num_tokens
    if not packing.suits_all_heads(3 * weight.shape[1] * weight.shape[2]):
        entries = packing.token, packing.head_sizes, packing.spans
        return RoutedCombination.apply(attended, weight, mix, *entries, num_tokens)
    mixed = (attended * mix[:, None]).to(attended.dtype)
    spread = mixed.new_zeros(num_tokens, len(weight), mixed.shape[1])
    spread = spread.index_put((packing.token, packing.head), mixed)
    return (spread.flatten(1) @ weight.flatten(0, 1)).to(mix.dtype)


class RoutedProjection(torch.autograd.Function):
    """Entries e of head h: out_e = x[token_e] @ weight[h], q and k rotated; saves x, not its P gathered rows."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, index, token, head_sizes, spans):
        ctx.save_for_backward(x, weight, cos, sin, index, token)
        ctx.head_sizes = head_sizes
        out = x.new_empty(len(token), weight.shape[2])
        for head, span in spans:
            torch.mm(x.index_select(0, token[span]), weight[head], out=out[span])
        return rotate_queries_and_keys(out, EntryAngles(cos, sin, index))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, cos, sin, index, token = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad = rotate_queries_and_keys(grad.clone(), EntryAngles(cos, -sin, index))
        for head, (rows, entries) in enumerate(split_together(ctx.head_sizes, token, grad)):
            if len(rows):
                grad_x.index_add_(0, rows, (entries @ weight[head].T).to(grad_x.dtype))
                if grad_weight is not None:
                    torch.mm(x.index_select(0, rows).T, entries, out=grad_weight[head])
        return grad_x.to(x.dtype), grad_weight, *[None] * 6


def split_together(sizes: int | list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(sizes) for tensor in tensors), strict=True)


def rotate_queries_and_keys(qkv: Tensor, angles: EntryAngles) -> Tensor:
    """In place and in blocks, qkv (P, 3A)."""
    turned = qkv.unflatten(-1, (3, -1))[:, :2]
    size = max(1, ROTATED_BLOCK // (2 * turned.shape[2]))
    for first in range(0, len(qkv), size):
        part = turned[first : first + size]
        apply_rotary(part, *angles.of(slice(first, first + size)), out=part)
    return qkv


class RoutedCombination(torch.autograd.Function):
    """y[token_e] += (mix_e * attended_e) @ weight[h], summed in wide precision; saves nothing of width D per entry."""

    @staticmethod
    def forward(ctx, attended, weight, mix, token, head_sizes, spans, num_tokens):
        ctx.save_for_backward(attended, weight, mix, token)
        ctx.head_sizes = head_sizes
        y = torch.zeros(num_tokens, weight.shape[2], dtype=mix.dtype, device=mix.device)
        for head, span in spans:
            mixed = (attended[span] * mix[span, None]).to(attended.dtype)
            y.index_add_(0, token[span], (mixed @ weight[head]).to(y.dtype))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        attended, weight, mix, token = ctx.saved_tensors
        grad_attended = torch.empty_like(attended)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_mix = torch.empty_like(mix)
        parts = split_together(ctx.head_sizes, attended, mix, token, grad_attended, grad_mix)
        for head, (a, m, rows, grad_a, grad_m) in enumerate(parts):
            if len(rows):
                grad_rows = grad.index_select(0, rows).to(a.dtype)
                unmixed = (grad_rows @ weight[head].T).to(m.dtype)
                grad_a.copy_(unmixed * m[:, None])
                torch.sum(unmixed * a, dim=-1, out=grad_m)
                if grad_weight is not None:
                    torch.mm((a * m[:, None]).to(a.dtype).T, grad_rows, out=grad_weight[head])
        return grad_attended, grad_weight, grad_mix, None, None, None, None


# ---------------------------------------------------------------------------------------------------- routed attention

# One padded call for all groups pays until the padded scores outgrow this number; then each group goes alone.
MAX_PADDED_SCORES = 2**20
QUERY_BLOCK = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    """Attention of the last m tokens of a sequence, q (m, A), to all its n keys, k, v (n, A), each to its own past."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    q, k, v = q[None, None], k[None, None], v[None, None]

    def attend(q, k, v, **mask):
        return F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout, **mask)[0, 0]

    if num_queries == num_keys or num_queries == 1:
        return attend(q, k, v, is_causal=num_queries > 1)
    blocks, num_before = [], num_keys - num_queries
    for first in range(0, num_queries, QUERY_BLOCK):
        rows = q[:, :, first : first + QUERY_BLOCK]
        last = num_before + first + rows.shape[2]
        mask = torch.ones(rows.shape[2], last, dtype=torch.bool, device=q.device).tril(num_before + first)
        blocks.append(attend(rows, k[:, :, :last], v[:, :, :last], attn_mask=mask))
    return torch.cat(blocks)


def attend_by_group(q, k, v, packing: Packing, first_slots, num_keys, scale, dropout) -> Tensor:
    """Exact-length attention, one group after the other, on views of its keys. Shapes as `attend_routed`."""
    starts, lengths = first_slots.tolist(), num_keys.tolist()
    if k.requires_grad or v.requires_grad:  # then groups follow each other, and split has one cheap backward
        keys, values = k.split(lengths), v.split(lengths)
    else:
        keys, values = ([x.narrow(0, s, n) for s, n in zip(starts, lengths, strict=True)] for x in (k, v))
    queries = q.split(packing.group_length.tolist())
    return torch.cat([causal_attention(*group, scale, dropout) for group in zip(queries, keys, values, strict=True)])


def attend_padded(q, k, v, packing: Packing, first_slots, num_keys, scale, dropout, eager=False):
    """All groups in one call, padded to the longest. Shapes as `attend_routed`; also returns the probabilities."""
    most_queries = int(packing.group_length.max())
    query_rank = torch.arange(most_queries, device=q.device).expand(len(num_keys), -1)
    # padding repeats the last live entry: dead slots are never read
    query_rank = torch.minimum(query_rank, packing.group_length[:, None] - 1)
    key_rank = torch.arange(int(num_keys.max()), device=q.device).expand(len(num_keys), -1)
    key_slots = first_slots[:, None] + torch.minimum(key_rank, num_keys[:, None] - 1)
    last_seen = (num_keys - packing.group_length)[:, None] + query_rank
    mask = (key_rank[:, None, :] <= last_seen[:, :, None])[:, None]
    query_slots = packing.group_start[:, None] + query_rank
    gathered = zip((q, k, v), (query_slots, key_slots, key_slots), strict=True)
    queries, keys, values = (x.index_select(0, at.flatten()).view(*at.shape, -1)[:, None] for x, at in gathered)
    probs = None
    if eager:
        out, probs = softmax_attention(queries, keys, values, mask, scale, dropout)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, dropout_p=dropout)
    return out.flatten(0, 2).index_select(0, packing.group * most_queries + packing.rank), probs


def attend_routed(q, k, v, packing: Packing, first_slots, num_keys, scale, dropout) -> Tensor:
    """Causal attention inside every group.

    q: (P, A) in packed order; k, v: (slots, A), where group g has its keys at first_slots[g] and the num_keys[g] - 1
    after it, its queries being the last of them. Returns (P, A).
    """
    most_keys = int(num_keys.max())
    if len(num_keys) * int(packing.group_length.max()) * most_keys <= MAX_PADDED_SCORES:
        return attend_padded(q, k, v, packing, first_slots, num_keys, scale, dropout)[0]
    return attend_by_group(q, k, v, packing, first_slots, num_keys, scale, dropout)


# ---------------------------------------------------------------------------------------------------- few tokens

# A chunk of few tokens on a cache is not packed: its P = B*T*K entries stay in the order of the choices, and each
# attends on its own to what its head holds up to itself.

# Of one token a row, gathering keys pays up to this length of the longest history; beyond, a view for each entry.
MAX_GATHERED_KEYS = 512
# More tokens a row gather the same keys again and again: up to so many entries times tokens of context.
MAX_GATHERED_ENTRIES = 2**19
# Every entry multiplies on its own: up to so many multiplications a head, as `suits_all_heads` counts them.
MAX_SINGLE_PRODUCTS = 2**20


class Entries(NamedTuple):
    """Where the P entries of a short chunk go: head_of_row, index into flat (B, L); first_slots of their heads'
    histories; their own slots there; num_keys up to and with themselves; all (P,) int64."""

    head_of_row: Tensor
    first_slots: Tensor
    slots: Tensor
    num_keys: Tensor


def fits_few(num_rows: int, num_tokens: int, num_selected: int, num_context: int, num_products: int) -> bool:
    """Whether a chunk on a cache is short enough; num_context: N; num_products: as `suits_all_heads`."""
    num_all = num_rows * num_tokens
    if num_all == 1:
        return True
    if num_all > FEW_TOKENS or num_all * num_products > MAX_SINGLE_PRODUCTS:
        return False
    return num_tokens == 1 or num_all * num_selected * num_context <= MAX_GATHERED_ENTRIES


def ranks_in_chunk(heads: Tensor, num_heads: int) -> Tensor:
    """(P,) how many tokens of the chunk chose the entry's head before its own: heads (B, T, K)."""
    chosen = heads.new_zeros(*heads.shape[:2], num_heads).scatter(-1, heads, 1)
    return (chosen.cumsum(dim=1) - chosen).gather(-1, heads).flatten()


# Where a sum of rows is best taken over a list of them; elsewhere a kernel would walk it row by row.
SUMS_IN_PLACE = ("cpu",)


def sums_in_place(table: Tensor) -> bool:
    return table.device.type in SUMS_IN_PLACE


def mix_rows(table: Tensor, rows: Tensor, weights: Tensor, num_sums: int) -> Tensor:
    """Weighted sums, each of k rows of a table (n, E): rows (num_sums * k,) int64, weights as many; (num_sums, E)."""
    if not sums_in_place(table):
        return torch.bmm(weights.view(num_sums, 1, -1), table[rows.view(num_sums, -1)])[:, 0]
    starts = torch.arange(0, rows.shape[0], rows.shape[0] // num_sums, device=rows.device)
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]  # 0: a sum


def rows_of_heads(heads: Tensor, num_rows: int) -> Tensor:
    """(P * num_rows,): the rows of heads (P,) in a table that gives each head num_rows of them."""
    return torch.add(torch.arange(num_rows, device=heads.device), heads[:, None], alpha=num_rows).view(-1)


def project_few(x: Tensor, weight: Tensor, heads: Tensor) -> Tensor:
    """Project every token for its heads: x (B*T, D), weight (L, D, 3A), heads (P,); returns (P, 3A)."""
    num_tokens, num_entries = x.shape[0], heads.shape[0]
    if sums_in_place(weight):
        repeated = x[:, None].expand(-1, num_entries // num_tokens, -1).reshape(-1)
        return mix_rows(weight.flatten(0, 1), rows_of_heads(heads, x.shape[1]), repeated, num_entries)
    if num_tokens == 1:
        return torch.bmm(x.expand(num_entries, 1, -1), weight.index_select(0, heads)).squeeze(1)
    entries = heads.view(num_tokens, -1) * num_tokens + torch.arange(num_tokens, device=heads.device)[:, None]
    return torch.bmm(x.expand(len(weight), -1, -1), weight).flatten(0, 1).index_select(0, entries.flatten())


def combine_few(attended: Tensor, weight: Tensor, heads: Tensor, mix: Tensor) -> Tensor:
    """Sum over each token's heads of mix * (attended @ weight): (P, A), (L, A, D), (P,), (B*T, K); returns (B*T, D)."""
    mixed = (attended * mix.view(-1, 1)).to(attended.dtype).view(-1)
    return mix_rows(weight.flatten(0, 1), rows_of_heads(heads, weight.shape[1]), mixed, mix.shape[0])


def attend_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One scaled query (A,) to all keys and values (n, A)."""
    if q.itemsize == 2:  # products of vectors round too early, and in bfloat16 compile a kernel for every n
        return F.scaled_dot_product_attention(q[None, None], k[None], v[None], scale=1.0)[0, 0]
    return torch.mv(v.t(), torch.mv(k, q).softmax(0))


def attend_few(q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float, is_one_each: bool) -> Tensor:
    """One query an entry, q (P, A), to the keys of its history up to its own, k, v (slots, A).

    is_one_each: no two entries share a history.
    """
    most_keys = int(entries.num_keys.max())
    if is_one_each and most_keys > MAX_GATHERED_KEYS:
        views = zip(q * scale, entries.first_slots.tolist(), entries.num_keys.tolist(), strict=True)
        return torch.stack([attend_view(x, k[s : s + n], v[s : s + n]) for x, s, n in views])
    slots = entries.first_slots[:, None] + torch.arange(most_keys, device=q.device)
    last = entries.slots[:, None]
    live = torch.minimum(slots, last).view(-1)  # dead slots are never read
    keys = k.index_select(0, live).view(q.shape[0], most_keys, -1)
    scores = torch.bmm(q[:, None] * scale, keys.transpose(1, 2)).to(wide_dtype(q.dtype))[:, 0]
    probs = scores.masked_fill(slots > last, -torch.inf).softmax(dim=-1)
    return mix_rows(v, live, probs.to(v.dtype).view(-1), q.shape[0])


# ---------------------------------------------------------------------------------------------------- static shapes


def chosen_first(heads: Tensor, mask: Tensor | None, num_heads: int) -> tuple[Tensor, Tensor]:
    """(B, L, T): for every head all tokens, those that chose it first and in order; (B, T, L) bool: who chose it."""
    chosen = torch.zeros(*heads.shape[:2], num_heads, dtype=torch.bool, device=heads.device)
    chosen = chosen.scatter(-1, heads, torch.ones_like(heads, dtype=torch.bool))
    chosen = chosen if mask is None else chosen & mask[..., None]
    return (~chosen).int().argsort(dim=1, stable=True).transpose(1, 2), chosen


def attend_static(q, keys, values, before, scale, dropout) -> Tensor:
    """q (B, L, T, A), the first of which stand behind `before` (B, L) live entries of keys, values (B, L, C, A)."""
    query, key = (torch.arange(n, device=q.device) for n in (q.shape[2], keys.shape[2]))
    mask = key <= before[..., None, None] + query[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, dropout_p=dropout)


def combine_static(attended, weight, heads, weights, order) -> Tensor:
    """Sum over the chosen heads: attended (B, L, T, A) in `order`, weight (L, A, D), heads, weights (B, T, K)."""
    attended = torch.zeros_like(attended).scatter(2, order[..., None].expand_as(attended), attended)
    mix = weights.new_zeros(*heads.shape[:2], len(weight)).scatter(-1, heads, weights)
    mixed = attended.permute(0, 2, 1, 3) * mix[..., None]
    return mixed.flatten(2).to(weight.dtype) @ weight.flatten(0, 1)


# ---------------------------------------------------------------------------------------------------- precision


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the autocast dtype where autocast is on: it does not look inside our autograd functions."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors]
