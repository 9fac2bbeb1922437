"""Pooling of centred moments: groups with their own means into one, without the cancellation of raw sums of squares.

Each row is one group (a sequence, a micro-batch, a rank). Pébay, *Formulas for robust, one-pass parallel computation
of covariances and arbitrary-order statistical moments*, SAND2008-6212. Sums are `math.fsum`: exact, so the order of
groups does not matter. Legend: R groups.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def fsum(values: Array) -> float:
    """Exact sum of a vector; NaN where infinities of both signs meet or the sum overflows."""
    try:
        return math.fsum(values.tolist())
    except (ValueError, OverflowError):
        return math.nan


def centre(n_R: Array, x_R: Array, y_R: Array, raw: dict[str, Array]) -> Array:
    """Raw sums of two variables per group → [R, 5] mean x, mean y, Σ(x−x̄)², Σ(x−x̄)(y−ȳ), Σ(y−ȳ)²; with `yyy` and
    `yyyy` in `raw`, [R, 7] with the third and fourth moment of y. Groups with n = 0 give zeros."""
    n = np.maximum(n_R, 1.0)
    mx, my = x_R / n, y_R / n
    columns = [
        mx,
        my,
        np.maximum(raw["xx"] - x_R * mx, 0.0),
        raw["xy"] - x_R * my,
        np.maximum(raw["yy"] - y_R * my, 0.0),
    ]
    if "yyy" in raw:
        columns.append(raw["yyy"] - 3 * my * raw["yy"] + 2 * my * my * y_R)
        columns.append(np.maximum(raw["yyyy"] - 4 * my * raw["yyy"] + 6 * my**2 * raw["yy"] - 3 * my**3 * y_R, 0.0))
    return np.stack(columns, axis=1)


def pool(n_R: Array, moments_RM: Array) -> list[float]:
    """Moments [R, 5] or [R, 7] of groups of n_R values → those of all together. Groups with n = 0 must have been
    left out."""
    count = float(n_R.sum())
    mean_x, mean_y = fsum(n_R * moments_RM[:, 0]) / count, fsum(n_R * moments_RM[:, 1]) / count
    dx, dy = moments_RM[:, 0] - mean_x, moments_RM[:, 1] - mean_y
    yy = moments_RM[:, 4]
    pooled = [
        mean_x,
        mean_y,
        fsum(moments_RM[:, 2] + n_R * dx * dx),
        fsum(moments_RM[:, 3] + n_R * dx * dy),
        fsum(yy + n_R * dy * dy),
    ]
    if moments_RM.shape[1] > 5:
        m3, m4 = moments_RM[:, 5], moments_RM[:, 6]
        pooled.append(fsum(m3 + 3 * dy * yy + n_R * dy**3))
        pooled.append(fsum(m4 + 4 * dy * m3 + 6 * dy**2 * yy + n_R * dy**4))
    return pooled
