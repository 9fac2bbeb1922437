"""Tensors in host memory → sums per sequence: the quick path for CPU tensors, same numbers as `device`.

Masked tokens are first packed end to end, so that no later pass carries a mask or meets padding; then everything is
float64, in reused buffers. A pass over 32,768 tokens costs some six microseconds, so the passes are counted. This
path may look at values and branch, which the device path must not.

Legend: S sequences, N masked tokens, W worst tokens. p = e^b, e = e^a − e^b, x = e^δ − 1.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from foreshock.stats.layout import (
    CALL_SUMS,
    COLUMN,
    COLUMNS,
    LN2,
    OVERFLOW_DELTA,
    SENTINEL_FLOOR,
    SERIES_DELTA,
    TOTALS,
    Array,
    IntArray,
    Reduction,
)
from foreshock.stats.places import FEW_TOKENS, Buckets, add_places
from foreshock.stats.shapes import Batch, sentinel_of
from foreshock.stats.sketch import DENSE_BUCKETS, SHIFT
from foreshock.stats.spans import Spans, spans_of

# Within these bounds of δ and b no token can be a sentinel, in any dtype's rounding of −9999.
_SUSPECT_DELTA = 8000.0
_SUSPECT_LOGP = -900.0

_FEW_EXPONENTS = 1024

_F64 = torch.float64
_PIVOT_TOKENS = 256
_vecdot: Any = getattr(np, "vecdot", None) or (lambda x, y: np.einsum("st,st->s", x, y))  # numpy < 2.0


class Workspace(threading.local):
    """Float64 buffers kept between calls, so that no pass pays for fresh pages; each as a tensor and as an array.

    Batches beyond `KEPT_TOKENS` get buffers of their own, which go when they are done: 10 MiB a thread are kept.
    """

    BUFFERS = 4
    KEPT_TOKENS = 1 << 18

    def __init__(self) -> None:
        self._capacity = 0
        self._size = -1
        self._kept: list[torch.Tensor] = []
        self._views: list[tuple[torch.Tensor, Array]] = []

    def take(self, size: int) -> list[tuple[torch.Tensor, Array]]:
        """Buffers of `size`; the last one holds ones, and is not to be written to."""
        if size > self.KEPT_TOKENS:
            return _views(_buffers(self.BUFFERS, size))
        if size > self._capacity:
            self._capacity, self._size = size, -1
            self._kept = _buffers(self.BUFFERS, size)
        if size != self._size:
            self._size, self._views = size, _views([tensor[:size] for tensor in self._kept])
        return self._views


def _buffers(count: int, size: int) -> list[torch.Tensor]:
    # A host may have made its GPU the default device; what is made in its inference mode can be written only there.
    with torch.inference_mode(False):
        empty = [torch.empty(size, dtype=_F64, device="cpu") for _ in range(count)]
        return [*empty, torch.ones(size, dtype=_F64, device="cpu")]


def _views(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, Array]]:
    return [(tensor, tensor.numpy()) for tensor in tensors]


_WORK = Workspace()


@dataclass(slots=True)
class _Tokens:
    """The tokens that count, end to end, and how many masked ones did not."""

    delta: tuple[torch.Tensor, Array]
    logp_b: tuple[torch.Tensor, Array]
    spans: Spans
    low: float
    high: float
    lowest_b: float
    nonfinite: int = 0
    sentinels: int = 0


def reduce(batch: Batch, into: Reduction, base: int) -> Array:
    """Adds a batch's totals, extremes, sketch, deciles and evidence to `into`; returns its table [S, K].

    `base` numbers the batch's first sequence where the host gave no ids. Raises ValueError where cu_seqlens does not
    ascend within the tokens.
    """
    spans, kept = spans_of(batch)
    buffers = _WORK.take(spans.total)
    tokens = _tokens(batch, spans, kept, buffers)
    table_KS = np.zeros((len(COLUMNS), batch.sequences))
    table_KS[COLUMN["masked"]] = tokens.spans.masked
    table_KS[COLUMN["n"]] = tokens.spans.counts
    size = tokens.delta[1].size
    into.totals[TOTALS.index("nonfinite")] += tokens.nonfinite
    into.totals[TOTALS.index("sentinels")] += tokens.sentinels
    if size == 0:
        return table_KS.T
    if size < spans.total:
        buffers = _WORK.take(size)
    abs_N = buffers[2][1]
    np.abs(tokens.delta[1], out=abs_N)
    bits, dense = _count(abs_N, into)
    near_zero = not bits.all() if dense is None else bool(dense[0])
    _add_totals(into, tokens, abs_N, near_zero, batch.clip_range)
    table_KS[COLUMN["abs"]] = add_places(
        into,
        batch,
        tokens.spans,
        abs_N,
        (tokens.delta[1], tokens.logp_b[1]),
        kept,
        (bits, dense),
        max(-tokens.low, tokens.high),
        base,
    )
    _fill(table_KS, into, tokens, buffers, _Sums(tokens.spans, buffers[-1][1]))
    return table_KS.T


def _count(abs_N: Array, into: Reduction) -> Buckets:
    """Adds |δ| to the sketch; returns the tokens' buckets, and this call's own counts where they are many."""
    bits = abs_N.astype(np.float32).view(np.int32)
    bits >>= SHIFT
    if into.dense is None:
        into.dense = np.zeros(DENSE_BUCKETS, dtype=np.int64)
    if bits.size <= FEW_TOKENS:
        np.add.at(into.dense, bits, 1)
        return bits, None
    dense: IntArray = np.bincount(bits, minlength=DENSE_BUCKETS)
    into.dense += dense
    return bits, dense


def _pack(values: torch.Tensor, kept: torch.Tensor | None, spans: Spans, out: Array) -> None:
    """Writes the masked tokens of `values` end to end into `out`; whole runs where they stand together."""
    if kept is None or spans.runs is None:
        np.copyto(out, _packed(values, kept))
        return
    array = _packed(values, None)
    for first, end, start in spans.runs:
        out[start : start + end - first] = array[first:end]


def _packed(values: torch.Tensor, kept: torch.Tensor | None) -> np.ndarray[Any, Any]:
    """The masked tokens of `values`, end to end. numpy's boolean index is several times quicker than torch's here."""
    if values.dtype == torch.bfloat16:  # numpy has none; float32 holds it exactly
        values = values.float()
    array: np.ndarray[Any, Any] = values.numpy()
    return array.reshape(-1) if kept is None else array[kept.numpy()]


def _tokens(
    batch: Batch, spans: Spans, kept: torch.Tensor | None, buffers: list[tuple[torch.Tensor, Array]]
) -> _Tokens:
    delta, logp_b, scratch = buffers[:3]
    _pack(batch.a, kept, spans, delta[1])
    _pack(batch.b, kept, spans, logp_b[1])
    np.subtract(delta[1], logp_b[1], out=delta[1])
    if batch.positions is not None:
        spans = replace(spans, positions=_packed(batch.positions, kept))
    low, high, lowest_b = _range(delta[1], logp_b[1])
    tokens = _Tokens(delta, logp_b, spans, low, high, lowest_b)
    # One comparison that NaN fails: holes are rare, and looking for them token by token is not free.
    if not (low > -_SUSPECT_DELTA and high < _SUSPECT_DELTA and lowest_b > _SUSPECT_LOGP):
        _pack(batch.a, kept, spans, scratch[1])
        _drop_holes(tokens, scratch[1], (sentinel_of(batch.a.dtype), sentinel_of(batch.b.dtype)))
    return tokens


def _range(D: Array, B: Array) -> tuple[float, float, float]:
    if D.size == 0:
        return 0.0, 0.0, 0.0
    return float(np.minimum.reduce(D)), float(np.maximum.reduce(D)), float(np.minimum.reduce(B))


def _drop_holes(tokens: _Tokens, a: Array, marks: tuple[float, float]) -> None:
    """Counts and takes out the tokens that are not finite or an engine's sentinel."""
    b = tokens.logp_b[1]
    finite = np.isfinite(a) & np.isfinite(b)
    marked = finite & ((a == marks[0]) | (a <= SENTINEL_FLOOR) | (b == marks[1]) | (b <= SENTINEL_FLOOR))
    valid = finite & ~marked
    tokens.nonfinite = int(np.count_nonzero(~finite))
    tokens.sentinels = int(np.count_nonzero(marked))
    if tokens.nonfinite + tokens.sentinels == 0:
        return
    tokens.spans = tokens.spans.without(valid)
    delta, logp_b = (torch.from_numpy(x[1][valid]) for x in (tokens.delta, tokens.logp_b))
    tokens.delta, tokens.logp_b = (delta, delta.numpy()), (logp_b, logp_b.numpy())
    tokens.low, tokens.high, tokens.lowest_b = _range(delta.numpy(), logp_b.numpy())


