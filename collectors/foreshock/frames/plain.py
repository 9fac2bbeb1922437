"""Host objects → what a notice may hold: plain, bounded, without secrets. For configs, scopes and details."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

from foreshock.frames.redaction import REDACTED, follows_secret_flag, grave_name, scrubbed, secret_name

MAX_DEPTH, MAX_NODES, MAX_TEXT = 8, 5000, 2000
_INT64 = 1 << 63


def plain(value: Any) -> Any:
    """A copy of `value` made of None, bool, int, float, str, list and dict; never raises for an odd object.

    At most 8 levels, 5,000 nodes and 2,000 characters a text; what is beyond is cut and marked with `…`. Secrets
    become `[redacted]` (`frames.redaction`).
    """
    budget = [MAX_NODES]
    return _plain(value, MAX_DEPTH, budget, False)


def _plain(value: Any, depth: int, budget: list[int], hidden: bool) -> Any:
    budget[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if hidden and (isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence | Set)):
        return REDACTED if value != "" else value
    if isinstance(value, Integral):
        number = int(value)
        return number if -_INT64 <= number < _INT64 else str(number)[:MAX_TEXT]
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return _text(value)
    if depth <= 0 or budget[0] <= 0:
        return "…"
    if isinstance(value, Mapping):
        return _mapping(value.items(), depth, budget, hidden)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapping(
            ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)), depth, budget, hidden
        )
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return _sequence(value, depth, budget, hidden)
    if hasattr(value, "__dict__") and type(value).__name__ == "Namespace":
        return _mapping(vars(value).items(), depth, budget, hidden)
    return _other(value)


def _mapping(items: Iterable[tuple[Any, Any]], depth: int, budget: list[int], hidden: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in items:
        if budget[0] <= 0:
            out["…"] = "…"
            break
        name = _text(key if isinstance(key, str) else str(key))[:256]
        told = isinstance(item, Sequence | Set) and not isinstance(item, Mapping) and secret_name(name)
        out[name] = _plain(item, depth - 1, budget, hidden or told or grave_name(name))
    return out


def _sequence(items: Iterable[Any], depth: int, budget: list[int], hidden: bool) -> list[Any]:
    out: list[Any] = []
    before: Any = None
    for item in items:
        if budget[0] <= 0:
            out.append("…")
            break
        out.append(_plain(item, depth - 1, budget, hidden or follows_secret_flag(before)))
        before = item
    return out


def _other(value: Any) -> Any:
    # The text of a tensor would wait for its device.
    if hasattr(value, "device"):
        return f"<{type(value).__name__}>"
    try:
        return _text(str(value))
    except Exception:
        return f"<{type(value).__name__}>"


def _text(text: str) -> str:
    """Without secrets, and without what neither PostgreSQL nor UTF-8 can hold."""
    text = scrubbed(text if len(text) <= 4 * MAX_TEXT else text[: 4 * MAX_TEXT])
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
