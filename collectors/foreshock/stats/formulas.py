"""Every statistic of SIGNALS.md as a formula over a stack of records: each takes all of them at once, [N] → [N].

A formula says nothing of a record for which `reasons_of` names a reason; what it gives there is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from foreshock.stats import sketch
from foreshock.stats.record import DECILES
from foreshock.stats.stack import Array, Stack

Mask = npt.NDArray[np.bool_]
REASONS = ("", "empty_mask", "overflow", "not_reported", "split_sequence", "constant")
_EMPTY, _OVERFLOW, _NOT_REPORTED, _SPLIT, _CONSTANT = range(1, 6)

SEQ_OUTLIER_FACTOR = 10.0
# Σ(x−x̄)² at or below this share of n·x̄²: x varies by less than a float32 can tell, and a correlation would be noise.
CONSTANT_SHARE = 4e-15

Answer = Array | tuple[Array, Mask, int]
"""Values; or values, where there is none, and the reason's place in `REASONS`."""


@lru_cache
def _midpoints() -> Array:
    return np.array([sketch.midpoint(bucket) for bucket in range(sketch.KEPT_BUCKETS)])


class Figures:
    """A stack with what several formulas share, each worked out when first asked for."""

    def __init__(self, many: Stack) -> None:
        self.many = many
        self.tokens = self.count("tokens")
        self.n = np.maximum(self.tokens, 1.0)
        self.sequences = self.count("sequences")
        self.logp, self.prob, self.sums = many["logp"].T, many["prob"].T, many["sums"].T
        self.low, self.high, self.prob_high = many["extremes"].T

    def count(self, name: str) -> Array:
        return self.many.count(name).astype(np.float64)

    @cached_property
    def largest(self) -> Array:
        size: Array = np.maximum(-self.low, self.high)
        return size

    @cached_property
    def slope(self) -> tuple[Array, Mask, int]:
        mean_b, _, bb, bd = self.logp[:4]
        constant = bb <= CONSTANT_SHARE * self.tokens * mean_b**2
        return 1.0 + bd / bb, constant, _CONSTANT

    @cached_property
    def decile_means(self) -> Array:
        """[deciles, N]"""
        means: Array = (self.many["decile_abs"] / self.many.decile_tokens).T
        return means

    @cached_property
    def decile_empty(self) -> Mask:
        """[deciles, N]"""
        empty: Mask = (self.many.decile_tokens == 0).T
        return empty

    @cached_property
    def _cumulated(self) -> Array:
        """Counts of all sketch entries before each, and of all at the end."""
        return np.concatenate([np.zeros(1), np.cumsum(self.many.sketches.count)])

    def quantile(self, name: str, share: float) -> Array:
        """`sketch.quantile` of each record's sketch; NaN where it is empty."""
        begin, end = self.many.sketches.within(name)
        before = self._cumulated[begin]
        total = self._cumulated[end] - before
        rank = np.minimum(total, np.maximum(1, np.ceil(share * total - 1e-9)))
        # The first entry up to which so many are counted.
        index = np.searchsorted(self._cumulated[1:], before + rank)
        bucket = np.append(self.many.sketches.bucket, 0)[index] % sketch.KEPT_BUCKETS
        return np.where(total > 0, _midpoints()[bucket], np.nan)

    def share_above(self, name: str, value: Array) -> Array:
        """`sketch.share_above` of each record's sketch, [N] values to compare with."""
        begin, end = self.many.sketches.within(name)
        row = np.repeat(np.arange(len(begin)), end - begin)
        entry = np.arange(len(row)) + np.repeat(end - np.cumsum(end - begin), end - begin)
        midpoint = _midpoints()[self.many.sketches.bucket[entry] % sketch.KEPT_BUCKETS]
        count = np.where(midpoint > value[row], self.many.sketches.count[entry], 0.0)
        total = self._cumulated[end] - self._cumulated[begin]
        above = np.bincount(row, weights=count, minlength=len(begin))
        share: Array = np.where(total > 0, above, np.nan) / np.maximum(total, 1)
        return share


Formula = Callable[[Figures], Answer]


