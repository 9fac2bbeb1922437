"""Points of a run read as columns: the database packs them, NumPy unpacks them, and no row becomes Python objects.

PostgreSQL answers with one row of packed columns. SQLite has no such aggregate; its rows are the driver's tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from foreshock_service.store.types import MISSING, MISSING_BITS, Packed

STEP_MAX = 2**63 - 1
ROWS_AT_ONCE = 10_000
"""Packed rows in memory at once, some kB each."""
_NONE: NDArray[np.intp] = np.empty(0, dtype=np.intp)
Values = tuple[NDArray[np.float64], NDArray[np.intp]]
"""Those that are there, and the positions of their rows."""


@dataclass(frozen=True)
class Columns:
    """The rows of a window in order of (attempt, step); `values`: one entry for each position that was asked for."""

    attempt: NDArray[np.int64]
    step: NDArray[np.int64]
    at: NDArray[np.float64]
    values: list[Values]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def joined(cls, parts: Sequence[Columns], count: int) -> Columns:
        """The rows of all parts, each of `count` values, in their order."""
        if len(parts) == 1:
            return parts[0]
        begins = np.cumsum([0, *map(len, parts)])
        values = [
            (
                np.concatenate([np.empty(0), *(part.values[i][0] for part in parts)]),
                np.concatenate([_NONE, *(part.values[i][1] + b for b, part in zip(begins, parts, strict=False))]),
            )
            for i in range(count)
        ]
        return cls(
            np.concatenate([_NONE, *(part.attempt for part in parts)]),
            np.concatenate([_NONE, *(part.step for part in parts)]),
            np.concatenate([np.empty(0), *(part.at for part in parts)]),
            values,
        )


@dataclass(frozen=True)
class Window:
    """Steps `from_step` to `to_step`, both included, of one attempt or of all."""

    run_id: int
    attempt: int | None = None
    from_step: int = 0
    to_step: int = STEP_MAX


def read_columns(session: Session, window: Window, places: Sequence[int], most: int) -> Columns:
    """The values at `places` (from 1, `signals.position`) of the window's first `most` rows.

    10⁴ rows of one value cost 2 ms of CPU here and 5 of PostgreSQL's; 20 ms on SQLite.
    """
    connection = session.connection()
    sqlite = connection.dialect.name == "sqlite"
    given = {"run": window.run_id, "low": window.from_step, "high": window.to_step, "most": most}
    if window.attempt is not None:
        given["attempt"] = window.attempt
    if not sqlite:
        given |= {f"p{i}": place for i, place in enumerate(places)}
        return _from_postgres(connection.execute(_postgres(len(places), window.attempt is not None), given).one())
    result = connection.execute(_SQLITE[window.attempt is not None], given)
    assert result.cursor is not None
    parts = []
    while rows := result.cursor.fetchmany(ROWS_AT_ONCE):  # SQLAlchemy's rows would cost as much as the reading
        parts.append(_from_sqlite(rows, places))
    result.close()
    return Columns.joined(parts, len(places))


_WHERE = "FROM points WHERE run_id = :run AND step BETWEEN :low AND :high"
_ORDER = "ORDER BY attempt, step LIMIT :most"


@lru_cache
def _postgres(count: int, one_attempt: bool) -> TextClause:
    cut = "".join(f', "values"[CAST(:p{i} AS int)] AS v{i}' for i in range(count))
    sent = ["int8send(attempt)", "int8send(step)", "float8send(at)"]
    sent += [f"coalesce(float8send(v{i}), '\\x{MISSING[::-1].hex()}')" for i in range(count)]
    packed = ", ".join(f"string_agg({one}, '')" for one in sent)
    attempt = " AND attempt = :attempt" if one_attempt else ""
    # The LIMIT also keeps the planner from handing the aggregates to parallel workers, who would lose the order.
    return text(
        f"SELECT {packed}"  # numbers and constants # nosec B608
        f" FROM (SELECT attempt, step, at{cut} {_WHERE}{attempt} {_ORDER}) AS rows"
    )


# The whole packed row: SQLite hands it over as fast as it cuts two values out of it.
_SQLITE = {
    one_attempt: text(f'SELECT attempt, step, at, "values" {_WHERE}{attempt} {_ORDER}')  # constants # nosec B608
    for one_attempt, attempt in ((True, " AND attempt = :attempt"), (False, ""))
}


def _from_postgres(row: Sequence[Any]) -> Columns:
    def column(packed: bytes | None, kind: str) -> NDArray[Any]:
        found = np.frombuffer(packed or b"", dtype=f">{kind}")
        return found.astype(found.dtype.newbyteorder("="))

    attempt, step, at, *values = row
    bits = [column(packed, "u8") for packed in values]
    return Columns(column(attempt, "i8"), column(step, "i8"), column(at, "f8"), [_there(b) for b in bits])


def _from_sqlite(rows: Sequence[tuple[Any, ...]], places: Sequence[int]) -> Columns:
    attempt, step, at, packed = zip(*rows, strict=True)
    table = Packed(packed)
    keys = np.array(attempt, dtype=np.int64), np.array(step, dtype=np.int64)
    return Columns(*keys, np.array(at, dtype=float), [table.column(place) for place in places])


def _there(bits: NDArray[np.uint64]) -> Values:
    there = np.flatnonzero(bits != MISSING_BITS)
    return np.ascontiguousarray(bits[there]).view("=f8"), there
