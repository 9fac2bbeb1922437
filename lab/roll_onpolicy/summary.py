"""From runs to the ladder's table: what the pair shows, and what a hundred steps of training do.

*crashes*: the learnable reward of the last fifth of the run is below half of the healthy level (the baseline's mean at
the same dtype). *stands still*: never rose two fifths of the way from its first tenth to the healthy level,
nor fell. *wobbles*: more than 0.05 below the worst healthy seed. *learns*: otherwise.
"""

from __future__ import annotations

import math
import statistics as stdlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lab.roll_onpolicy.rungs import BASELINE, LADDER

Run = dict[str, Any]
OUTCOMES = ("learns", "wobbles", "stands still", "crashes", "not judged")
SHOWN = ("policy.kl_k2", "policy.kl_k2 max", "policy.abs_max", "mismatch.kl_k3", "approxkl", "grad.norm")


def level(run: Run, first: float = 0.8, last: float = 1.0) -> float:
    """Mean learnable reward over a part of the run, steps without a learnable problem left out."""
    steps = run["steps"]
    part = steps[int(len(steps) * first) : max(1, int(len(steps) * last))] or steps
    values = [s["reward"] for s in part if not math.isnan(s["reward"])]
    return stdlib.fmean(values) if values else float("nan")


def crash_step(run: Run, window: int = 10) -> int | None:
    """First step whose trailing ``window``-step reward is below half of the best so far."""
    best, trail = 0.0, []
    for step in run["steps"]:
        if not math.isnan(step["reward"]):
            trail.append(step["reward"])
        if len(trail) >= window:
            now = stdlib.fmean(trail[-window:])
            best = max(best, now)
            if now < 0.5 * best:
                return int(step["step"])
    return None


def peak(run: Run, window: int = 10) -> float:
    """Best mean reward of ``window`` steps that had a learnable problem."""
    values = [s["reward"] for s in run["steps"] if not math.isnan(s["reward"])]
    means = [stdlib.fmean(values[i : i + window]) for i in range(max(1, len(values) - window + 1))]
    return max(means)


def outcome(value: float, healthy: list[float], start: float = math.nan, best: float = math.nan) -> str:
    """``start`` the level of the run's first tenth, ``best`` its peak; without them no run is said to stand still."""
    if not healthy:
        return "not judged"  # a short run, or no baseline beside it
    if value >= 0.8 * start and best < start + 0.4 * (stdlib.fmean(healthy) - start):
        return "stands still"
    if value < 0.5 * stdlib.fmean(healthy):
        return "crashes"
    return "wobbles" if value < min(healthy) - 0.05 else "learns"


def _median(runs: list[Run], read: Callable[[dict[str, Any]], Any]) -> float:
    values = [read(s) for run in runs for s in run["steps"]]
    numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return stdlib.median(numbers) if numbers else float("nan")


def _largest(runs: list[Run], read: Callable[[dict[str, Any]], Any]) -> float:
    values = [read(s) for run in runs for s in run["steps"]]
    numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return max(numbers) if numbers else float("nan")


def row(name: str, dtype: str, runs: list[Run], healthy: list[float]) -> dict[str, Any]:
    """One line of the table; nats where a unit applies."""
    rung = next(r for r in LADDER if r.name == name)
    levels = [level(run) for run in runs]
    outcomes = [outcome(v, healthy, level(run, 0.0, 0.1), peak(run)) for v, run in zip(levels, runs, strict=True)]
    return {
        "rung": name, "family": rung.family, "change": rung.change, "dtype": dtype, "seeds": len(runs),
        "policy.kl_k2": _median(runs, lambda s: s["policy"]["kl_k2"]),
        "policy.kl_k2 max": _largest(runs, lambda s: s["policy"]["kl_k2"]),
        "policy.kl_k2 first": stdlib.median(run["steps"][0]["policy"]["kl_k2"] for run in runs),
        "policy.abs_max": _largest(runs, lambda s: s["policy"]["abs_max"]),
        "policy.zero_share": _median(runs, lambda s: s["policy"].get("zero_share")),
        "policy.ess_token": _median(runs, lambda s: s["policy"].get("ess_token")),
        "policy.kl_k1": _median(runs, lambda s: s["policy"].get("kl_k1")),
        "mismatch.kl_k3": _median(runs, lambda s: s["mismatch"].get("kl_k3")),
        "approxkl": _median(runs, lambda s: s["approxkl"]), "approxkl max": _largest(runs, lambda s: s["approxkl"]),
        "grad.norm": _median(runs, lambda s: s["grad_norm"]), "group.mixed": _median(runs, lambda s: s["mixed"]),
        "truncated at end": stdlib.fmean(stdlib.fmean(s["truncated"] for s in r["steps"][-20:]) for r in runs),
        "reward at end": levels, "outcome": outcomes, "crash_step": [crash_step(run) for run in runs],
        "kl_k2 early and late": [
            stdlib.median(stdlib.fmean([s["policy"]["kl_k2"] for s in r["steps"][part]]) for r in runs)
            for part in (slice(0, 20), slice(-20, None))
        ],
    }  # fmt: skip


