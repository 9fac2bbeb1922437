"""What a rollout engine told of its samples, kept by sample id until the trainer asks: the join of the two sides.

Nothing is re-tokenised and nothing is guessed: a sample whose id is unknown, whose length or whose token ids are not
the trainer's is left out of the pair and counted by reason.

Legend: B rows of the trainer's batch, T response positions.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from foreshock.wire.envelope import Semantics

if TYPE_CHECKING:
    from foreshock.monitor import Monitor

SAMPLE_BYTES: Final = 400
"""Reckoned for a sample beside its tokens (8 bytes each)."""
REMEMBERED_IDS: Final = 100_000
"""Ids without a sample that are remembered with the reason, to tell them from ids that were never seen."""
UNMATCHED: Final = ("unknown", "evicted", "length", "token_ids", "semantics")
TRAINER: Final = Semantics(engine="trainer", source="rescore", truncation="none", normaliser="full_vocabulary")
"""What a trainer's log-probs are taken for where nothing else is said: of the whole vocabulary, temperature unsaid."""
_NUMBER = re.compile(r"(\d+)$")


class Span(NamedTuple):
    """Tokens [start, end) of a response were sampled under this version label."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as its engine told it: `token_ids` int32 and natural `log_probs` float32, one per sampled token."""

    id: str
    token_ids: np.ndarray[Any, Any]
    log_probs: np.ndarray[Any, Any]
    semantics: Semantics
    engine: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampler's settings as they were asked for."""
    spans: tuple[Span, ...] = ()
    finish_reason: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int = 0


class Aligned(NamedTuple):
    """The engine's side of a trainer's batch. Tensors live where the trainer's log-probs do."""

    log_probs_BT: Any
    """float32; 0 where nothing matched."""
    mask_BT: Any
    """bool: sampled tokens of the rows that matched."""
    lags_BT: Any
    """int64, versions behind the trainer; None where a label holds no number or none was given."""
    groups: list[tuple[Semantics, list[int]]]
    """Matched rows by what their log-probs mean."""
    counts: Counter[str]
    """Rows: `matched`, `unasked` (the engine was not asked for their log-probs), and the reasons of `UNMATCHED`."""


