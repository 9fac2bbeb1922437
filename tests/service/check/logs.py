"""Small logs for tests: one synthetic run, healthy or collapsing, written in any format that people have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from foreshock_service.check.judge import Report
from foreshock_service.check.run import check
from foreshock_service.rules.pack import default_pack


def steps(count: int = 60, *, break_at: int | None = None, seed: int = 0) -> Iterator[dict[str, float]]:
    """A run in plain names; from `break_at` on entropy rises, and three steps later the reward falls."""
    draw = random.Random(seed)
    for step in range(1, count + 1):
        ill = break_at is not None and step >= break_at
        since = step - break_at if break_at is not None and ill else 0
        yield {
            "step": step,
            "reward": (0.6 if since < 3 else 0.02) + draw.gauss(0, 0.02),
            "entropy": 0.3 * draw.uniform(0.95, 1.05) * (1.6 ** min(since + 1, 8) if ill else 1.0),
            "grad_norm": 0.5 * draw.uniform(0.8, 1.2),
            "loss": draw.gauss(0, 0.05),
            "kl": 0.01 * draw.uniform(0.9, 1.1),
            "length": 200 * draw.uniform(0.95, 1.05),
        }


def trl(row: dict[str, float]) -> dict[str, float]:
    """The step in TRL's names."""
    names = {"length": "completions/mean_length"}
    return {names.get(name, name): value for name, value in row.items()}


def verl(row: dict[str, float]) -> dict[str, float]:
    """The step in verl's names, without its number."""
    names = {
        "reward": "critic/score/mean",
        "entropy": "actor/entropy",
        "grad_norm": "actor/grad_norm",
        "loss": "actor/pg_loss",
        "kl": "actor/kl_loss",
        "length": "response_length/mean",
    }
    return {names[name]: value for name, value in row.items() if name in names}


def judged(path: Path, **options: object) -> Report:
    """The report of the shipped rules."""
    return check(path, default_pack(), **options)  # type: ignore[arg-type]


def rules(report: Report) -> set[str]:
    """Names of the rules that found something."""
    return {incident.rule for incident in report.incidents}
