"""The frames of steps, folded into what rules see: pairs pooled, scalars by the catalogue, the worst rank kept.

Many steps at once: a numpy call costs the same for one step as for 32, and it is the calls that cost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.frames.catalogue import PAIRS, merge_rule, valid_name
from foreshock.frames.catalogue import STATISTICS as CATALOGUE
from foreshock.stats.merge import STATISTICS, Statistics
from foreshock.stats.pooling import Spread, exact_sum, pool
from foreshock.stats.record import PairRecord
from foreshock.stats.stack import Stack, stack
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
    pairs: list[PairRecord | bytes] = []
    groups: list[tuple[int, str]] = []
    members: list[int] = []
    holders: list[int] = []
    for at, frames in enumerate(steps):
        number: dict[str, int] = {}
        for frame in frames:
            for name, pair in frame.pairs.items():
                group = number.get(name)
                if group is None:
                    if not _is_name(name):
                        continue
                    group = number[name] = len(groups)
                    groups.append((at, name))
                pairs.append(pair)
                members.append(group)
                holders.append(frame.rank)
    if not pairs:
        return
    many, bad = stack(pairs)
    group_N, rank_N = np.array(members, dtype=np.int64), np.array(holders, dtype=np.int64)
    if bad:
        logger.warning("%d pair records cannot be read, the first of rank %d", len(bad), holders[bad[0]])
        group_N, rank_N, groups = _without(bad, group_N, rank_N, groups, merged)
    if not groups:
        return
    # Where each pair has one record (numbered as they are), nothing needs to be pooled, and the only rank is the worst.
    alone = len(groups) == len(many)
    whole = many if alone else pool(many, group_N, len(groups))
    figures = Statistics.of(whole)
    for number_of, (at, name) in enumerate(groups):
        figures.fill(number_of, f"{name}.", merged[at].values, merged[at].missing)
    _keep_evidence(merged, groups, whole)
    of_groups = figures.only(WITH_A_WORST)
    if alone:
        by_rank, of_rank, rank = of_groups, group_N, rank_N
    else:
        by_rank, of_rank, rank = _by_rank(many, group_N, rank_N)
    _keep_worst(merged, groups, of_groups, by_rank, of_rank, rank)


def _without(
    bad: list[int],
    group_N: NDArray[np.int64],
    rank_N: NDArray[np.int64],
    groups: list[tuple[int, str]],
    merged: list[Merged],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[tuple[int, str]]]:
    """Groups and ranks of the records that are left, numbered anew; a pair that has none left is missing."""
    group_N, rank_N = np.delete(group_N, bad), np.delete(rank_N, bad)
    left = np.bincount(group_N, minlength=len(groups)) > 0
    for number in np.flatnonzero(~left).tolist():
        at, name = groups[number]
        merged[at].missing[name] = "malformed"
    return (np.cumsum(left) - 1)[group_N], rank_N, [groups[number] for number in np.flatnonzero(left).tolist()]


def _keep_evidence(merged: list[Merged], groups: list[tuple[int, str]], whole: Stack) -> None:
    tokens = whole.evidence
    ends = np.searchsorted(tokens.row, np.arange(len(groups) + 1)).tolist()
    ids, logps = tokens.ids.tolist(), tokens.logps.tolist()
    for number, (at, name) in enumerate(groups):
        low, high = ends[number], ends[number + 1]
        if low < high:
            merged[at].evidence[name] = [
                {"seq": s, "position": p, "token": t, "a": a, "b": b}
                for (s, p, t), (a, b) in zip(ids[low:high], logps[low:high], strict=True)
            ]


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
    whole: Statistics,
    figures: Statistics,
    group: NDArray[np.int64],
    ranks: NDArray[np.int64],
) -> None:
    """Of each statistic that has a worst side, the worst rank's own value."""
    ranked = np.where(_known(figures), _SIGN * figures.values, -np.inf)
    spread = Spread.of(group, len(groups))
    table = spread.filled(ranked, -np.inf)
    slot = table.argmax(axis=1)
    known = _known(whole)
    known &= np.take_along_axis(table, slot[:, None], axis=1)[:, 0] > -np.inf
    rank_of = np.take_along_axis(spread.filled(ranks, -1), slot, axis=1).tolist()
    value_of = np.take_along_axis(spread.filled(figures.values, 0.0), slot[:, None], axis=1)[:, 0].tolist()
    every = set(np.flatnonzero(known.all(axis=1)).tolist())
    for number, (at, name) in enumerate(groups):
        if name.partition("@")[0] not in PAIRS:
            continue
        found = zip(_worst_names(name), zip(value_of[number], rank_of[number], strict=True), strict=True)
        merged[at].worst.update(found if number in every else compress(found, known[number].tolist()))


