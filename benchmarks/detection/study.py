"""The rules on runs of the very study that the lab's leads are held against: its model, its faults, its definitions.

    python -m benchmarks.detection.study LAB.PY [--seeds 5] [--recipe NAME …] [--cache FOLDER]

LAB.PY is the study's program, which is not part of this repository (`lab-prototype/lab.py` beside its `lab.md`). Every
run is its own; what it hands to its statistics is handed to the SDK's as well, and the rows go through the shipped
pack. *Lead* and *break* are the study's: steps to the first break of reward or evaluation. Beside the rules stands the
single statistic with the best median on these runs, which knows the range of healthy seeds 0 to 4 beforehand. About 8
CPU seconds a run and 20 a seed; runs are kept in the cache. Exits 1 where the rules' mean lead is more than a step
shorter than that statistic's, where a run broke without a word, or where a healthy seed has a critical incident.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.detection.lab import PRECURSORS
from benchmarks.detection.single_statistic import alarm, best_lead, first_break, healthy_ranges
from benchmarks.detection.watching import incidents
from foreshock.stats.merge import statistics as statistics_of
from foreshock.stats.pair import PairAccumulator
from lab.figures import break_step

ONSET, STEPS, HEALTHY = 25, 85, 5
RECIPES: dict[str, tuple[str, dict[str, Any], float]] = {
    "stale10": ("stale", {"lag": 10}, 5),
    "nosync": ("nosync", {}, 5),
    "int3t": ("quant", {"kind": "int3t"}, 1),
    "skip0": ("skip", {"skip": ("0.",)}, 14),
    "gathertrain4": ("gathertrain", {"lag": 4}, 5),
    "label+1": ("label", {"dir": 1}, 5),
    "oldbatch": ("oldreuse", {"mode": "batch"}, 12),
    "ramp_int2": ("quant", {"kind": "int2", "ramp": 80}, 29),
    "ramp_stale13": ("stale", {"lag": 13, "ramp": 4}, 10),
    "ramp_gather6": ("gathertrain", {"lag": 6, "ramp": 8}, 9),
}
"""Name → the study's fault and its arguments, and the best median lead in its table."""
Rows = list[tuple[int, dict[str, float]]]


def load(path: Path, cache: Path) -> ModuleType:
    """The study's program, its warm-ups in `cache`, its statistics with the SDK's beside them."""
    spec = importlib.util.spec_from_file_location("study_lab", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    study.LAB = str(cache)  # type: ignore[attr-defined]
    own = study.stats

    def stats(old: Any, rollout: Any, mask: Any, advantage: Any) -> dict[str, float]:
        accumulator = PairAccumulator()
        accumulator.observe(old, rollout, mask)
        accumulator.collect()
        pair = {f"mismatch.{name}": x for name, x in statistics_of(accumulator.record()).values.items()}
        return {**own(old, rollout, mask, advantage), **pair}

    study.stats = stats  # type: ignore[attr-defined]
    return study


def rows_of(history: list[dict[str, float]]) -> Rows:
    """The study's steps under our names; steps count from 1."""
    found = []
    for step in history:
        row = {name: value for name, value in step.items() if name.startswith("mismatch.")}
        row |= {
            "policy.kl_k2": step["akl0"], "update.kl_k2": step["akl"], "update.clip_low": 0.0,
            "update.clip_high": step["clipfrac"], "grad.norm": step["gn"], "entropy.mean": step["ent"],
            "length.mean": step["len"], "length.truncated": step["trunc"], "reward.mean": step["reward"],
        }  # fmt: skip
        if "eval" in step:
            row["reward.validation"] = step["eval"]
        found.append((int(step["step"]) + 1, row))
    return found


def run(study: ModuleType, cache: Path, name: str, seed: int) -> Rows:
    """One run of the study, from the cache where it is there."""
    path = cache / f"{name}-{seed}.json"
    if not path.exists():
        fault, arguments = RECIPES[name][:2] if name in RECIPES else (None, {})
        history = study.train(seed, fault=fault, fargs=arguments, t0=ONSET, steps=STEPS, snap=True)["hist"]
        path.write_text(json.dumps(rows_of(history)), encoding="utf-8")
    return [(int(step), row) for step, row in json.loads(path.read_text(encoding="utf-8"))]


def _leads_of(name: str, broken: list[tuple[Rows, int]], ranges: dict[str, tuple[float, float]]) -> list[int]:
    """The leads of one statistic that spoke in all of them."""
    alarms = [alarm(rows, name, ranges[name], ONSET + 1) for rows, _ in broken]
    return [broke - step for (_, broke), step in zip(broken, alarms, strict=True) if step is not None]


def _told(values: list[int]) -> str:
    """Median, mean and extremes."""
    if not values:
        return "-"
    return f"{statistics.median(values):g}, mean {statistics.fmean(values):.1f} [{min(values)}, {max(values)}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--cache", type=Path, default=Path("out/study"))
    options = parser.parse_args()
    (options.cache / "cache").mkdir(parents=True, exist_ok=True)
    study = load(options.lab, options.cache)
    healthy = [run(study, options.cache, "healthy", seed) for seed in range(HEALTHY)]
    ranges = healthy_ranges(healthy)
    wrong = [f"healthy seed {n}: {i.rule}" for n, rows in enumerate(healthy) for i in incidents(rows) if i.critical]
    print("| fault | broke | steps after onset | lead | best single statistic | its lead | in the study |")
    print("|---" * 7 + "|")
    for name in options.recipe or RECIPES:
        runs = [run(study, options.cache, name, seed) for seed in range(options.seeds)]
        broken = [(rows, step) for rows in runs if (step := first_break(rows, break_step)) is not None]
        first = [
            min((i.opened for i in incidents(rows) if i.rule in PRECURSORS and i.opened > ONSET), default=None)
            for rows, _ in broken
        ]
        leads = [broke - step for (_, broke), step in zip(broken, first, strict=True) if step is not None]
        best = best_lead(broken, ranges, ONSET + 1)
        name_of, theirs = (best[0], _leads_of(best[0], broken, ranges)) if best else ("-", [])
        after = _told([step - ONSET - 1 for step in first if step is not None])
        cells = name, f"{len(broken)}/{len(runs)}", after, _told(leads), name_of, _told(theirs), f"{RECIPES[name][2]:g}"
        print("| " + " | ".join(cells) + " |", flush=True)
        if len(leads) < len(broken):
            wrong.append(f"{name}: {len(broken) - len(leads)} that broke without a word before")
        elif theirs and statistics.fmean(leads) < statistics.fmean(theirs) - 1:
            wrong.append(f"{name}: a shorter lead than {name_of}'s")
    for line in wrong:
        print(f"MISSED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
