"""The records of groups as one record a group: ranks of a step, micro-batches, versions of a lag.

Counts add, extremes are max or min, moments are re-centred (Pébay, SAND2008-6212), and every sum of floats carries its
rounding error along (two-sum trees), so that it comes out as exactly rounded as `math.fsum` makes it, in any order.

Legend: N records, G groups, R members of the largest group, F float columns, T evidence tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from foreshock.stats.packed import COUNTS, WIDTH
from foreshock.stats.record import EVIDENCE_TOKENS
from foreshock.stats.stack import COLUMN, Array, IntArray, Stack, Tokens

Element = TypeVar("Element", bound=np.generic)
_EXTREMES = np.array([-1.0, 1.0, 1.0])
_TOKENS = COUNTS.index("tokens")


def pool(many: Stack, group_N: IntArray, groups: int) -> Stack:
    """The records of each group as one: [G] from [N], `group_N` numbering the group of each record."""
    spread = Spread.of(group_N, groups)
    integers = spread.added(many.integers)
    sequenced = np.bincount(group_N[many.sequenced], minlength=groups) > 0
    with np.errstate(invalid="ignore", over="ignore"):
        floats = _pooled_floats(many, spread, integers[:, _TOKENS], sequenced)
    return Stack(
        integers=integers,
        floats=floats,
        sequenced=sequenced,
        sketches=many.sketches.pooled(group_N, groups),
        evidence=_worst(many.evidence, group_N, groups),
        missing=_reasons(many, group_N, groups),
    )


@dataclass
class Spread:
    """Puts rows [N, …] into their places of a rectangle [G, R, …], the rows of a group in their order."""

    group: IntArray
    slot: IntArray
    sizes: IntArray

    @staticmethod
    def of(group_N: IntArray, groups: int) -> Spread:
        # Of 16 bits numpy sorts by radix, some ten times as fast.
        order = np.argsort(group_N.astype(np.int16) if groups < 1 << 15 else group_N, kind="stable")
        sizes = np.bincount(group_N, minlength=groups)
        slot = np.empty(len(group_N), dtype=np.int64)
        slot[order] = np.arange(len(group_N)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Spread(group_N, slot, sizes)

    def filled(self, rows: npt.NDArray[Element], empty: float) -> npt.NDArray[Element]:
        shape = (len(self.sizes), int(self.sizes.max(initial=1)), *rows.shape[1:])
        placed = np.full(shape, empty, dtype=rows.dtype)
        placed[self.group, self.slot] = rows
        return placed

    def added(self, rows: IntArray) -> IntArray:
        total: IntArray = self.filled(rows, 0).sum(axis=1)
        return total

    def summed(self, rows: Array) -> Array:
        return exact_sum(self.filled(rows, 0.0))

    def highest(self, rows: Array) -> Array:
        top: Array = self.filled(rows, -np.inf).max(axis=1)
        return top


def exact_sum(rows_GR: Array) -> Array:
    """Sums over axis 1 to the rounding of a float64, whatever the order; NaN where infinities of both signs meet."""
    high: Array = np.ascontiguousarray(rows_GR.swapaxes(0, 1))
    low = np.zeros_like(high)
    with np.errstate(invalid="ignore", over="ignore"):
        while len(high) > 1:
            half, odd = divmod(len(high), 2)
            left, right = high[:half], high[half : 2 * half]
            both = left + right
            part = both - left
            carried = (left - (both - part)) + (right - part)
            carried += low[:half]
            carried += low[half : 2 * half]
            high = np.concatenate([both, high[-1:]]) if odd else both
            low = np.concatenate([carried, low[-1:]]) if odd else carried
        total = high[0] + low[0]
    exact: Array = np.where(np.isfinite(high[0]), total, high[0])
    return exact


def _pooled_floats(many: Stack, spread: Spread, tokens_G: IntArray, sequenced_G: npt.NDArray[np.bool_]) -> Array:
    tokens_N, there = many.count("tokens"), many.sequenced
    n = tokens_N.astype(np.float64)
    tops = np.concatenate([many["extremes"] * _EXTREMES, many["seq_sums"][:, 4:], many["seq_weights"][:, :1]], axis=1)
    tops[tokens_N == 0, :3] = -np.inf
    tops[~there, 3:] = -np.inf
    tops = spread.highest(tops)
    extremes, largest, top = tops[:, :3] * _EXTREMES, tops[:, 3], np.where(sequenced_G, tops[:, 4], 0.0)
    scale = np.where(there, np.exp(np.minimum(0.0, many["seq_weights"][:, 0] - top[spread.group])), 0.0)
    logp, prob = many["logp"], many["prob"]
    means = np.concatenate([logp[:, :2], prob[:, :2]], axis=1)
    means_G = spread.summed(n[:, None] * means) / np.maximum(tokens_G, 1.0)[:, None]
    off = np.where(n[:, None] > 0, means - means_G[spread.group], 0.0)
    added = [
        *_moments(logp, n, off[:, 0], off[:, 1]),
        *_moments(prob, n, off[:, 2], off[:, 3]),
        scale * many["seq_weights"][:, 1],
        scale * scale * many["seq_weights"][:, 2],
    ]
    plain = many["sums"], many["seq_sums"][:, :4], many["first_abs"], many["decile_abs"]
    sums = spread.summed(np.concatenate([np.stack(added, axis=1), *plain], axis=1))
    pooled = np.empty((len(spread.sizes), WIDTH))
    pooled[:, COLUMN["logp"]] = np.concatenate([means_G[:, :2], sums[:, :5]], axis=1)
    pooled[:, COLUMN["prob"]] = np.concatenate([means_G[:, 2:], sums[:, 5:8]], axis=1)
    pooled[:, COLUMN["sums"]] = sums[:, 10:15]
    pooled[:, COLUMN["extremes"]] = np.where(np.isinf(extremes) & (tokens_G == 0)[:, None], 0.0, extremes)
    pooled[:, COLUMN["seq_sums"]] = np.concatenate(
        [sums[:, 15:19], np.where(sequenced_G, largest, 0.0)[:, None]], axis=1
    )
    pooled[:, COLUMN["seq_weights"]] = np.concatenate([top[:, None], sums[:, 8:10]], axis=1)
    pooled[:, COLUMN["first_abs"].start :] = sums[:, 19:]
    return pooled


def _moments(rows: Array, n: Array, dx: Array, dy: Array) -> list[Array]:
    """The parts of the groups' moments: those of [N, 5], or [N, 7], about means that are dx and dy away."""
    yy = rows[:, 4]
    parts = [rows[:, 2] + n * dx * dx, rows[:, 3] + n * dx * dy, yy + n * dy * dy]
    if rows.shape[1] > 5:
        m3, m4 = rows[:, 5], rows[:, 6]
        parts.append(m3 + 3 * dy * yy + n * dy**3)
        parts.append(m4 + 4 * dy * m3 + 6 * dy**2 * yy + n * dy**4)
    return parts


