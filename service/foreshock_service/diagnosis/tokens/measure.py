"""Batches → every step's pair statistics, by the SDK's own code (`foreshock.stats`), and what a step says beside them.

Needs torch, as `foreshock.stats.pair` does. Mergeable: `merged` of parts, in any division, gives the same records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from foreshock.dumps.schema import PAIR_SIDES
from foreshock.frames.comparable import differences
from foreshock.stats.merge import merge, statistics
from foreshock.stats.record import EvidenceToken, PairRecord
from foreshock.wire.envelope import Semantics
from foreshock_service.diagnosis.tokens.batches import Array, Batch, DumpError, StepKey

MERGE_EVERY = 64


@dataclass
class StepMeasure:
    """One step, or a part of it."""

    records: dict[str, list[PairRecord]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """pair → rank → tokens, Σ|δ|, Σδ²"""
    lag: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """tokens, Σ lag, largest lag, of the tokens whose lag is known"""
    tokens: int = 0

    def add(self, batch: Batch) -> None:
        """Adds a batch."""
        self.tokens += int(np.count_nonzero(batch.columns["mask"]))
        for pair in PAIR_SIDES:
            sides = batch.sides(pair)
            if sides is None:
                continue
            why = _not_comparable(pair, batch)
            if why is not None:
                self.missing[pair] = why
                continue
            records = self.records.setdefault(pair, [])
            records.append(record_of(batch, *sides))
            if len(records) >= MERGE_EVERY:
                records[:] = [merge(records)]
            self._add_rank(pair, batch)
        lag = batch.columns.get("version_lag")
        if lag is not None and batch.optimizer_step == 0:
            known = lag[batch.columns["mask"] & np.isfinite(lag.astype(np.float64))].astype(np.float64)
            if known.size:
                self.lag = [self.lag[0] + known.size, self.lag[1] + known.sum(), max(self.lag[2], known.max())]

    def _add_rank(self, pair: str, batch: Batch) -> None:
        counted = batch.counted(pair)
        if counted is not None:
            d = counted.delta
            sums = self.ranks.setdefault(pair, {}).setdefault(batch.who, [0.0, 0.0, 0.0])
            for index, value in enumerate((d.size, np.abs(d).sum(), (d * d).sum())):
                sums[index] += float(value)

    def absorb(self, other: StepMeasure) -> None:
        """Adds another part of the same step."""
        self.tokens += other.tokens
        self.missing |= other.missing
        for pair, records in other.records.items():
            self.records.setdefault(pair, []).extend(records)
        for pair, ranks in other.ranks.items():
            for rank, sums in ranks.items():
                mine = self.ranks.setdefault(pair, {}).setdefault(rank, [0.0, 0.0, 0.0])
                mine[:] = [x + y for x, y in zip(mine, sums, strict=True)]
        self.lag = [self.lag[0] + other.lag[0], self.lag[1] + other.lag[1], max(self.lag[2], other.lag[2])]

    def values(self) -> dict[str, float]:
        """`<pair>.<statistic>` and `staleness.*`, as the service stores of a step."""
        found: dict[str, float] = {}
        for pair, records in self.records.items():
            found |= {f"{pair}.{name}": value for name, value in statistics(merge(records)).values.items()}
        if self.lag[0]:
            found |= {"staleness.mean": self.lag[1] / self.lag[0], "staleness.max": self.lag[2]}
        return found

    def evidence(self) -> dict[str, list[EvidenceToken]]:
        """The worst tokens of each pair."""
        return {pair: merge(records).evidence() for pair, records in self.records.items()}


Measured = dict[StepKey, StepMeasure]


def measure(batches: Iterable[Batch]) -> Measured:
    """Every step of the batches; the records of each are merged into one."""
    steps: Measured = {}
    for batch in batches:
        steps.setdefault(batch.key, StepMeasure()).add(batch)
    for step in steps.values():
        step.records = {pair: [merge(records)] for pair, records in step.records.items()}
    return steps


def merged(parts: Iterable[Measured]) -> Measured:
    """One for all, in the order of the parts."""
    whole: Measured = {}
    for part in parts:
        for key, step in part.items():
            whole.setdefault(key, StepMeasure()).absorb(step)
    return whole


def record_of(batch: Batch, a: Array, b: Array) -> PairRecord:
    """The pair's record, as the SDK would have sent it of these tokens. Raises DumpError without torch."""
    try:
        import torch

        from foreshock.stats.pair import PairAccumulator
    except ImportError:
        raise DumpError("diagnosing dumps needs torch, a CPU build is enough: pip install torch") from None
    columns = batch.columns
    tokens = columns.get("token")
    first = batch.edges[:-1]
    samples = columns["sample"][first] if "sample" in columns else np.arange(first.size)
    accumulator = PairAccumulator()
    accumulator.observe(
        torch.from_numpy(np.array(a)),
        torch.from_numpy(np.array(b)),
        torch.from_numpy(np.array(columns["mask"])),
        cu_seqlens=batch.edges.tolist(),
        seq_ids=np.nan_to_num(samples.astype(np.float64), nan=-1).astype(np.int64).tolist(),
        token_ids=None if tokens is None else torch.from_numpy(np.nan_to_num(tokens, nan=-1).astype(np.int64)),
        clip_range=batch.clip,
        split=batch.piece,
    )
    return accumulator.record()


def _not_comparable(pair: str, batch: Batch) -> str | None:
    """Why this pair of this batch proves nothing, in the words of SIGNALS.md."""
    if pair == "policy" and batch.old_source not in ("", "same_weights"):
        return batch.old_source
    said = batch.about.semantics.get(pair, {})
    if len(said) == 2:
        try:
            sides = {side: msgspec.convert(fields, Semantics) for side, fields in said.items()}
        except msgspec.ValidationError:
            return None
        if differences(sides["a"], sides["b"]):
            return "semantics_differ"
    return None
