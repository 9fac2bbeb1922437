"""Locates a fault by the three edges between the trainer's two passes and the engine (SIGNALS.md).

             training pass (current log-prob)
            policy /              \\ mismatch_current
    scoring pass (old) ── mismatch ── engine

The edge that stays at its floor joins the two that agree; the pass opposite to it is at fault. Pure: values and bands
in, a `Location` out; `check`, the API and the incidents share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from foreshock_service.rules.interface import Edge

Level = Literal["floor", "up", "missing", "unknown"]

SIGNALS: Final[Mapping[str, tuple[str, ...]]] = {
    "policy": ("policy.kl_k2", "policy.kl_k3"),
    "mismatch": ("mismatch.kl_k3", "mismatch.kl_k2"),
    "mismatch_current": ("mismatch_current.kl_k3", "mismatch_current.kl_k2"),
}
"""What each edge is read from: the first that has both a value and a band, else the first that has a value."""
CERTAINLY_UP: Final[Mapping[str, float]] = {"policy": 1e-2, "mismatch": 5e-2, "mismatch_current": 5e-2}
"""Nats. Without a band: above this no rounding explains it (bf16 floors measured: policy up to 4.4e-3, mismatch 1.9e-3;
fp8 weights 2.2e-2)."""
NEGLIGIBLE: Final[Mapping[str, float]] = {"policy": 1e-4, "mismatch": 1e-3, "mismatch_current": 1e-3}
"""Nats. Below this a figure must be FAR above its range, as the rules' own `negligible` would have it: three sigma are
exceeded now and then."""
FAR: Final = 10.0
CERTAINLY_FLOOR: Final = 1e-9
"""Nats. Without a band: below this the two sides are the same numbers."""
CLEAR_SHARE: Final = 0.5
"""(mismatch_current − mismatch) / policy, in kl_k2: near +1 for a training-pass fault, −1 for a scoring-pass one."""
FOLLOWS_SHARE: Final = 0.1
"""A policy edge below this share of both engine edges does not explain them."""
SETTLING: Final = 3
"""Steps whose median says where an edge stands: one step beyond three sigma is no fault yet."""
JUMP: Final = 10.0
"""A last step this many times the median counts by itself: a fault that began just now."""
PROVES_NOTHING: Final = frozenset({"detached", "rollout", "older_weights", "interpolated"})
"""Reasons (`old_source`) for which `policy` has no invariant, so that the two trainer passes cannot be told apart."""


class EdgeReading(msgspec.Struct, frozen=True, kw_only=True):
    """One edge: where it stands, and by which number."""

    pair: str
    level: Level
    signal: str | None = None
    value: float | None = None
    centre: float | None = None
    high: float | None = None
    reason: str | None = None
    """Why it is missing."""

    @property
    def sentence(self) -> str:
        """For people: the number beside its range."""
        if self.level == "missing":
            return f"{self.pair} is missing ({self.reason or 'not reported'})"
        bound = f", range up to {self.high:.3g}" if self.high is not None else ", no baseline yet"
        where = {"floor": "at its floor", "up": "up", "unknown": "not judged"}[self.level]
        return f"{self.signal} = {self.value:.3g} is {where}{bound}"


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Which pass is at fault; `edge` is None where nothing is up."""

    edge: Edge | None
    readings: tuple[EdgeReading, ...]
    sentence: str

    def level(self, pair: str) -> Level:
        """Of one edge."""
        return next(r.level for r in self.readings if r.pair == pair)


def locate(
    values: Mapping[str, float],
    bands: Mapping[str, tuple[float, float, float]],
    missing: Mapping[str, str] | None = None,
) -> Location:
    """Reads the three edges of one step. `bands`: (low, centre, high) of the baselines; `missing`: the reasons."""
    readings = tuple(_read(pair, values, bands, missing or {}) for pair in SIGNALS)
    policy, mismatch, current = readings
    edge = _opposite(policy, mismatch.level, current.level)
    if edge == "undecided" and policy.level == "up":
        edge = _by_size(values) or edge
    return Location(edge=edge, readings=readings, sentence=_sentence(edge, readings))


