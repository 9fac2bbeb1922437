"""The course of every signal for a plot, in bounded memory: neighbours are folded, their extremes kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

MAX_POINTS: Final = 1024
MAX_SIGNALS: Final = 64

Point = tuple[int, int, float, float, tuple[float, float, float] | None]
"""(index, step, smallest, largest, band)."""


class Trace:
    """Signal → at most 1024 points; when full, every two become one and the stride doubles."""

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}
        self._strides: dict[str, int] = {}

    def add(
        self, index: int, step: int, values: Mapping[str, float], bands: Mapping[str, tuple[float, float, float]]
    ) -> None:
        """One step; values that are not finite are left out, and so are a host's own series."""
        for signal, value in values.items():
            if not math.isfinite(value) or signal.startswith("host."):
                continue
            points = self.points.get(signal)
            if points is None:
                if len(self.points) >= MAX_SIGNALS:
                    continue
                points, self._strides[signal] = self.points.setdefault(signal, []), 1
            band = bands.get(signal)
            stride = self._strides[signal]
            if points and index - points[-1][0] < stride:
                first, at, low, high, _ = points[-1]
                points[-1] = (first, at, min(low, value), max(high, value), band)
            else:
                points.append((index, step, value, value, band))
            if len(points) >= MAX_POINTS:
                self.points[signal] = [_folded(a, b) for a, b in zip(points[::2], points[1::2], strict=True)]
                self._strides[signal] = 2 * stride


def _folded(a: Point, b: Point) -> Point:
    return a[0], a[1], min(a[2], b[2]), max(a[3], b[3]), b[4] or a[4]
