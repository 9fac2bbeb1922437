"""`clip_saturation`: the clip range of the loss cuts a large and growing share of the tokens.

A clipped token has no gradient. Most frameworks log a share that is constant 0 because nothing is off-policy: that is a
series which says nothing, and is not taken for health.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, band_log, fold_log
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SHARES: Final = (("update.clip_low", "update.clip_high"), ("policy.clip_low", "policy.clip_high"))
LOG_FLOOR = 1e-4


class Config(BaselineConfig):
    """The share must be large and out of the run's own range."""

    hold_steps: int = Field(3, ge=1, description="Consecutive steps above before it opens.")
    warn_share: float = Field(0.1, gt=0, le=1, description="Share of clipped tokens below which nothing is ever found.")
    critical_share: float = Field(0.4, gt=0, le=1, description="Share that is critical.")
    mild_ratio: float = Field(2.5, gt=1, description="Smoothed ratio to the centre that counts as out of range.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The baseline, and whether the share was ever anything but 0."""

    track: Track = FRESH
    alive: bool = False
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class ClipSaturation:
    """Warns, and is critical where the loss hardly learns any more."""

    name = "clip_saturation"
    title = "The clip range is saturated"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = tuple(name for pair in SHARES for name in pair)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Shares below and above the range, added; later optimizer steps where there are any."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        share = None
        for low, high in SHARES:
            if low in seen.values or high in seen.values:
                share = seen.values.get(low, 0.0) + seen.values.get(high, 0.0)
                break
        if share is None or not 0 <= share < math.inf:
            return state, UNKNOWN
        alive = state.alive or share > 0
        track, reading = fold_log(
            state.track, share, seen, config, floor=LOG_FLOOR, survives=False, learn=not state.ill
        )
        after = State(track, alive)
        if reading is None or not alive:
            return after, UNKNOWN
        up = reading.calibrated and share >= config.warn_share and reading.smooth >= math.log(config.mild_ratio)
        if not up:
            return after, QUIET
        message = f"{share:.0%} of the tokens are clipped, {reading.centre:.2%} used to be."
        evidence = Evidence(signal=low, value=share, expected=reading.centre, bound=config.warn_share, sentence=message)
        severity = "critical" if share >= config.critical_share else "warning"
        return State(track, alive, True), Verdict(
            firing=True,
            severity=severity,  # type: ignore[arg-type]
            onset_step=reading.onset,
            message=message,
            evidence=(evidence,),
        )

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range of the summed share."""
        band = band_log(state.track, config) if state.alive else None
        return {"update.clip_high": band} if band else {}


RULE = ClipSaturation()
