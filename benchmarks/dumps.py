"""What token dumps cost: the training thread's copy, the writer, and `foreshock diagnose` on dumps of two sizes.

    python -m benchmarks.dumps [--rows 64] [--width 1024] [--steps 4 32]

The copy is `observe` with the ring on beside `observe` without: least CPU time of the calling thread of 30. The
diagnosis runs in processes of its own: tokens a second and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import foreshock
from foreshock.monitor import Monitor

CALLS = 30


def monitor_of(folder: Path, **settings: Any) -> Monitor:
    """Against a port where nobody listens: nothing here waits for a service."""
    return foreshock.init(
        run="bench/dumps", url="http://127.0.0.1:9", spool_dir=str(folder / "spool"), finish_s=0.1, launch="one",
        dump_memory_bytes=4 << 30, dump_disk_bytes=64 << 30, **settings,
    )  # fmt: skip


def batch(rows: int, width: int, seed: int) -> dict[str, Any]:
    """Log-probs, token ids and sequence ids of a micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    b = -2 * torch.rand(rows, width, generator=generator)
    return {
        "a": b + 1e-3 * torch.randn(rows, width, generator=generator), "b": b, "mask": torch.ones(rows, width),
        "token_ids": torch.randint(0, 150_000, (rows, width), generator=generator), "seq_ids": torch.arange(rows),
    }  # fmt: skip


def observed_ms(monitors: list[Monitor], given: dict[str, Any]) -> list[float]:
    """Least CPU time of one `observe` on this thread, of each monitor, in turn: noise only adds."""
    times: list[list[float]] = [[] for _ in monitors]
    for step in range(CALLS):
        for monitor, taken in zip(monitors, times, strict=True):
            began = time.thread_time()
            monitor.observe("mismatch", **given)
            taken.append(1e3 * (time.thread_time() - began))
            monitor.end_step(step)
    return [min(taken) for taken in times]


def write(folder: Path, steps: int, rows: int, width: int) -> tuple[int, float]:
    """Dumps `steps` steps; bytes on disk, and seconds until the last file was there."""
    monitor = monitor_of(folder, dump_dir=str(folder / "d"), dump_share=1.0, dump_ring=0)
    given = [batch(rows, width, seed) for seed in range(4)]
    began = time.monotonic()
    for step in range(steps):
        monitor.observe("mismatch", **given[step % 4])
        monitor.end_step(step)
    keeper = monitor._keeper
    assert keeper is not None
    while len(keeper.written) < steps and not keeper.off:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    monitor.finish()
    return sum(path.stat().st_size for path in keeper.written), seconds


def diagnose(folder: Path) -> tuple[float, float]:
    """Seconds and peak MiB of `foreshock diagnose`, less those of importing."""
    code = (
        "import sys, time, resource, torch, pyarrow.parquet\n"
        "from foreshock_service.diagnosis.tokens.report import diagnose_dump\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; began = time.monotonic()\n"
        "diagnose_dump([sys.argv[1]])\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(time.monotonic() - began, (peak - base) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    seconds, mib = done.stdout.split()
    return float(seconds), float(mib)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, nargs=2, default=[4, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        given = batch(options.rows, options.width, 0)
        ringed = monitor_of(root / "b", dump_dir=str(root / "ring"), dump_ring=3)
        plain, ring = observed_ms([monitor_of(root / "a"), ringed], given)
        tokens = options.rows * options.width
        print(f"observe of {tokens} tokens: {plain:.2f} ms, with the ring on {ring:.2f} ms")
        print("tokens      bytes/token  written tokens/s  diagnosed tokens/s  peak MiB above imports")
        for steps in options.steps:
            folder = root / str(steps)
            size, seconds = write(folder, steps, options.rows, options.width)
            took, peak = diagnose(folder / "d")
            count = steps * tokens
            print(f"{count:<11} {size / count:<12.1f} {count / seconds:<17.0f} {count / took:<19.0f} {peak:.0f}")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
