"""What the routes reach of the other rooms, gathered by `app.py` and handed over on `app.state.rooms`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Path
from sqlalchemy import bindparam, event, select
from sqlalchemy.orm import Session
from starlette.requests import Request

from foreshock.wire.checks import Limits as WireLimits
from foreshock_service.api.limits import Slots
from foreshock_service.api.looks import Looks
from foreshock_service.api.telemetry import Telemetry
from foreshock_service.api.tokens import TokenBook
from foreshock_service.commands.limits import Limits
from foreshock_service.commands.protocol import CommandChange
from foreshock_service.errors import NotFound
from foreshock_service.evaluators import EvaluatorProcesses
from foreshock_service.incidents.book import IncidentChange
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.rules.pack import Pack, PackFile
from foreshock_service.settings import Settings
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Run
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from foreshock_service.api.slack import SlackRoom

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"
RUN_PATTERN = r"^[A-Za-z0-9._-]{1,128}/[A-Za-z0-9._-]{1,128}$"
ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

Project = Annotated[str, Path(pattern=NAME_PATTERN, description="First part of the run's name.", examples=["math"])]
Name = Annotated[str, Path(pattern=NAME_PATTERN, description="Second part.", examples=["qwen-7b-rlvr"])]
Announce = Callable[[Session, Run, Sequence[IncidentChange], Sequence[CommandChange], float], object]

_NAMED = select(Run).where(Run.name == bindparam("b_name"))


@dataclass
class Rooms:
    """One service process: its settings, its store, its workers, its bounds."""

    settings: Settings
    telemetry: Telemetry
    store: Store
    tokens: TokenBook
    waiters: Slots
    replays: Slots
    limits: Limits
    pack_file: PackFile
    announce: Announce
    """Puts alerts for changes into the outbox, in the caller's transaction."""
    hub: Hub
    looks: Looks
    writer: GroupWriter
    wire_limits: WireLimits
    ingest_limits: IngestLimits
    evaluator: Evaluator | EvaluatorProcesses
    supervisor: Supervisor
    slack: SlackRoom | None = None
    """Where clicks in Slack come back to, if an app is set up for them."""
    stopping: bool = False

    def ready(self) -> bool:
        """False while the service stops, or when a worker's thread is dead."""
        return not self.stopping and all(self.supervisor.alive().values())

    def pack(self) -> Pack:
        """The rule pack in use now."""
        return self.pack_file.current()

    def after_commit(self, session: Session, run_id: int) -> None:
        """Wakes whoever waits for news of the run, once the session's transaction is durable."""
        event.listen(session, "after_commit", lambda _: self.hub.changed(run_id), once=True)


def valid_name(word: str) -> bool:
    """True for one part of a run's name, a label or a token's name."""
    return re.fullmatch(NAME_PATTERN, word) is not None


async def rooms_of(request: Request) -> Rooms:
    """For `Depends`. Asynchronous, or each request would wait for a thread of the pool to look this up."""
    rooms: Rooms = request.app.state.rooms
    return rooms


InRooms = Annotated[Rooms, Depends(rooms_of)]


def find_run(session: Session, project: str, name: str) -> Run:
    """The run, or `NotFound`."""
    run = session.scalar(_NAMED, {"b_name": f"{project}/{name}"})
    if run is None:
        raise NotFound(f"No run named {project}/{name}.")
    return run
