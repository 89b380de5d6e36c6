"""Attention of SHRAM: rotary positions, router, packing, the local path, the routed path (MoSRAH) and their sum.

Shapes: B rows, T tokens in this call, N tokens so far, D hidden, H local heads, L routed heads, K heads chosen per
token, A head width, W window, P entries: one per real token and head it chose, G groups: the (row, head) pairs that
got an entry. Tokens arrive left-justified: in every row the real ones first, in order.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- positions


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles, router scores and norm statistics: float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotary_frequencies(head_dim: int, base: float) -> tuple[float, ...]:
    """Angle per position of each rotary pair, base^(-2i/A), in radians."""
    return tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2))


def yarn_frequencies(config) -> tuple[float, ...]:
    """Rotary frequencies of the routed path, stretched by YaRN (arXiv 2309.00071, section 3.2)."""
    stretched = []
    for theta in rotary_frequencies(config.head_dim, config.mosrah_rope_theta):
        num_turns = config.training_sequence_length * theta / (2 * math.pi)
        keep = (num_turns - config.yarn_alpha) / (config.yarn_beta - config.yarn_alpha)
        keep = min(max(keep, 0.0), 1.0)
        stretched.append((1 - keep) * theta / config.yarn_scale + keep * theta)
    return tuple(stretched)


def yarn_logit_factor(config) -> float:
    """Factor of the routed path's attention logits under YaRN (arXiv 2309.00071, section 3.4)."""
    return (0.1 * math.log(config.yarn_scale) + 1) ** 2


