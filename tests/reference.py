"""The slow oracle: SHRAM as plain loops in float64, differentiable; of a model it reads parameters and config alone.

Shapes: B rows, T tokens, D hidden, H local heads, L routed heads, K heads chosen per token, A head width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """What one forward computes; lists have one entry per layer."""

    logits: Tensor  # (B, T, V)
    local_maps: list[Tensor]  # (B, H, T, T) attention probabilities
    routed_maps: list[Tensor]  # (B, L, T, T), zero where a token did not choose the head
    router_scores: list[Tensor]  # (B, T, L)
    shares: list[Tensor]  # (L,) share of the assignments of real tokens
    histories: list[dict[tuple[int, int], tuple[Tensor, Tensor]]]  # (row, head) -> rotated keys (n, A), values (n, A)


def rotary_frequencies(head_dim: int, base: float) -> Tensor:
    return torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)


def yarn_frequencies(config) -> Tensor:
    """Stretched angles of low frequencies, plain angles of high ones, a linear blend between (arXiv 2309.00071)."""
    stretched = []
    for theta in rotary_frequencies(config.head_dim, config.mosrah_rope_theta).tolist():
        turns = config.training_sequence_length * theta / (2 * math.pi)
        keep = (turns - config.yarn_alpha) / (config.yarn_beta - config.yarn_alpha)
        keep = min(max(keep, 0.0), 1.0)
        stretched.append((1 - keep) * theta / yarn_scale(config) + keep * theta)
    return torch.tensor(stretched, dtype=torch.float64)


def yarn_scale(config) -> float:
    return config.inference_sequence_length / config.training_sequence_length


def yarn_logit_factor(config) -> float:
    return (0.1 * math.log(yarn_scale(config)) + 1) ** 2


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + A/2]) of every token by position · frequency i; x is (n, A)."""
    angles = positions.double()[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Query i sees keys i-window+1 … i of its own sequence: outputs (n, A), probabilities (n, n)."""
    outputs, maps = [], []
    for i in range(len(q)):
        first = max(0, i - window + 1)
        probabilities = torch.softmax(k[first : i + 1] @ q[i] * scale, dim=0)
        outputs.append(probabilities @ v[first : i + 1])
        maps.append(torch.nn.functional.pad(probabilities, (first, len(q) - i - 1)))
    return torch.stack(outputs), torch.stack(maps)


def local_attention(x: Tensor, real: Tensor, positions: Tensor, local, config) -> tuple[Tensor, Tensor]:
    """Sliding window over each row's real tokens: output (B, T, D), maps (B, H, T, T)."""
    rows, tokens, _ = x.shape
    heads, width = config.num_sliding_window_heads, config.head_dim
    frequencies = rotary_frequencies(width, config.local_rope_theta)
    output = torch.zeros_like(x)
    maps = x.new_zeros(rows, heads, tokens, tokens)
    for b in range(rows):
        seen = real[b].nonzero()[:, 0]
        if len(seen) == 0:
            continue
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            q, k, v = (
                x[b, seen] @ projection.weight.double()[part].T
                for projection in (local.q_proj, local.k_proj, local.v_proj)
            )
            q, k = rotate(q, positions[b, seen], frequencies), rotate(k, positions[b, seen], frequencies)
            mixed, probabilities = causal_attention(q, k, v, width**-0.5, config.window_size)
            output[b, seen] += mixed @ local.o_proj.weight.double()[:, part].T
            maps[b, h, seen[:, None], seen] = probabilities
    return output, maps


def route(scores: Tensor, bias: Tensor, num_selected: int) -> tuple[list[int], Tensor]:
    """One token's heads, best biased score first (ties to the lower head), and its weights from the plain scores."""
    biased = (scores + bias).tolist()
    heads = sorted(range(len(biased)), key=lambda head: (-biased[head], head))[:num_selected]
    return heads, torch.softmax(scores[heads], dim=0)


def route_all(x: Tensor, router, num_selected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, chosen (bool) and mixing weights (zero where not chosen), each (B, T, L)."""
    scores = x @ router.weight.double().T
    chosen, weights = torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(scores)
    for b, t in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        heads, mixture = route(scores[b, t], router.expert_bias.double(), num_selected)
        chosen[b, t, heads], weights[b, t, heads] = True, mixture
    return scores, chosen, weights


def mosrah_attention(x: Tensor, real: Tensor, positions: Tensor, mosrah, config):
    """Each head attends over the real tokens that chose it: output, maps (B, L, T, T), scores, shares, histories."""
    rows, tokens, _ = x.shape
    scores, chosen, weights = route_all(x, mosrah.router, config.num_selected_heads)
    chosen = chosen & real[:, :, None]
    scale = yarn_logit_factor(config) * config.head_dim**-0.5
    output, histories = torch.zeros_like(x), {}
    maps = x.new_zeros(rows, config.num_mosrah_heads, tokens, tokens)
    for b in range(rows):
        for head in range(config.num_mosrah_heads):
            seen = chosen[b, :, head].nonzero()[:, 0]
            q, k, v = (x[b, seen] @ mosrah.qkv_proj[head].double()).chunk(3, dim=-1)
            place = positions[b, seen] if config.rope_mode == "main_sequence" else torch.arange(len(seen))
            q, k = rotate(q, place, yarn_frequencies(config)), rotate(k, place, yarn_frequencies(config))
            histories[b, head] = k, v
            if len(seen) == 0:
                continue
            mixed, probabilities = causal_attention(q, k, v, scale, window=len(seen))
            output[b, seen] += weights[b, seen, head, None] * (mixed @ mosrah.out_proj[head].double())
            maps[b, head, seen[:, None], seen] = probabilities
    shares = chosen.sum(dim=(0, 1)).double() / max(1, int(chosen.sum()))
    return output, maps, scores, shares, histories


def rms_norm(x: Tensor, norm, config) -> Tensor:
    return norm.weight.double() * x / (x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps).sqrt()


def mlp(x: Tensor, layer) -> Tensor:
    gate, up, down = (p.weight.double() for p in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def places(real: Tensor) -> Tensor:
    """Positions 0, 1, … of each row's real tokens; what a pad gets is never read."""
    return (real.long().cumsum(dim=-1) - 1).clamp(min=0)


def reference_forward(model, input_ids=None, attention_mask=None, inputs_embeds=None, position_ids=None) -> Reference:
    """The whole of a ShramForCausalLM, float64 whatever the model's own dtype."""
    config, base = model.config, model.model
    x = base.embed_tokens.weight[input_ids].double() if inputs_embeds is None else inputs_embeds.double()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions = places(real) if position_ids is None else position_ids
    records = []
    for layer in base.layers:
        normed = rms_norm(x, layer.input_layernorm, config)
        local, local_maps = local_attention(normed, real, positions, layer.self_attn.local, config)
        sparse, *routed = mosrah_attention(normed, real, positions, layer.self_attn.mosrah, config)
        x = x + local + sparse
        x = x + mlp(rms_norm(x, layer.post_attention_layernorm, config), layer)
        records.append([local_maps, *routed])
    logits = rms_norm(x, base.norm, config) @ model.lm_head.weight.double().T
    return Reference(logits, *(list(field) for field in zip(*records, strict=True)))


def reference_logits(model, input_ids, attention_mask=None) -> Tensor:
    return reference_forward(model, input_ids, attention_mask).logits


def load_balance_loss(shares: list[Tensor]) -> Tensor:
    return torch.stack([(share - 1 / len(share)).abs().sum() for share in shares]).mean()


def max_vio(shares: list[Tensor]) -> Tensor:
    return torch.stack([len(share) * share.max() - 1 for share in shares]).max()


def append_real(histories: list[list], keys: Tensor, values: Tensor, real: Tensor) -> None:
    """Add (key (H, A), value (H, A), place in the row, padding counted) of each real token to histories[row]."""
    for b, t in real.nonzero().tolist():
        histories[b].append((keys[b, :, t], values[b, :, t], t))
