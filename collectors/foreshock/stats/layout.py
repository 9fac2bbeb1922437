"""What both reduction paths (`host`, `device`) hand over, and how it becomes a record. numpy only.

The joint is a table [S, K] of float64 sums, one row a sequence, one column a name of `COLUMNS`, beside a few totals
that need no row. Everything non-linear (means of ratios, correlations, weights of whole sequences) waits until the
rows are complete.

Legend: S sequences, K columns, D dense sketch buckets, W worst tokens. p = e^b, e = e^a − e^b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.stats import sketch
from foreshock.stats.moments import centre, fsum, pool
from foreshock.stats.record import DECILES, EVIDENCE_TOKENS, PairRecord

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

COLUMNS: Final = ("masked", "n", "b", "d", "bb", "bd", "dd", "abs", "k3", "pivot")
"""Sums over a sequence's tokens. `b`, `bb`, `bd` are of b − pivot; `pivot` itself is no sum."""
COLUMN: Final = {name: index for index, name in enumerate(COLUMNS)}
CALL_SUMS: Final = ("n", "d", "dd", "ddd", "dddd", "w", "ww", "p", "e", "pp", "pe", "ee", "eabs")
"""Sums over all tokens of one `observe` call: what nobody asks for by sequence. w = e^δ."""
TOTALS: Final = (
    "nonfinite",
    "sentinels",
    "overflow",
    "zeros",
    "positives",
    "tail",
    "clip_tokens",
    "clip_low",
    "clip_high",
)

# Engines' marks for "no log-prob here": −9999, and −3.4e38 in its several roundings.
SENTINEL: Final = -9999.0
SENTINEL_FLOOR: Final = -3.3e38
OVERFLOW_DELTA: Final = 88.722839
"""ln of the largest float32: beyond it the host's own e^δ is infinite."""
SERIES_DELTA: Final = 1e-3
"""Below it e^δ − 1 − δ is taken from its series, since the difference would cancel."""
LN2: Final = 0.6931471805599453


@dataclass(slots=True)
class Reduction:
    """One or more `observe` calls, reduced."""

    tables: list[Array] = field(default_factory=list)
    """rows for the token statistics, [S, K] each"""
    sequences: list[Array] = field(default_factory=list)
    """rows for the sequence statistics, complete over whatever holds the rest of them"""
    calls: list[Array] = field(default_factory=list)
    """`CALL_SUMS` of each call"""
    split: int = 0
    unplaced: int = 0
    totals: IntArray = field(default_factory=lambda: np.zeros(len(TOTALS), dtype=np.int64))
    extremes: list[float] = field(default_factory=lambda: [np.inf, -np.inf, 0.0])
    deciles: Array = field(default_factory=lambda: np.zeros((2, DECILES)))
    """tokens and Σ|δ| per decile"""
    first: Array = field(default_factory=lambda: np.zeros(2))
    """count and Σ|δ| of first tokens"""
    dense: IntArray | None = None
    """[D] counts of |δ|, once there are any"""
    worst_ids: list[IntArray] = field(default_factory=list)
    """[W, 3] sequence, position, token id"""
    worst_logps: list[Array] = field(default_factory=list)
    """[W, 2] a, b; rows with a = b are padding"""


def to_record(reduction: Reduction) -> PairRecord:
    """The mergeable record of what has been reduced."""
    with np.errstate(all="ignore"):
        return _to_record(reduction)


