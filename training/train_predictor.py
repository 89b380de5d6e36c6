"""Distil a Predictor from the shipped checkpoint, over its own greedy continuations of the training text.

    python -m training.train_predictor --ship

Every walk goes through a batch of rows chunk by chunk: the Predictor's steps P1..Pn on a workspace, then the Full pass,
which gives the teacher's distributions and commits the chunk; one backward and one optimizer step a chunk.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from shram.modeling_shram import ShramForCausalLM
from shram.predictor_shram import CONFIG_FILE, FOLDER, WEIGHTS_FILE, ShramPredictor
from training import ROOT, data, tokenizer
from training.text import DATA

DEFAULT = ROOT / "training" / "predictor_recipe.json"


# ---------------------------------------------------------------------------------------------------- rows


def prompts(recipe: dict, num_rows: int) -> Tensor:
    """Beginnings of training rows, drawn from the mixture."""
    words, length, seed = tokenizer.prepare(num_tokens()), recipe["prompt_tokens"], recipe["seed"]
    streams = {
        source: data.RowStream(data.load_tokens(source, "train", words), length, seed) for source in recipe["mixture"]
    }
    rows = data.MixedRows(streams, recipe["mixture"], num_rows, seed)
    return torch.stack([rows[i]["input_ids"] for i in range(num_rows)])


def num_tokens() -> int:
    return json.loads((ROOT / "config.json").read_text("utf-8"))["vocab_size"]


@torch.inference_mode()
def continue_greedily(teacher, rows: Tensor, length: int) -> Tensor:
    """The teacher's own choices behind each row, up to `length` tokens."""
    cache = teacher.new_cache()
    logits = teacher(rows, cache=cache, logits_to_keep=1).logits
    while rows.shape[1] < length:
        newest = logits[:, -1].argmax(dim=-1, keepdim=True)
        rows = torch.cat([rows, newest], dim=1)
        logits = teacher(newest, cache=cache).logits
    return rows


def prepare_rows(teacher, recipe: dict, target: Path, rows_at_once: int = 64) -> Tensor:
    """(num_rows, row_tokens) of prompt and continuation, kept beside the checkpoints."""
    if not target.exists():
        starts = prompts(recipe, recipe["num_rows"]).split(rows_at_once)
        made = [continue_greedily(teacher, part, recipe["row_tokens"]) for part in tqdm(starts, desc="continuations")]
        np.save(target, torch.cat(made).numpy().astype(np.int32))
    return torch.from_numpy(np.load(target).astype(np.int64))


# ---------------------------------------------------------------------------------------------------- training


def make_optimizer(predictor: ShramPredictor, recipe: dict) -> torch.optim.Optimizer:
    """Adam with slow routers, as in the teacher's own recipe; the teacher's balancing biases stay as they are."""
    rate, groups = recipe["learning_rate"], {True: [], False: []}
    for name, parameter in predictor.named_parameters():
        if name.endswith("expert_bias"):
            parameter.requires_grad_(False)
        else:
            groups["router" in name].append(parameter)
    scales = {True: recipe["router_rate_scale"], False: 1.0}
    return torch.optim.Adam(
        [{"params": found, "lr": rate * scales[slow], "scale": scales[slow]} for slow, found in groups.items()],
        betas=(0.9, 0.95),
    )


def set_rate(optimizer, recipe: dict, walk: float) -> None:
    """Linear warmup, then a cosine down to a twentieth."""
    share = walk / recipe["num_walks"]
    factor = min(1.0, (walk + 1) / recipe["warmup_walks"]) * (0.525 + 0.475 * math.cos(math.pi * share))
    for group in optimizer.param_groups:
        group["lr"] = recipe["learning_rate"] * group["scale"] * factor


def distillation_loss(logits: Tensor, target: Tensor, discount: float) -> Tensor:
    """Sum over places j of discount^j KL(teacher || Predictor), mean over rows: logits, target (B, C, V)."""
    places = F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (places.mean(dim=0) * discount ** torch.arange(places.shape[1])).sum()


