"""Many rows of one table into the database at the least cost: binary COPY and UPDATE … FROM unnest(…) on PostgreSQL,
executemany on SQLite.

SQLAlchemy's own insert costs some 40 µs a row, most of it in looking at every parameter of every row; this costs 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BigInteger, Boolean, Connection, Float, Integer, LargeBinary, String
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.types import JSON, TypeEngine

from foreshock_service.store.models import Base
from foreshock_service.store.types import MISSING_BITS, PackedFloats, dump_json

_INT8 = struct.Struct(">iq").pack
_INT4 = struct.Struct(">ii").pack
_FLOAT8 = struct.Struct(">id").pack
_LENGTH = struct.Struct(">i").pack
_ARRAY = struct.Struct(">iiiIii").pack
_HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_FLOAT8_OID = 701
_ELEMENT = np.dtype([("length", ">i4"), ("value", ">f8")])


Encoded = bytes | tuple[Any, ...]
"""A row as a database's driver takes it."""


def insert_rows(session: Session, model: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Inserts `rows`, which give every column of `model`, in the session's transaction.

    A column of `PackedFloats` takes float64 arrays in which `types.MISSING_BITS` stands for NULL (`types.packed`).
    Raises SQLAlchemy's `DBAPIError`s, as a statement of its own would.
    """
    dialect = session.get_bind().dialect.name
    insert_encoded(session, model, [encode_row(dialect, model, row) for row in rows])


def encode_row(dialect: str, model: type[Base], row: dict[str, Any]) -> Encoded:
    """A row for `insert_encoded`, worked out before a transaction."""
    return _table(model, dialect).encode(row)


def insert_encoded(session: Session, model: type[Base], rows: Sequence[Encoded]) -> None:
    """Inserts rows that `encode_row` made for the session's database. Raises as `insert_rows` does."""
    if not rows:
        return
    connection = session.connection()
    statement = _table(model, connection.dialect.name).statement
    with _driver(connection, statement) as raw:
        if connection.dialect.name == "postgresql":
            with raw.cursor().copy(statement) as copy:
                copy.write(b"".join((_HEADER, *cast(Sequence[bytes], rows), _END)))
        else:
            raw.executemany(statement, rows)


def update_rows(
    session: Session,
    model: type[Base],
    keys: tuple[str, ...],
    columns: tuple[str, ...],
    rows: Sequence[dict[str, Any]],
) -> int:
    """Sets `columns` of the rows named by `keys`, each as `rows` give them; returns how many there were.

    One statement on PostgreSQL, however many rows. Columns of numbers and texts only. Raises as `insert_rows` does.
    """
    if not rows:
        return 0
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        statement = _update_many(model, keys, columns)
        parameters = [[row[name] for row in rows] for name in (*keys, *columns)]
        with _driver(connection, statement) as raw:
            return int(raw.execute(statement, parameters).rowcount)
    statement = _update_one(model, keys, columns)
    with _driver(connection, statement) as raw:
        many = [tuple(row[name] for name in (*columns, *keys)) for row in rows]
        return int(raw.executemany(statement, many).rowcount)


def read_rows(session: Session, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """What a statement in PostgreSQL's own words returns, as the driver's tuples: a third of what SQLAlchemy's cost."""
    connection = session.connection()
    with _driver(connection, statement) as raw:
        found: list[tuple[Any, ...]] = raw.execute(statement, parameters, binary=True).fetchall()
        return found


def change_rows(session: Session, statement: str, parameters: Sequence[Any] = ()) -> int:
    """Carries out a statement in PostgreSQL's own words; returns how many rows it changed."""
    connection = session.connection()
    with _driver(connection, statement) as raw:
        return int(raw.execute(statement, parameters).rowcount)


@contextmanager
def _driver(connection: Connection, statement: str) -> Iterator[Any]:
    """The driver's own connection, its errors as SQLAlchemy raises them."""
    raw: Any = connection.connection.driver_connection
    try:
        yield raw
    except connection.dialect.loaded_dbapi.Error as error:
        lost = connection.dialect.is_disconnect(error, raw, None)
        raise DBAPIError.instance(
            statement, None, error, connection.dialect.loaded_dbapi.Error,
            connection_invalidated=lost, dialect=connection.dialect,
        ) from error  # fmt: skip


@lru_cache
def _update_many(model: type[Base], keys: tuple[str, ...], columns: tuple[str, ...]) -> str:
    table, names = model.__table__, (*keys, *columns)
    arrays = ", ".join(f"%s::{_type_name(table.columns[name].type)}[]" for name in names)
    new = ", ".join(f'"{name}"' for name in names)
    sets = ", ".join(f'"{name}" = new."{name}"' for name in columns)
    where = " AND ".join(f'old."{name}" = new."{name}"' for name in keys)
    return f'UPDATE "{model.__tablename__}" AS old SET {sets} FROM unnest({arrays}) AS new ({new}) WHERE {where}'  # nosec B608


@lru_cache
def _update_one(model: type[Base], keys: tuple[str, ...], columns: tuple[str, ...]) -> str:
    sets = ", ".join(f'"{name}" = ?' for name in columns)
    where = " AND ".join(f'"{name}" = ?' for name in keys)
    return f'UPDATE "{model.__tablename__}" SET {sets} WHERE {where}'  # names from the models # nosec B608


def _type_name(kind: TypeEngine[Any]) -> str:
    match kind:
        case BigInteger():
            return "bigint"
        case Integer():
            return "int"
        case Float():
            return "float8"
        case String():
            return "text"
    raise TypeError(f"no array of {kind!r}")


class _Table:
    """How the rows of one table are written."""

    def __init__(self, statement: str, encode: Callable[[dict[str, Any]], Encoded]) -> None:
        self.statement = statement
        self.encode = encode


_Columns = Sequence[tuple[str, Callable[[Any], Any]]]


def _binary(columns: _Columns) -> Callable[[dict[str, Any]], bytes]:
    """A row in COPY's binary format."""
    count = struct.pack(">h", len(columns))

    def encode(row: dict[str, Any]) -> bytes:
        parts = [count]
        for name, of in columns:
            value = row[name]
            parts.append(_NULL if value is None else of(value))
        return b"".join(parts)

    return encode


def _tuple(columns: _Columns) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A row as sqlite3 takes it."""
    return lambda row: tuple(of(value) if (value := row[name]) is not None else None for name, of in columns)


@lru_cache
def _table(model: type[Base], dialect: str) -> _Table:
    table = model.__table__
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    if dialect == "postgresql":
        statement = f'COPY "{model.__tablename__}" ({names}) FROM STDIN (FORMAT BINARY)'
        return _Table(statement, _binary([(column.name, _postgres(column.type)) for column in table.columns]))
    marks = ", ".join("?" for _ in table.columns)
    statement = f'INSERT INTO "{model.__tablename__}" ({names}) VALUES ({marks})'  # names from the models # nosec B608
    return _Table(statement, _tuple([(column.name, _sqlite(column.type)) for column in table.columns]))


def _postgres(kind: TypeEngine[Any]) -> Callable[[Any], bytes]:
    match kind:
        case PackedFloats():
            return _float8_array
        case JSON():
            return lambda value: _bytes(b"\x01" + dump_json(value).encode())
        case BigInteger():
            return lambda value: _INT8(8, value)
        case Integer():
            return lambda value: _INT4(4, value)
        case Float():
            return lambda value: _FLOAT8(8, value)
        case Boolean():
            return lambda value: b"\x00\x00\x00\x01" + (b"\x01" if value else b"\x00")
        case LargeBinary():
            return _bytes
        case String():
            return lambda value: _bytes(value.encode())
    raise TypeError(f"no binary form for {kind!r}")


def _sqlite(kind: TypeEngine[Any]) -> Callable[[Any], Any]:
    match kind:
        case PackedFloats():
            return lambda value: value.tobytes()
        case JSON():
            return dump_json
        case Boolean():
            return int
    return lambda value: value


def _bytes(value: bytes) -> bytes:
    return _LENGTH(len(value)) + value


def _float8_array(row: NDArray[np.float64]) -> bytes:
    """float8[] as PostgreSQL sends it: a head, then a length and a value each; NULL is the length −1 alone."""
    if not row.size:
        return struct.pack(">iiiI", 12, 0, 0, _FLOAT8_OID)
    nulls = row.view(np.uint64) == MISSING_BITS
    elements = np.empty(row.size, dtype=_ELEMENT)
    elements["length"], elements["value"] = np.where(nulls, -1, 8), row
    body = elements.tobytes()
    if nulls.any():
        kept = np.ones((row.size, 12), dtype=bool)
        kept[nulls, 4:] = False
        body = np.frombuffer(body, dtype=np.uint8).reshape(-1, 12)[kept].tobytes()
    return _ARRAY(20 + len(body), 1, int(nulls.any()), _FLOAT8_OID, row.size, 1) + body
