"""Lists by cursor: newest first, keyed by what never changes, so a page neither skips nor repeats a row."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

import msgspec
from fastapi import Query
from sqlalchemy import Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute

from foreshock_service.errors import BadRequest

Limit = Annotated[int, Query(ge=1, le=500, description="Most rows on the page.")]
Cursor = Annotated[
    str | None, Query(max_length=256, description="`next` of the page before; opaque. Absent: the first page.")
]


def encode(*key: float | int | str) -> str:
    """The cursor that continues after the row with this key."""
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode().rstrip("=")


def decode(cursor: str, *kinds: type) -> tuple[Any, ...]:
    """The key inside a cursor. Raises `BadRequest` for anything that this service did not make."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        key: tuple[Any, ...] = msgspec.json.decode(raw, type=tuple[kinds])  # type: ignore[valid-type]
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise BadRequest("The cursor is not one of ours.") from None
    if any(isinstance(part, int) and not -(2**63) <= part < 2**63 for part in key):
        raise BadRequest("The cursor is not one of ours.")
    return key


def newest_first(
    query: Select[*tuple[Any, ...]],
    at: InstrumentedAttribute[float],
    key: InstrumentedAttribute[str],
    cursor: str | None,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """`query` ordered by (at, key), newest first, after `cursor`; one row beyond `limit` tells whether more follow."""
    if cursor is not None:
        then, last = decode(cursor, float, str)
        query = query.where(or_(at < then, and_(at == then, key < last)))
    return query.order_by(at.desc(), key.desc()).limit(limit + 1)


def split(rows: list[Any], limit: int, at: str, key: str = "id") -> tuple[list[Any], str | None]:
    """The page and the cursor of the next one, None on the last."""
    page = rows[:limit]
    more = len(rows) > limit
    return page, encode(getattr(page[-1], at), getattr(page[-1], key)) if more else None
