"""The table of README.md: every illness on every seed, untreated, from the values that the trainer observed.

`python -m lab.figures --out FILE.json` runs two processes, about ten CPU seconds a run (and twenty for each seed that
has no warm-up in the cache), and prints Markdown. No service takes part. `--treat STEP` carries out, right after
that step, the command that cures the illness, by the same handlers that a service would drive.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import foreshock

from .faults import ILLNESSES
from .monitoring import Monitor
from .train import Result, RunConfig, run

HEALTHY_SEEDS = range(10)
ILL_SEEDS = range(5)
BREAK_FALL = 0.15
#: The command that is tried on an illness, where one of the lab's commands reaches its mechanism at all.
TREATMENTS = {
    "stale_parameters": "resync_trainer",
    "stale_scoring": "resync_trainer",
    "frozen_update": "resync_trainer",
    "stale_engine": "resync_engine",
    "frozen_engine": "resync_engine",
    "quantised_engine": "enable_is_correction",
}


@dataclass(frozen=True)
class Order:
    """A command as the table gives it, without a service."""

    kind: str
    id: str = "figures"
    arguments: dict[str, Any] = field(default_factory=dict)


class Ordering:
    """Wraps a monitor and carries out one command at the end of one step, by the registered handler."""

    def __init__(self, monitor: Monitor, kind: str, at_step: int) -> None:
        self._monitor, self._kind, self._at_step = monitor, kind, at_step
        self._handlers: dict[str, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)

    def on(self, kind: str, handler: Callable[[Any], Any]) -> None:
        """Keeps the handler and registers it."""
        self._handlers[kind] = handler
        self._monitor.on(kind, handler)

    def end_step(self, step: int) -> None:
        """Ends the step, then carries out the command if it is due."""
        self._monitor.end_step(step)
        if step == self._at_step:
            self._handlers[self._kind](Order(self._kind))


@dataclass(frozen=True)
class Row:
    """What one run shows. Steps are None where it did not happen; `floor` is over the healthy steps of the run."""

    illness: str
    seed: int
    treated: bool
    final_reward: float
    final_validation: float
    break_step: int | None
    policy_floor: float
    policy_ill: float | None
    policy_ill_early: float | None
    mismatch_floor: float
    mismatch_ill: float | None
    mismatch_ill_early: float | None
    current_ill: float | None
    cpu_seconds: float


def break_step(rewards: list[float]) -> int | None:
    """First step (from 1) whose five-step mean is 0.15 below the best so far, if the last ten are so too."""
    best, first = 0.0, None
    for end in range(5, len(rewards) + 1):
        mean = statistics.fmean(rewards[end - 5 : end])
        best = max(best, mean)
        if first is None and mean < best - BREAK_FALL:
            first = end
    return first if statistics.fmean(rewards[-10:]) < best - BREAK_FALL else None


def row_of(result: Result, treated: bool) -> Row:
    """Reduces a run to its row. `early` is the largest of the first four ill steps."""
    config = result.config
    ill = config.illness != "none"
    before = [entry for entry in result.history if not ill or entry["step"] < config.onset]
    after = [entry for entry in result.history if ill and entry["step"] >= config.onset]

    def largest(entries: list[dict[str, float]], signal: str) -> float | None:
        return max((entry[signal] for entry in entries), default=None)

    return Row(
        illness=config.illness,
        seed=config.seed,
        treated=treated,
        final_reward=result.final_reward,
        final_validation=result.final_validation,
        break_step=break_step([entry["reward.mean"] for entry in result.history]),
        policy_floor=largest(before, "policy.kl_k2") or 0.0,
        policy_ill=largest(after, "policy.kl_k2"),
        policy_ill_early=largest(after[:4], "policy.kl_k2"),
        mismatch_floor=largest(before, "mismatch.kl_k3") or 0.0,
        mismatch_ill=largest(after, "mismatch.kl_k3"),
        mismatch_ill_early=largest(after[:4], "mismatch.kl_k3"),
        current_ill=largest(after, "mismatch_current.kl_k3"),
        cpu_seconds=result.cpu_seconds,
    )


def one(job: tuple[str, int, int | None, int]) -> Row:
    """One run of (illness, seed, step of the treatment or None, onset), in a process of its own."""
    illness, seed, treat, onset = job
    monitor: Any = foreshock.init(url="")
    if treat is not None:
        monitor = Ordering(monitor, TREATMENTS[illness], treat)
    return row_of(run(RunConfig(seed=seed, illness=illness, onset=onset), monitor), treat is not None)


def table(rows: Iterable[Row]) -> str:
    """Markdown: a line per illness, mean [lowest, highest] over seeds."""
    lines = [
        "| run | seeds | final reward | final validation | broke (steps after onset) "
        "| policy.kl_k2 before → first 4 ill → all | mismatch.kl_k3 before → first 4 ill → all |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.illness, row.treated), []).append(row)
    for (illness, treated), group in kinds.items():
        name = f"{illness} + {TREATMENTS[illness]}" if treated else illness
        broke = [row.break_step for row in group if row.break_step is not None]
        lines.append(
            f"| {name} | {len(group)} | {_spread([r.final_reward for r in group])} "
            f"| {_spread([r.final_validation for r in group])} | {_broke(broke, len(group))} "
            f"| {_edge(group, 'policy')} | {_edge(group, 'mismatch')} |"
        )
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _broke(steps: list[int], runs: int, onset: int = 25) -> str:
    return f"{len(steps)}/{runs} ({min(steps) - onset}–{max(steps) - onset})" if steps else f"0/{runs}"


def _edge(group: list[Row], edge: str) -> str:
    floor = max(getattr(row, f"{edge}_floor") for row in group)
    early = [getattr(row, f"{edge}_ill_early") for row in group]
    late = [getattr(row, f"{edge}_ill") for row in group]
    if None in early or None in late:
        return f"{floor:.0e}"
    return f"{floor:.0e} → {min(early):.0e}–{max(early):.0e} → {min(late):.0e}–{max(late):.0e}"


def main() -> None:
    """`--illness` may be repeated; default: healthy and all."""
    parser = argparse.ArgumentParser(description="The lab's table.")
    parser.add_argument("--illness", action="append", choices=["none", *ILLNESSES])
    parser.add_argument("--treat", type=int, help="step after which the cure is carried out; default: untreated")
    parser.add_argument("--out", help="file for the rows as JSON")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = options.illness or (list(TREATMENTS) if options.treat else ["none", *ILLNESSES])
    jobs = [
        (name, seed, options.treat, 25) for name in names for seed in (HEALTHY_SEEDS if name == "none" else ILL_SEEDS)
    ]
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = []
        for row in pool.map(one, jobs):
            rows.append(row)
            print(f"{row.illness} seed {row.seed}: {row.final_reward:.2f} / {row.final_validation:.2f}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps([vars(row) for row in rows], indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