def _pearson(moments: Array, n: Array) -> Answer:
    """Of x + y and x, from the moments of x and y."""
    mean_x, mean_y, xx, xy, yy = moments[:5]
    variance_sum = xx + 2 * xy + yy
    constant = (xx <= CONSTANT_SHARE * n * mean_x**2) | (variance_sum <= CONSTANT_SHARE * n * (mean_x + mean_y) ** 2)
    found = (xx + xy) / np.sqrt(np.where(constant, 1.0, xx * variance_sum))
    return np.maximum(-1.0, np.minimum(1.0, found)), constant, _CONSTANT


def _intercept(f: Figures) -> Answer:
    slope, constant, reason = f.slope
    return f.logp[0] + f.logp[1] - slope * f.logp[0], constant, reason


def _kurtosis(f: Figures) -> Answer:
    _, mean, _, _, m2, _, m4 = f.logp
    return f.tokens * m4 / m2**2, m2 <= CONSTANT_SHARE * f.tokens * mean**2, _CONSTANT


def _of_sequences(compute: Callable[[Figures], Array]) -> Formula:
    return lambda f: (compute(f), f.sequences == 0, _NOT_REPORTED)


def _abs_quantile(share: float) -> Formula:
    return lambda f: np.minimum(f.quantile("abs_sketch", share), f.largest)


def _seq_outlier(f: Figures) -> Array:
    return f.share_above("seq_abs_sketch", SEQ_OUTLIER_FACTOR * f.quantile("seq_abs_sketch", 0.5))


def _seq_corr(f: Figures) -> Answer:
    worst = f.quantile("seq_corr_sketch", 0.9)
    return 1.0 - np.minimum(2.0, worst), np.isnan(worst), _CONSTANT


def _ess_token(f: Figures) -> Answer:
    squares = f.sums[3]
    return np.minimum(1.0, f.sums[2] ** 2 / (f.n * squares)), ~(squares > 0), _OVERFLOW


def _counted(name: str) -> Formula:
    return lambda f: f.count(name)


def _first(f: Figures) -> Answer:
    tokens = f.count("first_tokens")
    return f.many["first_abs"][:, 0] / tokens, tokens == 0, _EMPTY


def _decile(index: int) -> Formula:
    return lambda f: (f.decile_means[index], f.decile_empty[index], _EMPTY)


def _clip(name: str) -> Formula:
    return lambda f: f.count(name) / f.count("clip_tokens")


def _seq_ess(f: Figures) -> Array:
    weights = f.many["seq_weights"].T
    share: Array = np.minimum(1.0, weights[1] ** 2 / (f.sequences * weights[2]))
    return share


