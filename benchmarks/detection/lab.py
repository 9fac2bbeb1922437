"""What the rules say of the lab's illnesses and of its healthy seeds: when, which pass, how far ahead, how quiet.

`python -m benchmarks.detection.lab [--healthy 20] [--seeds 5] [--illness NAME …] [--record FOLDER] [--json FILE]`

Each run is recorded once into FOLDER (about 15 CPU seconds a run, and 20 for a seed's warm-up) with every statistic
that the SDK computes, then judged by the shipped pack. *Broke* is the lab's own definition: the five-step mean of the
reward, or the evaluation of the trainer's own weights, falls 0.15 below its best and stays. The last columns are the
yardstick of `single_statistic.py` on the same runs, and its published lead. Exits 1 where a healthy seed has a critical
incident.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.detection.single_statistic import PUBLISHED, best_lead, first_break, healthy_ranges
from benchmarks.detection.watching import Incident, incidents

ONSET, STEPS = 25, 85
RANGE_SEEDS = 5
"""Healthy seeds, from 0 on, whose range the yardstick knows."""
PRECURSORS = frozenset({
    "onpolicy_disagreement", "rollout_mismatch", "frozen_update", "stale_weights", "is_degeneracy", "outlier_sequences",
    "kl_blowup", "entropy_blowup", "entropy_collapse", "gradient_spike", "clip_saturation", "length_runaway",
    "length_collapse", "truncation_surge", "non_finite", "mixed_groups",
})  # fmt: skip
"""Rules that do not read the reward itself."""
HARMLESS = frozenset({"stale_scoring"})
"""Illnesses that must not bring a critical incident."""


def default_recordings() -> Path:
    """Beside the warm-ups, outside the checkout; the folder's name says how the runs were made."""
    from lab.warmup import cache_folder

    return cache_folder() / f"recordings-v1-onset{ONSET}-steps{STEPS}"


@dataclass(frozen=True)
class Judged:
    """One run: when reward or evaluation broke (steps count from 1), what was found."""

    illness: str
    seed: int
    reward_broke: int | None
    broke: int | None
    incidents: list[Incident]


class Recorder:
    """A monitor that reduces what the lab observes to the SDK's own statistics and keeps one row a step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._pairs: dict[str, Any] = {}
        self._scalars: dict[str, float] = {}

    def observe(self, pair: str, a: Any, b: Any, mask: Any, **where: Any) -> None:
        """Adds a micro-batch; later optimizer steps of `policy` land in `update`."""
        from foreshock.stats.pair import PairAccumulator

        landing = "update" if pair == "policy" and where.get("optimizer_step", 0) else pair
        kept: dict[str, Any] = {key: where[key] for key in ("seq_ids", "token_ids") if key in where}
        if "clip_range" in where:
            low, high = where["clip_range"]
            kept["clip_range"] = (1.0 - low, 1.0 + high)
        self._pairs.setdefault(landing, PairAccumulator()).observe(a, b, mask, **kept)

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Keeps the step's scalars."""
        self._scalars.update({name: float(value) for name, value in scalars.items()})

    def end_step(self, step: int) -> None:
        """Seals the row."""
        from foreshock.stats.merge import statistics as statistics_of

        values = dict(self._scalars)
        for pair, accumulator in self._pairs.items():
            accumulator.collect()
            values |= {f"{pair}.{name}": x for name, x in statistics_of(accumulator.record()).values.items()}
        self.rows.append((step, values))
        self._pairs, self._scalars = {}, {}

    def checkpoint(self, path: str, step: int, scope: Collection[str]) -> None:
        """Not recorded."""

    def notice(self, kind: str, step: int | None = None, **data: Any) -> None:
        """Not recorded."""

    def on(self, kind: str, handler: Callable[[Any], Any]) -> None:
        """No command comes."""

    def new_attempt(self, reason: str) -> None:
        """Never called: no command comes."""

    def finish(self, status: str) -> None:
        """Nothing to flush."""


