"""Bits per byte on held-out text, the baselines beside it, and the picture of a run."""

import math
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor, nn

matplotlib.use("Agg")
from matplotlib import pyplot


@torch.no_grad()
def measure(model: nn.Module, windows: list[Tensor], lengths: Tensor) -> dict[str, float]:
    """Bits per byte over all windows, and the routing balance, averaged over windows.

    Args:
        windows: token ids; all but a window's first are predicted.
        lengths: (V,) bytes per token id.
    """
    model.eval()
    nats, balance, violation = 0.0, [], []
    for window in windows:
        ids = window[None].to(next(model.parameters()).device)
        output = model(input_ids=ids, labels=ids, use_cache=False)
        nats += output.loss.item() * (len(window) - 1)
        balance.append(float(output.load_balance_loss))
        violation.append(float(output.max_vio))
    return {
        "bits_per_byte": nats / math.log(2) / count_bytes(windows, lengths),
        "load_balance_loss": float(np.mean(balance)),
        "max_vio": float(np.mean(violation)),
    }


def count_bytes(windows: list[Tensor], lengths: Tensor) -> int:
    return sum(int(lengths[window[1:]].sum()) for window in windows)


def baselines(training_tokens: np.ndarray, windows: list[Tensor], lengths: Tensor) -> dict[str, float]:
    """Bits per byte of guessing uniformly, and by the tokens' frequencies in training (add-one)."""
    counts = np.bincount(training_tokens, minlength=len(lengths)) + 1
    surprisal = torch.from_numpy(-np.log2(counts / counts.sum()))
    num_tokens = sum(len(window) - 1 for window in windows)
    num_bytes = count_bytes(windows, lengths)
    return {
        "uniform": num_tokens * math.log2(len(lengths)) / num_bytes,
        "unigram": sum(float(surprisal[window[1:]].sum()) for window in windows) / num_bytes,
    }


def plot(history: list[dict], path: Path) -> None:
    """Draw the training loss and the held-out bits per byte of a Trainer's log history."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    training = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    left.plot(*zip(*training, strict=True))
    left.set(xlabel="step", ylabel="nats per token", title="training loss")
    suffix = "_bits_per_byte"
    for key in sorted({key for entry in history for key in entry if key.endswith(suffix)}):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        right.plot(*zip(*points, strict=True), marker=".", label=key.removeprefix("eval_").removesuffix(suffix))
    right.set(xlabel="step", ylabel="bits per byte", title="held-out text")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