class Samples:
    """Bounded by `max_bytes`: the oldest go first and are counted as evicted. Safe to use from several threads."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.counts: Counter[str] = Counter()
        """Over the life of the process: kept, replaced, evicted, unasked, and the reasons of `UNMATCHED`."""
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._absent: OrderedDict[str, str] = OrderedDict()
        """Sample id → why there is none: evicted or unasked."""
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._samples)

    def put(self, sample: Sample) -> None:
        """Keeps a sample; one of the same id is replaced and counted. Raises ValueError for ids without log-probs."""
        if len(sample.token_ids) != len(sample.log_probs):
            raise ValueError(f"{len(sample.token_ids)} token ids and {len(sample.log_probs)} log-probs")
        with self._lock:
            old = self._samples.pop(sample.id, None)
            if old is not None:
                self.counts["replaced"] += 1
                self._bytes -= _bytes(old)
            self._samples[sample.id] = sample
            self._bytes += _bytes(sample)
            self.counts["kept"] += 1
            while self._bytes > self.max_bytes and self._samples:
                gone, evicted = self._samples.popitem(last=False)
                self._bytes -= _bytes(evicted)
                self.counts["evicted"] += 1
                self._remember(gone, "evicted")

    def pass_over(self, sample_id: str) -> None:
        """Remembers that the engine was not asked for the log-probs of this sample."""
        with self._lock:
            self._remember(sample_id, "unasked")

    def _remember(self, sample_id: str, reason: str) -> None:
        self._absent[sample_id] = reason
        if len(self._absent) > REMEMBERED_IDS:
            self._absent.popitem(last=False)

    def get(self, sample_id: str) -> Sample | None:
        """The sample of that id, or None."""
        with self._lock:
            return self._samples.get(sample_id)

    def forget(self, sample_ids: Sequence[str | Sequence[str]]) -> None:
        """Lets samples go that have been trained on."""
        with self._lock:
            for sample_id in _flat(sample_ids):
                self._absent.pop(sample_id, None)
                sample = self._samples.pop(sample_id, None)
                self._bytes -= 0 if sample is None else _bytes(sample)

    def align(
        self,
        sample_ids: Sequence[str | Sequence[str]],
        token_ids: Any,
        mask: Any,
        *,
        version: int | None = None,
        device: Any = None,
    ) -> Aligned:
        """The engine's log-probs at the places of `token_ids` [B, T] where `mask` is not 0.

        `sample_ids[b]` names the sample of row b, or in their order those of a row that took several calls. A row
        matches when its masked token ids are the engine's, all of them. `version` is the trainer's present version:
        the number at the end of a label is then its lag. Reads `token_ids` and `mask` on the host: where they live on
        a device, that waits for it.
        """
        import torch

        tokens_BT, mask_BT = _on_host(token_ids), _on_host(mask) != 0
        if tokens_BT.shape != mask_BT.shape or len(sample_ids) != len(tokens_BT):
            raise ValueError(
                f"{len(sample_ids)} ids for token ids {tokens_BT.shape} under a mask {mask_BT.shape}: they do not fit"
            )
        log_probs_BT = np.zeros(tokens_BT.shape, np.float32)
        matched_BT = np.zeros(tokens_BT.shape, bool)
        lags_BT = None if version is None else np.zeros(tokens_BT.shape, np.int64)
        groups: dict[Semantics, list[int]] = {}
        counts: Counter[str] = Counter()
        for row, ids in enumerate(sample_ids):
            parts, reason = self._parts(ids, tokens_BT[row][mask_BT[row]])
            counts[reason or "matched"] += 1
            if reason:
                continue
            places = mask_BT[row]
            log_probs_BT[row, places] = np.concatenate([part.log_probs for part in parts])
            matched_BT[row] = places
            groups.setdefault(parts[0].semantics, []).append(row)
            if lags_BT is not None and version is not None:
                lags = _lags(parts, version)
                if lags is None:
                    lags_BT = None
                else:
                    lags_BT[row, places] = lags
        with self._lock:
            self.counts.update({reason: n for reason, n in counts.items() if reason != "matched"})
        return Aligned(
            torch.from_numpy(log_probs_BT).to(device),
            torch.from_numpy(matched_BT).to(device),
            None if lags_BT is None else torch.from_numpy(lags_BT),
            list(groups.items()),
            counts,
        )

    def observe(
        self,
        monitor: Monitor,
        sample_ids: Sequence[str | Sequence[str]],
        log_probs: Any,
        token_ids: Any,
        mask: Any,
        *,
        pair: str = "mismatch",
        semantics: Semantics = TRAINER,
        version: int | None = None,
        **more: Any,
    ) -> Counter[str]:
        """Observes the trainer's `log_probs` [B, T] against what the engine told of the same samples; returns counts.

        `semantics` are the trainer's; rows are observed by what the engine's mean, so that one odd request does not
        silence the others. Rows that the engine was asked for and that did not match become the scalar
        `join.unmatched_share`, those it was not asked for `join.unasked_share`, and rows whose token ids
        or lengths differ a notice, which `semantics_differ` reports. Without any match the pair is missing. `more` goes
        to `Monitor.observe`. Raises ValueError where shapes do not fit.
        """
        found = self.align(sample_ids, token_ids, mask, version=version, device=getattr(log_probs, "device", None))
        if not found.groups:
            monitor.observe(pair, log_probs, None, mask)
        for theirs, rows in found.groups:
            chosen_BT = found.mask_BT
            if len(found.groups) > 1:
                import torch

                chosen_BT = torch.zeros_like(found.mask_BT)
                chosen_BT[rows] = found.mask_BT[rows]
            monitor.observe(
                pair, log_probs, found.log_probs_BT, chosen_BT, token_ids=token_ids,
                semantics={"a": semantics, "b": theirs}, versions=found.lags_BT, **more,
            )  # fmt: skip
        _tell(monitor, found)
        return found.counts

    def _parts(self, ids: str | Sequence[str], tokens: np.ndarray[Any, Any]) -> tuple[list[Sample], str]:
        """The samples of one row, and why they do not match ("" where they do)."""
        parts = []
        for sample_id in [ids] if isinstance(ids, str) else ids:
            sample = self.get(sample_id)
            if sample is None:
                return [], self._absent.get(sample_id, "unknown")
            parts.append(sample)
        if not parts:
            return [], "unknown"
        if sum(len(part.token_ids) for part in parts) != len(tokens):
            return [], "length"
        if not np.array_equal(np.concatenate([part.token_ids for part in parts]), tokens):
            return [], "token_ids"
        return parts, "semantics" if len({part.semantics for part in parts}) > 1 else ""


def _tell(monitor: Monitor, found: Aligned) -> None:
    """The share of rows that did not match, the staleness of those that did, and misalignment as a finding."""
    rows, unasked = sum(found.counts.values()), found.counts["unasked"]
    if not rows:
        return
    scalars: dict[str, float] = {"join.unasked_share": unasked / rows} if unasked else {}
    if rows > unasked:
        scalars["join.unmatched_share"] = 1.0 - found.counts["matched"] / (rows - unasked)
    if found.lags_BT is not None and found.groups:
        lags = found.lags_BT[found.mask_BT.cpu()]
        if lags.numel():
            scalars |= {"staleness.mean": float(lags.double().mean()), "staleness.max": float(lags.max())}
    monitor.log(scalars)
    wrong = found.counts["length"] + found.counts["token_ids"]
    if wrong:
        detail = f"{wrong} of {rows} samples of the engine have other lengths or token ids than the trainer's rows."
        monitor.notice("semantics", detail=detail, length=found.counts["length"], token_ids=found.counts["token_ids"])


def _lags(parts: Sequence[Sample], version: int) -> np.ndarray[Any, Any] | None:
    """Versions behind `version` per token; None where a label holds no number, a span lacks, or it is ahead."""
    lags = []
    for part in parts:
        lag = np.full(len(part.token_ids), -1, np.int64)
        for span in part.spans:
            number = _NUMBER.search(span.version)
            if number is not None:
                lag[span.start : span.end] = version - int(number[1])
        lags.append(lag)
    joined = np.concatenate(lags)
    return None if (joined < 0).any() else joined


def _on_host(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _flat(ids: Sequence[str | Sequence[str]]) -> list[str]:
    return [one for row in ids for one in ([row] if isinstance(row, str) else row)]


def _bytes(sample: Sample) -> int:
    return SAMPLE_BYTES + sample.token_ids.nbytes + sample.log_probs.nbytes
