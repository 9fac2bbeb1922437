"""What a `probe` command found, as evidence: the same rows scored again, one change at a time.

Pure: reads the detail that `foreshock.probes.experiment` makes and the adapters acknowledge with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

FAR: Final = 10.0
"""A variant that moves this many times the repeat's distance stands out."""
LEAST: Final = 1e-12
"""Below this, in nats (kl_k2), nothing moved."""

MEANING: Final[Mapping[str, str]] = {
    "repeat": "the same forward twice differs: kernels are not deterministic",
    "other_partition": "other micro-batches differ: rounding from batching",
    "no_padding": "unpadded rows differ: padding or its mask reaches the result",
    "other_mode": "training mode differs from evaluation: dropout or another forward path",
    "fp32": "float32 differs: precision",
    "after_resync": "a forced synchronisation changed the result: parameters were stale",
}


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """One probe. `variants` is {name: {kl_k2, abs_max, …} or {error}}; `moved` names those that stand out."""

    command: str
    step: int | None
    variants: dict[str, dict[str, Any]]
    moved: tuple[str, ...]
    sentence: str


def read(command: str, step: int | None, detail: Mapping[str, Any]) -> Probed | None:
    """The probe in an acknowledgement's detail; None where there is none."""
    variants = detail.get("probe")
    if not isinstance(variants, Mapping):
        return None
    kept = {str(name): dict(figures) for name, figures in variants.items() if isinstance(figures, Mapping)}
    figures = {name: _number(one.get("kl_k2")) for name, one in kept.items()}
    floor = figures.get("repeat")
    bar = max(LEAST, FAR * floor) if floor is not None and math.isfinite(floor) else LEAST
    moved = tuple(
        name for name, value in figures.items()
        if value is not None and (math.isnan(value) or value > (LEAST if name == "repeat" else bar))
    )  # fmt: skip
    return Probed(command=command, step=step, variants=kept, moved=moved, sentence=_sentence(kept, figures, moved))


def _sentence(variants: Mapping[str, Any], figures: Mapping[str, float | None], moved: Sequence[str]) -> str:
    if not any(value is not None for value in figures.values()):
        return "The probe gave no figures."
    if not moved:
        tried = ", ".join(name for name, value in figures.items() if value is not None)
        return f"Nothing moves the log-probs of these rows ({tried}): numerics do not explain a disagreement."
    said = [f"{MEANING.get(name, name)} (kl_k2 {figures[name]:.2g})" for name in moved]
    failed = [name for name, value in figures.items() if value is None and "error" in variants[name]]
    return "; ".join(said) + "." + (f" Not tried: {', '.join(failed)}." if failed else "")


def _number(value: Any) -> float | None:
    """JSON spells non-finite numbers out."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
