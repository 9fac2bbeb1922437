"""Records → one record (`merge`) → named numbers (`statistics`). No torch: the service imports this.

Merging is exact to rounding (sums by `math.fsum`, moments re-centred, sketches added), whatever the order and the
grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from foreshock.stats import sketch
from foreshock.stats.moments import fsum, pool
from foreshock.stats.record import DECILES, EvidenceToken, PairRecord

_COUNTS = (
    "masked", "tokens", "nonfinite", "sentinels", "overflow", "zeros", "positives", "tail", "clip_tokens", "clip_low",
    "clip_high", "sequences", "seq_zeros", "split", "unplaced", "first_tokens",
)  # fmt: skip

DECILE_NAMES = tuple(f"decile_abs_mean.{i}" for i in range(DECILES))
SEQUENCE_STATISTICS = (
    "sequences", "seq_zero_share", "kl_k1_seqmean", "kl_k2_seqmean", "kl_k3_seqmean", "abs_mean_seqmean", "seq_abs_max",
    "seq_outlier", "ess_sequence", "step_seq_corr",
)  # fmt: skip
PLACED_STATISTICS = ("first_abs_mean", *DECILE_NAMES)
RATIO_STATISTICS = ("kl_k3", "kl_k3_seqmean", "ratio_mean", "ratio_min", "ratio_max", "chi2_token", "ess_token")
COUNT_STATISTICS = ("tokens", "sequences", "nonfinite", "sentinels", "overflow")
STATISTICS = (
    "a_mean", "b_mean", "tokens", "nonfinite", "sentinels", "overflow", "zero_share", "positive_share",
    "delta_kurtosis", "delta_mean", "delta_std", "delta_min", "delta_max", "abs_mean", "abs_max", "kl_k1",
    "kl_k2", "kl_k3", "ratio_mean", "ratio_min", "ratio_max", "clip_low", "clip_high", "chi2_token",
    "ess_token", "prob_abs_mean", "prob_abs_max", "prob_pearson", "logp_pearson", "tail_ln2", "abs_q50",
    "abs_q90", "abs_q99", "abs_q999", "slope", "intercept",
    *SEQUENCE_STATISTICS, *PLACED_STATISTICS,
)  # fmt: skip

SEQ_OUTLIER_FACTOR = 10.0
# Σ(x−x̄)² at or below this share of n·x̄²: x varies by less than a float32 can tell, and a correlation would be noise.
CONSTANT_SHARE = 4e-15


@dataclass(frozen=True, slots=True)
class PairStatistics:
    """The statistics of one pair: each name of `STATISTICS` is in exactly one of `values` and `missing`."""

    values: dict[str, float]
    missing: dict[str, str]
    evidence: list[EvidenceToken] = field(default_factory=list)


def merge(records: Iterable[PairRecord]) -> PairRecord:
    """One record for all, in any order, to 1e-9 relative. No record at all gives the empty record."""
    parts = list(records)
    merged = PairRecord()
    for name in _COUNTS:
        setattr(merged, name, sum(getattr(part, name) for part in parts))
    filled = [part for part in parts if part.tokens]
    if filled:
        n_R = np.array([part.tokens for part in filled], dtype=np.float64)
        merged.logp = pool(n_R, np.array([part.logp for part in filled]))
        merged.prob = pool(n_R, np.array([part.prob for part in filled]))
        merged.sums = _added([part.sums for part in filled])
        low, high, prob = zip(*(part.extremes for part in filled), strict=True)
        merged.extremes = [min(low), max(high), max(prob)]
    _merge_sequences(merged, [part for part in parts if part.seq_sums])
    merged.first_abs = math.fsum(part.first_abs for part in parts)
    merged.decile_abs = _added([part.decile_abs for part in parts if part.decile_abs])
    merged.decile_tokens = [
        sum(column) for column in zip(*(p.decile_tokens for p in parts if p.decile_tokens), strict=True)
    ]
    for name in ("abs_sketch", "seq_abs_sketch", "seq_corr_sketch"):
        setattr(merged, name, sketch.pack(sketch.total(getattr(part, name) for part in parts)))
    merged.set_evidence([token for part in parts for token in part.evidence()])
    merged.missing = _merged_reasons(parts, bool(filled))
    return merged


def _merge_sequences(merged: PairRecord, parts: list[PairRecord]) -> None:
    if not parts:
        return
    merged.seq_sums = [*_added([part.seq_sums[:-1] for part in parts]), max(part.seq_sums[-1] for part in parts)]
    top = max(part.seq_weights[0] for part in parts)
    scales = [math.exp(part.seq_weights[0] - top) for part in parts]
    merged.seq_weights = [
        top,
        math.fsum(s * part.seq_weights[1] for s, part in zip(scales, parts, strict=True)),
        math.fsum(s * s * part.seq_weights[2] for s, part in zip(scales, parts, strict=True)),
    ]


def _added(rows: list[list[float]]) -> list[float]:
    return [fsum(column) for column in np.array(rows, dtype=np.float64).T] if rows else []


def _merged_reasons(parts: list[PairRecord], measured: bool) -> dict[str, str]:
    """Named reasons stay; that one rank had nothing at all (`*`) no longer matters once another has measured."""
    reasons: dict[str, str] = {}
    for name, reason in sorted((item for part in parts for item in part.missing.items()), reverse=True):
        if name != "*" or not measured:
            reasons[name] = reason
    return reasons


def statistics(record: PairRecord, only: Collection[str] | None = None) -> PairStatistics:
    """Every statistic of SIGNALS.md that the record supports, and for each other one the reason why not.

    `only`: no more than these, and no evidence; a rank's own figures are asked for where they can be the worst.

    Reasons: `empty_mask`, `overflow` (e^δ beyond float32, or a moment beyond float64), `split_sequence`,
    `not_reported`, `constant` (a correlation, slope or kurtosis of something that does not vary), and whatever
    `record.missing` names.
    """
    missing = _reasons(record)
    values: dict[str, float] = {}
    for name, compute in _FORMULAS.items():
        if name in missing or (only is not None and name not in only):
            continue
        value = compute(record)
        if isinstance(value, str):
            missing[name] = value
        elif math.isfinite(value):
            values[name] = value
        else:
            missing[name] = "overflow"
    return PairStatistics(values, missing, record.evidence() if only is None else [])


def _reasons(record: PairRecord) -> dict[str, str]:
    if "*" in record.missing:
        return dict.fromkeys(STATISTICS, record.missing["*"])
    missing: dict[str, str] = {}
    if not record.tokens:
        missing.update(dict.fromkeys((n for n in STATISTICS if n not in COUNT_STATISTICS), "empty_mask"))
    if record.overflow:
        missing.update(dict.fromkeys(RATIO_STATISTICS, "overflow"))
    if not record.clip_tokens and record.tokens:
        missing.update(clip_low="not_reported", clip_high="not_reported")
    if record.split:
        missing.update(dict.fromkeys(SEQUENCE_STATISTICS, "split_sequence"))
    if record.unplaced:
        missing.update(dict.fromkeys(PLACED_STATISTICS, "split_sequence"))
    missing.update({name: reason for name, reason in record.missing.items() if name in _FORMULAS})
    return missing


Formula = Callable[[PairRecord], float | str]


def _pearson(moments: list[float], n: int) -> float | str:
    """Of x + y and x, from the moments of x and y."""
    mean_x, mean_y, xx, xy, yy = moments[:5]
    variance_sum = xx + 2 * xy + yy
    if xx <= CONSTANT_SHARE * n * mean_x**2 or variance_sum <= CONSTANT_SHARE * n * (mean_x + mean_y) ** 2:
        return "constant"
    return max(-1.0, min(1.0, (xx + xy) / math.sqrt(xx * variance_sum)))


def _slope(r: PairRecord) -> float | str:
    mean_b, _, bb, bd = r.logp[:4]
    return "constant" if bb <= CONSTANT_SHARE * r.tokens * mean_b**2 else 1.0 + bd / bb


def _intercept(r: PairRecord) -> float | str:
    slope = _slope(r)
    return slope if isinstance(slope, str) else r.logp[0] + r.logp[1] - slope * r.logp[0]


def _kurtosis(r: PairRecord) -> float | str:
    _, mean, _, _, m2, _, m4 = r.logp
    return "constant" if m2 <= CONSTANT_SHARE * r.tokens * mean**2 else r.tokens * m4 / m2**2


def _abs_quantile(share: float) -> Formula:
    def compute(r: PairRecord) -> float:
        return min(sketch.quantile(sketch.unpack(r.abs_sketch), share), max(-r.extremes[0], r.extremes[1]))

    return compute


def _seq_mean(index: int, sign: float = 1.0) -> Formula:
    return lambda r: sign * r.seq_sums[index] / r.sequences if r.sequences else "not_reported"


def _seq_outlier(r: PairRecord) -> float | str:
    if not r.sequences:
        return "not_reported"
    kept = sketch.unpack(r.seq_abs_sketch)
    return sketch.share_above(kept, SEQ_OUTLIER_FACTOR * sketch.quantile(kept, 0.5))


def _seq_corr(r: PairRecord) -> float | str:
    if not r.sequences:
        return "not_reported"
    return 1.0 - min(2.0, sketch.quantile(sketch.unpack(r.seq_corr_sketch), 0.9)) if r.seq_corr_sketch else "constant"


def _decile(index: int) -> Formula:
    def compute(r: PairRecord) -> float | str:
        tokens = r.decile_tokens[index] if r.decile_tokens else 0
        return r.decile_abs[index] / tokens if tokens else "empty_mask"

    return compute


def _exp(value: float) -> float:
    return math.exp(value) if value < 709.0 else math.inf


_FORMULAS: dict[str, Formula] = {
    "tokens": lambda r: float(r.tokens),
    "sequences": lambda r: float(r.sequences),
    "nonfinite": lambda r: float(r.nonfinite),
    "sentinels": lambda r: float(r.sentinels),
    "overflow": lambda r: float(r.overflow),
    "a_mean": lambda r: r.logp[0] + r.logp[1],
    "b_mean": lambda r: r.logp[0],
    "zero_share": lambda r: r.zeros / r.tokens,
    "positive_share": lambda r: r.positives / r.tokens,
    "delta_mean": lambda r: r.logp[1],
    "delta_std": lambda r: math.sqrt(r.logp[4] / r.tokens),
    "delta_min": lambda r: r.extremes[0],
    "delta_max": lambda r: r.extremes[1],
    "delta_kurtosis": _kurtosis,
    "abs_mean": lambda r: r.sums[0] / r.tokens,
    "abs_max": lambda r: max(-r.extremes[0], r.extremes[1]),
    "kl_k1": lambda r: -r.logp[1],
    "kl_k2": lambda r: 0.5 * (r.logp[4] / r.tokens + r.logp[1] ** 2),
    "kl_k3": lambda r: r.sums[1] / r.tokens,
    "ratio_mean": lambda r: r.sums[2] / r.tokens,
    "ratio_min": lambda r: _exp(r.extremes[0]),
    "ratio_max": lambda r: _exp(r.extremes[1]),
    "clip_low": lambda r: r.clip_low / r.clip_tokens,
    "clip_high": lambda r: r.clip_high / r.clip_tokens,
    "chi2_token": lambda r: r.sums[3] / r.tokens - 1.0,
    "ess_token": lambda r: min(1.0, r.sums[2] ** 2 / (r.tokens * r.sums[3])) if r.sums[3] > 0 else "overflow",
    "prob_abs_mean": lambda r: r.sums[4] / r.tokens,
    "prob_abs_max": lambda r: r.extremes[2],
    "prob_pearson": lambda r: _pearson(r.prob, r.tokens),
    "logp_pearson": lambda r: _pearson(r.logp, r.tokens),
    "tail_ln2": lambda r: r.tail / r.tokens,
    "abs_q50": _abs_quantile(0.5),
    "abs_q90": _abs_quantile(0.9),
    "abs_q99": _abs_quantile(0.99),
    "abs_q999": _abs_quantile(0.999),
    "slope": _slope,
    "intercept": _intercept,
    "seq_zero_share": lambda r: r.seq_zeros / r.sequences if r.sequences else "not_reported",
    "kl_k1_seqmean": _seq_mean(0, -1.0),
    "kl_k2_seqmean": _seq_mean(1),
    "kl_k3_seqmean": _seq_mean(2),
    "abs_mean_seqmean": _seq_mean(3),
    "seq_abs_max": lambda r: r.seq_sums[4] if r.seq_sums else "not_reported",
    "seq_outlier": _seq_outlier,
    "ess_sequence": lambda r: (
        min(1.0, r.seq_weights[1] ** 2 / (r.sequences * r.seq_weights[2])) if r.seq_weights else "not_reported"
    ),
    "step_seq_corr": _seq_corr,
    "first_abs_mean": lambda r: r.first_abs / r.first_tokens if r.first_tokens else "empty_mask",
    **{name: _decile(i) for i, name in enumerate(DECILE_NAMES)},
}
