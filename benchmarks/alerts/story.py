"""What happens to incidents and commands, told through the real book, protocol and outbox."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from foreshock.wire.commands import Action
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.commands import protocol
from foreshock_service.incidents import book
from foreshock_service.rules.interface import Evidence, Finding, Outcome, StepView
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery, Run


class Story:
    """One store, some channels. Steps rise by themselves; `now` is the caller's."""

    def __init__(self, store: Store, channels: tuple[str, ...], followers: tuple[str, ...] = ("slack_app",)) -> None:
        self.store = store
        self.outbox = Outbox(channels, followers)
        self._step = 20

    def happen(
        self,
        run_id: int,
        transition: str,
        now: float,
        *,
        rule: str = "rollout_mismatch",
        severity: str = "critical",
        message: str = "engine at fault",
        signal: str = "mismatch.kl_k3",
        propose: str | None = None,
    ) -> tuple[str, str | None]:
        """One evaluation that changes an incident; the ids of the incident and of the command it led to."""
        self._step += 1
        with self.store.write() as session:
            run = session.get_one(Run, run_id)
            finding = Finding(
                rule=rule, transition=transition, severity=severity, step=self._step, onset_step=self._step - 1,  # type: ignore[arg-type]
                message=message, evidence=(Evidence(signal=signal, value=0.125, expected=5e-4),), edge="engine",
            )  # fmt: skip
            seen = StepView(run=run.name, attempt=1, step=self._step, values={"mismatch.kl_k3": 0.125})
            firing = [] if transition == "close" else [rule]
            others = [i.rule for i in book.incidents(session, run_id, book.ACTIVE) if i.rule != rule]
            outcome = Outcome(findings=[finding], firing=firing + others)
            changes = book.apply(session, run, seen, outcome, now)
            commands = []
            if propose is not None:
                change = protocol.propose(
                    session, run, [Action(kind=propose)], now, reason="push <weights>",
                    incident_id=changes[0].incident.id,
                )  # fmt: skip
                assert change is not None
                commands.append(change)
            self.outbox.enqueue(session, run, changes, commands, now)
            return changes[0].incident.id, commands[0].command.id if commands else None

    def decide(self, command_id: str, verb: str, by: str, now: float) -> None:
        """A person approves or rejects."""
        with self.store.write() as session:
            row = protocol.find(session, command_id)
            change = (protocol.approve if verb == "approve" else protocol.reject)(session, command_id, by, now)
            self.outbox.enqueue(session, session.get_one(Run, row.run_id), [], [change], now)

    def expire(self, now: float) -> None:
        """The sweep."""
        with self.store.write() as session:
            for change in protocol.expire_due(session, now):
                run = session.get_one(Run, change.command.run_id)
                self.outbox.enqueue(session, run, [], [change], now)

    def rows(self, **where: Any) -> list[Delivery]:
        """The outbox, in the order of writing."""
        with self.store.read() as session:
            return list(session.scalars(select(Delivery).filter_by(**where).order_by(Delivery.ordinal)))

    def states(self) -> list[tuple[str, str]]:
        """(event, state) of every alert."""
        return [(row.event, row.state) for row in self.rows()]
