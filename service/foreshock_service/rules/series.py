"""Several series of one illness, each judged by itself: the gravest speaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from foreshock_service.rules.interface import UNKNOWN, StepView, Verdict

S = TypeVar("S")


def judged_each(
    states: Sequence[S], signals: Sequence[str], seen: StepView, judge: Callable[[S, float, str], tuple[S, Verdict]]
) -> tuple[list[S], Verdict]:
    """Folds each signal that is there and finite into its own state; returns the states and the gravest verdict.

    A firing verdict comes before a quiet one, critical before warning, the first signal first; none: unknown.
    """
    after, verdicts = list(states), list[Verdict]()
    for i, signal in enumerate(signals):
        value = seen.values.get(signal)
        if value is not None and math.isfinite(value):
            after[i], verdict = judge(after[i], value, signal)
            verdicts.append(verdict)
    return after, max(verdicts, key=lambda v: (bool(v.firing), v.severity == "critical"), default=UNKNOWN)
