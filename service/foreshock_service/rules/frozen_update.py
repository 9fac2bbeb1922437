"""`frozen_update`: the optimizer reports steps and the parameters stay where they are.

Whatever shows movement is believed: per-tensor digests, the update's norm over the weights', or, where neither is
observed, `update.abs_mean`, the difference that the first optimizer step makes to the second. Exactly no movement is
an invariant; no baseline is needed.
"""

from __future__ import annotations

from typing import Final

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

MOVEMENT: Final = ("weights.changed_share", "norm.update_ratio")
"""Zero in any of these says that nothing moved; each is measured apart from the log-probs."""
UPDATE, REFERENCE = "update.abs_mean", "reference.abs_mean"
DEAD_GROUPS, REFERENCE_KL = "group.zero_std", "reference.kl_k3"


class Config(RuleConfig):
    """Several steps in a row: one skipped update moves nothing either."""

    hold_steps: int = Field(2, ge=1, description="Consecutive steps without movement before it opens.")
    clear_steps: int = Field(2, ge=1, description="Consecutive steps with movement before it resolves.")
    negligible: float = Field(1e-9, ge=0, description="Movement at or below this counts as none.")
    blind_steps: int = Field(3, ge=1, description="Steps in which only log-probs can tell before they are believed.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive steps at which only the log-probs said that nothing moved."""

    still: int = 0


class FrozenUpdate:
    """Critical: compute is burnt for nothing. A warning where only log-probs say so."""

    name = "frozen_update"
    title = "Parameters do not move"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (
        *MOVEMENT, UPDATE, REFERENCE, REFERENCE_KL, DEAD_GROUPS, "grad.norm", "lr", "update.skipped",
    )  # fmt: skip
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Unknown while an update was skipped, the learning rate is 0, or there was no gradient to follow."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        values = seen.values
        gradient = values.get("grad.norm")
        if values.get("update.skipped", 0.0) > 0 or values.get("lr", 1.0) == 0 or gradient is None:
            return state, UNKNOWN
        if gradient == 0 and values.get(DEAD_GROUPS, 1.0) < 1 and values.get(REFERENCE_KL) == 0:
            return State(), _unreached(values[DEAD_GROUPS])
        if not gradient > 0:
            return state, UNKNOWN
        told = [(name, values[name]) for name in MOVEMENT if name in values]
        if told:
            still = [(name, value) for name, value in told if value <= config.negligible]
            return State(), _verdict(still, gradient) if still else QUIET
        told = [(name, values[name]) for name in (UPDATE, REFERENCE) if name in values]
        if not told:
            return state, UNKNOWN
        if any(value > config.negligible for _, value in told):
            return State(), QUIET
        after = State(state.still + 1)
        # Zeros are also what a host logs whose old log-probs are the current ones, so this alone only warns.
        return after, _verdict(told, gradient, "warning") if after.still >= config.blind_steps else UNKNOWN


def _verdict(still: list[tuple[str, float]], gradient: float, severity: Severity = "critical") -> Verdict:
    names = ", ".join(name for name, _ in still)
    message = (
        f"The gradient norm is {gradient:.3g} and nothing moves ({names} is 0): the optimizer updates other tensors."
    )
    evidence = [Evidence(signal=name, value=value, bound=0.0, sentence="No movement at all.") for name, value in still]
    evidence.append(Evidence(signal="grad.norm", value=gradient, sentence="There was a gradient to follow."))
    return Verdict(firing=True, severity=severity, message=message, evidence=evidence)


def _unreached(dead: float) -> Verdict:
    """No gradient at all, though there is an advantage, and not a step away from the reference."""
    message = f"Gradient and KL are exactly 0 though {1 - dead:.0%} of the groups have unequal rewards: nothing moves."
    evidence = [
        Evidence(signal="grad.norm", value=0.0, sentence="Exactly."),
        Evidence(signal=REFERENCE_KL, value=0.0, sentence="Exactly: the weights are still the reference's."),
        Evidence(signal=DEAD_GROUPS, value=dead, bound=1.0, sentence="There were advantages to follow."),
    ]
    return Verdict(firing=True, severity="warning", message=message, evidence=evidence)


RULE = FrozenUpdate()
