"""What a well-typed envelope must also be before anyone stores it: within bounds, with names that may be stored."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

import msgspec

from foreshock.frames.catalogue import MAX_NAME, valid_name
from foreshock.frames.identity import LAUNCH, RUN_NAME
from foreshock.stats.packed import reasons_of
from foreshock.stats.record import PairRecord
from foreshock.wire.envelope import Envelope, Frame, Notice, Semantics
from foreshock.wire.errors import Malformed, TooLarge

_CLIENT = re.compile(r"^[0-9a-f]{32}\Z")
_WORD = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")
_INT64 = 1 << 63
_INT32 = 1 << 31
MAX_TEXT = 64 << 10
_MOST_KNOWN = 65_536
_known_names: set[str] = set()
"""Names that were found valid: every frame of a run brings the same ones."""
_empty = msgspec.structs.astuple(PairRecord())
_lists_of = attrgetter(
    *(n for n, v in zip(PairRecord.__struct_fields__, _empty, strict=True) if isinstance(v, list | bytes))
)
_counts_of = attrgetter(*(n for n, v in zip(PairRecord.__struct_fields__, _empty, strict=True) if isinstance(v, int)))


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one envelope."""

    body_bytes: int = 8 << 20
    inflated_bytes: int = 32 << 20
    items: int = 4096
    signals: int = 4096
    """Scalars, or missing signals, of one frame."""
    pairs: int = 64
    sketch: int = 1 << 16
    """Entries of any list in a pair record."""
    nodes: int = 20_000
    """Values in a notice's data."""


def check(envelope: Envelope, limits: Limits) -> None:
    """Raises TooLarge or Malformed; what is odd but storable (NaN, absurd clocks) passes, for it is a finding."""
    if len(envelope.frames) + len(envelope.notices) > limits.items:
        raise TooLarge(f"{len(envelope.frames) + len(envelope.notices)} items, at most {limits.items} are taken")
    if not RUN_NAME.match(envelope.run):
        raise Malformed(f"run must be project/name, not {envelope.run[:300]!r}")
    if not _CLIENT.match(envelope.client):
        raise Malformed("client must be 32 hexadecimal digits")
    if not LAUNCH.match(envelope.launch):
        raise Malformed("launch must be 1 to 128 printable characters without blanks")
    _text("sdk", envelope.sdk, 64)
    _place(envelope.role, envelope.rank)
    _count("sequence", envelope.sequence)
    _counts("losses", envelope.losses, 100)
    _counts("expected_ranks", envelope.expected_ranks or {}, 16)
    seen: set[int] = set()
    for frame in envelope.frames:
        _item(frame, envelope.sequence, seen)
        _frame(frame, limits)
    for notice in envelope.notices:
        _item(notice, envelope.sequence, seen)
        _notice(notice, limits)


def _item(item: Frame | Notice, highest: int, seen: set[int]) -> None:
    _count("sequence", item.sequence)
    _count("generation", item.generation, _INT32)
    if item.sequence > highest:
        raise Malformed(f"item {item.sequence} is above the envelope's sequence {highest}")
    if item.sequence in seen:
        raise Malformed(f"two items have sequence {item.sequence}")
    seen.add(item.sequence)
    if item.step is not None and not -_INT64 <= item.step < _INT64:
        raise Malformed("step does not fit 64 bits")


def _frame(frame: Frame, limits: Limits) -> None:
    _place(frame.role, frame.rank)
    if len(frame.pairs) > limits.pairs:
        raise TooLarge(f"{len(frame.pairs)} pairs in a frame, at most {limits.pairs} are taken")
    signals = max(len(frame.scalars), len(frame.missing))
    if signals > limits.signals:
        raise TooLarge(f"{signals} signals in a frame, at most {limits.signals} are taken")
    if not (_known_names.issuperset(frame.scalars) and _known_names.issuperset(frame.pairs)):
        _learn_names((*frame.scalars, *frame.pairs))
    if frame.missing or frame.semantics:
        _learn_names((*frame.missing, *frame.semantics))
    for reason in frame.missing.values():
        if not _WORD.match(reason):
            raise Malformed(f"not a reason: {reason[:100]!r}")
    for pair in frame.pairs.values():
        if isinstance(pair, bytes):
            _block(pair)
        else:
            _record(pair, limits)
    for sides in frame.semantics.values():
        if not set(sides) <= {"a", "b"}:
            raise Malformed("semantics must name the sides a and b")
        for said in sides.values():
            _semantics(said)


