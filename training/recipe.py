"""Recipes: JSON files that hold every setting of a run.

`seed`; `tokens`, the budget; `row_tokens`, the length of a training row; `mixture`, passes per source relative to each
other; `held_out_windows`, windows per source in evaluations on the way (the last one takes all); `model`, fields of
ShramConfig; `trainer`, fields of transformers.TrainingArguments; `learning_rate_scales`, factors for the parameters
whose name contains a key.
"""

import json
from pathlib import Path

from training import ROOT

DEFAULT = ROOT / "training" / "recipe.json"
KEYS = {"seed", "tokens", "row_tokens", "mixture", "held_out_windows", "model", "trainer", "learning_rate_scales"}


def load(path: Path = DEFAULT) -> dict:
    recipe = json.loads(path.read_text(encoding="utf-8"))
    if recipe.keys() != KEYS:
        raise ValueError(f"{path}: missing or unknown keys {sorted(recipe.keys() ^ KEYS)}")
    return recipe


def save(recipe: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def tokens_per_step(recipe: dict) -> int:
    trainer = recipe["trainer"]
    rows = trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"]
    return rows * recipe["row_tokens"]


def num_steps(recipe: dict) -> int:
    return max(1, recipe["tokens"] // tokens_per_step(recipe))
