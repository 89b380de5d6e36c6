"""What every test starts from: the flat root as the package `shram`, one tiny configuration, one lively model.

Shipped files import each other relatively (`from .cache_shram import ShramCache`), as the Hub loader wants it.
Importing this module lets tests say `from shram.cache_shram import ShramCache` and run those same imports.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shram.configuration_shram import ShramConfig
    from shram.modeling_shram import ShramForCausalLM

ROOT = Path(__file__).resolve().parent.parent
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


def install_root_package(name: str = "shram") -> None:
    """Make the repository root importable as a package; the second call changes nothing."""
    if name not in sys.modules:
        spec = ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(ROOT)]
        sys.modules[name] = importlib.util.module_from_spec(spec)


install_root_package()


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