def _learn_names(names: tuple[str, ...]) -> None:
    """Raises Malformed for what is no signal name; remembers the others, a bounded number of them."""
    for name in names:
        if not valid_name(name):
            raise Malformed(f"not a signal name: {name[: MAX_NAME + 1]!r}")
    if len(_known_names) > _MOST_KNOWN:
        _known_names.clear()
    _known_names.update(names)


def _block(block: bytes) -> None:
    try:
        reasons = reasons_of(block)
    except ValueError as error:
        raise Malformed(str(error)[:300]) from None
    if reasons:
        _missing(reasons)


def _record(record: PairRecord, limits: Limits) -> None:
    if max(map(len, _lists_of(record))) > limits.sketch:
        raise TooLarge(f"a list of more than {limits.sketch} entries in a pair record")
    counts = _counts_of(record)
    if not (min(counts) >= -_INT64 and max(counts) < _INT64):
        raise Malformed("a count in a pair record does not fit 64 bits")
    if record.missing:
        _missing(record.missing)


def _missing(missing: dict[str, str]) -> None:
    if len(missing) > 256:
        raise TooLarge("more than 256 missing statistics")
    for statistic, reason in missing.items():
        if not (statistic == "*" or valid_name(statistic)) or not _WORD.match(reason):
            raise Malformed("not a missing statistic with its reason")


def _semantics(said: Semantics) -> None:
    for name in said.__struct_fields__:
        value = getattr(said, name)
        if isinstance(value, str):
            _text(name, value, 256)


def _notice(notice: Notice, limits: Limits) -> None:
    if not _WORD.match(notice.kind):
        raise Malformed(f"not a notice's kind: {notice.kind[:100]!r}")
    if notice.role:
        _place(notice.role, notice.rank)
    budget = [limits.nodes]
    _plain(notice.data, 16, budget)


def _plain(value: Any, depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0:
        raise TooLarge("too many values in a notice's data")
    if depth <= 0:
        raise Malformed("a notice's data is nested too deeply")
    if value is None or isinstance(value, bool | float):
        return
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise Malformed("an integer in a notice's data does not fit 64 bits")
    elif isinstance(value, str):
        _text("a text in a notice's data", value, MAX_TEXT)
    elif isinstance(value, list):
        for item in value:
            _plain(item, depth - 1, budget)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Malformed("keys of a notice's data must be strings")
            _text("a key in a notice's data", key, 1024)
            _plain(item, depth - 1, budget)
    else:
        raise Malformed(f"a notice's data may not hold {type(value).__name__}")


def _place(role: str, rank: int) -> None:
    if not _WORD.match(role) or len(role) > 16:
        raise Malformed(f"not a role: {role[:100]!r}")
    _count("rank", rank, _INT32)


def _counts(what: str, counts: dict[str, int], most: int) -> None:
    if len(counts) > most:
        raise TooLarge(f"more than {most} entries in {what}")
    for name, value in counts.items():
        if not _WORD.match(name):
            raise Malformed(f"not a name in {what}: {name[:100]!r}")
        _count(what, value)


def _count(what: str, value: int, below: int = _INT64) -> None:
    if not 0 <= value < below:
        raise Malformed(f"{what} must be from 0 to {below - 1}")


def _text(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise TooLarge(f"{what} is longer than {most} characters")
    # PostgreSQL's text cannot hold NUL, and no honest client sends it.
    if "\x00" in text:
        raise Malformed(f"{what} holds a NUL character")
