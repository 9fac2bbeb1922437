"""On a GPU: that `observe()` and `collect()` never wait for the device, and what they add to a training step.

    python benchmarks/gpu_check.py [--json FILE]

Runs them under `torch.cuda.set_sync_debug_mode("error")`, compares their numbers with the host path's, and measures the
time that they add to a step of matrix products on realistic shapes. Exits 0 when all holds, 1 when not, and 3, having
checked nothing, where CUDA is absent.
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
import sys
import time
from pathlib import Path

import torch

from foreshock.stats.merge import statistics
from foreshock.stats.pair import PairAccumulator

SHAPES = [
    ((8, 4096), torch.float32),
    ((8, 4096), torch.bfloat16),
    ((16, 14336), torch.float32),
    ((16, 14336), torch.bfloat16),
]
STEPS = 50


def streams(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    b = -3 * torch.rand(shape, device="cuda")
    mask = torch.arange(shape[1], device="cuda")[None] < torch.randint(
        shape[1] // 2, shape[1] + 1, (shape[0], 1), device="cuda"
    )
    return (b + 0.05 * torch.randn(shape, device="cuda")).to(dtype), b.to(dtype), mask


def unsynchronised(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> PairAccumulator:
    """Observes padded and packed rows and collects, while any synchronisation raises."""
    edges = torch.arange(0, a.numel() + 1, a.shape[1], device="cuda")
    tokens = torch.zeros_like(a, dtype=torch.int64)
    accumulator = PairAccumulator()
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulator.observe(a, b, mask, clip_range=(0.8, 1.2), token_ids=tokens)
        accumulator.observe(a.reshape(1, -1), b.reshape(1, -1), mask.reshape(1, -1), cu_seqlens=edges)
        accumulator.collect()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return accumulator


def differing(accumulator: PairAccumulator, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """Names of the statistics that differ from the host path's."""
    host = PairAccumulator()
    for options in ({"clip_range": (0.8, 1.2)}, {}):
        host.observe(a.cpu(), b.cpu(), mask.cpu(), **options)
    wanted, found = statistics(host.record()).values, statistics(accumulator.record()).values
    return [n for n in wanted if abs(found.get(n, float("inf")) - wanted[n]) > 1e-9 * abs(wanted[n]) + 1e-9]


def added_us(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Median microseconds of a step without and with the pair observed, and of the caller's thread inside `observe`."""
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    bare, watched, caller = [], [], []
    for step in range(2 * STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        x = weights
        for _ in range(20):
            x = x @ weights * 0.01
        if step % 2:
            accumulator = PairAccumulator()
            entered = time.perf_counter()
            accumulator.observe(a, b, mask)
            accumulator.collect()
            caller.append(time.perf_counter() - entered)
        torch.cuda.synchronize()
        (watched if step % 2 else bare).append(time.perf_counter() - start)
    medians = {"step": stats.median(bare[5:]), "watched": stats.median(watched[5:]), "caller": stats.median(caller[5:])}
    return {name: seconds * 1e6 for name, seconds in medians.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: NOT RUN: no CUDA device here, so nothing was checked")
        return 3
    results, failed = [], False
    for shape, dtype in SHAPES:
        a, b, mask = streams(shape, dtype)
        wrong = differing(unsynchronised(a, b, mask), a, b, mask)
        figures = added_us(a, b, mask)
        added = figures["watched"] - figures["step"]
        print(
            f"{shape!s:12s} {dtype!s:15s} no sync; added {added:7.0f} µs to {figures['step']:.0f} µs, "
            f"caller {figures['caller']:.0f} µs"
        )
        if wrong:
            failed = True
            print(f"  differ from the host path: {', '.join(wrong)}")
        results.append({"shape": shape, "dtype": str(dtype), "added_us": added, **figures, "differ": wrong})
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=2) + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
