"""The yardstick of the lab: one statistic against the range it has on healthy seeds, as a person at a dashboard does.

The method of the study that came before the rules: an alarm is the first step at which the statistic leaves
[least, largest] of healthy seeds 0 to 4 over all their steps; `floor` widens a range that is narrower than any real
stack's. It knows each statistic's healthy range on this very task beforehand, which no rule of the pack does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Final

Rows = Sequence[tuple[int, Mapping[str, float]]]

FALL: Final = 0.15
"""The lab's own: how far below its best a reward or an evaluation has broken."""
STATISTICS: Final[Mapping[str, tuple[tuple[str, ...], float]]] = {
    "policy.kl_k2": (("policy.kl_k2",), 1e-3),
    "update.kl_k2": (("update.kl_k2",), 0.0),
    "mismatch.kl_k1": (("mismatch.kl_k1",), 0.0),
    "mismatch.kl_k3": (("mismatch.kl_k3",), 1e-3),
    "mismatch.abs_mean": (("mismatch.abs_mean",), 0.0),
    "mismatch.abs_max": (("mismatch.abs_max",), 0.0),
    "mismatch.ess_token": (("mismatch.ess_token",), 0.0),
    "mismatch.ess_sequence": (("mismatch.ess_sequence",), 0.0),
    "mismatch.logp_pearson": (("mismatch.logp_pearson",), 0.0),
    "update.clip": (("update.clip_low", "update.clip_high"), 0.0),
    "grad.norm": (("grad.norm",), 0.0),
    "entropy.mean": (("entropy.mean",), 0.0),
    "length.mean": (("length.mean",), 0.0),
}
"""Name → the signals whose sum it is, and the least upper end of its range."""
PUBLISHED: Final[Mapping[str, float]] = {
    "stale_engine": 5, "frozen_engine": 5, "quantised_engine": 1, "stale_parameters": 5, "shifted_labels": 5,
    "old_batch": 12, "ramped_quantised_engine": 29, "ramped_stale_engine": 10, "ramped_stale_parameters": 9,
}  # fmt: skip
"""Median lead, in steps to the first break, of the best single statistic in that study. Its faults were of the same
kinds and not of the same sizes; the rest of the illnesses had none or were not in it."""


def value(values: Mapping[str, float], name: str) -> float | None:
    """The statistic at one step, None where a signal of it is missing."""
    parts = [values.get(signal) for signal in STATISTICS[name][0]]
    return sum(p for p in parts if p is not None) if all(p is not None for p in parts) else None


def healthy_ranges(runs: Iterable[Rows]) -> dict[str, tuple[float, float]]:
    """Statistic → (least, largest) over all steps of healthy runs, widened by its floor."""
    ranges = {}
    kept = list(runs)
    for name, (_, floor) in STATISTICS.items():
        seen = [x for rows in kept for _, values in rows if (x := value(values, name)) is not None and math.isfinite(x)]
        if seen:
            ranges[name] = (min(seen), max(*seen, floor))
    return ranges


def alarm(rows: Rows, name: str, allowed: tuple[float, float], begin: int) -> int | None:
    """The first step from `begin` on at which the statistic is out of its range or not finite."""
    for step, values in rows:
        x = value(values, name)
        if step >= begin and x is not None and not allowed[0] <= x <= allowed[1]:
            return step
    return None


def first_break(rows: Rows, reward_break: Callable[[list[float]], int | None]) -> int | None:
    """The step at which the reward or the evaluation broke, whichever was first; None where neither did."""
    steps = [step for step in (reward_break([v["reward.mean"] for _, v in rows]), validation_break(rows)) if step]
    return min(steps, default=None)


def validation_break(rows: Rows) -> int | None:
    """The first evaluation FALL below the best so far, where the last three are so on average."""
    told = [(step, v["reward.validation"]) for step, v in rows if "reward.validation" in v]
    best, first = -math.inf, None
    for step, x in told:
        best = max(best, x)
        first = step if first is None and x < best - FALL else first
    return first if told and fmean(x for _, x in told[-3:]) < best - FALL else None


def best_lead(
    runs: Sequence[tuple[Rows, int]], ranges: Mapping[str, tuple[float, float]], begin: int
) -> tuple[str, float] | None:
    """The statistic with the largest median lead over (rows, broke) runs, of those that spoke in all of them."""
    leads = {}
    for name, allowed in ranges.items():
        spoke = [(alarm(rows, name, allowed, begin), broke) for rows, broke in runs]
        if runs and all(step is not None for step, _ in spoke):
            leads[name] = median(broke - step for step, broke in spoke if step is not None)
    return max(leads.items(), key=lambda pair: pair[1]) if leads else None
