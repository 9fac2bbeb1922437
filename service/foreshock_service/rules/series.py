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
    after, gravest, gravity = list(states), UNKNOWN, -1
    for i, signal in enumerate(signals):
        value = seen.values.get(signal)
        if value is not None and -math.inf < value < math.inf:
            after[i], verdict = judge(after[i], value, signal)
            grave = (2 if verdict.firing else 0) + (1 if verdict.severity == "critical" else 0)
            if grave > gravity:
                gravest, gravity = verdict, grave
    return after, gravest
