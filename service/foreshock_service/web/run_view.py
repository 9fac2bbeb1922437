"""What a run's page shows: what is open, why, its signals, its ranks, its worst tokens, its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import case, select
from sqlalchemy.orm import Session

from foreshock.wire import TERMINAL_STATES
from foreshock_service.api.bodies import CommandBody, IncidentBody, command_body, incident_body
from foreshock_service.api.principal import Principal
from foreshock_service.diagnosis.window import PastStep, recent_steps
from foreshock_service.store.models import (
    Attempt,
    Checkpoint,
    Client,
    CommandRow,
    Incident,
    Point,
    Run,
    SignalName,
    Silence,
)
from foreshock_service.web.charts import DRAWN_STEPS, NUMBER_STEPS, Chart, build, kinds
from foreshock_service.web.fleet import active_silences
from foreshock_service.web.recent import recent

MAX_ROWS: Final = 100
MAX_TOKENS: Final = 16
MAX_WORST: Final = 12


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything on the page but the diagnosis."""

    run: Run
    incidents: Sequence[IncidentBody]
    commands: Sequence[CommandBody]
    waiting: Sequence[CommandBody]
    """Those of `commands` that are not over."""
    checkpoints: Sequence[Checkpoint]
    attempts: Sequence[Attempt]
    clients: Sequence[Client]
    silences: Sequence[Silence]
    charts: Sequence[Chart]
    signals: Sequence[str]
    last: PastStep | None
    worst: Sequence[tuple[str, Any, Any]]
    """(signal, worst rank's value, rank) of the last step."""
    tokens: Sequence[tuple[str, Mapping[str, Any]]]
    """(pair, token) of the step `tokens_step`, the largest difference first."""
    tokens_step: int | None

    @property
    def open(self) -> list[IncidentBody]:
        """Incidents that are not resolved: the gravest first, and of those what came first, for it may have led on."""
        found = [incident for incident in self.incidents if incident.status != "resolved"]
        return sorted(found, key=lambda incident: (incident.severity, incident.opened_at))


def read_view(session: Session, dialect: str, run: Run, visitor: Principal, wished: Sequence[str]) -> RunView:
    """About ten queries, whatever the run's length."""
    incidents = [incident_body(i, run.name) for i in session.scalars(_incidents(run))]
    commands = [command_body(c, run.name) for c in session.scalars(_newest(CommandRow, run, CommandRow.created_at))]
    places = dict(
        session.execute(select(SignalName.name, SignalName.position).where(SignalName.run_id == run.id)).all()
    )
    accused = [e["signal"] for i in incidents if i.status != "resolved" for e in i.evidence if "signal" in e]
    wanted = kinds(places, accused, wished)
    shown = {name: places[name] for kind in wanted for name in kind.signals}
    past = recent_steps(session, run.id, run.attempt, steps=NUMBER_STEPS)
    tokens_step, tokens = _tokens(past)
    return RunView(
        run=run,
        incidents=incidents,
        commands=commands,
        waiting=[c for c in commands if c.state not in TERMINAL_STATES],
        checkpoints=list(session.scalars(_newest(Checkpoint, run, Checkpoint.registered_at))),
        attempts=list(session.scalars(_newest(Attempt, run, Attempt.ordinal))),
        clients=list(session.scalars(_newest(Client, run, Client.last_seen_at))),
        silences=active_silences(session, visitor, run.name),
        charts=build(wanted, recent(session, dialect, run.id, shown, DRAWN_STEPS), past),
        signals=sorted(places),
        last=past[-1] if past else None,
        worst=_worst(session, run),
        tokens=tokens,
        tokens_step=tokens_step,
    )


def _newest(table: Any, run: Run, at: Any) -> Any:
    return select(table).where(table.run_id == run.id).order_by(at.desc()).limit(MAX_ROWS)


def _incidents(run: Run) -> Any:
    over = case((Incident.status == "resolved", 1), else_=0)
    query = select(Incident).where(Incident.run_id == run.id)
    return query.order_by(over, Incident.severity, Incident.opened_at.desc()).limit(MAX_ROWS)


def _worst(session: Session, run: Run) -> list[tuple[str, Any, Any]]:
    query = select(Point.worst).where(Point.run_id == run.id, Point.attempt == run.attempt)
    worst = session.scalar(query.order_by(Point.step.desc()).limit(1)) or {}
    ranked = [(signal, pair[0], pair[1]) for signal, pair in sorted(worst.items()) if len(pair) == 2]
    leading = [row for row in ranked if row[0].rpartition(".")[2] in ("kl_k2", "kl_k3", "abs_max", "norm", "nonfinite")]
    return (leading or ranked)[:MAX_WORST]


def _tokens(past: Sequence[PastStep]) -> tuple[int | None, list[tuple[str, Mapping[str, Any]]]]:
    """Of the newest step that has evidence."""
    for step in reversed(past):
        rows = [(pair, token) for pair, tokens in step.evidence.items() for token in tokens]
        if rows:
            return step.step, sorted(rows, key=_difference, reverse=True)[:MAX_TOKENS]
    return None, []


def _difference(row: tuple[str, Mapping[str, Any]]) -> float:
    """|a − b|; what is not finite comes first."""
    try:
        difference = abs(float(row[1]["a"]) - float(row[1]["b"]))
    except (KeyError, TypeError, ValueError):
        return float("inf")
    return difference if difference == difference else float("inf")  # noqa: PLR0124
