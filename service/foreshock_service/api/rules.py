"""What is watched, and a rule file tried on stored history before it goes live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import Body, Object, Plain
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import RUN_PATTERN, InRooms, Rooms, find_run
from foreshock_service.errors import TooLarge, Unprocessable
from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.illnesses import all_rules
from foreshock_service.rules.interface import Finding, StepView
from foreshock_service.rules.pack import Pack, PackError, parse_pack
from foreshock_service.store.models import Point, Run, SignalName

router = APIRouter(prefix="/v1/rules", tags=["rules"])

MAX_PACK_CHARACTERS = 256 * 1024
MAX_FINDINGS = 1000


class RuleBody(Body):
    """One illness, and the configuration it is watched under."""

    name: str = Field(examples=["onpolicy_disagreement"])
    title: str
    enabled: bool
    reads: list[str] = Field(description="The signals it reads.")
    wants_ticks: bool = Field(description="Also looked at when no step comes.")
    config: Object
    config_schema: Object = Field(description="JSON Schema of the configuration.")


class RulesAnswer(Body):
    """The rule pack in use."""

    pack_hash: str
    error: str | None = Field(description="Why the pack file as it is now is not in use; null while it is.")
    rules: list[RuleBody]


class ReplayAsked(BaseModel):
    """A rule pack and the stored history to try it on. Nothing is stored, nobody is alerted."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "run": "math/qwen-7b",
                    "pack": "version: 1\nrules:\n  entropy_collapse: {hold_steps: 3}\n",
                    "from_step": 0,
                }
            ]
        },
    )

    run: str = Field(pattern=RUN_PATTERN)
    pack: str = Field(
        "", max_length=MAX_PACK_CHARACTERS, description="YAML laid over the shipped pack; empty: the pack in use."
    )
    from_step: int | None = Field(None, ge=0, le=2**63 - 1)
    to_step: int | None = Field(None, ge=0, le=2**63 - 1)
    attempt: int | None = Field(None, ge=1, le=2**31 - 1)


class ReplayFinding(Body):
    """What would have happened to an incident."""

    attempt: int
    step: int | None
    rule: str
    transition: str = Field(description="open · update · escalate · close")
    severity: str
    onset_step: int | None
    message: str
    edge: str | None
    evidence: list[Plain]


class ReplayAnswer(Body):
    """Every finding of the pack over the window, in order."""

    run: str
    pack_hash: str
    steps: int = Field(description="Steps folded.")
    findings: list[ReplayFinding]
    truncated: bool = Field(description=f"More than {MAX_FINDINGS} findings; the rest is left out.")
    open: list[str] = Field(description="Rules whose incident would be open at the end.")


@router.get("", responses=documented())
def list_rules(rooms: InRooms, _: Reader) -> RulesAnswer:
    """Every rule that ships, with the configuration in use."""
    pack = rooms.pack()
    return RulesAnswer(
        pack_hash=pack.hash, error=rooms.pack_file.error, rules=[_rule(rule, pack) for rule in all_rules()]
    )


def _rule(rule: Any, pack: Pack) -> RuleBody:
    config = pack.config(rule.name)
    return RuleBody(
        name=rule.name,
        title=rule.title,
        enabled=config is not None,
        reads=list(rule.reads),
        wants_ticks=rule.wants_ticks,
        config=config.model_dump(mode="json") if config else dict(pack.settings.get(rule.name, {})),
        config_schema=rule.config.model_json_schema(),
    )


@router.post("/replay", responses=documented(404))
async def replay_rules(rooms: InRooms, caller: Reader, asked: ReplayAsked) -> ReplayAnswer:
    """What a rule pack would have found on a run's stored steps. Bounded in steps, findings and at once."""
    project, _, name = asked.run.partition("/")
    caller.check_project(project)
    with rooms.replays.place():
        return await run_in_threadpool(_replay, rooms, project, name, asked)


def _replay(rooms: Rooms, project: str, name: str, asked: ReplayAsked) -> ReplayAnswer:
    try:
        pack = parse_pack(asked.pack, "pack") if asked.pack.strip() else rooms.pack()
    except PackError as error:
        raise Unprocessable(str(error)) from None
    engine = RuleEngine(pack)
    state, now = engine.initial(), time.time()
    findings: list[ReplayFinding] = []
    steps, truncated = 0, False
    firing: tuple[str, ...] = ()
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        for view in _views(session, run, asked, rooms.settings.max_replay_steps):
            state, outcome = engine.evaluate(state, view, now)
            steps += 1
            firing = tuple(outcome.firing)
            truncated = truncated or len(findings) + len(outcome.findings) > MAX_FINDINGS
            findings += [_finding(view, f) for f in outcome.findings[: MAX_FINDINGS - len(findings)]]
    return ReplayAnswer(
        run=asked.run, pack_hash=pack.hash, steps=steps, findings=findings, truncated=truncated, open=list(firing)
    )


def _finding(view: StepView, finding: Finding) -> ReplayFinding:
    plain = msgspec.to_builtins(finding)
    return ReplayFinding(
        **{k: plain.get(k) for k in ReplayFinding.model_fields if k != "attempt"}, attempt=view.attempt
    )


def _views(session: Session, run: Run, asked: ReplayAsked, most: int) -> Iterator[StepView]:
    """The stored steps as rules see them, in (attempt, step) order. Notices are not kept with them."""
    window = [Point.run_id == run.id]
    if asked.attempt is not None:
        window.append(Point.attempt == asked.attempt)
    if asked.from_step is not None:
        window.append(Point.step >= asked.from_step)
    if asked.to_step is not None:
        window.append(Point.step <= asked.to_step)
    stored = session.scalar(select(func.count()).select_from(Point).where(*window)) or 0
    if stored > most:
        raise TooLarge(f"The window holds {stored} steps; at most {most} are folded at once.")
    names = dict(session.execute(select(SignalName.position, SignalName.name).where(SignalName.run_id == run.id)).all())
    query = select(Point).where(*window).order_by(Point.attempt, Point.step).limit(most)
    for point in session.scalars(query).yield_per(500):
        yield StepView(
            run=run.name,
            attempt=point.attempt,
            step=point.step,
            values={names[i]: v for i, v in enumerate(point.values, 1) if v is not None and i in names},
            worst={k: (float(v[0]), int(v[1])) for k, v in point.worst.items()},
            missing=point.missing,
            reported=point.reported,
            expected=point.expected,
            segment=point.segment,
            settings=run.settings,
            evidence=point.evidence,
        )
        session.expunge(point)
