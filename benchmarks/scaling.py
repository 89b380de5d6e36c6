"""How SHRAM's cost moves with the number of routed heads L at fixed K, and with K at fixed L.

python -m benchmarks.scaling [--length 8192] [--threads 1] [--repeats 5]
"""

import argparse
import json

import torch
from tqdm import tqdm

from benchmarks.machine import describe, medians
from benchmarks.models import make_shram, parity
from benchmarks.speed import DECODE_STEPS, DecodeCall, draw_ids, prefill_call, table

HEADS_AT_16 = (16, 32, 64, 128, 256)
CHOSEN_OF_64 = (4, 8, 16, 32, 64)


def measure(num_heads: int, num_chosen: int, length: int, repeats: int) -> dict:
    fields = {"num_mosrah_heads": num_heads, "num_selected_heads": num_chosen}
    model = make_shram(length + 1024, torch.float32, **fields)
    ids = draw_ids(1, length)
    times = medians({"prefill": prefill_call(model, ids), "decode": DecodeCall(model, ids)}, repeats)
    return {
        "L": num_heads,
        "K": num_chosen,
        "parameters_m": model.num_parameters() / 1e6,
        "prefill_ms": 1e3 * times["prefill"],
        "decode_ms": 1e3 * times["decode"] / DECODE_STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = describe(torch.float32)
    print(json.dumps(machine))
    difference = parity(make_shram(1024, torch.float32))
    print(f"parity of cached and uncached logits: largest difference {difference:.1e}")
    if difference > 1e-4:
        raise SystemExit("cached and uncached logits differ: nothing is timed")
    cases = [(heads, 16) for heads in HEADS_AT_16] + [(64, chosen) for chosen in CHOSEN_OF_64 if chosen != 16]
    rows = [measure(*case, arguments.length, arguments.repeats) for case in tqdm(cases)]
    print(table(rows))
    print(json.dumps({"machine": machine, "length": arguments.length, "rows": rows}))


if __name__ == "__main__":
    main()
