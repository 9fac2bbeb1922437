"""`gradient_spike`: the gradient norm leaves its own range, again and again or for good.

One spike is an outlier batch and heals. The yardstick is the largest norm of the run's past, slowly forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

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
from foreshock_service.rules.peak import FRESH, NONE, Peak, fold_peak

SIGNAL = "grad.norm"


class Config(RuleConfig):
    """Ratios are to the largest norm of the run's past."""

    calibration_steps: int = Field(12, ge=3, description="Norms above zero before anything is said.")
    spike_ratio: float = Field(3.0, gt=1, description="Ratio to the largest norm before at which a step is a spike.")
    spikes: float = Field(2.5, gt=0, description="Sum of leaking spikes that warns.")
    spike_decay: float = Field(0.9, gt=0, lt=1, description="What is left of a spike after one step.")
    forget: float = Field(0.01, ge=0, description="What the largest norm of the past loses a step, in log units.")
    sustained_steps: int = Field(6, ge=1, description="Consecutive spikes that are critical.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The past's largest norm, the leaking sum of spikes, spikes in a row."""

    peak: Peak = FRESH
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
        """A norm of exactly 0 (every group tied) is neither a finding nor part of the past."""
        value = seen.values.get(SIGNAL) if isinstance(seen, StepView) else None
        if not isinstance(seen, StepView) or value is None or not 0 <= value < math.inf:
            return state, UNKNOWN
        if value == 0:
            return State(state.peak, state.spikes * config.spike_decay, 0, state.onset), QUIET
        peak, excess = fold_peak(
            state.peak,
            value,
            seen,
            calibration=config.calibration_steps,
            forget=config.forget,
            survives=False,
            learn=state.sustained < config.sustained_steps,
        )
        spike = excess is not None and excess >= math.log(config.spike_ratio)
        spikes = state.spikes * config.spike_decay + (1.0 if spike else 0.0)
        sustained = state.sustained + 1 if spike else 0
        onset = (state.onset if state.onset is not None else seen.step) if spikes >= 0.2 else None
        after = State(peak, spikes, sustained, onset)
        if sustained >= config.sustained_steps:
            return after, _verdict(value, excess, onset, "critical", f"and has stayed up for {sustained} steps")
        if spikes >= config.spikes:
            return after, _verdict(value, excess, onset, "warning", "one of several spikes")
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """From zero to where a spike begins; the centre is the largest norm of the past."""
        if state.peak.past == NONE:
            return {}
        past = math.exp(state.peak.past)
        return {SIGNAL: (0.0, past, past * config.spike_ratio)}


def _verdict(value: float, excess: float | None, onset: int | None, severity: Severity, why: str) -> Verdict:
    ratio = math.exp(excess or 0.0)
    expected = value / ratio
    message = f"grad.norm is {value:.3g}, {ratio:.3g} times the {expected:.3g} it had reached before: {why}."
    evidence = Evidence(signal=SIGNAL, value=value, expected=expected, sentence="Against the largest norm of its past.")
    return Verdict(firing=True, severity=severity, onset_step=onset, message=message, evidence=(evidence,))


RULE = GradientSpike()
