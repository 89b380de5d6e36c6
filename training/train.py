"""Train a SHRAM checkpoint, from fetching the text to the files of the Hub repository.

python -m training.train --ship
"""

import argparse
import copy
import json
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, TrainingArguments

from shram.configuration_shram import ShramConfig
from shram.modeling_shram import ShramForCausalLM
from training import ROOT, data, measure, tokenizer
from training import recipe as recipes
from training.text import DATA
from training.trainer import HeldOutTrainer, JsonLines

CHECKPOINT_FILES = ("model.safetensors", "config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass
class Corpus:
    """What a recipe trains and measures on, by source."""

    tokens: dict[str, np.ndarray]
    windows: dict[str, list[Tensor]]
    byte_lengths: Tensor

    @classmethod
    def of(cls, recipe: dict) -> "Corpus":
        words = tokenizer.prepare(recipe["model"]["vocab_size"])
        tokens = {source: data.load_tokens(source, "train", words) for source in recipe["mixture"]}
        windows = {
            source: data.held_out_windows(data.load_tokens(source, "held_out", words), recipe["row_tokens"])
            for source in recipe["mixture"]
        }
        return cls(tokens, windows, data.byte_lengths(words))

    def rows(self, recipe: dict) -> data.MixedRows:
        seed, length = recipe["seed"], recipe["row_tokens"]
        streams = {source: data.RowStream(tokens, length, seed) for source, tokens in self.tokens.items()}
        num_rows = recipes.num_steps(recipe) * recipes.tokens_per_step(recipe) // length
        return data.MixedRows(streams, recipe["mixture"], num_rows, seed)


def describe(recipe: dict) -> dict:
    """What a run needs to be told apart: settings, commit, versions."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    git = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return {
        "recipe": recipe,
        "commit": git.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def build_trainer(recipe: dict, corpus: Corpus, output: Path, **overrides) -> HeldOutTrainer:
    """Make a fresh model and the Trainer that trains it as the recipe says."""
    fixed = {
        "output_dir": str(output),
        "seed": recipe["seed"],
        "max_steps": recipes.num_steps(recipe),
        "use_cpu": not torch.accelerator.is_available(),  # bf16 on a CPU wants it said
    }
    arguments = TrainingArguments(**(recipe["trainer"] | fixed | overrides))
    transformers.set_seed(recipe["seed"])
    return HeldOutTrainer(
        model=ShramForCausalLM(ShramConfig(**recipe["model"])),
        args=arguments,
        train_dataset=corpus.rows(recipe),
        windows={source: data.spread(found, recipe["held_out_windows"]) for source, found in corpus.windows.items()},
        byte_lengths=corpus.byte_lengths,
        rate_scales=recipe["learning_rate_scales"],
    )


def tokens_within(minutes: float, recipe: dict, corpus: Corpus, steps: int = 3) -> int:
    """Time a few steps of a throw-away model: the budget in tokens for so many minutes."""
    probe = copy.deepcopy(recipe)
    probe["tokens"] = steps * recipes.tokens_per_step(recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(probe, corpus, Path(folder), eval_strategy="no", save_strategy="no")
        seconds = trainer.train().metrics["train_runtime"]
    return int(minutes * 60 / seconds * probe["tokens"])


def evaluate(model: ShramForCausalLM, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Measure all held-out text, with the baselines beside it."""
    training_tokens = np.concatenate(list(corpus.tokens.values()))
    return {
        source: measure.measure(model, windows, corpus.byte_lengths)
        | measure.baselines(training_tokens, windows, corpus.byte_lengths)
        for source, windows in corpus.windows.items()
    }


def save_repository(model: ShramForCausalLM, output: Path) -> None:
    """Write a folder that loads by from_pretrained(..., trust_remote_code=True)."""
    model.config.use_cache = True  # Trainer turned it off
    model.save_pretrained(output)
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(output)
    for file in (*ROOT.glob("*_shram.py"), *(ROOT / name for name in TOKENIZER_FILES)):
        shutil.copy(file, output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=recipes.DEFAULT)
    parser.add_argument("--output", type=Path, help="default: data/runs/NAME of the recipe")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="token budget by a measured pace instead of the recipe's")
    length.add_argument("--max-steps", type=int, help="token budget by optimizer steps instead of the recipe's")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of OUTPUT")
    parser.add_argument("--ship", action="store_true", help="copy the checkpoint to the repository root at the end")
    arguments = parser.parse_args()
    arguments.output = arguments.output or DATA / "runs" / arguments.recipe.stem
    if arguments.resume and (arguments.minutes or arguments.max_steps):
        parser.error("--resume keeps the token budget of the run it continues")
    if not arguments.resume and any(arguments.output.glob("checkpoint-*")):
        parser.error(f"{arguments.output} holds the checkpoints of a run: --resume it or choose another --output")
    return arguments


def resolve_recipe(arguments: argparse.Namespace) -> tuple[dict, Corpus]:
    """Settle the recipe, token budget included, and keep it beside the checkpoints for --resume."""
    resolved = arguments.output / "recipe.json"
    recipe = recipes.load(resolved if arguments.resume else arguments.recipe)
    corpus = Corpus.of(recipe)
    if arguments.minutes:
        recipe["tokens"] = tokens_within(arguments.minutes, recipe, corpus)
    if arguments.max_steps:
        recipe["tokens"] = arguments.max_steps * recipes.tokens_per_step(recipe)
    recipes.save(recipe, resolved)
    return recipe, corpus


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recipe, corpus = resolve_recipe(arguments)
    run = describe(recipe)
    print(json.dumps(run, indent=2))

    trainer = build_trainer(recipe, corpus, output)
    trainer.add_callback(JsonLines(output / "training_log.jsonl"))
    result = trainer.train(resume_from_checkpoint=arguments.resume)
    # without the autocast wrapper: measured as it is shipped
    model = cast(ShramForCausalLM, trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False))

    run["parameters"] = model.num_parameters()
    run["steps"], run["seconds"] = result.global_step, result.metrics["train_runtime"]
    run["held_out"] = evaluate(model, corpus)
    (output / "metrics.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(run["held_out"], indent=2))
    measure.plot(trainer.state.log_history, output / "loss.png")
    save_repository(model, output)
    if arguments.ship:
        for name in CHECKPOINT_FILES:
            shutil.copyfile(output / name, ROOT / name)


if __name__ == "__main__":
    main()
