"""The frames of one step, folded into what rules see: pairs pooled, scalars by the catalogue, the worst rank kept."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from foreshock.frames.catalogue import find, merge_rule, valid_name
from foreshock.stats.merge import STATISTICS, PairStatistics, merge, statistics
from foreshock.stats.record import PairRecord
from foreshock.wire import Frame

logger = logging.getLogger(__name__)


@dataclass
class Merged:
    """One step over all its ranks; names are full signal names."""

    values: dict[str, float] = field(default_factory=dict)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def merge_frames(frames: Sequence[Frame]) -> Merged:
    """Folds the frames of one step (any order, one or more a rank). Never raises for what a frame holds.

    A pair record that cannot be read is left out, and the pair is missing as `malformed` where none is left.
    """
    merged = Merged()
    ordered = sorted(frames, key=lambda f: (f.role, f.rank, f.sequence))
    for name, records in _pairs(ordered).items():
        _merge_pair(merged, name, records)
    for name, values in _scalars(ordered).items():
        _merge_scalar(merged, name, values)
    for frame in ordered:
        for name, reason in frame.missing.items():
            if name not in merged.values:
                merged.missing.setdefault(name, reason)
    return merged


def _pairs(frames: Sequence[Frame]) -> dict[str, list[tuple[int, PairRecord]]]:
    found: dict[str, list[tuple[int, PairRecord]]] = defaultdict(list)
    for frame in frames:
        for name, record in frame.pairs.items():
            if valid_name(name):
                found[name].append((frame.rank, record))
    return found


def _merge_pair(merged: Merged, name: str, records: list[tuple[int, PairRecord]]) -> None:
    by_rank: dict[int, list[PairRecord]] = defaultdict(list)
    for rank, record in records:
        by_rank[rank].append(record)
    per_rank: dict[int, tuple[PairRecord, PairStatistics]] = {}
    for rank, parts in by_rank.items():
        try:
            pooled = merge(parts) if len(parts) > 1 else parts[0]
            per_rank[rank] = (pooled, statistics(pooled, None if len(by_rank) == 1 else _with_a_worst(name)))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            logger.warning("the %s record of rank %d cannot be read: %s", name, rank, error)
    if not per_rank:
        merged.missing[name] = "malformed"
        return
    whole = next(iter(per_rank.values()))[1]
    if len(per_rank) > 1:
        try:
            whole = statistics(merge([record for record, _ in per_rank.values()]))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            logger.warning("the %s records of %d ranks do not go together: %s", name, len(per_rank), error)
            merged.missing[name] = "malformed"
            return
    merged.values.update({f"{name}.{s}": float(v) for s, v in whole.values.items()})
    merged.missing.update({f"{name}.{s}": reason for s, reason in whole.missing.items()})
    if whole.evidence:
        merged.evidence[name] = [
            {"seq": t.sequence, "position": t.position, "token": t.token, "a": t.a, "b": t.b} for t in whole.evidence
        ]
    for statistic in (s for s in whole.values if s in _with_a_worst(name)):
        _keep_worst(merged, f"{name}.{statistic}", {r: s.values.get(statistic) for r, (_, s) in per_rank.items()})


@lru_cache(256)
def _with_a_worst(pair: str) -> frozenset[str]:
    """The statistics of which the worst rank's own figure is kept."""
    return frozenset(s for s in STATISTICS if (entry := find(f"{pair}.{s}")) is not None and entry.worst)


def _keep_worst(merged: Merged, signal: str, by_rank: Mapping[int, float | None]) -> None:
    entry = find(signal)
    if entry is None or not entry.worst:
        return
    sign = 1.0 if entry.worst == "max" else -1.0
    known = [(v, rank) for rank, v in by_rank.items() if v is not None]
    if known:
        merged.worst[signal] = max(known, key=lambda k: math.inf if math.isnan(k[0]) else sign * k[0])


def _scalars(frames: Sequence[Frame]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for frame in frames:
        for name, value in frame.scalars.items():
            if valid_name(name):
                found[name].append(float(value))
        if frame.step_s is not None and "time.step_s" not in frame.scalars:
            found["time.step_s"].append(float(frame.step_s))
    return found


_FOLDS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def _merge_scalar(merged: Merged, name: str, values: list[float]) -> None:
    # max() and min() drop or keep a NaN by its place in the list, and fsum raises on inf - inf.
    if any(math.isnan(v) for v in values):
        merged.values[name] = math.nan
        return
    fold = _FOLDS.get(merge_rule(name), _FOLDS["mean"])
    try:
        merged.values[name] = fold(values)
    except (ValueError, OverflowError):
        merged.values[name] = sum(values) / (len(values) if merge_rule(name) == "mean" else 1)
