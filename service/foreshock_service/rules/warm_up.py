"""The learning-rate warm-up at the start of a run: staleness scales with the rate, so no mismatch is learned in it."""

from __future__ import annotations

from typing import Final

import msgspec

from foreshock_service.rules.interface import StepView

MOST_STEPS: Final = 100


class WarmUp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last rate, how many steps it has risen, and whether that is over."""

    rate: float = 0.0
    steps: int = 0
    over: bool = False


def fold_warm_up(warm: WarmUp, seen: StepView) -> WarmUp:
    """Over once the rate no longer rises (or is not told), after a hundred steps, or with the first attempt."""
    rate = seen.values.get("lr")
    if warm.over or rate is None or seen.attempt > 1 or warm.steps >= MOST_STEPS:
        return warm if warm.over else WarmUp(over=True)
    if warm.steps and rate <= warm.rate:
        return WarmUp(over=True)
    return WarmUp(rate, warm.steps + 1)
