"""The small functions that let one room call another without importing it: engines, hooks, alerts."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from foreshock_service.commands import checkpoints, policy, protocol
from foreshock_service.commands.limits import Limits
from foreshock_service.commands.protocol import CommandChange
from foreshock_service.incidents import book
from foreshock_service.incidents.book import IncidentChange
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.interface import Observation
from foreshock_service.rules.pack import PackError, PackFile
from foreshock_service.settings import Settings
from foreshock_service.store.models import Run
from foreshock_service.workers.rooms import Rooms as EvaluatorRooms

Alerts = Callable[[Session, Run, Sequence[IncidentChange], Sequence[CommandChange], float], object]
log = logging.getLogger(__name__)
MAX_ENGINES = 256


class Engines:
    """Run overrides → engine, kept by (pack, overrides). A run whose overrides no longer fit the pack gets the pack."""

    def __init__(self, file: PackFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._told: str | None = None
        self._made: dict[tuple[str, str], RuleEngine] = {}

    def __call__(self, overrides: Mapping[str, Any]) -> tuple[RuleEngine, str]:
        with self._lock:
            pack = self._file.current()
            if self._file.error != self._told:
                self._told = self._file.error
                if self._told is None:
                    log.info("the rule pack is good again and in use")
                else:
                    log.warning("the rule pack is not taken, the last good one stays: %s", self._told)
            key = (pack.hash, json.dumps(overrides, sort_keys=True, default=str))
            if key not in self._made:
                if len(self._made) >= MAX_ENGINES:
                    self._made.clear()
                self._made[key] = RuleEngine(_laid_over(pack, overrides))
            engine = self._made[key]
        return engine, engine.pack.hash


def _laid_over(pack: Any, overrides: Mapping[str, Any]) -> Any:
    try:
        return pack.with_overrides(overrides)
    except PackError:
        return pack


def command_limits(settings: Settings) -> Limits:
    """The limits of acting, with the two that settings expose."""
    return Limits(budget_per_run=settings.budget_per_run, command_expiry_s=settings.command_expiry_s)


def ingest_hooks(limits: Limits) -> Hooks:
    """What ingest asks of commands."""
    return Hooks(
        deliver=protocol.deliver,
        waiting=protocol.waiting,
        register_checkpoint=checkpoints.register,
        attempt_began=protocol.lose_accepted,
        run_finished=protocol.close_run,
    )


def evaluator_rooms(engines: Engines, limits: Limits, alerts: Alerts) -> EvaluatorRooms:
    """What the evaluator asks of rules, incidents, commands and alerts."""

    def consider(
        session: Session, run: Run, seen: Observation, changes: Sequence[Any], now: float, may_command: bool
    ) -> Sequence[CommandChange]:
        return policy.consider(session, run, seen, changes, now, may_command, limits=limits)

    def expire(session: Session, now: float) -> set[int]:
        changes = protocol.expire_due(session, now, limits=limits)
        by_run: dict[int, list[CommandChange]] = {}
        for change in changes:
            by_run.setdefault(change.command.run_id, []).append(change)
        for run_id, of_run in by_run.items():
            run = session.get(Run, run_id)
            if run is not None:
                alerts(session, run, [], of_run, now)
        return set(by_run)

    return EvaluatorRooms(
        engine=engines,
        incidents=book.apply,
        commands=consider,
        alerts=alerts,
        quiet=policy.idle,
        verdict=lambda session, run_id, calibrated: book.verdict(session, run_id, calibrated=calibrated),
        expire=expire,
    )
