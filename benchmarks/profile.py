"""Where the time of one step goes: the profiler's table of a prefill, a decode step or a training step.

python -m benchmarks.profile [--phase prefill|decode|train] [--length 2048] [--model shram|llama] [--rows 25]
"""

import argparse
import json

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import describe
from benchmarks.models import make_llama, make_shram, parity
from benchmarks.speed import make_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", default="prefill", choices=("prefill", "decode", "train"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--model", default="shram", choices=("shram", "llama"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(describe(torch.float32)))
    print(f"parity of cached and uncached logits: largest difference {parity(make_shram(1024, torch.float32)):.1e}")
    make = make_shram if arguments.model == "shram" else make_llama
    models = {arguments.model: make(arguments.length + 1024, torch.float32)}
    call = make_calls(arguments.phase, models, arguments.length)[arguments.model]
    call()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        call()
    print(run.key_averages().table(sort_by="self_cpu_time_total", row_limit=arguments.rows, max_name_column_width=40))
    slowest = sorted(run.key_averages(), key=lambda entry: -entry.self_cpu_time_total)[:5]
    print(json.dumps({entry.key: entry.self_cpu_time_total / 1e3 for entry in slowest}))


if __name__ == "__main__":
    main()
