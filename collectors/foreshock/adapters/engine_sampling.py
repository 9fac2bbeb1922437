"""How a sampler was asked to sample, from a mapping or an engine's own object. What was not asked for is not said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TRUNCATION: Final = ("top_k", "top_p", "min_p")
PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SETTINGS: Final = ("temperature", *TRUNCATION, *PENALTIES, "seed", "sampling_seed", "n", "max_tokens", "max_new_tokens")
GREEDY: Final = 1e-5
"""Temperatures below this are greedy to both engines, and their log-probs are of temperature 1."""


def settings_of(params: Any) -> dict[str, Any]:
    """The sampler's settings that were said, plain."""
    found = {}
    for name in SETTINGS:
        value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
        if value is not None:
            found[name] = value
    return found


def temperature_of(settings: Mapping[str, Any]) -> float | None:
    """The temperature that log-probs were divided by; None where the engine's own default held."""
    said = settings.get("temperature")
    if said is None:
        return None
    return 1.0 if float(said) < GREEDY else float(said)


def spelled(settings: Mapping[str, Any], names: tuple[str, ...], complete: bool) -> str:
    """`top_k=100,top_p=0.9`, `none` where nothing is in force; empty where that is not known.

    `complete`: what is not among the settings is switched off, rather than left to the server's default.
    """
    said = [f"{name}={settings[name]}" for name in names if name in settings]
    if len(said) < len(names) and not complete:
        return ""
    return ",".join(said) or "none"
