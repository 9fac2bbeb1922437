"""`reward_hacking`: the rollout reward climbs while what it stands for falls.

What it stands for is `reward.validation` where there is one. Repetition that rises with the reward is the other sign.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, band_linear, fold_linear, gain
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

REWARD, VALIDATION, REPETITION = "reward.mean", "reward.validation", "length.repetition"


class Config(BaselineConfig):
    """All three series are linear, in sigmas of their own baselines."""

    hold_steps: int = Field(3, ge=1, description="Consecutive steps before it opens.")
    calibration_steps: int = Field(6, ge=3, le=64, description="Clean values before a baseline is trusted.")
    reward_gain: float = Field(2.0, gt=0, description="Sigmas that the rollout reward must be up.")
    validation_loss: float = Field(2.0, gt=0, description="Sigmas that the validation reward must be down.")
    repetition_gain: float = Field(1.5, gt=0, description="Sigmas that the share of repetitive responses must be up.")
    repetition_rise: float = Field(0.2, gt=0, le=1, description="Rise of that share which must go with it.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines, and the last validation's change in sigmas (it comes only every few steps)."""

    reward: Track = FRESH
    validation: Track = FRESH
    repetition: Track = FRESH
    validated: float = 0.0


class RewardHacking:
    """Warns: only a person can say what the reward was meant to be."""

    name = "reward_hacking"
    title = "The reward is being hacked"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (REWARD, VALIDATION, REPETITION)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Unknown without a reward, or with neither of the two that could contradict it."""
        if not isinstance(seen, StepView) or REWARD not in seen.values:
            return state, UNKNOWN
        values = seen.values
        reward, reading = fold_linear(state.reward, values[REWARD], seen, config)
        validation, validated = state.validation, state.validated
        if VALIDATION in values:
            validation, judged = fold_linear(validation, values[VALIDATION], seen, config)
            validated = gain(state.validation, judged)
        repetition, repeated = state.repetition, None
        if REPETITION in values:
            repetition, repeated = fold_linear(repetition, values[REPETITION], seen, config)
        after = State(reward, validation, repetition, validated)
        if reading is None or (repeated is None and not validation.learned):
            return after, UNKNOWN
        up = gain(state.reward, reading)
        if up < config.reward_gain:
            return after, QUIET
        evidence = [Evidence(signal=REWARD, value=reading.value, expected=reading.centre, sentence=f"{up:+.1f} sigma.")]
        if validated <= -config.validation_loss:
            sentence = f"{validated:+.1f} sigma at the last validation."
            evidence.append(Evidence(signal=VALIDATION, value=values.get(VALIDATION), sentence=sentence))
            message = "The rollout reward climbs while the validation reward falls."
            return after, Verdict(firing=True, onset_step=reading.onset, message=message, evidence=evidence)
        repeats = gain(state.repetition, repeated)
        if repeated is not None and repeats >= config.repetition_gain and repeated.excess >= config.repetition_rise:
            sentence = f"{repeats:+.1f} sigma."
            evidence.append(
                Evidence(signal=REPETITION, value=repeated.value, expected=repeated.centre, sentence=sentence)
            )
            message = "The reward climbs together with the share of responses that repeat themselves."
            return after, Verdict(firing=True, onset_step=reading.onset, message=message, evidence=evidence)
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range of the rollout reward."""
        band = band_linear(state.reward, config)
        return {REWARD: band} if band else {}


RULE = RewardHacking()
