"""What one step costs the whole rule pack, and that it does not grow with history.

`python -m benchmarks.detection.cost`: CPU microseconds of the evaluating thread per step (118 signals, 8 ranks, worst
ranks given), least and median of 500 steps at several lengths of history. Target: 200 µs, constant.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time

from foreshock_service.rules.engine import EngineState, RuleEngine
from foreshock_service.rules.interface import StepView
from foreshock_service.rules.pack import default_pack

TARGET_US = 200.0
SAMPLE = 500
HISTORIES = (500, 2_000, 10_000)
PAIRS = ("policy", "update", "mismatch", "mismatch_current")
FILLERS = (
    *(f"decile_abs_mean.{i}" for i in range(10)), "a_mean", "b_mean", "tokens", "zero_share", "delta_mean",
    "delta_std", "abs_q50", "abs_q90", "abs_q99", "ratio_mean", "slope", "intercept",
)  # fmt: skip
LEVELS = {
    "policy.kl_k2": 2e-5, "mismatch.kl_k2": 3e-4, "mismatch.kl_k3": 3e-4, "mismatch_current.kl_k2": 3e-4,
    "update.kl_k2": 1e-3, "reference.kl_k3": 1e-2, "reward.mean": 0.5, "reward.validation": 0.5, "reward.std": 0.4,
    "entropy.mean": 0.5, "grad.norm": 0.4, "loss": 0.01, "lr": 1e-6, "length.mean": 600.0, "length.truncated": 0.05,
    "length.max": 2000.0, "length.repetition": 0.02, "group.zero_std": 0.4, "group.mixed": 0.0,
    "update.clip_low": 0.004, "update.clip_high": 0.004, "mismatch.ess_token": 0.99,
    "mismatch.seq_outlier": 0.01, "policy.seq_outlier": 0.01, "mismatch.abs_q50": 4e-3, "mismatch.abs_mean": 9e-3,
    "mismatch.sequences": 512.0, "weights.changed_share": 1.0, "staleness.max": 1.0, "is_weight.masked": 0.01,
    "update.skipped": 0.0,
}  # fmt: skip


def views(first: int, steps: int) -> list[StepView]:
    """Calm steps of a run that reports everything that rules read."""
    source = random.Random(first)
    result = []
    for step in range(first, first + steps):
        values = {f"{pair}.{name}": 0.1 for pair in PAIRS for name in FILLERS}
        values |= {"mismatch.b_mean": -0.4 * math.exp(source.gauss(0, 0.1))}
        values |= {name: level * math.exp(source.gauss(0, 0.1)) for name, level in LEVELS.items()}
        worst = {name: (1.5 * values[name], step % 8) for name in ("policy.kl_k2", "mismatch.kl_k3")}
        result.append(
            StepView(run="bench/run", attempt=1, step=step, values=values, worst=worst, reported=8, expected=8)
        )
    return result


def timed(engine: RuleEngine, state: EngineState, first: int) -> tuple[EngineState, list[float]]:
    """`SAMPLE` evaluations from `first` on, each in CPU microseconds."""
    took = []
    for view in views(first, SAMPLE):
        begun = time.thread_time_ns()
        state, _ = engine.evaluate(state, view, 0.0)
        took.append((time.thread_time_ns() - begun) / 1e3)
    return state, took


def main() -> int:
    """Prints a row per length of history; 1 where the median exceeds the target."""
    engine, step = RuleEngine(default_pack()), 0
    state = engine.initial()
    medians = []
    print(f"{len(engine.pack.entries)} rules, {len(views(0, 1)[0].values)} signals a step")
    for history in HISTORIES:
        while step < history - SAMPLE:
            chunk = views(step, min(1_000, history - SAMPLE - step))
            for view in chunk:
                state, _ = engine.evaluate(state, view, 0.0)
            step += len(chunk)
        state, took = timed(engine, state, step)
        step += SAMPLE
        medians.append(statistics.median(took))
        dumped = len(engine.dump(state))
        print(
            f"after {history:6d} steps: median {medians[-1]:6.1f} µs, least {min(took):6.1f} µs, state {dumped} bytes"
        )
    return 1 if max(medians) > TARGET_US else 0


if __name__ == "__main__":
    sys.exit(main())
