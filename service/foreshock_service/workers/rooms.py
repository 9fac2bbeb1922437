"""What the evaluator asks of the other rooms. `app.py` introduces the real ones; tests introduce tiny ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy.orm import Session

from foreshock_service.rules.interface import Observation, Outcome
from foreshock_service.store.models import Run


class Engine(Protocol):
    """A rule pack, ready to fold. `rules.engine.RuleEngine`; states are opaque here, and never changed in place."""

    def load(self, data: bytes | None) -> Any: ...

    def dump(self, state: Any) -> bytes: ...

    def evaluate(self, state: Any, seen: Observation, now: float) -> tuple[Any, Outcome]: ...


def _none(*_: Any) -> Sequence[Any]:
    return ()


def _never(*_: Any) -> bool:
    return False


def _unknown(_session: Session, _run_id: int, _calibrated: bool) -> str:
    return "unknown"


@dataclass(frozen=True)
class Rooms:
    """Each is called inside the evaluation's transaction and commits nothing."""

    engine: Callable[[Mapping[str, Any]], tuple[Engine, str]]
    """`runs.rules` (the run's overrides) → the engine, and a hash of its pack: a new hash means new rules."""
    incidents: Callable[[Session, Run, Observation, Outcome, float], Sequence[Any]] = _none
    commands: Callable[[Session, Run, Observation, Sequence[Any], float, bool], Sequence[Any]] = _none
    """(session, run, seen, incident changes, now, may_command)."""
    alerts: Callable[[Session, Run, Sequence[Any], Sequence[Any], float], object] = _none
    quiet: Callable[[Session, Run, Observation], bool] = _never
    """Asked where the rules found nothing new: True where nothing is open, pending or to be looked after either, so
    that incidents, commands and verdict need not be asked. The verdict is then healthy, or unknown until calibrated."""
    verdict: Callable[[Session, int, bool], str] = _unknown
    """(session, run_id, calibrated) → healthy · warning · critical · unknown."""
    expire: Callable[[Session, float], Collection[int]] = _none
    """The sweep of commands whose time has passed → the runs that it touched."""
