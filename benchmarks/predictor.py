"""The shipped Predictor on held-out text: what its drafts save, and whether the text stays the teacher's own.

    python -m benchmarks.predictor [--prompts 20] [--new-tokens 96] [--threads 1] [--batch 1,4] [--predictor FOLDER]

`tokens` are those a Full pass yields, plain greedy has 1; `ratio` is plain greedy's CPU time over that of decoding with
drafts, both through `generate`, prompt by prompt in turn; `equal` counts the prompts whose output is plain greedy's.
P1..P3 are the Predictor's steps per chunk; "no K/V" hides the teacher's committed K/V from it. In float64 the output
must be equal on every prompt. In float32 a near-tie may fall either way, since one forward over a chunk rounds
differently from several over single tokens.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import ROOT
from benchmarks.machine import describe
from benchmarks.speed import table
from shram.modeling_shram import ShramForCausalLM
from shram.predictor_shram import ShramPredictor, decode_with_predictor
from training import data, tokenizer
from training.text import PACKAGES

PROMPT_TOKENS = 64


def prompts(vocab_size: int, num_prompts: int) -> Tensor:
    """Beginnings of held-out windows, evenly spread over all sources."""
    words = tokenizer.prepare(vocab_size)
    windows = [
        window
        for source in PACKAGES
        for window in data.held_out_windows(data.load_tokens(source, "held_out", words), PROMPT_TOKENS)
        if len(window) == PROMPT_TOKENS
    ]
    return torch.stack(data.spread(windows, num_prompts))


class Arm:
    """One way to draft, with what it took so far."""

    def __init__(self, name: str, predictor: ShramPredictor, num_steps: int, reads_history: bool = True):
        self.name, self.predictor, self.num_steps, self.reads_history = name, predictor, num_steps, reads_history
        self.seconds, self.tokens, self.passes, self.num_equal, self.num_prompts = 0.0, 0, 0, 0, 0

    def run(self, model, ids: Tensor, plain: Tensor, **options) -> None:
        self.predictor.reads_history = self.reads_history
        started = time.process_time()
        out = model.generate(
            ids,
            custom_generate=decode_with_predictor,
            predictor=self.predictor,
            predictor_steps=self.num_steps,
            **options,
        )
        self.seconds += time.process_time() - started
        self.predictor.reads_history = True
        self.tokens += out.shape[1] - ids.shape[1]
        self.passes += self.predictor.num_full_passes
        self.num_prompts += len(ids)
        if out.shape == plain.shape:
            self.num_equal += sum(torch.equal(*rows) for rows in zip(out, plain, strict=True))


def measure(model, predictor, ids: Tensor, batch: int, new_tokens: int) -> list[dict]:
    """All arms on all prompts, `batch` rows a call; the first call warms up."""
    mask = torch.ones(batch, ids.shape[1], dtype=torch.long)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": mask}
    arms = [Arm(f"P{n}", predictor, n) for n in (1, 2, 3)] + [Arm("P1, no K/V", predictor, 1, reads_history=False)]
    plain_seconds = 0.0
    model.generate(ids[:batch], **options)
    Arm("warmup", predictor, 2).run(model, ids[:batch], ids[:batch], **options)
    calls = [part for part in ids.split(batch) if len(part) == batch]
    for part in tqdm(calls, desc=f"batch {batch}, {str(model.dtype).removeprefix('torch.')}"):
        started = time.process_time()
        plain = model.generate(part, **options)
        plain_seconds += time.process_time() - started
        for arm in arms:
            arm.run(model, part, plain, **options)
    return [
        {
            "batch": batch,
            "dtype": str(model.dtype).removeprefix("torch."),
            "drafts": arm.name,
            "tokens": arm.tokens / arm.passes,
            "ratio": plain_seconds / arm.seconds,
            "equal": f"{arm.num_equal}/{arm.num_prompts}",
        }
        for arm in arms
    ]


def load(folder: Path | None, dtype: torch.dtype):
    model = ShramForCausalLM.from_pretrained(ROOT, dtype=dtype).eval()
    return model, ShramPredictor.load(model, ROOT if folder is None else folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--predictor", type=Path, help="folder that holds another Predictor's `predictor/`")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    machine = describe(torch.float32)
    print(json.dumps(machine))
    rows = []
    for dtype, batches in ((torch.float64, [1]), (torch.float32, [int(n) for n in arguments.batch.split(",")])):
        model, predictor = load(arguments.predictor, dtype)
        ids = prompts(model.config.vocab_size, arguments.prompts)
        for batch in batches:
            rows += measure(model, predictor, ids, batch, arguments.new_tokens)
    print(table(rows))
    print(json.dumps({"machine": machine, "settings": vars(arguments) | {"predictor": None}, "rows": rows}))
    if any(row["dtype"] == "float64" and len(set(row["equal"].split("/"))) > 1 for row in rows):
        raise SystemExit("drafted and plain greedy output differ in float64")


if __name__ == "__main__":
    main()
