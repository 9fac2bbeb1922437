"""`length_collapse`: responses shrink out of their range while the reward falls.

Answers that become shorter as the reward rises, or stays, are learning to be brief. A collapse ends them early and pays
for it: the policy gives up, an end token is forced, or the engine stops it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, fold_linear, gain
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL, REWARD = "length.mean", "reward.mean"


class Config(BaselineConfig):
    """Ratios are centre over value: how many times shorter than their baseline responses are."""

    hold_steps: int = Field(3, ge=1, description="Consecutive steps out of range before an incident opens.")
    calibration_steps: int = Field(10, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    min_spread: float = Field(0.06, gt=0, description="Smallest spread (sigma) of ln(length) believed.")
    mild_ratio: float = Field(1.5, gt=1, description="Smoothed fall, as a ratio, that warns.")
    critical_ratio: float = Field(3.0, gt=1, description="Smoothed fall, as a ratio, that is critical.")
    reward_loss: float = Field(
        1.0, ge=0, description="Reward below its baseline, in sigmas, without which nothing is found."
    )


class State(msgspec.Struct, frozen=True, array_like=True):
    """Baselines of length (log, falling) and reward (linear)."""

    track: Track = FRESH
    reward: Track = FRESH
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class LengthCollapse:
    """Warns; critical where little is left of the responses."""

    name = "length_collapse"
    title = "Responses collapse in length"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, REWARD)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Mean length in log space, its sign turned, so that a fall is an excess. Cannot tell without a reward."""
        values = seen.values if isinstance(seen, StepView) else {}
        length, paid = values.get(SIGNAL), values.get(REWARD)
        if not isinstance(seen, StepView) or length is None or paid is None or not 0 <= length < math.inf:
            return state, UNKNOWN
        learn = not state.ill
        track, reading = fold_linear(state.track, math.log(max(length, 1.0)), seen, config, sign=-1.0, learn=learn)
        reward, earned = fold_linear(state.reward, paid, seen, config, learn=learn)
        after = State(track, reward)
        if reading is None or earned is None:
            return after, UNKNOWN
        low = reading.calibrated and reading.drift >= config.drift_limit
        change = gain(state.reward, earned)
        if not low or reading.smooth < math.log(config.mild_ratio) or change > -config.reward_loss:
            return after, QUIET
        critical = reading.smooth >= math.log(config.critical_ratio)
        return State(track, reward, True), _verdict(length, reading, change, earned, critical)

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """None: `length_runaway` draws the range of this signal."""
        return {}


def _verdict(length: float, reading: Reading, change: float, earned: Reading, critical: bool) -> Verdict:
    usual = math.exp(reading.centre)
    figures = f"{length:.3g} tokens, {usual / max(length, 1.0):.2g} times shorter than their {usual:.3g}"
    message = f"Responses average {figures}, and the reward falls with them."
    below = f"{reading.z:.1f} sigma below its range."
    paid = f"{change:+.1f} sigma from its baseline."
    evidence = [
        Evidence(signal=SIGNAL, value=length, expected=usual, sentence=below),
        Evidence(signal=REWARD, value=earned.value, expected=earned.centre, sentence=paid),
    ]
    return Verdict(
        firing=True,
        severity="critical" if critical else "warning",
        onset_step=reading.onset,
        message=message,
        evidence=evidence,
    )


RULE = LengthCollapse()