def _to_record(r: Reduction) -> PairRecord:
    rows = np.concatenate(r.tables) if r.tables else np.zeros((0, len(COLUMNS)))
    record = PairRecord(
        masked=int(rows[:, COLUMN["masked"]].sum()),
        tokens=int(rows[:, COLUMN["n"]].sum()),
        split=r.split,
        unplaced=r.unplaced,
    )
    for name, count in zip(TOTALS, r.totals.tolist(), strict=True):
        setattr(record, name, count)
    if not record.tokens:
        return record
    c = _columns(rows)
    all_calls = np.array(r.calls)
    calls = dict(zip(CALL_SUMS, all_calls[all_calls[:, 0] > 0].T, strict=True))
    higher = centre(
        calls["n"], calls["d"], calls["d"], {k: calls["d" * len(k)] for k in ("xx", "xy", "yy", "yyy", "yyyy")}
    )
    moments = _logp_moments(c)
    record.logp = pool(c["n"], moments) + pool(calls["n"], higher)[5:]
    prob = centre(calls["n"], calls["p"], calls["e"], {"xx": calls["pp"], "xy": calls["pe"], "yy": calls["ee"]})
    record.prob = pool(calls["n"], prob)
    record.sums = [fsum(c["abs"]), fsum(c["k3"]), *(fsum(calls[name]) for name in ("w", "ww", "eabs"))]
    record.extremes = [float(value) for value in r.extremes]
    if r.dense is not None:
        record.abs_sketch = sketch.pack(sketch.keep(r.dense))
    if not r.unplaced:
        record.decile_tokens = [int(count) for count in r.deciles[0]]
        record.decile_abs = r.deciles[1].tolist()
        record.first_tokens, record.first_abs = int(r.first[0]), float(r.first[1])
    if r.sequences and not r.split:
        if len(r.sequences) == len(r.tables) and all(map(is_, r.sequences, r.tables)):
            _add_sequences(record, c, moments)
        else:
            of_sequences = _columns(np.concatenate(r.sequences))
            _add_sequences(record, of_sequences, _logp_moments(of_sequences))
    _add_evidence(record, r)
    return record


def uncentred(table_SK: Array) -> Array:
    """The table with b about 0 and pivot 0, so that tables of several ranks add up."""
    plain = table_SK.copy()
    n, b, bb, bd, d, pivot = (table_SK[:, COLUMN[name]] for name in ("n", "b", "bb", "bd", "d", "pivot"))
    plain[:, COLUMN["b"]] = b + n * pivot
    plain[:, COLUMN["bb"]] = bb + 2 * pivot * b + n * pivot**2
    plain[:, COLUMN["bd"]] = bd + pivot * d
    plain[:, COLUMN["pivot"]] = 0.0
    return plain


def _columns(rows_SK: Array) -> dict[str, Array]:
    kept = rows_SK[rows_SK[:, COLUMN["n"]] > 0]
    return dict(zip(COLUMNS, kept.T, strict=True))


def _logp_moments(c: dict[str, Array]) -> Array:
    moments_S5 = centre(c["n"], c["b"], c["d"], {"xx": c["bb"], "xy": c["bd"], "yy": c["dd"]})
    moments_S5[:, 0] += c["pivot"]
    return moments_S5


def _add_sequences(record: PairRecord, c: dict[str, Array], moments: Array) -> None:
    n = c["n"]
    record.sequences = len(n)
    if not record.sequences:
        return
    record.seq_zeros = int(np.count_nonzero(c["abs"] == 0))
    abs_mean = c["abs"] / n
    means = (c["d"] / n, 0.5 * c["dd"] / n, c["k3"] / n, abs_mean)
    record.seq_sums = [*(fsum(values) for values in means), float(abs_mean.max())]
    top = float(c["d"].max())
    weights = np.exp(c["d"] - top)
    record.seq_weights = [top, fsum(weights), fsum(weights * weights)]
    record.seq_abs_sketch = sketch.pack(sketch.of_values(abs_mean))
    record.seq_corr_sketch = sketch.pack(sketch.of_values(1.0 - _correlations(c["n"], moments)))


def _correlations(n: Array, moments: Array) -> Array:
    """Pearson of a and b within each sequence, where both vary by more than a float32 can tell."""
    mean_b, mean_d, bb, bd, dd = moments.T
    aa = bb + 2 * bd + dd
    floor = 4e-15 * n
    varies = (bb > floor * mean_b**2) & (aa > floor * (mean_b + mean_d) ** 2)
    r: Array = (bb[varies] + bd[varies]) / np.sqrt(bb[varies] * aa[varies])
    return np.clip(r[np.isfinite(r)], -1.0, 1.0)


def _add_evidence(record: PairRecord, r: Reduction) -> None:
    """As `PairRecord.set_evidence` keeps them."""
    if not r.worst_ids:
        return
    ids, logps = np.concatenate(r.worst_ids), np.concatenate(r.worst_logps)
    size = np.abs(logps[:, 0] - logps[:, 1])
    order = np.lexsort((logps[:, 0], ids[:, 2], ids[:, 1], ids[:, 0], -size))
    order = order[size[order] > 0][:EVIDENCE_TOKENS]
    record.evidence_ids = ids[order].reshape(-1).tolist()
    record.evidence_logps = logps[order].astype("<f4").tobytes()
