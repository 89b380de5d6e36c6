"""What every test starts from: the flat root as the package `shram` (importing `training` makes it one), one tiny
configuration, one lively model."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from training import ROOT

if TYPE_CHECKING:
    from shram.configuration_shram import ShramConfig
    from shram.modeling_shram import ShramForCausalLM

__all__ = ["ROOT", "TINY", "tiny_config", "wide_model"]

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_sliding_window_heads": 2,
    "num_mosrah_heads": 4,
    "num_selected_heads": 2,
    "head_dim": 8,
    "window_size": 4,
    "training_sequence_length": 32,
    "inference_sequence_length": 64,
}


def tiny_config(**overrides: Any) -> ShramConfig:
    """A configuration small enough for a loop oracle, in which windows overflow and routing is sparse."""
    from shram.configuration_shram import ShramConfig

    unknown = overrides.keys() - inspect.signature(ShramConfig).parameters.keys()
    if unknown:
        raise TypeError(f"ShramConfig declares no field {', '.join(sorted(unknown))}")
    return ShramConfig(**{**TINY, **overrides})


def wide_model(config: ShramConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> ShramForCausalLM:
    """A model in eval mode whose weights are so large that every path and every head matters.

    The draws are made in float32, so that models of one seed differ between dtypes by rounding alone.
    """
    from shram.modeling_shram import ShramForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = ShramForCausalLM(config).eval().to(dtype)  # pyrefly: ignore[bad-argument-type]  (the library wraps `to`)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("expert_bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model