def table(results: list[Run]) -> list[dict[str, Any]]:
    """Rows in the ladder's order, float32 before bfloat16; a rung that could not run says why."""
    grouped: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for result in results:
        grouped[result["rung"], result["dtype"]].append(result)
    rows: list[dict[str, Any]] = []
    for dtype in ("fp32", "bf16"):
        base = grouped.get((BASELINE.name, dtype)) or grouped.get((BASELINE.name, "fp32"))
        healthy = (
            [level(run) for run in base if len(run["steps"]) >= 50 or run["steps"][-1]["truncated"] > 0.98]
            if base
            else []
        )
        for rung in LADDER:
            runs = grouped.get((rung.name, dtype))
            if not runs:
                continue
            if "not_run" in runs[0]:
                rows.append({"rung": rung.name, "dtype": dtype, "not_run": runs[0]["not_run"]})
            else:
                rows.append(row(rung.name, dtype, runs, healthy))
    return rows


def _n(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return "0" if value == 0 else f"{value:.1e}" if abs(value) < 0.01 or abs(value) >= 1000 else f"{value:.2f}"


def markdown(rows: list[dict[str, Any]], megatron: dict[str, Any] | None) -> str:
    """The table that the page shows."""
    lines = [
        "| rung | dtype | `policy.kl_k2` median | largest | `policy.abs_max` | `mismatch.kl_k3` | `approxkl` median | "
        "`grad.norm` | reward at the end, by seed | what 100 steps do |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "not_run" in r:
            lines.append(f"| {r['rung']} | {r['dtype']} | not run: {r['not_run']} | | | | | | | |")
            continue
        ends = " ".join(f"{value:.2f}" for value in r["reward at end"])
        counts = ", ".join(
            f"{word} {r['outcome'].count(word)}/{r['seeds']}" for word in OUTCOMES if word in r["outcome"]
        )
        cells = [_n(r[key]) for key in SHOWN]
        lines.append(f"| {r['rung']} | {r['dtype']} | {' | '.join(cells)} | {ends} | {counts} |")
    if megatron:
        lines += ["", *megatron_markdown(megatron)]
    return "\n".join(lines) + "\n"


def megatron_markdown(megatron: dict[str, Any]) -> list[str]:
    """The table of the rungs on real Megatron-core, two ranks."""
    lines = [
        "| condition (real worker, strategy, Megatron-core; 2 ranks) | Megatron-core | dtype | "
        "`policy.kl_k2` per step | `policy.abs_max` | parameters moved | ranks equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in megatron.items():
        if "not_run" in result:
            lines.append(f"| {name} | not run: {result['not_run']} | | | | | |")
            continue
        if "raised" in result:
            lines.append(f"| {name} | raises {result['raised'].split('. ')[0]} | | | | | |")
            continue
        steps = result["steps"]
        lines.append(
            f"| {name} | {result['megatron']} | {result['options']['dtype']} | "
            f"{' '.join(_n(s['policy']['kl_k2']) for s in steps)} | {_n(max(s['policy']['abs_max'] for s in steps))} | "
            f"{' '.join('yes' if s['parameters']['moved'] else 'NO' for s in steps)} | "
            f"{'yes' if all(s['ranks_equal'] for s in steps) else 'NO'} |"
        )
    return lines
