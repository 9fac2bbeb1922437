"""The answers that several routes share: a run, an incident, a checkpoint, a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.api.encoding import Body, Number, Object, Plain
from foreshock_service.store.models import Checkpoint, CommandRow, Incident, Run

Mode = Literal["observe", "approve", "auto"]


class RunBody(Body):
    """A run, without its configuration."""

    name: str = Field(examples=["math/qwen-7b-rlvr"])
    project: str = Field(examples=["math"])
    status: str = Field(description="running · paused · finished · crashed · silent", examples=["running"])
    verdict: str = Field(description="healthy · warning · critical · unknown", examples=["healthy"])
    mode: str | None = Field(description="observe · approve · auto", examples=["observe"])
    attempt: int = Field(examples=[1])
    last_step: int | None = Field(examples=[412])
    created_at: float
    last_seen_at: float
    finished_at: float | None
    labels: Object = Field(examples=[{"team": "reasoning"}])


class RunDetail(RunBody):
    """A run with everything that it announced and what was set for it."""

    capabilities: list[Plain] = Field(examples=[["rollback", "pause"]])
    settings: Object
    config: Object
    rules: Object = Field(description="This run's overrides of the rule pack.")
    budget: Object = Field(description="What was spent, by command kind; `limit` where an operator set one.")
    open_incidents: int = 0
    pending_commands: int = 0


class EvidenceBody(Body):
    """One number behind an incident."""

    signal: str = Field(examples=["policy.kl_k2"])
    value: Number | None
    expected: Number | None = None
    bound: Number | None = None
    rank: int | None = None
    sentence: str = ""


class IncidentBody(Body):
    """A rule's finding on a run."""

    id: str
    run: str = Field(examples=["math/qwen-7b-rlvr"])
    rule: str = Field(examples=["onpolicy_disagreement"])
    severity: str = Field(examples=["critical"])
    status: str = Field(description="open · acknowledged · mitigated · resolved", examples=["open"])
    attempt: int
    opened_at: float
    opened_step: int | None
    onset_step: int | None
    last_step: int | None
    resolved_at: float | None
    resolved_step: int | None
    acknowledged_by: str | None
    message: str
    edge: str | None = Field(description="training_pass · scoring_pass · engine · undecided, where the rule can tell")
    evidence: list[Plain]
    diagnosis: Object
    precursor_id: str | None
    times_opened: int


class CheckpointBody(Body):
    """A checkpoint that the run registered."""

    id: str
    attempt: int
    step: int
    path: str
    scope: list[Plain]
    status: str = Field(description="candidate · healthy · quarantined")
    reason: str
    registered_at: float


class CommandBody(Body):
    """A command, where it stands and what came of it."""

    id: str
    run: str
    attempt: int
    kind: str = Field(examples=["rollback"])
    actions: list[Plain] = Field(examples=[[{"kind": "rollback", "arguments": {"step": 380}}]])
    state: str = Field(examples=["proposed"])
    reason: str
    incident_id: str | None
    requested_by: str
    decided_by: str | None
    created_at: float
    expires_at: float
    issued_step: int | None
    at_step: int | None
    delivered_at: float | None
    accepted_at: float | None
    finished_at: float | None
    done_step: int | None
    detail: Object
    verdict: str | None = Field(description="helped · no_effect · worse · undecided, judged afterwards")
    verdict_step: int | None
    verdict_detail: Object


def fields_of(row: object, body: type[Body]) -> dict[str, Any]:
    """The row's attributes that the body has; a NaN inside is spelled out on the way to JSON."""
    return {name: getattr(row, name) for name in body.model_fields if hasattr(row, name)}


def run_body(run: Run) -> RunBody:
    return RunBody(**fields_of(run, RunBody))


def incident_body(incident: Incident, run: str) -> IncidentBody:
    return IncidentBody(**{**fields_of(incident, IncidentBody), "run": run})


def command_body(command: CommandRow, run: str) -> CommandBody:
    return CommandBody(**{**fields_of(command, CommandBody), "run": run})


def checkpoint_body(checkpoint: Checkpoint) -> CheckpointBody:
    return CheckpointBody(**fields_of(checkpoint, CheckpointBody))


def run_names(session: Session, ids: Iterable[int]) -> Mapping[int, str]:
    """run id → name, for the rows of one page."""
    wanted = set(ids)
    if not wanted:
        return {}
    return dict(session.execute(select(Run.id, Run.name).where(Run.id.in_(wanted))).all())
