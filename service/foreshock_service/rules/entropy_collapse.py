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
LIVELY = 50.0
"""Entropy that was once so many times dead_entropy is in nats, and was alive."""


class Config(BaselineConfig):
    """Ratios are centre over value: how many times smaller than its baseline entropy is."""

    calibration_steps: int = Field(10, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    mild_ratio: float = Field(
        2.0, gt=1, description="Smoothed fall, as a ratio, at which a fall that buys nothing warns."
    )
    critical_ratio: float = Field(4.0, gt=1, description="The same at which it is critical, if the reward has fallen.")
    dead_entropy: float = Field(
        1e-3, ge=0, description="Entropy (nats) of a deterministic policy: warns after dead_steps."
    )
    dead_steps: int = Field(5, ge=1, description="Consecutive steps at dead_entropy before it warns.")
    reward_gain: float = Field(
        1.0, ge=0, description="Reward above its baseline, in sigmas, that counts as bought by the fall."
    )
    reward_loss: float = Field(2.0, ge=0, description="Reward below its baseline, in sigmas, that makes it critical.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines of entropy (log, falling) and reward (linear)."""

    track: Track = FRESH
    reward: Track = FRESH
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""
    peak: float = 0.0
    """The largest entropy seen: an entropy that was always tiny may be logged in another unit."""
    dead: int = 0
    """Consecutive steps at dead_entropy."""


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
        dead = state.dead + 1 if value <= config.dead_entropy else 0
        after = State(track, reward, False, max(state.peak, value), dead)
        if reading is None:
            return after, UNKNOWN
        drifted = reading.calibrated and reading.drift >= config.drift_limit
        low = drifted and reading.smooth >= math.log(config.mild_ratio)
        change = gain(state.reward, gained)
        if not low and dead >= config.dead_steps and after.peak >= LIVELY * config.dead_entropy:
            # Gone before a baseline was calibrated: there is nothing left to compare with, and no need to.
            return after, _deterministic(value, after, seen.step - dead + 1) if change < config.reward_gain else QUIET
        if not low or change >= config.reward_gain:
            return after, QUIET
        fallen = change <= -config.reward_loss and reading.smooth >= math.log(config.critical_ratio)
        after = msgspec.structs.replace(after, ill=True)
        return after, _verdict(value, reading, change, gained, "critical" if fallen else "warning")

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


def _deterministic(value: float, state: State, onset: int) -> Verdict:
    message = f"Entropy is {value:.3g} nats for {state.dead} steps, {state.peak:.3g} it was: no choice is left."
    evidence = Evidence(signal=SIGNAL, value=value, bound=state.peak, sentence="The policy is deterministic.")
    return Verdict(firing=True, severity="warning", onset_step=onset, message=message, evidence=(evidence,))


RULE = EntropyCollapse()
