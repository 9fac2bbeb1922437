"""Which pass is the odd one out: the three edges between training pass, scoring pass and engine (SIGNALS.md).

`policy` joins training and scoring pass, `mismatch` scoring pass and engine, `mismatch_current` training pass and
engine. Half mean squared differences add like variances: with a fault in the training pass alone,
mismatch_current.kl_k2 ≈ mismatch.kl_k2 + policy.kl_k2; with one in the scoring pass, the other way round. So the
difference of the two, in units of policy.kl_k2, is near +1 or near −1, and needs no baseline.
"""

from __future__ import annotations

from foreshock_service.rules.interface import Edge, StepView

FLOOR = 0.1
"""An edge below this share of another is at its floor beside it."""
POLICY_SHARE = 0.1
"""A policy edge below this share of the mismatch cannot be what raised it."""
CLEAR = 0.5
"""The difference must be at least this share of policy.kl_k2 to name a pass."""


def odd_pass(seen: StepView) -> tuple[Edge, float | None]:
    """The pass at fault given that `policy` is up, and (mismatch_current − mismatch) / policy. `undecided` if unsure.

    Where the engine edges are far above `policy`, their own noise decides nothing.
    """
    values = seen.values
    policy = values.get("policy.kl_k2")
    scoring = values.get("mismatch.kl_k2", values.get("mismatch.kl_k3"))
    training = values.get("mismatch_current.kl_k2", values.get("mismatch_current.kl_k3"))
    if policy is None or scoring is None or training is None or not policy > 0:
        return "undecided", None
    if not (scoring < float("inf") and training < float("inf") and policy < float("inf")):
        return "undecided", None
    share = (training - scoring) / policy
    if training <= FLOOR * policy:
        # On the very tokens on which the trainer's passes differ, the training pass and the engine agree.
        return "scoring_pass", share
    if min(scoring, training) > policy:
        return "undecided", share
    if share >= CLEAR:
        return "training_pass", share
    if share <= -CLEAR:
        return "scoring_pass", share
    return "undecided", share


def engine_edge(seen: StepView) -> Edge:
    """`engine` where the trainer's passes differ far less than the engine does, else what the three edges say.

    Without a policy edge (not observed, or old log-probs that are the detached current ones) nothing is decided.
    `policy` and `mismatch_current` are of the same tokens and compare best; `mismatch` may be of more.
    """
    values = seen.values
    policy = values.get("policy.kl_k2")
    current = values.get("mismatch_current.kl_k2", values.get("mismatch_current.kl_k3"))
    mismatch = values.get("mismatch.kl_k2", values.get("mismatch.kl_k3"))
    if policy is None or mismatch is None:
        return "undecided"
    if current is None:
        return "engine" if policy <= POLICY_SHARE**2 * mismatch else "undecided"
    if current <= POLICY_SHARE * mismatch:
        return "scoring_pass"
    return "engine" if policy <= POLICY_SHARE * current else odd_pass(seen)[0]
