"""`semantics_differ`: two streams of log-probs do not mean the same thing, so that they were not compared.

Temperature, penalties, truncation or the normaliser is applied on one side only. It is a finding of its own: the loss
compares them all the same.
"""

from __future__ import annotations

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

REASON = "semantics_differ"


class Config(RuleConfig):
    """What must match is fixed by the catalogue of semantics."""

    hold_steps: int = Field(1, ge=1, description="Consecutive steps before it opens.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nothing to remember."""


class SemanticsDiffer:
    """Warns, naming the pairs."""

    name = "semantics_differ"
    title = "Streams that do not mean the same"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = ("mismatch.kl_k3", "mismatch_current.kl_k3", "policy.kl_k2")
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Reads why signals are missing, and notices of kind `semantics`."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        pairs = sorted({name.partition(".")[0] for name, reason in seen.missing.items() if reason == REASON})
        told = [notice for notice in seen.notices if notice.get("kind") == "semantics"]
        if not pairs and not told:
            return state, QUIET
        details = "; ".join(str((notice.get("data") or {}).get("detail", "")) for notice in told if notice.get("data"))
        what = details or "Temperature, truncation, penalties or normaliser differ."
        message = f"Not comparable: {', '.join(pairs) or 'two streams'}. {what}"
        evidence = [
            Evidence(signal=f"{pair}.kl_k3", value=None, sentence="Missing: its sides mean different things.")
            for pair in pairs
        ]
        return state, Verdict(firing=True, message=message, evidence=evidence)


RULE = SemanticsDiffer()
