"""The frames of steps, folded into what rules see: pairs pooled, scalars by the catalogue, the worst rank kept.

Many steps at once: a numpy call costs the same for one step as for 32, and it is the calls that cost.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.frames.catalogue import PAIRS, merge_rule, valid_name
from foreshock.frames.catalogue import STATISTICS as CATALOGUE
from foreshock.stats.merge import STATISTICS, Statistics
from foreshock.stats.record import PairRecord
from foreshock.stats.stack import Spread, Stack, exact_sum, pool, stack
from foreshock.wire import Frame

logger = logging.getLogger(__name__)

WITH_A_WORST = tuple(s for s in STATISTICS if s in CATALOGUE and CATALOGUE[s].worst)
"""The statistics of which the worst rank's own figure is kept."""
_SIGN = np.array([1.0 if CATALOGUE[s].worst == "max" else -1.0 for s in WITH_A_WORST])


@dataclass
class Merged:
    """One step over all its ranks; names are full signal names."""

    values: dict[str, float] = field(default_factory=dict)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def merge_steps(steps: Sequence[Sequence[Frame]]) -> list[Merged]:
    """Folds the frames of each step (any order, one or more a rank). Never raises for what a frame holds.

    A pair record that contradicts itself is left out, and the pair is missing as `malformed` where none is left.
    """
    ordered = [sorted(frames, key=lambda f: (f.role, f.rank, f.sequence)) for frames in steps]
    merged = [Merged() for _ in steps]
    _merge_pairs(merged, ordered)
    _merge_scalars(merged, ordered)
    for one, frames in zip(merged, ordered, strict=True):
        for frame in frames:
            for name, reason in frame.missing.items():
                if name not in one.values:
                    one.missing.setdefault(name, reason)
    return merged


def _merge_pairs(merged: list[Merged], steps: list[list[Frame]]) -> None:
    records: list[PairRecord] = []
    of_pair: dict[tuple[int, str], list[int]] = {}
    ranks: list[int] = []
    for at, frames in enumerate(steps):
        for frame in frames:
            for name, record in frame.pairs.items():
                if _is_name(name):
                    of_pair.setdefault((at, name), []).append(len(records))
                    records.append(record)
                    ranks.append(frame.rank)
    if not records:
        return
    many, bad = stack(records)
    if bad:
        logger.warning("%d pair records cannot be read, the first of rank %d", len(bad), ranks[bad[0]])
        of_pair, ranks = _without(bad, of_pair, ranks, merged)
    groups = list(of_pair)
    if not groups:
        return
    group = np.empty(len(many), dtype=np.int64)
    for number, members in enumerate(of_pair.values()):
        group[members] = number
    # Where each pair has one record, nothing needs to be pooled and the only rank is the worst one.
    alone = len(groups) == len(many)
    whole = many if alone else pool(many, group, len(groups))
    figures = Statistics.of(whole)
    for number, (at, name) in enumerate(groups):
        values, missing = figures.row(number, f"{name}.")
        merged[at].values.update(values)
        merged[at].missing.update(missing)
    _keep_evidence(merged, groups, whole)
    if alone:
        by_rank, of_rank, rank = figures.only(WITH_A_WORST), group, np.array(ranks, dtype=np.int64)
    else:
        by_rank, of_rank, rank = _by_rank(many, group, np.array(ranks, dtype=np.int64))
    _keep_worst(merged, groups, by_rank, of_rank, rank)


def _without(
    bad: list[int], of_pair: dict[tuple[int, str], list[int]], ranks: list[int], merged: list[Merged]
) -> tuple[dict[tuple[int, str], list[int]], list[int]]:
    """The members numbered anew without the bad ones; a pair that has none left is missing."""
    good = [index for index in range(len(ranks)) if index not in set(bad)]
    number = {index: n for n, index in enumerate(good)}
    left = {}
    for (at, name), members in of_pair.items():
        kept = [number[index] for index in members if index in number]
        if kept:
            left[(at, name)] = kept
        else:
            merged[at].missing[name] = "malformed"
    return left, [ranks[index] for index in good]


def _keep_evidence(merged: list[Merged], groups: list[tuple[int, str]], whole: Stack) -> None:
    tokens = whole.evidence
    for number, (s, p, t), (a, b) in zip(tokens.row.tolist(), tokens.ids.tolist(), tokens.logps.tolist(), strict=True):
        at, name = groups[number]
        found = {"seq": s, "position": p, "token": t, "a": a, "b": b}
        merged[at].evidence.setdefault(name, []).append(found)


def _by_rank(
    many: Stack, group: NDArray[np.int64], ranks: NDArray[np.int64]
) -> tuple[Statistics, NDArray[np.int64], NDArray[np.int64]]:
    """Each rank's own figures, with its pair's group and its number. A rank's records are pooled first."""
    both = group * (int(ranks.max()) + 1) + ranks
    keys, first, of_rank = np.unique(both, return_index=True, return_inverse=True)
    if len(keys) < len(many):
        many = pool(many, of_rank, len(keys))
        group, ranks = group[first], ranks[first]
    return Statistics.of(many, WITH_A_WORST), group, ranks


