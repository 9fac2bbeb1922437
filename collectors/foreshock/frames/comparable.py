"""Do two streams of log-probs mean the same thing? (SIGNALS.md, "Semantics travel with every log-prob")

What is only spelt differently is brought to one spelling. Nothing else can be converted exactly from the sampled
token's log-prob alone: another temperature or a kept set needs the whole distribution's normaliser. Those differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreshock.wire.envelope import Semantics

_NEUTRAL_TRUNCATION = {
    "top_k": ("-1", "0", "none"), "top_p": ("1", "1.0", "none"),
    "min_p": ("0", "0.0", "none"), "typical_p": ("1", "1.0"),
}  # fmt: skip
_NEUTRAL_PENALTIES = {
    "repetition": ("1", "1.0"), "repetition_penalty": ("1", "1.0"),
    "presence": ("0", "0.0"), "presence_penalty": ("0", "0.0"),
    "frequency": ("0", "0.0"), "frequency_penalty": ("0", "0.0"),
}  # fmt: skip


def sides(semantics: Semantics | Mapping[str, Any] | None) -> dict[str, Semantics]:
    """One Semantics speaks for side b (the sampled side); a mapping names `a` and `b`. Raises TypeError otherwise."""
    if semantics is None:
        return {}
    if isinstance(semantics, Semantics):
        return {"b": semantics}
    if not isinstance(semantics, Mapping) or not set(semantics) <= {"a", "b"}:
        raise TypeError("semantics must be a Semantics or a mapping of 'a' and 'b' to one")
    for side, said in semantics.items():
        if not isinstance(said, Semantics):
            raise TypeError(f"semantics[{side!r}] must be a foreshock.Semantics, not {type(said).__name__}")
    return dict(semantics)


def differences(a: Semantics, b: Semantics) -> dict[str, tuple[Any, Any]]:
    """Field → (a's, b's), for the fields that both said and that forbid a comparison; empty: comparable."""
    found: dict[str, tuple[Any, Any]] = {}
    if a.temperature is not None and b.temperature is not None and a.temperature != b.temperature:
        found["temperature"] = (a.temperature, b.temperature)
    for name, one, other in (
        ("truncation", _truncation(a), _truncation(b)),
        ("normaliser", _normaliser(a), _normaliser(b)),
        ("penalties", _plain(a.penalties, _NEUTRAL_PENALTIES), _plain(b.penalties, _NEUTRAL_PENALTIES)),
    ):
        if one and other and one != other:
            found[name] = (getattr(a, name), getattr(b, name))
    return found


def _truncation(said: Semantics) -> str:
    return _plain(said.truncation, _NEUTRAL_TRUNCATION)


def _normaliser(said: Semantics) -> str:
    """Where nothing was cut, the kept set is the vocabulary."""
    if said.normaliser == "kept_set" and _truncation(said) == "none":
        return "full_vocabulary"
    return said.normaliser.strip().lower()


def _plain(text: str, neutral: Mapping[str, tuple[str, ...]]) -> str:
    """One spelling: sorted, lower case, settings that change nothing left out; `none` where nothing remains."""
    text = text.strip().lower()
    if not text:
        return ""
    parts = []
    for part in text.replace(";", ",").split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in ("", "none") or value in neutral.get(name, ()):
            continue
        parts.append(f"{name}={value}")
    return ",".join(sorted(parts)) or "none"