def settled(window: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The last step's values, the edges' signals as medians of the last steps unless they have just jumped.

    A signal that the last step does not have is missing. Raises IndexError on an empty window.
    """
    values = dict(window[-1])
    for signal in (s for signals in SIGNALS.values() for s in signals):
        past = [v[signal] for v in window[-SETTLING:] if math.isfinite(v.get(signal, math.nan))]
        if signal in values and len(past) == SETTLING and past[-1] < JUMP * (middle := median(past)):
            values[signal] = middle
    return values


def _opposite(policy: EdgeReading, mismatch: Level, current: Level) -> Edge | None:
    up = "up" in (policy.level, mismatch, current)
    if not up:
        return None
    if policy.level == "up":
        if mismatch == "floor" and current != "floor":
            return "training_pass"
        if current == "floor" and mismatch != "floor":
            return "scoring_pass"
        return "undecided"
    # By the triangle a policy at its floor makes both mismatches alike, so one of them is enough.
    if policy.level == "floor" and "floor" not in (mismatch, current):
        return "engine"
    return "undecided"


def _by_size(values: Mapping[str, float]) -> Edge | None:
    """Half mean squares add like variances: a fault of the training pass gives current ≈ mismatch + policy."""
    policy, mismatch, current = (values.get(f"{pair}.kl_k2", math.nan) for pair in SIGNALS)
    if not (policy > 0 and math.isfinite(policy + mismatch + current)):
        return None
    if policy <= FOLLOWS_SHARE * min(mismatch, current):
        return "engine"  # rounding grows with surprise: a policy edge this much smaller only follows the engine's
    if min(mismatch, current) > policy:
        return None
    share = (current - mismatch) / policy
    if abs(share) < CLEAR_SHARE:
        return None
    return "training_pass" if share > 0 else "scoring_pass"


def _read(
    pair: str,
    values: Mapping[str, float],
    bands: Mapping[str, tuple[float, float, float]],
    missing: Mapping[str, str],
) -> EdgeReading:
    present = [s for s in SIGNALS[pair] if s in values and not math.isnan(values[s])]
    if not present:
        reason = next((missing[s] for s in (*SIGNALS[pair], pair) if s in missing), None)
        return EdgeReading(pair=pair, level="missing", reason=reason)
    signal = next(
        (s for s in present if s in bands or s.replace("mismatch_current.", "mismatch.") in bands), present[0]
    )
    value = values[signal]
    # The two engine edges share a floor: where only one of them has a baseline it serves both.
    band = bands.get(signal, bands.get(signal.replace("mismatch_current.", "mismatch.")))
    if band is not None:
        beyond = value > band[2] * (1.0 if value >= NEGLIGIBLE[pair] else FAR)
        # A range that heavy tails have made very wide excuses nothing that no rounding explains.
        beyond = beyond or (value > CERTAINLY_UP[pair] and value > FAR * band[1])
        level: Level = "up" if beyond else "floor"
        return EdgeReading(pair=pair, level=level, signal=signal, value=value, centre=band[1], high=band[2])
    level = "up" if value > CERTAINLY_UP[pair] else "floor" if value < CERTAINLY_FLOOR else "unknown"
    return EdgeReading(pair=pair, level=level, signal=signal, value=value)


def _sentence(edge: Edge | None, readings: tuple[EdgeReading, ...]) -> str:
    numbers = "; ".join(r.sentence for r in readings)
    blind = readings[0].level == "missing" and readings[0].reason in PROVES_NOTHING
    said = {
        None: "No edge is up",
        "training_pass": "The training pass is the odd one out",
        "scoring_pass": "The scoring pass is the odd one out",
        "engine": "The engine is the odd one out",
        "undecided": "Which pass is at fault cannot be told until a micro-batch has been scored again",
    }[edge]
    why = " (the old log-probs are no second look at the same weights)" if blind and edge == "undecided" else ""
    return f"{said}{why}: {numbers}."
