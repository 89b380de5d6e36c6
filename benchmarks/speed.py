"""SHRAM against a Llama of equal width, depth and active attention width, side by side in one run.

    python -m benchmarks.speed [--phase prefill,decode,train,batch_decode] [--lengths 512,2048,8192,32768]
                               [--threads 1] [--dtype float32] [--collapsed] [--plot FILE]

Ratios are Llama's time over SHRAM's. `limit` is the share of the machine's limit that SHRAM's prefill reaches: the
time of its counted work at the machine's own GEMM, SDPA and copy rates, over the time taken.
"""

import argparse
import json
from collections.abc import Callable

import torch
from tqdm import tqdm

from benchmarks.counts import prefill_work
from benchmarks.machine import Rates, describe, medians, peak_extra_bytes
from benchmarks.models import collapse, make_llama, make_shram, parity
from shram.modeling_shram import CACHE_KEY

PHASES = ("prefill", "decode", "train", "batch_decode")
BATCH, DECODE_STEPS = 8, 8


def draw_ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(2048, (rows, tokens), generator=torch.Generator().manual_seed(0))


def prefill_call(model, ids) -> Callable:
    @torch.inference_mode()
    def call():
        return model(ids, use_cache=True, logits_to_keep=1)

    return call


class DecodeCall:
    """DECODE_STEPS tokens on a cache of the prompt; later calls find it that much longer."""

    def __init__(self, model, ids):
        self.model, self.token = model, ids[:, :1]
        self.cache = getattr(prefill_call(model, ids)(), CACHE_KEY)

    @torch.inference_mode()
    def __call__(self):
        for _ in range(DECODE_STEPS):
            self.model(self.token, **{CACHE_KEY: self.cache}, use_cache=True)


def train_call(model, ids) -> Callable:
    def call():
        model.train()
        model(ids, labels=ids).loss.backward()
        model.zero_grad()
        model.eval()

    return call


def make_calls(phase: str, models: dict, length: int) -> dict[str, Callable]:
    ids = draw_ids(BATCH if phase == "batch_decode" else 1, length)
    make = {"prefill": prefill_call, "train": train_call}.get(phase, DecodeCall)
    return {name: make(model, ids) for name, model in models.items()}


def cache_bytes(cache) -> int:
    if hasattr(cache, "num_bytes"):
        return cache.num_bytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measure(phase: str, length: int, arguments) -> dict:
    dtype = getattr(torch, arguments.dtype)
    models = {"llama": make_llama(length + 1024, dtype), "shram": make_shram(length + 1024, dtype)}
    if arguments.collapsed:
        collapse(models["shram"])
    calls = make_calls(phase, models, length)
    probes = Rates.probes(dtype) if phase == "prefill" else {}
    times = medians(calls | probes, arguments.repeats)
    steps = DECODE_STEPS if "decode" in phase else 1
    row = {"phase": phase, "length": length}
    row |= {f"{name}_ms": 1e3 * times[name] / steps for name in calls}
    row["ratio"] = times["llama"] / times["shram"]
    if steps > 1:
        row |= {
            f"{name}_cache_mb": cache_bytes(call.cache) / 2**20
            for name, call in calls.items()
            if isinstance(call, DecodeCall)
        }
    else:
        row |= {f"{name}_peak_mb": peak_extra_bytes(call) / 2**20 for name, call in calls.items()}
    if phase == "prefill":
        work, rates = prefill_work(models["shram"].config, length, dtype.itemsize), Rates.of(times)
        row |= {"gemm_gflops": rates.gemm / 1e9, "sdpa_gflops": rates.sdpa / 1e9, "copy_gbs": rates.copy / 1e9}
        row["limit"] = work.seconds(rates) / times["shram"]
    return row


def table(rows: list[dict]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        lines.append([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(rows: list[dict], file: str, machine: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure, axes = plt.subplots(1, len(phases), figsize=(4 * len(phases), 3.6), layout="constrained", squeeze=False)
    for axis, phase in zip(axes[0], phases, strict=True):
        chosen = [row for row in rows if row["phase"] == phase]
        for name in ("llama", "shram"):
            axis.plot([r["length"] for r in chosen], [r[f"{name}_ms"] for r in chosen], marker="o", label=name)
        axis.set(xscale="log", yscale="log", title=phase.replace("_", " "), xlabel="tokens of context", ylabel="ms")
        axis.set_xticks(lengths := [r["length"] for r in chosen], [f"{length:,}" for length in lengths])
        axis.xaxis.set_minor_locator(plt.NullLocator())
        axis.legend()
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} thread, {machine['dtype']}")
    figure.savefig(file, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", default=",".join(PHASES))
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-train", type=int, default=8192, help="longest training step and longest batch decode")
    parser.add_argument("--collapsed", action="store_true", help="send every token to the same heads")
    parser.add_argument("--plot", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    machine = describe(dtype)
    print(json.dumps(machine))
    difference = parity(make_shram(1024, dtype))
    print(f"parity of cached and uncached logits: largest difference {difference:.1e}")
    if difference > {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]:
        raise SystemExit("cached and uncached logits differ: nothing is timed")
    lengths = [int(length) for length in arguments.lengths.split(",")]
    cases = [(phase, length) for phase in arguments.phase.split(",") for length in lengths]
    cases = [(p, n) for p, n in cases if p in ("prefill", "decode") or n <= arguments.max_train]
    rows = [measure(phase, length, arguments) for phase, length in tqdm(cases)]
    print(table(rows))
    print(json.dumps({"machine": machine, "rows": rows}))
    if arguments.plot:
        plot(rows, arguments.plot, machine)


if __name__ == "__main__":
    main()
