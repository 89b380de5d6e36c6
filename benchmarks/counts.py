"""Operations and bytes of a SHRAM forward, counted, for the machine's limit (balanced routing)."""

from dataclasses import dataclass

from benchmarks.machine import Rates


@dataclass
class Work:
    """gemm and sdpa in FLOP, copied in bytes."""

    gemm: float
    sdpa: float
    copied: float

    def seconds(self, rates: Rates) -> float:
        """Time of this work at the machine's rates, one kind after the other."""
        return self.gemm / rates.gemm + self.sdpa / rates.sdpa + self.copied / rates.copy


def prefill_work(config, num_tokens: int, itemsize: int) -> Work:
    """One row of `num_tokens` tokens through all layers: products, attention to what each query sees, moved rows."""
    hidden, width = config.hidden_size, config.head_dim
    local, routed = config.num_sliding_window_heads, config.num_selected_heads
    per_token = 4 * hidden * width * (local + routed)  # projections of the active heads
    per_token += hidden * config.num_mosrah_heads + 3 * hidden * config.intermediate_size
    gemm = 2 * num_tokens * per_token * config.num_hidden_layers
    window = min(config.window_size, num_tokens)
    seen = local * (num_tokens * window - window * (window - 1) / 2)
    per_head = num_tokens * routed / config.num_mosrah_heads
    seen += config.num_mosrah_heads * per_head * (per_head + 1) / 2
    # an entry's row is gathered once for its projection and added once to the result
    copied = 2 * 2 * num_tokens * routed * hidden * itemsize * config.num_hidden_layers
    return Work(gemm, 4 * width * seen * config.num_hidden_layers, copied)
