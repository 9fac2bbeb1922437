"""What a contestant's alarms amount to: the arithmetic of the two tables, and the tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.detection.cases import FAILED_LABELS, QUIET_LABELS
from benchmarks.detection.common_stream import BREAK, PRECURSOR

ILL = ("collapse", "approxkl_only")


@dataclass(frozen=True)
class Heard:
    """One run as one contestant saw it: (step, severity) of each alarm, and the CPU time that it took."""

    run: str
    kind: str
    alarms: tuple[tuple[int, str], ...]
    steps: int
    cpu_seconds: float
    onset: int | None = None
    """The labelled onset of a real run."""


def stream_figures(heard: Sequence[Heard]) -> dict[str, Any]:
    """Figures over the common stream; None where there are no runs of a kind. Every alarm counts, warnings too."""
    healthy = [h for h in heard if h.kind == "healthy"]
    told: dict[str, Any] = {
        "runs": len(heard),
        "false_alarms_per_healthy_run": statistics.fmean(len(h.alarms) for h in healthy) if healthy else None,
        "healthy_runs_with_alarm": _share([bool(h.alarms) for h in healthy]),
        "healthy_in_window": _share([_in_window(h) for h in healthy]),
    }
    for kind in ILL:
        ill = [h for h in heard if h.kind == kind]
        first = [min((s for s, _ in h.alarms if s >= PRECURSOR), default=None) for h in ill]
        seen = [step for step in first if step is not None]
        told[f"{kind}_in_window"] = _share([_in_window(h) for h in ill])
        told[f"{kind}_median_first"] = statistics.median(seen) if seen else None
    told["ms_per_step"] = _milliseconds(heard)
    return told


def case_figures(heard: Sequence[Heard]) -> dict[str, Any]:
    """Figures over the labelled real runs: how quiet on the quiet ones, how many failed ones caught, how many early."""
    quiet = [h for h in heard if h.kind in QUIET_LABELS]
    healed = [h for h in heard if h.kind == "spike-recovered"]
    failed = [h for h in heard if h.kind in FAILED_LABELS]
    dated = [h for h in failed if h.onset is not None]
    steps = sum(h.steps for h in quiet)
    alarms = sum(len(h.alarms) for h in quiet)
    return {
        "runs": len(heard),
        "quiet_critical": _share([_critical(h) for h in quiet]),
        "quiet_any": _share([bool(h.alarms) for h in quiet]),
        "quiet_alarms_per_1000_steps": 1000 * alarms / steps if steps else None,
        "recovered_critical": _share([_critical(h) for h in healed]),
        "failed_caught": _share([bool(h.alarms) for h in failed]),
        "failed_early": _share([_early(h) for h in dated]),
        "ms_per_step": _milliseconds(heard),
    }


def _in_window(heard: Heard) -> bool:
    return any(PRECURSOR <= step < BREAK for step, _ in heard.alarms)


def _critical(heard: Heard) -> bool:
    return any(severity == "critical" for _, severity in heard.alarms)


def _early(heard: Heard) -> bool:
    return heard.onset is not None and any(step <= heard.onset for step, _ in heard.alarms)


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def _milliseconds(heard: Sequence[Heard]) -> float | None:
    steps = sum(h.steps for h in heard)
    return 1000 * sum(h.cpu_seconds for h in heard) / steps if steps else None


STREAM_HEAD = {
    "runs": "runs",
    "false_alarms_per_healthy_run": "false alarms per healthy run",
    "healthy_runs_with_alarm": "healthy runs with any",
    "healthy_in_window": "healthy, alarm in [90, 120)",
    "collapse_in_window": "collapse found in [90, 120)",
    "approxkl_only_in_window": "approxkl only, found in [90, 120)",
    "collapse_median_first": "median first, collapse",
    "approxkl_only_median_first": "median first, approxkl only",
    "ms_per_step": "CPU ms per step",
}
CASE_HEAD = {
    "runs": "runs",
    "quiet_critical": "quiet runs with a critical",
    "quiet_any": "quiet runs with any",
    "quiet_alarms_per_1000_steps": "alarms per 1,000 quiet steps",
    "recovered_critical": "recovered runs with a critical",
    "failed_caught": "failed runs caught",
    "failed_early": "caught at or before the onset",
    "ms_per_step": "CPU ms per step",
}
COUNTS = frozenset({"runs", "collapse_median_first", "approxkl_only_median_first"})
RATES = frozenset({"false_alarms_per_healthy_run", "quiet_alarms_per_1000_steps", "ms_per_step"})


def markdown(rows: Mapping[str, Mapping[str, Any]], head: Mapping[str, str], skipped: Mapping[str, str]) -> str:
    """One row per contestant, then a line per contestant that could not be run, with the reason."""
    lines = ["| contestant | " + " | ".join(head.values()) + " |", "|---" * (len(head) + 1) + "|"]
    for name, told in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(column, told[column]) for column in head) + " |")
    lines += [""] * bool(skipped) + [f"- not run: {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    if column in COUNTS:
        return f"{value:g}"
    return f"{value:.2f}" if column in RATES else f"{100 * value:.0f} %"
