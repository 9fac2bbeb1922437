"""A dump's own baseline: its calm steps, where the illness began, and the bands that the edges are held against.

A run's service has learned its baseline over many steps; a dump holds few. Without enough calm steps before a clear
rise there are no bands, and only what is certain without one counts (`diagnosis.edges`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

SIGNALS: Final = ("policy.kl_k2", "mismatch.kl_k3", "mismatch_current.kl_k3")
MIN_CALM: Final = 3
"""Fewest steps that a band is made of."""
RISE: Final = 2.5
"""The first ill steps lie at least this many times above every calm one."""
HOLD: Final = 2
"""… so many in a row (fewer where the dump ends)."""
WIDTH: Final = 3.0
"""The band reaches from a third of the calm median to three times it, or over the largest calm value."""

Values = Mapping[str, float]
Bands = dict[str, tuple[float, float, float]]


class Calm(NamedTuple):
    """`onset` is the index of the first ill step, None where no clear rise was found."""

    bands: Bands
    onset: int | None


def look(steps: Sequence[Values], healthy: Sequence[Values] = (), since: int | None = None) -> Calm:
    """The bands and the onset in `steps`, oldest first.

    `healthy` are steps of a dump that was said to be healthy; `since` is the index that was said to be the first ill
    one. Either spares the search for calm steps.
    """
    if healthy:
        bands = bands_of(healthy)
        above = [i for i, values in enumerate(steps) if _above(values, bands)]
        return Calm(bands, since if since is not None else above[0] if above else None)
    onset = since if since is not None else _onset(steps)
    return Calm(bands_of(steps[:onset]) if onset is not None and onset >= MIN_CALM else {}, onset)


def bands_of(steps: Sequence[Values]) -> Bands:
    """signal → (low, centre, high) of calm steps."""
    bands: Bands = {}
    for signal in SIGNALS:
        known = [v[signal] for v in steps if math.isfinite(v.get(signal, math.nan))]
        if known:
            centre = median(known)
            bands[signal] = (centre / WIDTH, centre, max(WIDTH * centre, RISE * max(known)) + 1e-9)
    return bands


def _above(values: Values, bands: Bands) -> bool:
    return any(values.get(signal, 0.0) > band[2] for signal, band in bands.items())


def _onset(steps: Sequence[Values]) -> int | None:
    """The earliest step from which some edge stays clear of all that was before."""
    found = [i for i in (_rise([v.get(signal, math.nan) for v in steps]) for signal in SIGNALS) if i is not None]
    return min(found) if found else None


def _rise(values: Sequence[float]) -> int | None:
    for index in range(MIN_CALM, len(values)):
        before = [v for v in values[:index] if math.isfinite(v)]
        after = [v for v in values[index : index + HOLD] if math.isfinite(v)]
        if len(before) >= MIN_CALM and after and min(after) > RISE * max(before) + 1e-9:
            return index
    return None
