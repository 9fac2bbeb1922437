"""What an envelope must satisfy before anything of it is stored. Findings (NaN, clocks, steps) pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from foreshock.wire import SUPPORTED, Envelope, Frame
from foreshock_service.errors import TooLarge, Unprocessable, UpgradeRequired

RUN: Final = re.compile(r"^(?!\.+/)[A-Za-z0-9._-]{1,128}/(?!\.+\Z)[A-Za-z0-9._-]{1,128}\Z")
ID: Final = re.compile(r"^[A-Za-z0-9_-]{1,32}\Z")
WORD: Final = re.compile(r"^[A-Za-z0-9_.-]{1,32}\Z")
ROLE: Final = re.compile(r"^[A-Za-z0-9_-]{1,16}\Z")
LAUNCH: Final = re.compile(r"^[\x21-\x7e]{1,128}\Z")
BIGINT: Final = 2**63 - 1
INTEGER: Final = 2**31 - 1
MAX_WORLD: Final = 65_536


@dataclass(frozen=True)
class IngestLimits:
    """The bounds of one envelope and of one service; `settings.py` documents each."""

    max_items: int = 1024
    max_signals_per_frame: int = 512
    max_runs: int = 10_000
    watermark_min_s: float = 5.0
    default_mode: str = "observe"
    max_mode: str = "auto"


def check_envelope(envelope: Envelope, limits: IngestLimits) -> None:
    """Raises `UpgradeRequired`, `TooLarge` or `Unprocessable` naming what is wrong; O(items + signals)."""
    if envelope.protocol not in SUPPORTED:
        known = ", ".join(map(str, sorted(SUPPORTED)))
        raise UpgradeRequired(f"protocol {envelope.protocol} is not spoken here; this service speaks {known}")
    _need(RUN.match(envelope.run), "run must be project/name, each of 1-128 letters, digits, '.', '_' or '-'")
    _need(ID.match(envelope.client), "client must be 1-32 letters, digits, '_' or '-'")
    _need(LAUNCH.match(envelope.launch), "launch must be 1-128 printable ASCII characters without blanks")
    _need(0 <= envelope.sequence <= BIGINT, "sequence is out of range")
    _check_place("envelope", envelope.role, envelope.rank)
    _need(len(envelope.losses) <= 64, "losses has more than 64 reasons")
    _need(all(0 <= n <= BIGINT for n in envelope.losses.values()), "a count in losses is out of range")
    _check_expected(envelope.expected_ranks)
    if len(envelope.frames) + len(envelope.notices) > limits.max_items:
        raise TooLarge(f"more than {limits.max_items} frames and notices in one envelope")
    for frame in envelope.frames:
        _check_frame(frame, limits)
    for notice in envelope.notices:
        _check_item("notice", notice.sequence, notice.generation)
        _need(WORD.match(notice.kind), "a notice's kind must be 1-32 letters, digits, '_', '.' or '-'")
        _check_place("notice", notice.role or envelope.role, notice.rank)
        _need(notice.step is None or 0 <= notice.step <= BIGINT, "a notice's step is out of range")


def _check_frame(frame: Frame, limits: IngestLimits) -> None:
    _check_item("frame", frame.sequence, frame.generation)
    _check_place("frame", frame.role, frame.rank)
    _need(0 <= frame.step <= BIGINT, "a frame's step is out of range")
    most = limits.max_signals_per_frame
    if max(len(frame.scalars), len(frame.pairs), len(frame.semantics)) > most:
        raise TooLarge(f"more than {most} scalars or pairs in one frame")
    _need(len(frame.missing) <= 16 * most, "too many missing signals in one frame")


def _check_item(what: str, sequence: int, generation: int) -> None:
    _need(1 <= sequence <= BIGINT, f"a {what}'s sequence is out of range")
    _need(0 <= generation <= INTEGER, f"a {what}'s generation is out of range")


def _check_place(what: str, role: str, rank: int) -> None:
    _need(ROLE.match(role), f"{what}: role must be 1-16 letters, digits, '_' or '-'")
    _need(0 <= rank <= INTEGER, f"{what}: rank is out of range")


def _check_expected(expected: dict[str, int] | None) -> None:
    for role, world in (expected or {}).items():
        _need(ROLE.match(role), "expected_ranks: role must be 1-16 letters, digits, '_' or '-'")
        _need(0 <= world <= MAX_WORLD, f"expected_ranks: a role has 0 to {MAX_WORLD} ranks")
    _need(len(expected or {}) <= 16, "expected_ranks has more than 16 roles")


def _need(good: object, sentence: str) -> None:
    if not good:
        raise Unprocessable(sentence)
