"""Every statistic of a pair once more, naively: Python loops and plain float64, one sequence at a time. Slow and
obvious.

It takes lists of sequences; each sequence is a list of (a, b, masked) in the order of its positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

F32_MAX_LN = 88.722839


def holes(a: float, b: float, marks: tuple[float, float]) -> str | None:
    if not (math.isfinite(a) and math.isfinite(b)):
        return "nonfinite"
    if a in (-9999.0, marks[0]) or b in (-9999.0, marks[1]) or a <= -3.3e38 or b <= -3.3e38:
        return "sentinels"
    return None


def pearson(x: Any, y: Any) -> float | None:
    x, y = np.asarray(x), np.asarray(y)
    dx, dy = x - x.mean(), y - y.mean()
    floor = 4e-15 * len(x)
    if (dx**2).sum() <= floor * x.mean() ** 2 or (dy**2).sum() <= floor * y.mean() ** 2:
        return None
    return float((dx * dy).sum() / math.sqrt((dx**2).sum() * (dy**2).sum()))


def inverted_cdf(values: Any, share: float) -> float:
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)])


def naive(
    sequences: list[list[tuple[float, float, bool]]],
    clip: tuple[float, float] | None = None,
    marks: tuple[float, float] = (-9999.0, -9999.0),
) -> dict[str, float]:
    """The statistics that are defined; a name that is absent has to be missing."""
    counts = {"nonfinite": 0, "sentinels": 0}
    kept: list[list[tuple[int, int, float, float]]] = []  # position, length, a, b
    for sequence in sequences:
        masked = [(a, b) for a, b, m in sequence if m]
        rows = []
        for position, (a, b) in enumerate(masked):
            hole = holes(a, b, marks)
            if hole:
                counts[hole] += 1
            else:
                rows.append((position, len(masked), a, b))
        if rows:
            kept.append(rows)
    tokens = [row for rows in kept for row in rows]
    out: dict[str, float] = {"tokens": len(tokens), "sequences": len(kept), **counts}
    if not tokens:
        return out | {"overflow": 0}
    a = np.array([t[2] for t in tokens])
    b = np.array([t[3] for t in tokens])
    d = a - b
    out["overflow"] = int((d > F32_MAX_LN).sum())
    out |= _tokens(a, b, d, clip, out["overflow"] > 0)
    out |= _sequences(kept, out["overflow"] > 0)
    first = [abs(t[2] - t[3]) for t in tokens if t[0] == 0]
    if first:
        out["first_abs_mean"] = sum(first) / len(first)
    for decile in range(10):
        values = [abs(t[2] - t[3]) for t in tokens if 10 * t[0] // t[1] == decile]
        if values:
            out[f"decile_abs_mean.{decile}"] = sum(values) / len(values)
    return out


def k3(d: Any) -> Any:
    return np.where(np.abs(d) < 1e-3, d**2 / 2 + d**3 / 6 + d**4 / 24, np.expm1(np.minimum(d, 700)) - d)


def _tokens(a: Any, b: Any, d: Any, clip: tuple[float, float] | None, overflow: bool) -> dict[str, float]:
    absolute, n = np.abs(d), len(d)
    e = np.where(absolute < 1, np.exp(b) * np.expm1(np.minimum(d, 1)), np.exp(a) - np.exp(b))
    out = {
        "a_mean": a.mean(), "b_mean": b.mean(), "zero_share": (d == 0).mean(), "positive_share": (d > 0).mean(),
        "delta_mean": d.mean(), "delta_std": d.std(), "delta_min": d.min(), "delta_max": d.max(),
        "abs_mean": absolute.mean(), "abs_max": absolute.max(), "kl_k1": (b - a).mean(), "kl_k2": (d**2 / 2).mean(),
        "prob_abs_mean": np.abs(e).mean(), "prob_abs_max": np.abs(e).max(), "tail_ln2": (absolute > math.log(2)).mean(),
        "abs_q50": inverted_cdf(absolute, 0.5), "abs_q90": inverted_cdf(absolute, 0.9),
        "abs_q99": inverted_cdf(absolute, 0.99), "abs_q999": inverted_cdf(absolute, 0.999),
    }  # fmt: skip
    if not overflow:
        w = np.exp(d)
        out |= {"kl_k3": k3(d).mean(), "ratio_mean": w.mean(), "ratio_min": w.min(), "ratio_max": w.max()}
        out["chi2_token"] = (w**2).mean() - 1
        if (w**2).sum() > 0:
            out["ess_token"] = w.sum() ** 2 / (n * (w**2).sum())
    if clip is not None:
        out |= {"clip_low": (d < math.log(clip[0])).mean(), "clip_high": (d > math.log(clip[1])).mean()}
    m2 = ((d - d.mean()) ** 2).sum()
    if m2 > 4e-15 * n * d.mean() ** 2:
        out["delta_kurtosis"] = n * ((d - d.mean()) ** 4).sum() / m2**2
    for name, value in (("logp_pearson", pearson(a, b)), ("prob_pearson", pearson(np.exp(a), np.exp(b)))):
        if value is not None:
            out[name] = value
    bb = ((b - b.mean()) ** 2).sum()
    if bb > 4e-15 * n * b.mean() ** 2:
        out["slope"] = ((a - a.mean()) * (b - b.mean())).sum() / bb
        out["intercept"] = a.mean() - out["slope"] * b.mean()
    return {name: float(value) for name, value in out.items()}


def _sequences(kept: list[list[tuple[int, int, float, float]]], overflow: bool) -> dict[str, float]:
    ds = [np.array([t[2] - t[3] for t in rows]) for rows in kept]
    means = [np.abs(d).mean() for d in ds]
    out = {
        "seq_zero_share": np.mean([bool((d == 0).all()) for d in ds]),
        "kl_k1_seqmean": np.mean([-d.mean() for d in ds]), "kl_k2_seqmean": np.mean([(d**2 / 2).mean() for d in ds]),
        "abs_mean_seqmean": np.mean(means), "seq_abs_max": max(means),
    }  # fmt: skip
    if not overflow:
        out["kl_k3_seqmean"] = np.mean([k3(d).mean() for d in ds])
    log_w = np.array([d.sum() for d in ds])
    w = np.exp(log_w - log_w.max())
    out["ess_sequence"] = w.sum() ** 2 / (len(w) * (w**2).sum())
    corr = [pearson([t[2] for t in rows], [t[3] for t in rows]) for rows in kept]
    defined = [1 - r for r in corr if r is not None]
    if defined:
        out["step_seq_corr"] = 1 - inverted_cdf(defined, 0.9)
    return {name: float(value) for name, value in out.items()}
