"""What one `observe()` costs on [8, 4096] float32 CPU tensors, beside verl's own metrics on the same tensors.

    python benchmarks/sdk/observe.py [--json FILE] [--rounds 300]

verl's `compute_offpolicy_metrics` and `calculate_debug_metrics` are what a verl run pays for its mismatch figures;
together they are the peer. All contenders take turns in one process with one thread, so that a busy machine slows each
alike; best and median over the rounds are reported, and the ratio of ours to the peer's for both. `record()`, paid once
a step and not in the training loop, is measured as well. Exits 1 where the median misses the target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as stats
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

SEQUENCES, POSITIONS = 8, 4096


def tensors() -> dict[str, torch.Tensor]:
    """Log-probs as an RL step has them: responses of differing length, noise of bf16's size between the two sides."""
    torch.manual_seed(0)
    b = -torch.rand(SEQUENCES, POSITIONS) * 3
    lengths = torch.randint(POSITIONS // 2, POSITIONS + 1, (SEQUENCES, 1))
    return {
        "a": b + 0.05 * torch.randn(SEQUENCES, POSITIONS),
        "b": b,
        "mask": torch.arange(POSITIONS)[None] < lengths,
        "token_ids": torch.randint(0, 150_000, (SEQUENCES, POSITIONS)),
    }


def contenders(data: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Named calls; verl's get the float mask that verl itself hands them."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    from foreshock.stats.merge import statistics
    from foreshock.stats.pair import PairAccumulator

    a, b, mask = data["a"], data["b"], data["mask"]
    float_mask = mask.float()
    proto = DataProto.from_dict(
        tensors={
            "old_log_probs": a,
            "rollout_log_probs": b,
            "response_mask": float_mask,
            "responses": data["token_ids"],
        }
    )

    def record() -> object:
        accumulator = PairAccumulator()
        accumulator.observe(a, b, mask)
        start = time.perf_counter()
        result = accumulator.record()
        extra["record"].append(time.perf_counter() - start)
        return result

    def whole() -> object:
        return statistics(record())  # type: ignore[arg-type]

    return {
        "observe": lambda: PairAccumulator().observe(a, b, float_mask),
        "observe, no padding": lambda: PairAccumulator().observe(a, b),
        "observe, all options": lambda: PairAccumulator().observe(
            a, b, mask, clip_range=(0.8, 1.2), token_ids=data["token_ids"]
        ),
        "observe + record + statistics": whole,
        "verl compute_offpolicy_metrics": lambda: compute_offpolicy_metrics(a, b, float_mask),
        "verl calculate_debug_metrics": lambda: calculate_debug_metrics(proto),
    }


extra: dict[str, list[float]] = {"record": []}


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, the calls taking turns."""
    for call in calls.values():
        for _ in range(10):
            call()
    extra["record"].clear()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds | extra


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(contenders(tensors()), arguments.rounds)
    figures = {n: {"best_us": min(s) * 1e6, "median_us": stats.median(s) * 1e6} for n, s in seconds.items()}
    peer = [name for name in figures if name.startswith("verl")]
    ratio = {
        key: figures["observe"][key] / sum(figures[name][key] for name in peer) for key in ("best_us", "median_us")
    }
    print(f"{'[8, 4096] float32, CPU, one thread':36s} {'best µs':>9s} {'median µs':>10s}")
    for name, figure in figures.items():
        print(f"{name:36s} {figure['best_us']:9.0f} {figure['median_us']:10.0f}")
    print(f"{'observe / verl together':36s} {ratio['best_us']:9.2f} {ratio['median_us']:10.2f}   target ≤ 0.50")
    if arguments.json:
        payload = {"shape": [SEQUENCES, POSITIONS], "rounds": arguments.rounds, "figures": figures, "ratio": ratio}
        arguments.json.write_text(json.dumps(payload, indent=2) + "\n")
    return 0 if ratio["median_us"] <= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
