"""`dead_groups`: nearly all groups have equal rewards, so that there is no advantage left to learn from."""

from __future__ import annotations

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

SIGNAL, REWARD = "group.zero_std", "reward.mean"


class Config(RuleConfig):
    """An invariant of group-relative advantages: equal rewards, no gradient."""

    hold_steps: int = Field(8, ge=1, description="Consecutive steps above the share before it opens.")
    share: float = Field(0.98, gt=0, le=1, description="Share of groups with equal rewards that counts as dead.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Smoothed share."""

    smooth: float = 0.0


class DeadGroups:
    """Warns: at the top a run is finished, at the bottom no gradient will lift it, only a rollback."""

    name = "dead_groups"
    title = "Groups without any signal"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, REWARD)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """A quarter of the weight goes to the newest step: batches are small and shares coarse."""
        value = seen.values.get(SIGNAL) if isinstance(seen, StepView) else None
        if not isinstance(seen, StepView) or value is None or not 0 <= value <= 1:
            return state, UNKNOWN
        smooth = state.smooth + 0.25 * (value - state.smooth)
        after = State(smooth)
        if min(value, smooth) < config.share:
            return after, QUIET
        reward = seen.values.get(REWARD)
        tail = "" if reward is None else f" at a reward of {reward:.3g}"
        message = f"{value:.0%} of the groups have equal rewards{tail}: no advantage is left to learn from."
        evidence = [
            Evidence(signal=SIGNAL, value=value, bound=config.share, sentence="Share of groups without any signal.")
        ]
        if reward is not None:
            evidence.append(Evidence(signal=REWARD, value=reward, sentence="All right, or all wrong."))
        return after, Verdict(firing=True, message=message, evidence=evidence)


RULE = DeadGroups()
