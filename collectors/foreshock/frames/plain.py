"""Host objects → what a notice may hold: plain, bounded, without secrets. For configs, scopes and details."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

_SECRET = re.compile(r"(token|secret|passw|api_?key|credential|authorization)", re.IGNORECASE)
_HARMLESS = re.compile(r"(tokens|tokenizer|token_id|(max|num|per)_token|token_(level|mean|type))", re.IGNORECASE)
MAX_DEPTH, MAX_NODES, MAX_TEXT = 8, 5000, 2000
_INT64 = 1 << 63


def plain(value: Any) -> Any:
    """A copy of `value` made of None, bool, int, float, str, list and dict; never raises for an odd object.

    At most 8 levels, 5,000 nodes and 2,000 characters a text; what is beyond is cut and marked with `…`. Values under a
    name that looks like a secret become `[redacted]`.
    """
    budget = [MAX_NODES]
    return _plain(value, MAX_DEPTH, budget)


def _plain(value: Any, depth: int, budget: list[int]) -> Any:
    budget[0] -= 1
    if value is None or isinstance(value, bool):
        return value
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
        return _mapping(value.items(), depth, budget)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapping(((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)), depth, budget)
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return _sequence(value, depth, budget)
    if hasattr(value, "__dict__") and type(value).__name__ == "Namespace":
        return _mapping(vars(value).items(), depth, budget)
    return _other(value)


def _mapping(items: Iterable[tuple[Any, Any]], depth: int, budget: list[int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in items:
        if budget[0] <= 0:
            out["…"] = "…"
            break
        name = _text(key if isinstance(key, str) else str(key))[:256]
        secret = isinstance(item, str | bytes) and item and _SECRET.search(name) and not _HARMLESS.search(name)
        out[name] = "[redacted]" if secret else _plain(item, depth - 1, budget)
    return out


def _sequence(items: Iterable[Any], depth: int, budget: list[int]) -> list[Any]:
    out: list[Any] = []
    for item in items:
        if budget[0] <= 0:
            out.append("…")
            break
        out.append(_plain(item, depth - 1, budget))
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
    """Without what neither PostgreSQL nor UTF-8 can hold."""
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
