"""The rule interface: a pure fold, (state, observation, now) → (state, verdict).

A rule opens no session, reads no clock, keeps constant cost however long the run. Its state is a msgspec Struct that is
committed together with the verdict it led to, keyed by (run, rule, configuration hash).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

Severity = Literal["warning", "critical"]
Edge = Literal["training_pass", "scoring_pass", "engine", "undecided"]


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One completed step of one attempt, as rules see it: merged over ranks and marked with how complete it was."""

    run: str
    attempt: int
    step: int
    values: Mapping[str, float]
    """Signal → merged value. May hold NaN or infinities (they are findings); what is absent is missing."""
    worst: Mapping[str, tuple[float, int]] = {}
    """Signal → (the worst rank's own value, that rank), for signals whose catalogue entry names a worst side."""
    missing: Mapping[str, str] = {}
    reported: int = 1
    expected: int = 1
    absent_ranks: Sequence[tuple[str, int]] = ()
    """(role, rank) that were expected and did not report before the watermark."""
    segment: int = 0
    """Rises at a restart and at a change of learning rate, batch, sampling or engine: baselines begin anew."""
    settings: Mapping[str, Any] = {}
    notices: Sequence[Mapping[str, Any]] = ()
    """Notices since the last step: {kind, step, role, rank, data}."""
    flags: Sequence[str] = ()
    """What ingest flagged: step_backwards, duplicate_rank, absurd_clock, replayed."""
    evidence: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    """Pair → the 16 worst tokens {seq, position, token, a, b}."""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """No step: time passed. Sent to rules with `wants_ticks` a few times a minute, for runs that are not finished."""

    run: str
    attempt: int
    step: int | None
    """The last evaluated step, or None before the first."""
    silent_s: float
    """Seconds since anything was heard of the run (service clock)."""
    median_step_s: float | None
    silent_ranks: Sequence[tuple[str, int, float]] = ()
    """(role, rank, seconds since heard)."""
    finished: bool = False
    paused: bool = False


Observation = StepView | Tick


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number that speaks for (or against) a verdict."""

    signal: str
    value: float | None
    expected: float | None = None
    """The baseline's centre, or the invariant's bound."""
    bound: float | None = None
    rank: int | None = None
    sentence: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says after one observation.

    `firing` True opens or keeps the incident; False lets hysteresis close it. `None`: cannot be told at this
    observation (the signal is missing): an open incident stays as it is, and nothing new opens.
    """

    firing: bool | None
    severity: Severity = "warning"
    onset_step: int | None = None
    """First step of the excursion that led here (not the step at which the rule had seen enough)."""
    message: str = ""
    evidence: Sequence[Evidence] = ()
    edge: Edge | None = None
    """Which pass is at fault, where the rule can tell by the three edges."""


QUIET = Verdict(firing=False)
UNKNOWN = Verdict(firing=None)


class RuleConfig(BaseModel):
    """What every rule's YAML entry may say; each rule extends it. Unknown keys are errors that name the key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="False silences the rule.")
    severity: Severity | None = Field(None, description="Overrides the severity that the rule itself would give.")
    hold_steps: int = Field(1, ge=1, description="Consecutive steps out of range before an incident opens.")
    clear_steps: int = Field(5, ge=1, description="Consecutive steps back in range before it resolves.")
    cooldown_steps: int = Field(10, ge=0, description="Steps after a resolution in which it reopens the old incident.")


S = TypeVar("S", bound=msgspec.Struct)
C_contra = TypeVar("C_contra", bound=RuleConfig, contravariant=True)


class Rule(Protocol, Generic[S, C_contra]):
    """One illness, one file: `rules/<name>.py` exports `RULE`, and `docs/rules/<name>.md` explains it.

    Hysteresis, hold and cool-down are the engine's (`rules/engine.py`), the same for all; `step` says only whether this
    observation is out of range.
    """

    name: str
    title: str
    config: type[RuleConfig]
    state: type[S]
    reads: tuple[str, ...]
    """The signals it reads, for docs, dashboards and the alias check."""
    wants_ticks: bool

    def step(self, state: S, seen: Observation, config: C_contra, now: float) -> tuple[S, Verdict]:
        """Folds one observation. `now` is the service's clock in epoch seconds, given and never read.

        `state` is never changed in place. A rule with baselines also has `bands(state, config)`:
        signal → (low, centre, high).
        """
        ...


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine tells the incident book after hold, hysteresis and cool-down."""

    rule: str
    transition: Literal["open", "update", "escalate", "close"]
    severity: Severity
    step: int | None
    onset_step: int | None = None
    message: str = ""
    evidence: Sequence[Evidence] = ()
    edge: Edge | None = None
    reopens: bool = False
    """With `open`, within the cool-down after a resolution: the same illness again, so its incident is reopened."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: the findings that changed something, and the baseline bands as of this step."""

    findings: Sequence[Finding] = ()
    firing: Sequence[str] = ()
    """Rules whose incident is open after this step."""
    bands: Mapping[str, tuple[float, float, float]] = {}
    """signal → (low, centre, high) of its baseline, for signals that have one."""
    errors: Mapping[str, str] = {}
    """Rules that raised at this step, with what they raised. They count as unknown; the others are not touched."""