def rotary_tables(positions: Tensor, frequencies: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., A/2) of positions (...), computed in wide precision, returned in `dtype`."""
    wide = wide_dtype(dtype)
    # not a buffer: made anew each time, it survives meta initialisation and `.to(bfloat16)`
    angles = positions[..., None].to(wide) * torch.tensor(frequencies, dtype=wide, device=positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + A/2) of x (..., A) by angles given as cos, sin (..., A/2)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, dim=-1)


@dataclass
class TokenRows:
    """What the layers know about the tokens of a call, left-justified.

    mask: (B, T) bool, or None when every token is real. positions: (B, T) int64, for rotary embedding.
    index: (B, T) int64, place of the token in its row as the caller counts, padding included.
    num_keys: tokens of a row so far, N, padding included.
    """

    mask: Tensor | None
    positions: Tensor
    index: Tensor
    num_keys: int


# ---------------------------------------------------------------------------------------------------- local path


def band_mask(alive: Tensor, num_queries: int, window: int) -> Tensor:
    """(B, 1, T, W-1+T) bool: query t sees the W keys t .. t+W-1 of (window, chunk), as far as they are alive."""
    key, query = (torch.arange(n, device=alive.device) for n in (alive.shape[1], num_queries))
    distance = key - query[:, None]
    return ((distance >= 0) & (distance < window)) & alive[:, None, None, :]


def blocked_window_attention(q: Tensor, k: Tensor, v: Tensor, alive: Tensor, window: int, dropout: float) -> Tensor:
    """Sliding-window attention at a cost linear in T: blocks of queries, each with the keys of its band.

    q: (B, H, T, A); k, v: (B, H, W-1+T, A); alive: (B, W-1+T). Returns (B, H, T, A).
    """
    num_queries = q.shape[2]
    block = min(max(window, 32), num_queries)
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


class SlidingWindowHeads(nn.Module):
    """Causal multi-head attention over the last W real tokens, the query's own included."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        inner = config.num_sliding_window_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, tokens: TokenRows, cache=None, output_attentions: bool = False):
        """Return (B, T, D) and, when asked, the attention maps (B, H, T, N)."""
        config = self.config
        q, k, v = (
            proj(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        frequencies = rotary_frequencies(config.head_dim, config.local_rope_theta)
        cos, sin = rotary_tables(tokens.positions[:, None], frequencies, q.dtype)
        q, k = apply_rotary(torch.cat([q, k], dim=1), cos, sin).chunk(2, dim=1)
        k, v, alive, key_index = self.with_window(k, v, tokens, cache)
        dropout = config.attention_dropout if self.training else 0.0
        maps = None
        if config._attn_implementation == "eager":
            out, probs = softmax_attention(q, k, v, band_mask(alive, x.shape[1], config.window_size), dropout=dropout)
            if output_attentions:
                maps = probs.new_zeros(*probs.shape[:3], tokens.num_keys)
                maps = maps.scatter_add(3, key_index[:, None, None].expand_as(probs), probs)
        elif x.shape[1] == 1:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=alive[:, None, None], dropout_p=dropout)
        else:
            out = blocked_window_attention(q, k, v, alive, config.window_size, dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2)), maps

    def with_window(self, k: Tensor, v: Tensor, tokens: TokenRows, cache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The W-1 keys and values before the chunk and the chunk's, which are alive, and their places in the row."""
        num_before = self.config.window_size - 1
        # padding of the chunk counts as alive: only padding sees it, and its softmax must not be empty
        alive = torch.ones_like(tokens.index, dtype=torch.bool)
        if cache is None:
            k, v = F.pad(k, (0, 0, num_before, 0)), F.pad(v, (0, 0, num_before, 0))
            return k, v, F.pad(alive, (num_before, 0)), F.pad(tokens.index, (num_before, 0))
        cache.adopt(k.shape[0], k)
        key_index = torch.cat([cache.window_positions, tokens.index], dim=1)
        k, v, seen = cache.update(k, v, tokens.mask, tokens.index)
        return k, v, torch.cat([seen[:, :num_before], alive], dim=1), key_index


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale=None, dropout: float = 0.0):
    """Plain masked attention that also returns its probabilities (before dropout)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-1, -2)).to(wide_dtype(q.dtype)) * scale
    probs = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(q.dtype)
    return F.dropout(probs, dropout, training=dropout > 0) @ v, probs


# ---------------------------------------------------------------------------------------------------- routing


def load_balance(expert_bias: Tensor, frequencies: Tensor) -> Tensor:
    """Imbalance sum_l |f_l - 1/L| of head frequencies (L,), whose gradient is sign(f_l - 1/L) on the bias alone.

    Auxiliary-loss-free balancing (arXiv 2408.15664), expressed so that any optimizer applies it.
    """
    excess = frequencies.detach() - 1 / frequencies.numel()
    # value 0, gradient sign(excess)
    pull = ((expert_bias - expert_bias.detach()) * excess.sign()).sum()
    return excess.abs().sum() + pull


def head_load(heads: Tensor, mask: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Share of the assignments (B, T, K) of real tokens that went to each head, (L,); even where there are none."""
    traffic = torch.ones_like(heads, dtype=dtype) if mask is None else mask[..., None].expand_as(heads).to(dtype)
    load = torch.zeros(num_heads, dtype=dtype, device=heads.device).scatter_add(0, heads.flatten(), traffic.flatten())
    return torch.where(load.sum() > 0, load / load.sum().clamp(min=1), 1 / num_heads)


class Routing(NamedTuple):
    """heads: (B, T, K) int64, distinct, best first. weights: (B, T, K) wide, summing to 1. logits: (B, T, L) wide.
    load_balance_loss: (). max_vio: (), L * max_l(f_l) - 1, detached."""

    heads: Tensor
    weights: Tensor
    logits: Tensor
    load_balance_loss: Tensor
    max_vio: Tensor


