"""`entropy_collapse`: entropy falls out of its range while the reward does not rise.

Entropy that falls while reward rises is what reinforcement learning does (sharpening); an absolute floor would cry on
every run that starts at 0.6 nats. What precedes a collapse is a fall that buys nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, band_linear, fold_linear, gain
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

SIGNAL = "entropy.mean"
REWARD = "reward.mean"
LOG_FLOOR = 1e-6


class Config(BaselineConfig):
    """Ratios are centre over value: how many times smaller than its baseline entropy is."""

    calibration_steps: int = Field(10, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    mild_ratio: float = Field(
        2.0, gt=1, description="Smoothed fall, as a ratio, at which a fall that buys nothing warns."
    )
    critical_ratio: float = Field(4.0, gt=1, description="The same at which it is critical, if the reward has fallen.")
    reward_gain: float = Field(
        1.0, ge=0, description="Reward above its baseline, in sigmas, that counts as bought by the fall."
    )
    reward_loss: float = Field(2.0, ge=0, description="Reward below its baseline, in sigmas, that makes it critical.")


class State(msgspec.Struct, frozen=True, array_like=True):
    """Baselines of entropy (log, falling) and reward (linear)."""

    track: Track = FRESH
    reward: Track = FRESH
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class EntropyCollapse:
    """Warns; critical once the reward falls as well."""

    name = "entropy_collapse"
    title = "Entropy collapses"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, REWARD)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Entropy in log space, its sign turned, so that a fall is an excess."""
        if not isinstance(seen, StepView) or (value := seen.values.get(SIGNAL)) is None or not 0 <= value < math.inf:
            return state, UNKNOWN
        learn = not state.ill
        track, reading = fold_linear(state.track, math.log(max(value, LOG_FLOOR)), seen, config, sign=-1.0, learn=learn)
        reward, gained = state.reward, None
        if REWARD in seen.values:
            reward, gained = fold_linear(reward, seen.values[REWARD], seen, config, learn=learn)
        after = State(track, reward)
        if reading is None:
            return after, UNKNOWN
        drifted = reading.calibrated and reading.drift >= config.drift_limit
        if not (drifted and reading.smooth >= math.log(config.mild_ratio)):
            return after, QUIET
        change = gain(state.reward, gained)
        if change >= config.reward_gain:
            return after, QUIET
        fallen = change <= -config.reward_loss and reading.smooth >= math.log(config.critical_ratio)
        return State(track, reward, True), _verdict(value, reading, change, gained, "critical" if fallen else "warning")

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range, in nats."""
        band = band_linear(state.track, config, -1.0)
        return {SIGNAL: (math.exp(band[0]), math.exp(band[1]), math.exp(band[2]))} if band else {}


def _verdict(value: float, reading: Reading, change: float, gained: Reading | None, severity: Severity) -> Verdict:
    centre = math.exp(reading.centre)
    times = centre / max(value, LOG_FLOOR)
    message = f"Entropy is {value:.3g} nats, {times:.2g} times below its {centre:.3g}, and the reward did not rise."
    evidence = [
        Evidence(signal=SIGNAL, value=value, expected=centre, sentence=f"{reading.z:.1f} sigma below its range.")
    ]
    if gained is not None:
        sentence = f"{change:+.1f} sigma from its baseline."
        evidence.append(Evidence(signal=REWARD, value=gained.value, expected=gained.centre, sentence=sentence))
    return Verdict(firing=True, severity=severity, onset_step=reading.onset, message=message, evidence=evidence)


RULE = EntropyCollapse()
