"""What a benchmark needs of the machine: its description and rates, medians, and the peak of a call's memory."""

import ctypes
import gc
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from benchmarks import ROOT


def describe(dtype: torch.dtype) -> dict:
    """Processor, versions, threads and commit of this run."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip(),
    }


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def medians(calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each call, taken in turn so that drift of a shared machine meets all of them."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Highest resident memory during the call above what was resident before it (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    call()
    return max(0, resident_bytes("VmHWM") - before)


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text("utf-8")
    found = re.search(rf"{field}:\s*(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else 0


@dataclass
class Rates:
    """What the machine reaches in one operation each: GEMM and causal SDPA in FLOP/s, copy in bytes/s."""

    gemm: float
    sdpa: float
    copy: float

    @classmethod
    def probes(cls, dtype: torch.dtype, head_dim: int = 16) -> dict[str, Callable[[], object]]:
        """Calls to be timed beside others, so that rates and times come from the same moments."""
        square = torch.randn(1024, 1024, dtype=dtype)
        q = torch.randn(1, 1, 2048, head_dim, dtype=dtype)
        source = torch.randn(2**24, dtype=torch.float32)
        target = torch.empty_like(source)
        return {
            "gemm": lambda: square @ square,
            "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            "copy": lambda: target.copy_(source),
        }

    @classmethod
    def of(cls, times: dict[str, float], head_dim: int = 16) -> "Rates":
        """Rates from the seconds of the probes."""
        # a causal half of 2048 x 2048 pairs, 4 A operations each; a copy reads and writes 2^24 float32
        sdpa = 4 * head_dim * 2048 * 2049 / 2
        return cls(2 * 1024**3 / times["gemm"], sdpa / times["sdpa"], 2 * 4 * 2**24 / times["copy"])