class Router(nn.Module):
    """Choose K of L heads for every token by the token alone; the bias steers the choice, never the mixture."""

    def __init__(self, config):
        super().__init__()
        self.num_selected_heads = config.num_selected_heads
        self.weight = nn.Parameter(torch.empty(config.num_mosrah_heads, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.empty(config.num_mosrah_heads))

    def forward(self, x: Tensor, mask: Tensor | None) -> Routing:
        wide = wide_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
        biased = logits.detach() + self.expert_bias.detach().to(wide)
        # a stable sort, not topk: ties go to the lower index in every execution path
        heads = biased.sort(dim=-1, descending=True, stable=True).indices[..., : self.num_selected_heads]
        load = head_load(heads, mask, logits.shape[-1], wide)
        max_vio = len(load) * load.max() - 1
        weights = logits.gather(-1, heads).softmax(dim=-1)
        return Routing(heads, weights, logits, load_balance(self.expert_bias, load), max_vio)


# ---------------------------------------------------------------------------------------------------- packing


@dataclass
class Packing:
    """The assignments of a call, sorted by head, then row, then token: one entry per real token and chosen head.

    choice: (P,) int64, index of the entry into the flat (B, T, K) choices; token: (P,), its flat (B, T) token.
    group, rank: (P,), its group and its place there. group_row, group_head, group_start, group_length: (G,).
    head_sizes: entries of each head, on the host. num_rows, num_tokens: B, T.
    """

    choice: Tensor
    token: Tensor
    group: Tensor
    rank: Tensor
    group_row: Tensor
    group_head: Tensor
    group_start: Tensor
    group_length: Tensor
    head_sizes: list[int]
    num_rows: int
    num_tokens: int


def pack(heads: Tensor, mask: Tensor | None, num_heads: int) -> Packing:
    """Sort the chosen heads (B, T, K) into groups; padding is never packed."""
    num_rows, num_tokens, num_selected = heads.shape
    if num_tokens == 1 and num_rows <= FEW_TOKENS and mask is None:
        return pack_one_each(heads)
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
    group_head = group_key // num_rows
    head_sizes = torch.zeros(num_heads, dtype=torch.int64, device=key.device).index_add_(0, group_head, group_length)
    return Packing(
        choice=choice,
        token=choice // num_selected,
        group=group,
        rank=torch.arange(len(key), device=key.device) - group_start[group],
        group_row=group_key % num_rows,
        group_head=group_head,
        group_start=group_start,
        group_length=group_length,
        head_sizes=head_sizes.tolist(),
        num_rows=num_rows,
        num_tokens=num_tokens,
    )


def pack_one_each(heads: Tensor) -> Packing:
    """One token a row (B, 1, K): every entry is a group of its own, and no order matters."""
    num_rows, _, num_selected = heads.shape
    entry = torch.arange(num_rows * num_selected, device=heads.device)
    row = entry // num_selected
    return Packing(
        choice=entry,
        token=row,
        group=entry,
        rank=torch.zeros_like(entry),
        group_row=row,
        group_head=heads.flatten(),
        group_start=entry,
        group_length=torch.ones_like(entry),
        head_sizes=[],
        num_rows=num_rows,
        num_tokens=1,
    )


# ---------------------------------------------------------------------------------------------------- projections

# Up to so many tokens, one product for all heads costs less than a loop over those chosen.
FEW_TOKENS = 16


def project(x: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Project tokens for their heads: x (B*T, D), weight (L, D, 3A); returns (P, 3A)."""
    if len(x) == 1:
        return torch.matmul(x, weight.index_select(0, packing.group_head))[packing.group, 0]
    if len(x) <= FEW_TOKENS:
        return torch.matmul(x, weight)[packing.group_head[packing.group], packing.token]
    return RoutedProjection.apply(x, weight, packing.token, packing.head_sizes)


def combine(attended: Tensor, weight: Tensor, mix: Tensor, packing: Packing) -> Tensor:
    """Sum over each token's heads of mix * (attended @ weight): (P, A), (L, A, D), (P,); returns (B*T, D) wide."""
    num_tokens = packing.num_rows * packing.num_tokens
    if num_tokens > FEW_TOKENS:
        return RoutedCombination.apply(attended, weight, mix, packing.token, packing.head_sizes, num_tokens)
    mixed = (attended * mix[:, None]).to(attended.dtype)
    if num_tokens == 1:
        return (mixed.view(1, -1) @ weight.index_select(0, packing.group_head).flatten(0, 1)).to(mix.dtype)
    spread = mixed.new_zeros(num_tokens, len(weight), mixed.shape[1])
    spread = spread.index_put((packing.token, packing.group_head[packing.group]), mixed)
    return (spread.flatten(1) @ weight.flatten(0, 1)).to(mix.dtype)


class RoutedProjection(torch.autograd.Function):
    """Entries e of head h: out_e = x[token_e] @ weight[h]; saves x, not its P gathered rows."""

    @staticmethod
    def forward(ctx, x, weight, token, head_sizes):
        ctx.save_for_backward(x, weight, token)
        ctx.head_sizes = head_sizes
        out = x.new_empty(len(token), weight.shape[2])
        for head, (rows, entries) in enumerate(zip(token.split(head_sizes), out.split(head_sizes), strict=True)):
            if len(rows):
                torch.mm(x.index_select(0, rows), weight[head], out=entries)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, token = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        grad_weight = torch.zeros_like(weight)
        for head, (rows, entries) in enumerate(
            zip(token.split(ctx.head_sizes), grad.split(ctx.head_sizes), strict=True)
        ):
            if len(rows):
                grad_x.index_add_(0, rows, (entries @ weight[head].T).to(grad_x.dtype))
                torch.mm(x.index_select(0, rows).T, entries, out=grad_weight[head])
        return grad_x.to(x.dtype), grad_weight, None, None


class RoutedCombination(torch.autograd.Function):
    """y[token_e] += mix_e * (attended_e @ weight[h]), summed in wide precision; saves nothing of width D per entry."""

    @staticmethod
    def forward(ctx, attended, weight, mix, token, head_sizes, num_tokens):
        ctx.save_for_backward(attended, weight, mix, token)
        ctx.head_sizes = head_sizes
        y = torch.zeros(num_tokens, weight.shape[2], dtype=mix.dtype, device=mix.device)
        for head, (a, m, rows) in enumerate(
            zip(attended.split(head_sizes), mix.split(head_sizes), token.split(head_sizes), strict=True)
        ):
            if len(rows):
                y.index_add_(0, rows, (a @ weight[head]).to(y.dtype).mul_(m[:, None]))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        attended, weight, mix, token = ctx.saved_tensors
        grad_attended = torch.empty_like(attended)
        grad_weight = torch.zeros_like(weight)
        grad_mix = torch.empty_like(mix)
        parts = (x.split(ctx.head_sizes) for x in (attended, mix, token, grad_attended, grad_mix))
        for head, (a, m, rows, grad_a, grad_m) in enumerate(zip(*parts, strict=True)):
            if len(rows):
                grad_rows = grad.index_select(0, rows).to(a.dtype)
                unmixed = (grad_rows @ weight[head].T).to(m.dtype)
                grad_a.copy_(unmixed * m[:, None])
                torch.sum(unmixed * a, dim=-1, out=grad_m)
                torch.mm((a * m[:, None]).to(a.dtype).T, grad_rows, out=grad_weight[head])
        return grad_attended, grad_weight, grad_mix, None, None, None


# ---------------------------------------------------------------------------------------------------- routed attention

# One padded call for all groups pays until the padded scores outgrow this number; then each group goes alone.
MAX_PADDED_SCORES = 2**20
# Gathering the keys of single queries pays up to this length of the longest history.
MAX_GATHERED_KEYS = 1024
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


def attend_one_each(q, k, v, first_slots, num_keys, most_keys: int, scale) -> Tensor:
    """One query a group, keys gathered and padded to the longest history. Shapes as `attend_routed`."""
    rank = torch.arange(most_keys, device=q.device)
    last = num_keys[:, None] - 1
    slots = first_slots[:, None] + torch.minimum(rank, last)  # dead slots are never read
    keys, values = (x.index_select(0, slots.flatten()).view(*slots.shape, -1) for x in (k, v))
    scores = torch.bmm(keys, q[:, :, None])[..., 0].to(wide_dtype(q.dtype)) * scale
    probs = scores.masked_fill(rank > last, -torch.inf).softmax(dim=-1)
    return torch.bmm(probs.to(values.dtype)[:, None], values)[:, 0]


def attend_routed(q, k, v, packing: Packing, first_slots, num_keys, scale, dropout) -> Tensor:
    """Causal attention inside every group.

    q: (P, A) in packed order; k, v: (slots, A), where group g has its keys at first_slots[g] and the num_keys[g] - 1
    after it, its queries being the last of them. Returns (P, A).
    """
    most_keys = int(num_keys.max())
    if packing.num_tokens == 1:
        if most_keys <= MAX_GATHERED_KEYS and not dropout:
            return attend_one_each(q, k, v, first_slots, num_keys, most_keys, scale)
    elif len(num_keys) * int(packing.group_length.max()) * most_keys <= MAX_PADDED_SCORES:
        return attend_padded(q, k, v, packing, first_slots, num_keys, scale, dropout)[0]
    return attend_by_group(q, k, v, packing, first_slots, num_keys, scale, dropout)


class MosrahHeads(nn.Module):
    """Mixture of sparse routed attention heads: each head attends over the tokens that chose it, and only those."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        num_heads, hidden, width = config.num_mosrah_heads, config.hidden_size, config.head_dim
        self.router = Router(config)
        self.qkv_proj = nn.Parameter(torch.empty(num_heads, hidden, 3 * width))
        self.out_proj = nn.Parameter(torch.empty(num_heads, width, hidden))

    def forward(self, x: Tensor, tokens: TokenRows, cache=None, output_attentions: bool = False):
        """Return (B, T, D), the routing, and, when asked, the attention maps (B, L, T, N)."""
        routing = self.router(x, tokens.mask)
        packing = pack(routing.heads, tokens.mask, self.config.num_mosrah_heads)
        positions = self.rotary_positions(tokens, packing, cache)  # before the cache is written
        x_flat, qkv_weight, out_weight = autocast(x.flatten(0, 1), self.qkv_proj, self.out_proj)
        qkv = project(x_flat, qkv_weight, packing).unflatten(-1, (3, self.config.head_dim))
        cos, sin = rotary_tables(positions[:, None], yarn_frequencies(self.config), qkv.dtype)
        q, k = apply_rotary(qkv[:, :2], cos, sin).unbind(1)
        v = qkv[:, 2]
        first_slots, num_keys = packing.group_start, packing.group_length
        if cache is not None:
            k, v, first_slots, num_keys = cache.update(k, v, packing, tokens.index.flatten()[packing.token])
        attended, probs = self.attend(q, k, v, packing, first_slots, num_keys)
        mix = routing.weights.flatten()[packing.choice]
        y = combine(attended, out_weight, mix, packing)
        maps = self.scatter_maps(probs, tokens, packing, cache) if output_attentions else None
        return y.view_as(x).to(x.dtype), routing, maps

    def rotary_positions(self, tokens: TokenRows, packing: Packing, cache) -> Tensor:
        """(P,) the token's own position, or its index within its head's sequence, continued over the cache."""
        if self.config.rope_mode == "main_sequence":
            return tokens.positions.flatten()[packing.token]
        if cache is None or cache.is_empty:
            return packing.rank
        before = cache.get_heads_lengths()[packing.group_row, packing.group_head]
        return packing.rank + before.to(packing.rank.device)[packing.group]

    def attend(self, q, k, v, packing: Packing, first_slots, num_keys):
        scale = yarn_logit_factor(self.config) / math.sqrt(self.config.head_dim)
        dropout = self.config.attention_dropout if self.training else 0.0
        if len(q) == 0:  # a call of padding only
            return q, None
        if self.config._attn_implementation == "eager":
            return attend_padded(q, k, v, packing, first_slots, num_keys, scale, dropout, eager=True)
        return attend_routed(q, k, v, packing, first_slots, num_keys, scale, dropout), None

    def scatter_maps(self, probs, tokens: TokenRows, packing: Packing, cache) -> Tensor:
        """Spread the probabilities of the groups (G, 1, queries, keys) over (B, L, T, N); N counts padding too."""
        (num_rows, num_tokens), num_heads = tokens.index.shape, self.config.num_mosrah_heads
        maps = torch.zeros(num_rows, num_heads, num_tokens, tokens.num_keys, device=tokens.index.device)
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
        where = packing.group_row[packing.group], packing.group_head[packing.group], packing.token % num_tokens
        return maps.to(spread.dtype).index_put(where, spread)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the autocast dtype where autocast is on: it does not look inside our autograd functions."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors]


class AttentionStats(NamedTuple):
    """What a layer reports beside its result: (), (), (B, T, L), (B, H, T, N) or None, (B, L, T, N) or None."""

    load_balance_loss: Tensor
    max_vio: Tensor
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
        stats = routing.load_balance_loss, routing.max_vio, routing.logits
        return local + routed, AttentionStats(*stats, local_maps, routed_maps)


__all__ = ["AttentionStats", "ShramHybridLayer", "TokenRows"]
