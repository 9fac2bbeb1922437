"""TensorBoard event files: TFRecords of `Event` messages, read without TensorFlow; checksums verified, damage noted.

ROLL, HF and slime write them. Files of one folder are merged by wall time, so that a restarted run reads as it went.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from foreshock_service.check.readers import protobuf
from foreshock_service.check.readers.base import Notes, Row
from foreshock_service.check.readers.protobuf import blob, real, signed
from foreshock_service.check.readers.source import opened

LARGEST: Final = 1 << 20
"""Bytes; a larger event is an image or a graph and is passed over unread."""
DT_FLOAT, DT_DOUBLE = 1, 2
CUT: Final = "The event file is cut or damaged; what came before was read."


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE: Final = _table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecords."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def looks_like(head: bytes) -> bool:
    """True where the head is a record's length with its checksum."""
    return len(head) >= 12 and struct.unpack("<I", head[8:12])[0] == masked_crc32c(head[:8])


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row a scalar."""
    for _, row in _timed(stream, notes):
        yield row


def merged(paths: Sequence[Path], notes: Notes) -> Iterator[Row]:
    """The rows of several files in the order in which they were written. Raises Unreadable."""
    with ExitStack() as stack:
        streams = [stack.enter_context(opened(path, notes)) for path in paths]
        for _, row in heapq.merge(*(_timed(s, notes) for s in streams), key=lambda timed: timed[0]):
            yield row


def _timed(stream: BinaryIO, notes: Notes) -> Iterator[tuple[float, Row]]:
    for record in _records(stream, notes):
        try:
            yield from _scalars(record)
        except protobuf.Malformed:
            notes.add("An event is damaged and was skipped.")


def _records(stream: BinaryIO, notes: Notes) -> Iterator[bytes]:
    while head := stream.read(12):
        if len(head) < 12 or not looks_like(head):
            notes.add(CUT)
            return
        (length,) = struct.unpack("<Q", head[:8])
        if length > LARGEST:
            left = length + 4
            while left:
                passed = len(stream.read(min(left, LARGEST)))
                if not passed:
                    notes.add(CUT)
                    return
                left -= passed
            continue
        data, check = stream.read(length), stream.read(4)
        if len(data) < length or len(check) < 4:
            notes.add(CUT)
            return
        if struct.unpack("<I", check)[0] != masked_crc32c(data):
            notes.add("An event fails its checksum and was skipped.")
            continue
        yield data


def _scalars(event: bytes) -> Iterator[tuple[float, Row]]:
    wall, step, summaries = 0.0, 0, []
    for field, _, value in protobuf.fields(event):
        if field == 1:
            wall = real(value)
        elif field == 2:
            step = signed(value)
        elif field == 5:
            summaries.append(blob(value))
    for summary in summaries:
        values = {}
        for field, _, value in protobuf.fields(summary):
            if field == 1 and (told := _tagged(blob(value))):
                values[told[0]] = told[1]
        if values and step >= 0:
            yield wall, Row(step, values)


def _tagged(value: bytes) -> tuple[str, float] | None:
    tag, told = None, None
    for field, wire, inner in protobuf.fields(value):
        if field == 1:
            tag = blob(inner).decode("utf-8", "replace")
        elif field == 2 and wire == protobuf.FLOAT:
            told = real(inner)
        elif field == 8:
            told = _tensor(blob(inner))
    return (tag, told) if tag and told is not None else None


def _tensor(value: bytes) -> float | None:
    """A scalar tensor (TensorFlow 2 and PyTorch with `new_style`); None for text, images and histograms."""
    kind, shaped, content, floats = 0, False, b"", b""
    for field, _, inner in protobuf.fields(value):
        if field == 1:
            kind = signed(inner)
        elif field == 2:
            shaped = bool(blob(inner))
        elif field == 4:
            content = blob(inner)
        elif field in (5, 6):
            floats = blob(inner)
    data = content or floats
    if shaped or (kind, len(data)) not in ((DT_FLOAT, 4), (DT_DOUBLE, 8)):
        return None
    return real(data)
