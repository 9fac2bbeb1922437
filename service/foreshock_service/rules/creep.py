"""Creep: a rise so slow that the baseline follows it, held against the level at which that was first trusted."""

from __future__ import annotations

import math

from foreshock_service.rules.baseline import Reading
from foreshock_service.rules.interface import Edge, Evidence, Verdict


def crept(reading: Reading, ratio: float) -> bool:
    """The baseline's centre is at `ratio` times the first trusted one, or more. One step moves no centre."""
    return reading.calibrated and reading.creep >= math.log(ratio)


def creeping(signal: str, reading: Reading, edge: Edge) -> Verdict:
    """A warning. From here on the baseline is frozen, so that what goes on rising is soon out of range as well."""
    first = reading.centre / math.exp(min(reading.creep, 700.0))
    times = reading.value / max(first, 1e-300)
    message = f"{signal} has crept up to {reading.value:.2g}, {times:.3g} times the {first:.2g} of its calibration."
    evidence = Evidence(signal=signal, value=reading.value, expected=first, sentence="Against its first trusted level.")
    return Verdict(firing=True, message=message, evidence=(evidence,), edge=edge)