def _worst(tokens: Tokens, group_N: IntArray, groups: int) -> Tokens:
    """The `EVIDENCE_TOKENS` worst of each group by |a − b|, worst first, in an order that does not depend on theirs."""
    group_T = group_N[tokens.row]
    with np.errstate(invalid="ignore"):
        size_T = np.abs(tokens.logps[:, 0].astype(np.float64) - tokens.logps[:, 1])
    size_T = np.where(np.isnan(size_T), -1.0, size_T)
    kept = np.arange(len(group_T))
    spread = Spread.of(group_T, groups)
    if spread.sizes.max(initial=0) > 2 * EVIDENCE_TOKENS:
        # Only those at or above the group's sixteenth largest need sorting by every key.
        edge = np.partition(spread.filled(size_T, -2.0), -EVIDENCE_TOKENS, axis=1)[:, -EVIDENCE_TOKENS]
        kept = np.flatnonzero(size_T >= edge[group_T])
    ids = tokens.ids[kept]
    keys = (tokens.logps[kept, 0], ids[:, 2], ids[:, 1], ids[:, 0], -size_T[kept], group_T[kept])
    kept = kept[np.lexsort(keys)]
    kept = kept[Spread.of(group_T[kept], groups).slot < EVIDENCE_TOKENS]
    return Tokens(group_T[kept], tokens.ids[kept], tokens.logps[kept])


def _reasons(many: Stack, group_N: IntArray, groups: int) -> list[dict[str, str]]:
    """Named reasons stay; that one record had nothing at all (`*`) no longer matters once another has measured."""
    found: list[dict[str, str]] = [{} for _ in range(groups)]
    named = [(int(group_N[row]), reasons) for row, reasons in enumerate(many.missing) if reasons]
    if not named:
        return found
    measured = np.bincount(group_N[many.count("tokens") > 0], minlength=groups) > 0
    everything: dict[int, list[tuple[str, str]]] = {}
    for group, reasons in named:
        everything.setdefault(group, []).extend(reasons.items())
    for group, items in everything.items():
        for name, reason in sorted(items, reverse=True):
            if name != "*" or not measured[group]:
                found[group][name] = reason
    return found