def _known(figures: Statistics) -> NDArray[np.bool_]:
    """Which statistics of which records have a value."""
    known = np.asarray(figures.codes == 0, dtype=np.bool_)
    for row, named in enumerate(figures.named):
        for statistic in named:
            known[row, [s for s, name in enumerate(figures.names) if statistic in ("*", name)]] = False
    return known


@lru_cache(256)
def _worst_names(pair: str) -> tuple[str, ...]:
    return tuple(f"{pair}.{s}" for s in WITH_A_WORST)


_is_name = lru_cache(65_536)(valid_name)


def _merge_scalars(merged: list[Merged], steps: list[list[Frame]]) -> None:
    frames = [frame for some in steps for frame in some]
    if not frames:
        return
    # The frames of a run name the same scalars in the same order, so that most are one rectangle of values.
    alike: dict[tuple[str, ...], list[int]] = {}
    for row, frame in enumerate(frames):
        alike.setdefault(tuple(frame.scalars), []).append(row)
    number: dict[str, int] = {}
    for names in (*alike, ("time.step_s",)):
        for name in names:
            if name not in number and _is_name(name):
                number[name] = len(number)
    value, there = np.zeros((len(frames), len(number))), np.zeros((len(frames), len(number)), dtype=bool)
    for names, rows in alike.items():
        found = np.fromiter(
            chain.from_iterable([frames[row].scalars.values() for row in rows]), np.float64, len(rows) * len(names)
        )
        known = [place for place, name in enumerate(names) if name in number]
        where = np.ix_(rows, [number[names[place]] for place in known])
        value[where], there[where] = found.reshape(len(rows), -1)[:, known], True
    seconds = np.array([math.nan if frame.step_s is None else frame.step_s for frame in frames])
    column = number["time.step_s"]
    added = ~there[:, column] & np.array([frame.step_s is not None for frame in frames], dtype=bool)
    value[added, column], there[added, column] = seconds[added], True
    spread = Spread.of(np.repeat(np.arange(len(steps)), list(map(len, steps))), len(steps))
    folded, present = _folded(value, there, spread, _rules(tuple(number)))
    signals = list(number)
    for one, row_of, known_of in zip(merged, folded, present, strict=True):
        if known_of.all():
            one.values.update(zip(signals, row_of.tolist(), strict=True))
        else:
            one.values.update((signals[i], float(row_of[i])) for i in np.flatnonzero(known_of))


@lru_cache(256)
def _rules(names: tuple[str, ...]) -> dict[str, NDArray[np.intp]]:
    """How each scalar folds: rule → the numbers of its scalars. Any NaN makes the fold NaN."""
    rules = [merge_rule(name) for name in names]
    return {rule: np.array([i for i, r in enumerate(rules) if r == rule], dtype=np.intp) for rule in set(rules)}


def _folded(
    value: NDArray[np.float64], there: NDArray[np.bool_], spread: Spread, rules: dict[str, NDArray[np.intp]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[steps, scalars] folded from [frames, scalars], and which of them any frame had."""
    table, kept = spread.filled(value, 0.0), spread.filled(there, False)
    total, sizes = exact_sum(table), kept.sum(axis=1)
    folded = total / np.maximum(sizes, 1)
    for rule, numbers in rules.items():
        match rule:
            case "sum":
                folded[:, numbers] = total[:, numbers]
            case "max":
                folded[:, numbers] = np.where(kept[:, :, numbers], table[:, :, numbers], -np.inf).max(axis=1)
            case "min":
                folded[:, numbers] = np.where(kept[:, :, numbers], table[:, :, numbers], np.inf).min(axis=1)
            case "last":
                last = kept.shape[1] - 1 - kept[:, ::-1, numbers].argmax(axis=1)
                folded[:, numbers] = np.take_along_axis(table[:, :, numbers], last[:, None], axis=1)[:, 0]
    spoilt = (np.isnan(table) & kept).any(axis=1)
    folded[spoilt] = np.nan
    return folded, sizes > 0
