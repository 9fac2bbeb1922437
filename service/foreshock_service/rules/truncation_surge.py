"""`truncation_surge`: the share of responses cut by the limit leaps above what it was.

Cut responses earn nothing for what they may have known, and filters that drop them leave a biased rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, band_linear, fold_linear
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL = "length.truncated"


class Config(BaselineConfig):
    """Shares are linear: distances, not ratios."""

    hold_steps: int = Field(2, ge=1, description="Consecutive steps above before it opens.")
    calibration_steps: int = Field(5, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    min_spread: float = Field(0.03, gt=0, description="Smallest spread (sigma) of the share believed.")
    large_z: float = Field(4.0, gt=0, description="Sigmas above the baseline that count, if also `rise`.")
    rise: float = Field(0.3, gt=0, le=1, description="Rise of the share above its baseline that warns.")
    critical_share: float = Field(
        0.9, gt=0, le=1, description="Share that is critical after critical_steps, if it is a rise."
    )
    critical_steps: int = Field(5, ge=1, description="Consecutive steps at critical_share.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The baseline and consecutive steps at the critical share."""

    track: Track = FRESH
    full: int = 0
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class TruncationSurge:
    """Warns; critical where nearly everything stays cut."""

    name = "truncation_surge"
    title = "Responses are cut by the limit"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL,)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """A run that was always cut has that as its baseline."""
        if not isinstance(seen, StepView) or (value := seen.values.get(SIGNAL)) is None:
            return state, UNKNOWN
        # Half-way to a finding nothing is learned, or a slow surge would be its own baseline; single steps are, for
        # in batches of a few answers shares of a half come and go.
        usual = state.track.learned < config.calibration_steps or state.track.smooth < config.rise / 2
        track, reading = fold_linear(state.track, value, seen, config, learn=usual and not state.ill)
        if reading is None:
            return state, UNKNOWN
        up = reading.calibrated and reading.excess >= config.rise and reading.z >= config.large_z
        full = state.full + 1 if up and value >= config.critical_share else 0
        after = State(track, full, up)
        if not up:
            return after, QUIET
        message = f"{value:.0%} of the responses are cut by the limit, {reading.centre:.0%} used to be."
        evidence = Evidence(signal=SIGNAL, value=value, expected=reading.centre, sentence=message)
        severity = config.severity or ("critical" if full >= config.critical_steps else "warning")
        return after, Verdict(
            firing=True, severity=severity, onset_step=reading.onset, message=message, evidence=(evidence,)
        )

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range."""
        band = band_linear(state.track, config)
        return {SIGNAL: band} if band else {}


RULE = TruncationSurge()