def recorded(folder: Path, illness: str, seed: int) -> list[tuple[int, dict[str, float]]]:
    """The rows of a run, from the folder where it is there."""
    path = folder / f"{illness}-{seed}.json"
    if not path.exists():
        from lab.train import RunConfig, run

        recorder = Recorder()
        run(RunConfig(seed=seed, illness=illness, onset=ONSET, steps=STEPS), recorder)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(recorder.rows), encoding="utf-8")
        os.replace(part, path)
    return [(int(step), values) for step, values in json.loads(path.read_text(encoding="utf-8"))]


def judged(folder: Path, illness: str, seed: int) -> Judged:
    """Records the run if need be, and judges it."""
    from lab.figures import break_step

    rows = recorded(folder, illness, seed)
    broke = break_step([values["reward.mean"] for _, values in rows])
    return Judged(illness, seed, broke, first_break(rows, break_step), incidents(rows))


HEADER = (
    "| illness | found | steps after onset | critical | reward broke | any broke | lead to the first break "
    "| best single statistic, its lead | published lead | before onset | first |\n" + "|---" * 11 + "|"
)


def line(illness: str, runs: list[Judged], single: tuple[str, float] | None) -> str:
    """One row of the table."""
    first = [min((i for i in run.incidents if i.opened >= ONSET), key=lambda i: i.opened, default=None) for run in runs]
    ahead = [
        min((i.opened for i in run.incidents if i.rule in PRECURSORS and i.opened >= ONSET), default=None)
        for run in runs
    ]
    delays = [i.opened - ONSET for i in first if i is not None]
    leads = [
        run.broke - step for run, step in zip(runs, ahead, strict=True) if run.broke is not None and step is not None
    ]
    named = sorted({f"{i.rule} ({i.edge})" if i.edge else i.rule for i in first if i is not None})
    cells = [
        illness,
        f"{len(delays)}/{len(runs)}",
        f"{statistics.median(delays):.0f} [{min(delays)}, {max(delays)}]" if delays else "-",
        sum(any(i.critical is not None for i in run.incidents) for run in runs),
        f"{sum(run.reward_broke is not None for run in runs)}/{len(runs)}",
        f"{sum(run.broke is not None for run in runs)}/{len(runs)}",
        f"{statistics.median(leads):.0f} [{min(leads)}, {max(leads)}]" if leads else "-",
        f"{single[0]} {single[1]:.0f}" if single else "-",
        f"{PUBLISHED[illness]:.0f}" if illness in PUBLISHED else "-",
        sum(i.opened < ONSET for run in runs for i in run.incidents),
        ", ".join(named) or "-",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> int:
    """Prints the table; 1 where a run that should have none has a critical incident."""
    from lab.faults import ILLNESSES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--healthy", type=int, default=20, help="healthy seeds")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each illness")
    parser.add_argument("--illness", action="append", choices=sorted(ILLNESSES), help="default: all")
    parser.add_argument("--record", type=Path, default=default_recordings(), help="where runs are kept")
    parser.add_argument("--json", type=Path, help="also write every run's incidents here")
    options = parser.parse_args()
    print(HEADER)
    ranges = healthy_ranges(recorded(options.record, "none", seed) for seed in range(RANGE_SEEDS))
    runs, wrong = list[Judged](), list[str]()
    for illness, seeds in [("none", options.healthy)] + [
        (n, options.seeds) for n in options.illness or sorted(ILLNESSES)
    ]:
        here = [judged(options.record, illness, seed) for seed in range(seeds)]
        broken = [(recorded(options.record, illness, run.seed), run.broke) for run in here if run.broke is not None]
        print(line(illness, here, best_lead(broken, ranges, ONSET)), flush=True)
        runs += here
        if illness in HARMLESS | {"none"}:
            wrong += [f"{illness} seed {r.seed}" for r in here if any(i.critical is not None for i in r.incidents)]
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1), encoding="utf-8")
    for name in wrong:
        print(f"critical incident where there must be none: {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
