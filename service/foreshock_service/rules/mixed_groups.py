"""`mixed_groups`: an advantage group holds answers to more than one prompt. Always a defect of the data path.

Rewards are then normalised against other prompts: right answers to easy prompts push, wrong ones to hard prompts pull,
and what is learned is the prompts' difficulty.
"""

from __future__ import annotations

import math

import msgspec

from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL = "group.mixed"


class Config(RuleConfig):
    """An invariant: the share must be 0."""


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nothing to remember."""


class MixedGroups:
    """Critical at the first step."""

    name = "mixed_groups"
    title = "Advantage groups mix prompts"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL,)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Any mixed group at all."""
        value = seen.values.get(SIGNAL) if isinstance(seen, StepView) else None
        if value is None or math.isnan(value):
            return state, UNKNOWN
        if value <= 0:
            return state, QUIET
        message = (
            f"{value:.0%} of the advantage groups hold more than one prompt: rewards are normalised across prompts."
        )
        evidence = Evidence(signal=SIGNAL, value=value, bound=0.0, sentence="Must be 0.")
        return state, Verdict(firing=True, severity="critical", message=message, evidence=(evidence,))


RULE = MixedGroups()