def _add_totals(
    into: Reduction, tokens: _Tokens, abs_N: Array, near_zero: bool, clip: tuple[float, float] | None
) -> None:
    d_N, low, high = tokens.delta[1], tokens.low, tokens.high
    totals = {"positives": int(np.count_nonzero(d_N > 0)) if high > 0 else 0}
    if near_zero:
        negatives = int(np.count_nonzero(d_N < 0)) if low < 0 else 0
        totals["zeros"] = d_N.size - totals["positives"] - negatives
    if max(-low, high) > LN2:
        totals["tail"] = int(np.count_nonzero(abs_N > LN2))
    if high > OVERFLOW_DELTA:
        totals["overflow"] = int(np.count_nonzero(d_N > OVERFLOW_DELTA))
    if clip is not None:
        totals["clip_tokens"] = d_N.size
        totals["clip_low"] = int(np.count_nonzero(d_N < clip[0])) if low < clip[0] else 0
        totals["clip_high"] = int(np.count_nonzero(d_N > clip[1])) if high > clip[1] else 0
    for name, count in totals.items():
        into.totals[TOTALS.index(name)] += count
    into.extremes[0] = min(into.extremes[0], low)
    into.extremes[1] = max(into.extremes[1], high)


class _Sums:
    """Sums per sequence of packed values: by rows where all sequences are equally long, else by spans."""

    def __init__(self, spans: Spans, ones: Array) -> None:
        self.ones = ones
        self._spans = spans
        self._shape = spans.rectangle()

    def of(self, x: Array) -> Array:
        if self._shape is None:
            return self._spans.sums(x)
        sums: Array = _vecdot(x.reshape(self._shape), self.ones.reshape(self._shape))
        return sums

    def product(self, x: Array, y: Array, room: Array) -> Array:
        """Of x·y; `room` may be overwritten by it."""
        if self._shape is None:
            return self._spans.sums(np.multiply(x, y, out=room))
        sums: Array = _vecdot(x.reshape(self._shape), y.reshape(self._shape))
        return sums


