"""What ingest asks of later rooms, handed in by `app.py` so that the street keeps its one direction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from foreshock.wire import Command
from foreshock_service.store.models import Run


def _no_commands(_session: Session, _run_id: int, _client_id: str, _now: float) -> Sequence[Command]:
    return ()


def _all(_session: Session, run_ids: Collection[int]) -> Collection[int]:
    return run_ids


def _nothing(*_: Any, **__: Any) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """Called inside the transaction that stores the envelope; an exception fails that envelope and is logged."""

    deliver: Callable[[Session, int, str, float], Sequence[Command]] = _no_commands
    """(session, run_id, client_id, now): the commands for this controller. `commands.protocol.deliver`."""
    waiting: Callable[[Session, Collection[int]], Collection[int]] = _all
    """(session, run ids): those of these runs for which `deliver` may have something. `commands.protocol.waiting`."""
    register_checkpoint: Callable[[Session, Run, int, int, Mapping[str, Any], float], object] = _nothing
    """(session, run, attempt, step, the notice's data {path, scope, reward}, now)."""
    attempt_began: Callable[[Session, int, int, float, str | None], object] = _nothing
    """(session, run_id, attempt, now, id of the rollback that led here). `commands.protocol.lose_accepted`."""
    run_finished: Callable[[Session, int, float, str], object] = _nothing
    """(session, run_id, now, reason). `commands.protocol.close_run`."""
