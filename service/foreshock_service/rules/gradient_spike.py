"""`gradient_spike`: the gradient norm leaves its own range, again and again or for good.

One spike is an outlier batch and heals. Several within a few steps warn; a norm that stays at a multiple of its
baseline is critical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, band_log, fold_log
from foreshock_service.rules.interface import (
    QUIET,
    UNKNOWN,
    Evidence,
    Observation,
    RuleConfig,
    Severity,
    StepView,
    Verdict,
)

SIGNAL = "grad.norm"
LOG_FLOOR = 1e-9


class Config(BaselineConfig):
    """A spike is a step at `large_ratio` and `large_z`; spikes leak away at `spike_decay` a step."""

    calibration_steps: int = Field(10, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    large_ratio: float = Field(
        5.0, gt=1, description="Ratio to the centre at which a step is a spike, if also large_z."
    )
    large_z: float = Field(
        5.0, gt=0, description="Sigmas out of range at which a step is a spike, if also large_ratio."
    )
    mild_ratio: float = Field(
        8.0, gt=1, description="Smoothed ratio to the centre at which the norm is up for good: critical."
    )
    spikes: float = Field(2.5, gt=0, description="Sum of leaking spikes that warns.")
    spike_decay: float = Field(0.9, gt=0, lt=1, description="What is left of a spike after one step.")
    sustained_steps: int = Field(5, ge=1, description="Consecutive steps above mild_ratio before it is critical.")


class State(msgspec.Struct, frozen=True, array_like=True):
    """Baseline, leaking count of spikes, consecutive steps up."""

    track: Track = FRESH
    spikes: float = 0.0
    sustained: int = 0
    onset: int | None = None


class GradientSpike:
    """Warns at a burst of spikes; critical where the norm stays up."""

    name = "gradient_spike"
    title = "Gradient norm spikes"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL,)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """A norm of exactly 0 (every group tied) is not learned from."""
        if not isinstance(seen, StepView) or (value := seen.values.get(SIGNAL)) is None:
            return state, UNKNOWN
        track, reading = fold_log(state.track, value, seen, config, floor=LOG_FLOOR, survives=False, learn=value > 0)
        if reading is None:
            return state, UNKNOWN
        spike = reading.calibrated and reading.z >= config.large_z and reading.excess >= math.log(config.large_ratio)
        spikes = state.spikes * config.spike_decay + (1.0 if spike else 0.0)
        up = reading.calibrated and reading.smooth >= math.log(config.mild_ratio)
        sustained = state.sustained + 1 if up else 0
        onset = (state.onset if state.onset is not None else seen.step) if spikes >= 0.1 or up else None
        after = State(track, spikes, sustained, onset)
        if sustained >= config.sustained_steps:
            return after, _verdict(reading, onset, "critical", f"and has stayed up for {sustained} steps")
        if spikes >= config.spikes:
            return after, _verdict(reading, onset, "warning", f"{spikes:.1f} spikes within the last steps")
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range."""
        band = band_log(state.track, config)
        return {SIGNAL: band} if band else {}


def _verdict(reading: Reading, onset: int | None, severity: Severity, why: str) -> Verdict:
    message = f"grad.norm is {reading.value:.3g}, {reading.ratio:.3g} times its {reading.centre:.3g}: {why}."
    evidence = Evidence(
        signal=SIGNAL, value=reading.value, expected=reading.centre, sentence=f"{reading.z:.1f} sigma out of its range."
    )
    return Verdict(firing=True, severity=severity, onset_step=onset, message=message, evidence=(evidence,))


RULE = GradientSpike()
