"""The two models compared: SHRAM and a Llama of equal width, depth and active attention width."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shram.configuration_shram import ShramConfig
from shram.modeling_shram import ShramForCausalLM

SIZE = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1366, "num_hidden_layers": 2}
ROUTED = {"num_sliding_window_heads": 16, "num_mosrah_heads": 64, "num_selected_heads": 16, "head_dim": 16}


def make_shram(length: int, dtype: torch.dtype, **overrides) -> ShramForCausalLM:
    torch.manual_seed(0)
    fields = {**SIZE, **ROUTED, "window_size": 128, "training_sequence_length": length, **overrides}
    return ShramForCausalLM(ShramConfig(**fields)).to(dtype).eval()  # pyrefly: ignore[bad-argument-type]


def make_llama(length: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    num_heads = ROUTED["num_sliding_window_heads"] + ROUTED["num_selected_heads"]
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": ROUTED["head_dim"]}
    config = LlamaConfig(**SIZE, **heads, max_position_embeddings=length)
    return LlamaForCausalLM(config).to(dtype).eval()  # pyrefly: ignore[bad-argument-type]


def collapse(model: ShramForCausalLM) -> ShramForCausalLM:
    """Send every token to the same K heads."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.mosrah.router.expert_bias[: model.config.num_selected_heads] = 100
    return model


@torch.no_grad()
def parity(model: ShramForCausalLM) -> float:
    """Largest difference between logits of one forward and of a cached one in uneven chunks."""
    ids = torch.randint(model.config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(1))
    cache, chunks = model.new_cache(), []
    for part in ids.split([170, 1, 1, 100, 28], dim=1):
        chunks.append(model(part, cache=cache).logits)
    return (torch.cat(chunks, dim=1) - model(ids, use_cache=False).logits).abs().max().item()
