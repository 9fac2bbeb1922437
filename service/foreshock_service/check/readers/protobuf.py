"""Just enough of protobuf's wire format to read event files without TensorFlow's or W&B's libraries."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
DOUBLE: Final = 1
BYTES: Final = 2
FLOAT: Final = 5


class Malformed(ValueError):  # noqa: N818 - what the message is
    """The bytes are no protobuf message."""


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(field number, wire type, value) in order. Fixed-size values come as their little-endian bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, wire, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (DOUBLE, FLOAT):
            size = 8 if wire == DOUBLE else 4
        else:
            raise Malformed(f"wire type {wire}")
        if at + size > end:
            raise Malformed("cut")
        yield key >> 3, wire, data[at : at + size]
        at += size


def signed(value: int | bytes) -> int:
    """An int64 as protobuf writes it."""
    if isinstance(value, bytes):
        raise Malformed("expected an integer")
    return value - (1 << 64) if value >= 1 << 63 else value


def real(value: int | bytes) -> float:
    """A float or a double by its size."""
    if isinstance(value, bytes) and len(value) in (4, 8):
        return float(struct.unpack("<f" if len(value) == 4 else "<d", value)[0])
    raise Malformed("expected a float")


def blob(value: int | bytes) -> bytes:
    """Bytes, a text or an inner message."""
    if not isinstance(value, bytes):
        raise Malformed("expected bytes")
    return value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if at >= len(data) or shift > 63:
            raise Malformed("cut")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
