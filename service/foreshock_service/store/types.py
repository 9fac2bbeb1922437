"""Column types and JSON spelling shared by both databases.

`PackedFloats` holds one row of signal values. None (missing), NaN and both infinities each come back as they went in.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Float, LargeBinary, func, type_coerce
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import TypeDecorator, TypeEngine

WIDTH: Final = 8
MISSING_BITS: Final = 0x7FF4_4653_4D49_5353
_encode_json = msgspec.json.Encoder().encode
MISSING: Final = struct.pack("<Q", MISSING_BITS)
"""The one NaN payload that means "missing" on SQLite; a measured NaN is written with the default payload."""


def pack(values: Sequence[float | None]) -> bytes:
    """Little-endian float64, 8 bytes a value; None as `MISSING`. O(n), about 0.1 µs a value."""
    packed = bytearray(struct.pack(f"<{len(values)}d", *[math.nan if v is None or v != v else v for v in values]))  # noqa: PLR0124
    for i, value in enumerate(values):
        if value is None:
            packed[i * WIDTH : (i + 1) * WIDTH] = MISSING
    return bytes(packed)


def packed(places: NDArray[np.intp], values: Sequence[float], width: int) -> NDArray[np.float64]:
    """A row of `width` with `values` at `places` (from 0), "missing" elsewhere; a measured NaN has the default bits."""
    row = np.full(width, MISSING_BITS, dtype="<u8").view("<f8")
    given = np.array(values, dtype="<f8")
    row[places] = np.where(np.isnan(given), np.nan, given)
    return row


def unpack(packed: bytes) -> list[float | None]:
    """The inverse of `pack`. Raises ValueError where the length is not a multiple of 8."""
    if len(packed) % WIDTH:
        raise ValueError(f"packed floats of {len(packed)} bytes: not a multiple of {WIDTH}")
    count = len(packed) // WIDTH
    values: list[float | None] = list(struct.unpack(f"<{count}d", packed))
    if MISSING in packed:
        for i, bits in enumerate(struct.unpack(f"<{count}Q", packed)):
            if bits == MISSING_BITS:
                values[i] = None
    return values


def unpack_one(packed: bytes) -> float | None:
    """One value of a packed row; None where it is missing or the slice lies past the row's end."""
    if len(packed) < WIDTH or packed == MISSING:
        return None
    value: float = struct.unpack("<d", packed)[0]
    return value


class Packed:
    """Many packed rows of different lengths as columns, without unpacking each: 8 bytes a value."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        width = max((len(row) for row in rows), default=0)
        if any(len(row) != width for row in rows):
            rows = [row + MISSING * ((width - len(row)) // WIDTH) for row in rows]
        self._bits = np.frombuffer(b"".join(rows), dtype="<u8").reshape(len(rows), width // WIDTH)

    def column(self, position: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """Of the value at `position` (from 1): those that are there, and the indices of their rows."""
        if position > self._bits.shape[1]:
            return np.empty(0), np.empty(0, dtype=np.intp)
        column = self._bits[:, position - 1]
        there = np.flatnonzero(column != MISSING_BITS)
        return np.ascontiguousarray(column[there]).view("<f8"), there


class PackedFloats(TypeDecorator[list[Any]]):
    """list[float | None] as float8[] on PostgreSQL, packed float64 on SQLite, whose REAL would turn NaN to NULL."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(ARRAY(Float(53)))
        return dialect.type_descriptor(LargeBinary())

    def process_bind_param(self, value: Sequence[float | None] | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            value = unpack(value.tobytes())
        if dialect.name == "postgresql":
            return [None if v is None else float(v) for v in value]
        return pack(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> list[Any] | None:
        if value is None or dialect.name == "postgresql":
            return value  # type: ignore[no-any-return]
        return unpack(value)


def value_at(column: ColumnElement[Any], position: int, dialect: str) -> ColumnElement[Any]:
    """SQL for one value (from 1) of a PackedFloats column, without fetching the row; read it with `read_value`."""
    if dialect == "postgresql":
        return type_coerce(column, ARRAY(Float(53)))[position]
    return func.substr(column, (position - 1) * WIDTH + 1, WIDTH, type_=LargeBinary)


def read_value(raw: Any) -> float | None:
    """What `value_at` selected, on either database."""
    return unpack_one(raw) if isinstance(raw, bytes) else raw


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def clean(text: str) -> str:
    """`text` without what PostgreSQL cannot store: NUL becomes U+FFFD, and so do lone surrogates."""
    if text.isascii() and "\x00" not in text:
        return text
    return text.replace("\x00", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def dump_json(value: Any) -> str:
    """JSON in which NaN and infinities are the strings "nan", "inf", "-inf"; what JSON has no word for is its `str`.

    (Bytes and dates are spelled as msgspec does.)
    """
    try:
        # The common case: nothing that must be spelled otherwise. A NaN shows as a null; what PostgreSQL cannot store
        # shows as an escape, and a lone surrogate raises.
        words = _encode_json(value)
        if b"null" not in words and b"\\u0000" not in words:
            return words.decode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"), default=str)