def _exp(x: torch.Tensor, X: Array, out: torch.Tensor, OUT: Array) -> None:
    """e^x: torch's is vectorised where numpy's is not, but costs ten numpy calls to come to."""
    if X.size <= _FEW_EXPONENTS:
        np.exp(X, out=OUT)
    else:
        torch.exp(x, out=out)


def _fill(
    table_KS: Array, into: Reduction, tokens: _Tokens, buffers: list[tuple[torch.Tensor, Array]], sums: _Sums
) -> None:
    """Fills the table's columns of b, δ and e^δ − 1 − δ, and adds the call's sums over all tokens."""
    (delta, D), (logp_b, B) = tokens.delta, tokens.logp_b
    (w, W), (p, P) = buffers[2:4]
    one, dot, add = sums.ones, np.dot, np.add.reduce
    _exp(logp_b, B, p, P)
    if tokens.high > OVERFLOW_DELTA:
        torch.exp(delta.clamp(max=OVERFLOW_DELTA), out=w)
    else:
        _exp(delta, D, w, W)
    call = {"n": D.size, "p": dot(P, one), "pp": dot(P, P)}
    if tokens.high < -1.0:  # all weights small: 1 + x would lose their digits
        call |= {"w": dot(W, one), "ww": dot(W, W)}
    np.subtract(W, 1.0, out=W)
    x_S = sums.of(W)
    if tokens.high >= -1.0:
        x = add(x_S)
        call |= {"w": x + D.size, "ww": dot(W, W) + 2.0 * x + D.size}
    e, E = w, W
    if tokens.high > 50.0 or tokens.low < -30.0 or tokens.lowest_b < -600.0:
        # p·x would be a product of something lost with something huge.
        torch.exp(logp_b + delta, out=e)
        np.subtract(E, P, out=E)
    else:
        np.multiply(E, P, out=E)  # keeps its relative precision where a ≈ b
    call |= {"e": dot(E, one), "pe": dot(P, E), "ee": dot(E, E)}
    np.abs(E, out=E)
    call["eabs"] = dot(E, one)
    into.extremes[2] = max(into.extremes[2], float(np.maximum.reduce(E)))

    squared = np.multiply(D, D, out=P)
    d_S, dd_S = sums.of(D), sums.of(squared)
    call |= {"d": add(d_S), "dd": add(dd_S), "ddd": dot(squared, D), "dddd": dot(squared, squared)}
    into.calls.append(np.array([call[name] for name in CALL_SUMS]))
    if max(-tokens.low, tokens.high) < SERIES_DELTA:
        x_S = d_S + dd_S / 2 + sums.product(squared, D, W) / 6 + sums.product(squared, squared, W) / 24
    # Any value amid b will do to centre it.
    few = min(_PIVOT_TOKENS, D.size)
    pivot = dot(B[:few], one[:few]) / few
    np.subtract(B, pivot, out=B)
    table_KS[COLUMN["d"]], table_KS[COLUMN["dd"]], table_KS[COLUMN["k3"]] = d_S, dd_S, x_S - d_S
    table_KS[COLUMN["b"]], table_KS[COLUMN["pivot"]] = sums.of(B), pivot
    table_KS[COLUMN["bb"]], table_KS[COLUMN["bd"]] = sums.product(B, B, W), sums.product(B, D, W)
