"""Tiny real rules and rooms: enough for the evaluator to open an incident and issue a command, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from sqlalchemy.orm import Session

from foreshock_service.rules.interface import Finding, Observation, Outcome, StepView, Tick
from foreshock_service.store.models import CommandRow, Incident, Run
from foreshock_service.store.upsert import insert_new
from foreshock_service.workers.rooms import Rooms


class CountState(msgspec.Struct):
    seen: list[tuple[int, int]] = []
    firing: bool = False


@dataclass
class Threshold:
    """Fires while `loss` is above 1 or not finite; remembers every step that it folded."""

    views: list[Observation] = field(default_factory=list)
    fails_on: int | None = None

    def load(self, data: bytes | None) -> CountState:
        return msgspec.msgpack.decode(data, type=CountState) if data else CountState()

    def dump(self, state: CountState) -> bytes:
        return msgspec.msgpack.encode(state)

    def evaluate(self, state: CountState, seen: Observation, now: float) -> tuple[CountState, Outcome]:
        self.views.append(seen)
        if isinstance(seen, Tick):
            silent = seen.silent_s > 100.0
            return state, Outcome(firing=("silent_run",) if silent else ())
        if seen.step == self.fails_on:
            raise ArithmeticError("this step cannot be evaluated")
        loss = seen.values.get("loss", 0.0)
        firing = not loss <= 1.0
        findings = []
        if firing and not state.firing:
            findings = [Finding(rule="threshold", transition="open", severity="critical", step=seen.step)]
        after = CountState(seen=[*state.seen, (seen.attempt, seen.step)], firing=firing)
        return after, Outcome(
            findings=findings, firing=("threshold",) if firing else (), bands={"loss": (0.0, 0.5, 1.0)}
        )


def open_incidents(session: Session, run: Run, seen: Observation, outcome: Outcome, now: float) -> Sequence[Any]:
    rows = [
        {
            "id": f"{run.id}-{f.rule}-{seen.attempt}-{f.step}",
            "run_id": run.id,
            "rule": f.rule,
            "severity": f.severity,
            "status": "open",
            "attempt": seen.attempt,
            "opened_at": now,
            "message": "",
            "evidence": [],
            "diagnosis": {},
            "times_opened": 1,
        }
        for f in outcome.findings
    ]
    session.add_all([Incident(**row) for row in rows])
    session.flush()
    return rows


def issue_commands(
    session: Session, run: Run, seen: Observation, changes: Sequence[Any], now: float, may_command: bool
) -> Sequence[Any]:
    if not changes or not may_command:
        return ()
    row = {
        "id": changes[0]["id"],
        "run_id": run.id,
        "attempt": seen.attempt,
        "kind": "pause",
        "actions": [],
        "state": "proposed",
        "reason": "",
        "evidence_key": changes[0]["id"],
        "requested_by": "policy",
        "created_at": now,
        "expires_at": now + 600,
        "detail": {},
        "verdict_detail": {},
    }
    insert_new(session, CommandRow, [row])
    return [row]


def verdict(_session: Session, _run_id: int, calibrated: bool) -> str:
    return "healthy" if calibrated else "unknown"


@pytest.fixture
def engine() -> Threshold:
    return Threshold()


def rooms_with(engine: Threshold) -> Rooms:
    return Rooms(lambda overrides: (engine, "tiny"), open_incidents, issue_commands, verdict=verdict)


@pytest.fixture
def rooms(engine: Threshold) -> Rooms:
    return rooms_with(engine)


def steps_of(views: Sequence[Observation]) -> list[tuple[int, int]]:
    return [(v.attempt, v.step) for v in views if isinstance(v, StepView)]
