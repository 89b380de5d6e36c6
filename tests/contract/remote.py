"""A tiny checkpoint folder as the Hub would hand it over, loaded through the auto classes of whichever release runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support import ROOT, TINY, tiny_config, wide_model

RELEASE = Version(transformers.__version__)
CODE = sorted(ROOT.glob("*_shram.py"))
AUTO_MAP = {
    "AutoConfig": "configuration_shram.ShramConfig",
    "AutoModel": "modeling_shram.ShramModel",
    "AutoModelForCausalLM": "modeling_shram.ShramForCausalLM",
    "AutoModelForSequenceClassification": "modeling_shram.ShramForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_shram.ShramForTokenClassification",
}
# an end that no tiny model can reach, so that lengths are known
GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 64, "pad_token_id": 0}


def write_checkpoint(folder: Path, seed: int = 0, **overrides) -> Path:
    """Code, config.json and model.safetensors of a wide model, written without any `save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in CODE:
        shutil.copy(file, folder)
    declared = {"model_type": "shram", "architectures": ["ShramForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps({**TINY, **overrides, **declared}))
    weights = dict(wide_model(tiny_config(**overrides), seed).state_dict())
    if overrides.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, auto=AutoModelForCausalLM, **keywords):
    return auto.from_pretrained(folder, trust_remote_code=True, **keywords).eval()


def cache_of(output):
    """The cache in a model or generate output, under the name this release gives it."""
    return output.past_key_values if Version("5.24") > RELEASE else output.cache


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[torch.Tensor]) -> dict:
    """Ids and mask of prompts (1, n) of unequal lengths, which never use token 0: pads on the left."""
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def library_fault(first: str, last: str, reason: str):
    """Skip on the releases first … last, both included, which fail for any model."""
    inside = Version(first) <= RELEASE <= Version(last)
    return pytest.mark.skipif(inside, reason=f"library fault in {first} to {last}: {reason}")
