"""`entropy_blowup`: entropy rises out of its range and the reward does not follow.

A policy on its way to noise: tokens at random, answers that run to the limit. Often within a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import (
    FRESH,
    BaselineConfig,
    Reading,
    Track,
    band_log,
    drifted,
    early,
    fold_linear,
    fold_log,
    gain,
    large,
)
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL = "entropy.mean"
REWARD = "reward.mean"
LOG_FLOOR = 1e-6


class Config(BaselineConfig):
    """Ratios are value over centre."""

    large_z: float = Field(
        5.0, gt=0, description="Sigmas out of range at which one step is enough, if also large_ratio."
    )
    large_ratio: float = Field(
        4.0, gt=1, description="Ratio to the centre at which one step is critical, if also large_z."
    )
    mild_ratio: float = Field(
        1.8, gt=1, description="Smoothed rise, as a ratio, at which a rise that buys nothing warns."
    )
    negligible: float = Field(0.05, ge=0, description="Entropy (nats) below which no rise is ever found.")
    reward_gain: float = Field(1.0, ge=0, description="Reward above its baseline, in sigmas, that excuses a mild rise.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines of entropy (log) and reward (linear)."""

    track: Track = FRESH
    reward: Track = FRESH
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class EntropyBlowup:
    """Warns at a drift, critical at a jump."""

    name = "entropy_blowup"
    title = "Entropy blows up"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, REWARD)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Entropy in log space against its own baseline, upwards."""
        if not isinstance(seen, StepView) or (value := seen.values.get(SIGNAL)) is None:
            return state, UNKNOWN
        learn = not state.ill
        track, reading = fold_log(state.track, value, seen, config, floor=LOG_FLOOR, survives=False, learn=learn)
        reward, gained = state.reward, None
        if REWARD in seen.values:
            reward, gained = fold_linear(reward, seen.values[REWARD], seen, config, learn=learn)
        after = State(track, reward)
        if reading is None:
            return after, UNKNOWN
        jumped = large(reading, config)
        if value < config.negligible or not (jumped or drifted(reading, config) or early(reading, config)):
            return after, QUIET
        bought = gain(state.reward, gained)
        serious = jumped or (reading.calibrated and reading.smooth >= math.log(config.large_ratio))
        if bought >= config.reward_gain and not serious:
            return after, QUIET
        return State(track, reward, True), _verdict(reading, bought, gained, serious)

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range, in nats."""
        band = band_log(state.track, config)
        return {SIGNAL: band} if band else {}


def _verdict(reading: Reading, bought: float, gained: Reading | None, serious: bool) -> Verdict:
    message = f"Entropy is {reading.value:.3g} nats, {reading.ratio:.3g} times its {reading.centre:.3g}."
    sentence = f"{reading.z:.1f} sigma above its range."
    evidence = [Evidence(signal=SIGNAL, value=reading.value, expected=reading.centre, sentence=sentence)]
    if gained is not None:
        sentence = f"{bought:+.1f} sigma from its baseline."
        evidence.append(Evidence(signal=REWARD, value=gained.value, expected=gained.centre, sentence=sentence))
    return Verdict(
        firing=True,
        severity="critical" if serious else "warning",
        onset_step=reading.onset,
        message=message,
        evidence=evidence,
    )


RULE = EntropyBlowup()