COUNT_STATISTICS = ("tokens", "sequences", "nonfinite", "sentinels", "overflow")
DECILE_NAMES = tuple(f"decile_abs_mean.{i}" for i in range(DECILES))
FORMULAS: dict[str, Formula] = {
    **{name: _counted(name) for name in COUNT_STATISTICS},
    "a_mean": lambda f: f.logp[0] + f.logp[1],
    "b_mean": lambda f: f.logp[0],
    "zero_share": lambda f: f.count("zeros") / f.n,
    "positive_share": lambda f: f.count("positives") / f.n,
    "delta_mean": lambda f: f.logp[1],
    "delta_std": lambda f: np.sqrt(f.logp[4] / f.n),
    "delta_min": lambda f: f.low,
    "delta_max": lambda f: f.high,
    "delta_kurtosis": _kurtosis,
    "abs_mean": lambda f: f.sums[0] / f.n,
    "abs_max": lambda f: f.largest,
    "kl_k1": lambda f: -f.logp[1],
    "kl_k2": lambda f: 0.5 * (f.logp[4] / f.n + f.logp[1] ** 2),
    "kl_k3": lambda f: f.sums[1] / f.n,
    "ratio_mean": lambda f: f.sums[2] / f.n,
    "ratio_min": lambda f: np.exp(f.low),
    "ratio_max": lambda f: np.exp(f.high),
    "clip_low": _clip("clip_low"),
    "clip_high": _clip("clip_high"),
    "chi2_token": lambda f: f.sums[3] / f.n - 1.0,
    "ess_token": _ess_token,
    "prob_abs_mean": lambda f: f.sums[4] / f.n,
    "prob_abs_max": lambda f: f.prob_high,
    "prob_pearson": lambda f: _pearson(f.prob, f.tokens),
    "logp_pearson": lambda f: _pearson(f.logp, f.tokens),
    "tail_ln2": lambda f: f.count("tail") / f.n,
    "abs_q50": _abs_quantile(0.5),
    "abs_q90": _abs_quantile(0.9),
    "abs_q99": _abs_quantile(0.99),
    "abs_q999": _abs_quantile(0.999),
    "slope": lambda f: f.slope,
    "intercept": _intercept,
    "seq_zero_share": _of_sequences(lambda f: f.count("seq_zeros") / f.sequences),
    "kl_k1_seqmean": _of_sequences(lambda f: -f.many["seq_sums"][:, 0] / f.sequences),
    "kl_k2_seqmean": _of_sequences(lambda f: f.many["seq_sums"][:, 1] / f.sequences),
    "kl_k3_seqmean": _of_sequences(lambda f: f.many["seq_sums"][:, 2] / f.sequences),
    "abs_mean_seqmean": _of_sequences(lambda f: f.many["seq_sums"][:, 3] / f.sequences),
    "seq_abs_max": lambda f: (f.many["seq_sums"][:, 4], ~f.many.sequenced, _NOT_REPORTED),
    "seq_outlier": _of_sequences(_seq_outlier),
    "ess_sequence": lambda f: (_seq_ess(f), ~f.many.sequenced, _NOT_REPORTED),
    "step_seq_corr": _seq_corr,
    "first_abs_mean": _first,
    **{name: _decile(i) for i, name in enumerate(DECILE_NAMES)},
}  # fmt: skip
SEQUENCE_STATISTICS = (
    "sequences", "seq_zero_share", "kl_k1_seqmean", "kl_k2_seqmean", "kl_k3_seqmean", "abs_mean_seqmean", "seq_abs_max",
    "seq_outlier", "ess_sequence", "step_seq_corr",
)  # fmt: skip
PLACED_STATISTICS = ("first_abs_mean", *DECILE_NAMES)
RATIO_STATISTICS = ("kl_k3", "kl_k3_seqmean", "ratio_mean", "ratio_min", "ratio_max", "chi2_token", "ess_token")


def reasons_of(many: Stack, names: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """[N, S] place in `REASONS` of why a statistic of `names` is missing whatever its formula gives; 0: it is not."""
    where = {name: s for s, name in enumerate(names)}
    codes = np.zeros((len(many), len(names)), dtype=np.uint8)

    def note(rows: Mask, statistics: tuple[str, ...], reason: int) -> None:
        if rows.any():
            columns = np.array([where[name] for name in statistics if name in where], dtype=np.intp)
            codes[np.ix_(np.flatnonzero(rows), columns)] = reason

    empty = many.count("tokens") == 0
    note(empty, tuple(n for n in names if n not in COUNT_STATISTICS), _EMPTY)
    note(many.count("overflow") != 0, RATIO_STATISTICS, _OVERFLOW)
    note((many.count("clip_tokens") == 0) & ~empty, ("clip_low", "clip_high"), _NOT_REPORTED)
    note(many.count("split") != 0, SEQUENCE_STATISTICS, _SPLIT)
    note(many.count("unplaced") != 0, PLACED_STATISTICS, _SPLIT)
    return codes


def evaluate(many: Stack, names: tuple[str, ...]) -> tuple[Array, npt.NDArray[np.uint8]]:
    """[N, S] values and [N, S] reasons (places in `REASONS`, 0 where the value stands) of the statistics `names`."""
    codes = reasons_of(many, names)
    values = np.empty(codes.shape)
    figures = Figures(many)
    with np.errstate(all="ignore"):
        for s, name in enumerate(names):
            answer = FORMULAS[name](figures)
            if isinstance(answer, tuple):
                values[:, s], absent, reason = answer
                column = codes[:, s]
                column[absent & (column == 0)] = reason
            else:
                values[:, s] = answer
    codes[~np.isfinite(values) & (codes == 0)] = _OVERFLOW
    return values, codes