def _keep_worst(
    merged: list[Merged],
    groups: list[tuple[int, str]],
    figures: Statistics,
    group: NDArray[np.int64],
    ranks: NDArray[np.int64],
) -> None:
    """Of each statistic that has a worst side, the worst rank's own value."""
    unknown = figures.codes != 0
    for row, named in enumerate(figures.named):
        for statistic in named:
            unknown[row, [s for s, name in enumerate(WITH_A_WORST) if statistic in ("*", name)]] = True
    ranked = np.where(unknown, -np.inf, _SIGN * figures.values)
    spread = Spread.of(group, len(groups))
    table = spread.filled(ranked, -np.inf)
    slot = table.argmax(axis=1)
    known = np.take_along_axis(table, slot[:, None], axis=1)[:, 0] > -np.inf
    rank_of = np.take_along_axis(spread.filled(ranks, -1), slot, axis=1).tolist()
    value_of = np.take_along_axis(spread.filled(figures.values, 0.0), slot[:, None], axis=1)[:, 0].tolist()
    for number, (at, name) in enumerate(groups):
        if name.partition("@")[0] not in PAIRS:
            continue
        of_whole = merged[at].values
        for signal, there, value, rank in zip(
            _worst_names(name), known[number].tolist(), value_of[number], rank_of[number], strict=True
        ):
            if there and signal in of_whole:
                merged[at].worst[signal] = (value, rank)


@lru_cache(256)
def _worst_names(pair: str) -> tuple[str, ...]:
    return tuple(f"{pair}.{s}" for s in WITH_A_WORST)


_is_name = lru_cache(65_536)(valid_name)


class _Names:
    """Scalars of a batch numbered as they come; the frames of a run name the same ones in the same order."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self._known: dict[tuple[str, ...], list[int]] = {}

    def of(self, names: tuple[str, ...]) -> list[int]:
        """Their numbers; −1 for what is no signal's name."""
        found = self._known.get(names)
        if found is None:
            found = [self.number.setdefault(n, len(self.number)) if _is_name(n) else -1 for n in names]
            self._known[names] = found
        return found


def _merge_scalars(merged: list[Merged], steps: list[list[Frame]]) -> None:
    names = _Names()
    values, numbers, at_step = array("d"), array("q"), []
    for frames in steps:
        before = len(values)
        for frame in frames:
            numbers.extend(names.of(tuple(frame.scalars)))
            values.extend(frame.scalars.values())
            if frame.step_s is not None and "time.step_s" not in frame.scalars:
                numbers.extend(names.of(("time.step_s",)))
                values.append(frame.step_s)
        at_step.append(len(values) - before)
    number, value = np.frombuffer(numbers, dtype=np.int64), np.frombuffer(values, dtype=np.float64)
    step = np.repeat(np.arange(len(steps)), at_step)[number >= 0]
    number, value = number[number >= 0], value[number >= 0]
    width = len(names.number)
    if not len(number):
        return
    folded, there = _folded(value, step * width + number, len(steps) * width, _rules(tuple(names.number)))
    signals = list(names.number)
    for one, row, known in zip(merged, folded.reshape(-1, width), there.reshape(-1, width), strict=True):
        if known.all():
            one.values.update(zip(signals, row.tolist(), strict=True))
        else:
            one.values.update((signals[i], float(row[i])) for i in np.flatnonzero(known))


@lru_cache(256)
def _rules(names: tuple[str, ...]) -> dict[str, NDArray[np.intp]]:
    """How each scalar folds: rule → the numbers of its scalars. Any NaN makes the fold NaN."""
    rules = [merge_rule(name) for name in names]
    return {rule: np.array([i for i, r in enumerate(rules) if r == rule], dtype=np.intp) for rule in set(rules)}


def _folded(
    value: NDArray[np.float64], group: NDArray[np.int64], groups: int, rules: dict[str, NDArray[np.intp]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    spread = Spread.of(group, groups)
    sizes = spread.sizes
    table = spread.filled(value, 0.0)
    total = exact_sum(table)
    width = max(max(numbers) for numbers in rules.values()) + 1
    folded = (total / np.maximum(sizes, 1)).reshape(-1, width)
    for rule, numbers in rules.items():
        match rule:
            case "sum":
                folded[:, numbers] = total.reshape(-1, width)[:, numbers]
            case "max":
                folded[:, numbers] = spread.filled(value, -np.inf).max(axis=1).reshape(-1, width)[:, numbers]
            case "min":
                folded[:, numbers] = spread.filled(value, np.inf).min(axis=1).reshape(-1, width)[:, numbers]
            case "last":
                last = table[np.arange(groups), np.maximum(sizes, 1) - 1]
                folded[:, numbers] = last.reshape(-1, width)[:, numbers]
    spoilt = np.zeros(groups, dtype=bool)
    spoilt[group[np.isnan(value)]] = True
    folded[spoilt.reshape(-1, width)] = np.nan
    return folded, sizes > 0
