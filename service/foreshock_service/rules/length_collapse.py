"""`length_collapse`: responses shrink out of their range while the reward falls.

Answers that become shorter as the reward rises, or stays, are learning to be brief. A collapse ends them early and pays
for it: the policy gives up, an end token is forced, or the engine stops it. The last of these shows at once, whatever
the reward does: the longest response of a step is shorter than the average one used to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, fold_linear, gain
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL, REWARD, LONGEST = "length.mean", "reward.mean", "length.max"
PRESSED = 0.8
"""Mean over longest length from which responses are pressed against a limit: most of them end there."""
UNSEEN = 0.8
"""Longest length over the least that a step's longest ever had: small batches have short ones now and then."""
COUNTS: Final = ("mismatch.sequences", "policy.sequences", "mismatch_current.sequences")
MANY = 32
"""Responses of a step from which one step tells; with fewer, or an unknown number, the limit must be the same again."""


class Config(BaselineConfig):
    """Ratios are centre over value: how many times shorter than their baseline responses are."""

    fall_steps: int = Field(3, ge=1, description="Consecutive steps of a fall before it is found; a cut is at once.")
    calibration_steps: int = Field(10, ge=3, le=64, description="Clean steps before the baseline is trusted.")
    min_spread: float = Field(0.06, gt=0, description="Smallest spread (sigma) of ln(length) believed.")
    mild_ratio: float = Field(1.5, gt=1, description="Smoothed fall, as a ratio, that warns.")
    critical_ratio: float = Field(3.0, gt=1, description="Smoothed fall, as a ratio, that is critical.")
    reward_loss: float = Field(
        1.0, ge=0, description="Reward below its baseline, in sigmas, without which nothing is found."
    )


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines of length (log, falling) and reward (linear)."""

    track: Track = FRESH
    reward: Track = FRESH
    ill: bool = False
    """Out of range at the step before: nothing is learned from."""
    fallen: int = 0
    """Consecutive steps of a fall that is paid for."""
    least: float = math.inf
    """The shortest that the longest response of a step has been in this attempt."""
    limit: float = 0.0
    """The longest response of the step before, where that looked like a cut."""
    pressed: int = 0
    """Consecutive steps at that very limit."""


class LengthCollapse:
    """Warns; critical where little is left of the responses."""

    name = "length_collapse"
    title = "Responses collapse in length"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, REWARD, LONGEST)
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
        longest, least = values.get(LONGEST), math.inf if seen.attempt != state.track.attempt else state.least
        after = State(track, reward, False, 0, least)
        if reading is None or earned is None:
            return after, UNKNOWN
        if longest is not None and longest > 0.0:
            if longest < UNSEEN * least < math.inf and _cut(state.track, length, longest, seen, config):
                pressed = state.pressed + 1 if longest == state.limit else 1
                after = replace(after, ill=True, limit=longest, pressed=pressed)
                many = max(values.get(name, 0.0) for name in COUNTS) >= MANY
                told = many or pressed >= config.fall_steps
                return after, _cut_verdict(length, longest, reading) if told else QUIET
            after = replace(after, least=min(least, longest))
        low = reading.calibrated and reading.drift >= config.drift_limit
        change = gain(state.reward, earned)
        if not low or reading.smooth < math.log(config.mild_ratio) or change > -config.reward_loss:
            return after, QUIET
        after = replace(after, ill=True, fallen=state.fallen + 1)
        if after.fallen < config.fall_steps:
            return after, QUIET
        critical = reading.smooth >= math.log(config.critical_ratio)
        return after, _verdict(length, reading, change, earned, critical)

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """None: `length_runaway` draws the range of this signal."""
        return {}


def _cut(track: Track, length: float, longest: float, seen: StepView, config: Config) -> bool:
    """Most responses end at a limit that is below their former mean, and no setting was changed."""
    known = track.learned >= config.calibration_steps and (track.attempt, track.segment) == (seen.attempt, seen.segment)
    return known and longest < math.exp(-track.centre) and length >= PRESSED * longest


def _cut_verdict(length: float, longest: float, reading: Reading) -> Verdict:
    usual = math.exp(reading.centre)
    message = f"The longest response has {longest:.3g} tokens and the average one used to have {usual:.3g}: "
    message += "something ends them early (a forced end token, a stop word, a limit of the engine)."
    evidence = [
        Evidence(signal=LONGEST, value=longest, bound=usual, sentence="Below the former mean."),
        Evidence(signal=SIGNAL, value=length, expected=usual, sentence="Most responses end at the limit."),
    ]
    return Verdict(firing=True, message=message, evidence=evidence)


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
