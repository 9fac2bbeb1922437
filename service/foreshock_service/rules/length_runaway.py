"""`length_runaway`: responses grow out of their range and buy no reward.

Reasoning models learn to write longer, and are paid for it. A runaway grows fast, towards the limit, unpaid.
"""

from __future__ import annotations

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
    fold_linear,
    fold_log,
    gain,
)
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL, TRUNCATED, REWARD = "length.mean", "length.truncated", "reward.mean"
CUT_RATE = 1 / 8


class Config(BaselineConfig):
    """Lengths vary little, so small ratios mean much."""

    min_spread: float = Field(0.06, gt=0, description="Smallest spread (sigma) of ln(length) believed.")
    mild_ratio: float = Field(
        1.4, gt=1, description="Smoothed ratio to the centre at which growth that buys nothing warns."
    )
    critical_truncated: float = Field(
        0.9, gt=0, le=1, description="Share of responses cut by the limit that makes it critical."
    )
    critical_steps: int = Field(5, ge=1, description="Consecutive steps at that share before it is critical.")
    reward_gain: float = Field(1.0, ge=0, description="Reward above its baseline, in sigmas, that growth has bought.")
    negligible: float = Field(16.0, ge=0, description="Mean length (tokens) below which no growth is ever found.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines of length (log) and reward (linear), and the share that is usually cut."""

    track: Track = FRESH
    reward: Track = FRESH
    usually_cut: float = -1.0
    """Slow mean of the truncated share; below 0 before the first."""
    full: int = 0
    """Consecutive steps at which nearly every response was cut."""
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""


class LengthRunaway:
    """Warns; critical once nearly every response is cut that was not cut before."""

    name = "length_runaway"
    title = "Responses run away in length"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, TRUNCATED, REWARD)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Mean length in log space against its own baseline, upwards."""
        values = seen.values if isinstance(seen, StepView) else {}
        if not isinstance(seen, StepView) or (value := values.get(SIGNAL)) is None:
            return state, UNKNOWN
        learn = not state.ill
        track, reading = fold_log(state.track, value, seen, config, floor=1.0, survives=False, learn=learn)
        reward, gained = state.reward, None
        if REWARD in values:
            reward, gained = fold_linear(reward, values[REWARD], seen, config, learn=learn)
        cut, usual = values.get(TRUNCATED), state.usually_cut
        steps = state.full + 1 if cut is not None and cut >= config.critical_truncated else 0
        if cut is not None and 0 <= cut <= 1 and learn and not steps:
            usual = cut if usual < 0 else usual + CUT_RATE * (cut - usual)
        after = State(track, reward, usual, steps)
        if reading is None:
            return after, UNKNOWN
        if value < config.negligible or not drifted(reading, config):
            return after, QUIET
        full = steps >= config.critical_steps and 0 <= usual <= config.critical_truncated / 2
        if gain(state.reward, gained) >= config.reward_gain and not full:
            return after, QUIET
        return State(track, reward, usual, steps, True), _verdict(reading, cut, usual, full)

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range, in tokens."""
        band = band_log(state.track, config)
        return {SIGNAL: band} if band else {}


def _verdict(reading: Reading, cut: float | None, usual: float, full: bool) -> Verdict:
    message = f"Responses average {reading.value:.0f} tokens, {reading.ratio:.2g} times their {reading.centre:.0f}."
    sentence = f"{reading.z:.1f} sigma above its range."
    evidence = [Evidence(signal=SIGNAL, value=reading.value, expected=reading.centre, sentence=sentence)]
    if cut is not None:
        expected = usual if usual >= 0 else None
        evidence.append(Evidence(signal=TRUNCATED, value=cut, expected=expected, sentence="Share cut by the limit."))
    return Verdict(
        firing=True,
        severity="critical" if full else "warning",
        onset_step=reading.onset,
        message=message,
        evidence=evidence,
    )


RULE = LengthRunaway()