def train_chunk(predictor, cache, chunk: Tensor, feature: Tensor, num_steps: int, recipe: dict):
    """P-steps, Full pass, backward: the teacher's hidden state behind the chunk, and tokens a Full pass would give."""
    teacher = predictor.teacher[0]
    with predictor.open(cache) as workspace:
        guesses = list(predictor.roll_out(chunk[:, 0], feature, workspace, num_steps))
    with torch.no_grad():  # the only writer of the cache
        hidden = teacher.model(chunk, cache=cache).last_hidden_state
        target = teacher.lm_head(hidden[:, :-1])
    losses = [distillation_loss(logits, target, recipe["discount"]) for logits in guesses]
    torch.stack(losses).mean().backward()
    agreed = (guesses[0].argmax(-1) == target.argmax(-1)).cumprod(dim=1).sum(dim=1)
    return hidden[:, -1], 1 + agreed.float().mean().item()


def train_walk(predictor, optimizer, rows: Tensor, walk: int, recipe: dict) -> float:
    """One batch of rows from end to end; mean tokens a Full pass would give with P1."""
    generator = np.random.default_rng([recipe["seed"], walk])
    teacher, width = predictor.teacher[0], predictor.num_drafts + 1
    rows = rows[generator.choice(len(rows), recipe["rows_per_batch"], replace=False)]
    start = recipe["first_tokens"] + int(generator.integers(width))
    cache = teacher.new_cache()
    with torch.no_grad():
        feature = teacher.model(rows[:, :start], cache=cache).last_hidden_state[:, -1]
    given = []
    for first in range(start, rows.shape[1] - width + 1, width):
        num_steps = 1 + generator.choice(predictor.num_steps, p=recipe["step_shares"])
        chunk = rows[:, first : first + width]
        feature, tokens = train_chunk(predictor, cache, chunk, feature, int(num_steps), recipe)
        torch.nn.utils.clip_grad_norm_(predictor.parameters(), recipe["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        given.append(tokens)
    return float(np.mean(given))


def train(teacher, rows: Tensor, recipe: dict, checkpoint: Path | None = None, resume: bool = False) -> ShramPredictor:
    """Train as the recipe says; with a checkpoint file, save there now and then and go on from it."""
    teacher.requires_grad_(False)
    torch.manual_seed(recipe["seed"])
    predictor = ShramPredictor(teacher, **recipe["predictor"]).requires_grad_(True).train()
    optimizer, first = make_optimizer(predictor, recipe), 0
    if resume and checkpoint is not None:
        state = torch.load(checkpoint, weights_only=True)
        predictor.load_state_dict(state["predictor"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["walk"]
    bar = tqdm(range(first, recipe["num_walks"]), initial=first, total=recipe["num_walks"], desc="walks")
    for walk in bar:
        set_rate(optimizer, recipe, walk)
        tokens = train_walk(predictor, optimizer, rows, walk, recipe)
        bar.set_postfix_str(f"{tokens:.2f} tokens per Full pass at P1")
        if checkpoint is not None and ((walk + 1) % 10 == 0 or walk + 1 == recipe["num_walks"]):
            state = {"predictor": predictor.state_dict(), "optimizer": optimizer.state_dict(), "walk": walk + 1}
            torch.save(state, checkpoint)
    return predictor.eval()


def save(predictor: ShramPredictor, folder: Path) -> None:
    """Settings and weights, these in bfloat16: a draft need not be exact."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(predictor.settings, indent=2) + "\n", encoding="utf-8")
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in predictor.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=DEFAULT)
    parser.add_argument("--output", type=Path, help="default: data/runs/NAME of the recipe")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of OUTPUT")
    parser.add_argument("--ship", action="store_true", help=f"copy the result to {FOLDER}/ at the end")
    arguments = parser.parse_args()
    arguments.output = arguments.output or DATA / "runs" / arguments.recipe.stem
    if not arguments.resume and (arguments.output / "checkpoint.pt").exists():
        parser.error(f"{arguments.output} holds the checkpoint of a run: --resume it or choose another --output")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recipe = json.loads(arguments.recipe.read_text(encoding="utf-8"))
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"recipe": recipe, "torch": torch.__version__, "threads": torch.get_num_threads()}))
    teacher = ShramForCausalLM.from_pretrained(ROOT).eval()
    rows = prepare_rows(teacher, recipe, output / "rows.npy")
    predictor = train(teacher, rows, recipe, output / "checkpoint.pt", arguments.resume)
    save(predictor, output / FOLDER)
    if arguments.ship:
        shutil.copytree(output / FOLDER, ROOT / FOLDER, dirs_exist_ok=True)
        print(f"wrote {FOLDER}/: {sum(p.numel() for p in predictor.parameters()):,} parameters")


if __name__ == "__main__":
    main()
