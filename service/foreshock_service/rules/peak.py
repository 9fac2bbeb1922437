"""The largest value of a run's past: the yardstick for series whose healthy course is bimodal or rises by nature.

A median says little about gradient norms that are near zero whenever every group ties, or about a KL to the reference
that grows as training goes on. What the run has survived before says more. Values become the past only when their
block of `BLOCK` is over, so that a burst is held against what came before it.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from foreshock_service.rules.interface import StepView

BLOCK: Final = 32
NONE: Final = -1e9


class Peak(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """ln of the largest past value and of the largest in the present block, with how many values there were."""

    past: float = NONE
    block: float = NONE
    count: int = 0
    attempt: int = -1
    segment: int = -1
    step: int = -1


FRESH: Final = Peak()


def fold_peak(
    peak: Peak, value: float, seen: StepView, *, calibration: int, forget: float, survives: bool, learn: bool
) -> tuple[Peak, float | None]:
    """Folds a positive value; returns ln(value / largest past value), None while `calibration` values are awaited.

    The first `calibration` values are the past at once. `forget` is what the past loses a value, in log units.
    """
    if seen.attempt != peak.attempt or seen.step <= peak.step or (seen.segment != peak.segment and not survives):
        peak = Peak()
    x, past, block, count = math.log(value), peak.past, peak.block, peak.count + 1
    excess = x - past if count > calibration else None
    if count <= calibration:
        past = max(past, x)
    elif learn:
        past -= forget
        block = max(block, x)
        if count % BLOCK == 0:
            past, block = max(past, block), NONE
    return Peak(past, block, count, seen.attempt, seen.segment, seen.step), excess
