"""Gauges read from the database: runs, their signals, and the backlog. One replica alone shows them: sums are right.

Every replica could read the same rows, and a sum over replicas would then count each run N times. So the replica that
holds the lease `metrics` shows them and the others leave them out; after its death another takes over within a minute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import case, func, literal_column, select
from sqlalchemy.orm import Session

from foreshock.frames import catalogue
from foreshock_service.store import leases
from foreshock_service.store.engine import Store
from foreshock_service.store.models import (
    Client,
    CommandRow,
    Delivery,
    EvaluationState,
    Incident,
    Lease,
    Point,
    Run,
    SignalName,
    Step,
)

LEASE: Final = "metrics"
LEASE_S: Final = 60.0
VERDICTS: Final = ("healthy", "warning", "critical", "unknown")
SEVERITIES: Final = ("warning", "critical")
LOSS_REASONS: Final = frozenset(
    {
        "queue_full",
        "spool_full",
        "disk_full",
        "spool_unwritable",
        "corrupt",
        "refused",
        "too_large",
        "unencodable",
        "invalid_signal",
        "command_ignored",
    }
)
"""Reasons shown by name; whatever else a client counts is shown as `other`, so that labels stay bounded."""

SIGNALS: Final = (
    "policy.kl_k2", "policy.kl_k3", "policy.abs_mean", "policy.ess_token", "policy.nonfinite", "update.kl_k2",
    "update.clip_low", "update.clip_high", "mismatch.kl_k3", "mismatch.kl_k2", "mismatch.abs_mean",
    "mismatch.abs_q99", "mismatch.ess_token", "mismatch.prob_pearson", "entropy.mean", "reward.mean",
    "reward.validation", "group.zero_std", "grad.norm", "length.mean", "length.truncated", "staleness.max", "lr",
    "loss", "time.step_s",
)  # fmt: skip
"""The signals shown here, 25 a run; Grafana reads all of them from the database."""
SUFFIXES: Final = {
    "nats": "_nats", "share": "_ratio", "tokens": "_tokens", "steps": "_steps", "seconds": "_seconds",
    "count": "", "1": "",
}  # fmt: skip
"""Unit in the catalogue → end of the metric's name: Prometheus wants one unit a metric, base units, in the name."""


def leads(store: Store, owner: str, now: float) -> bool:
    """True where this replica shows what the database holds; claims or renews the lease when it is due."""
    if store.dialect == "sqlite":
        return True  # one process
    with store.read() as session:
        held = session.execute(select(Lease.owner, Lease.until_at).where(Lease.name == LEASE)).first()
    if held is not None and held.owner is not None and held.until_at >= now:
        if held.owner != owner:
            return False
        if held.until_at > now + LEASE_S / 2:
            return True
    with store.write(durable=False) as session:
        return leases.claim(session, LEASE, owner, now, LEASE_S) is not None


def families(session: Session, project: str | None, most_runs: int, now: float) -> Iterable[Metric]:
    """Gauges of the runs heard last (of one project, or all), and for all projects those of the backlog too."""
    query = select(Run).order_by(Run.last_seen_at.desc()).limit(most_runs)
    if project is not None:
        query = query.where(Run.project == project)
    runs = list(session.scalars(query))
    yield from _runs(session, runs, now)
    yield from _signals(session, runs)
    yield _losses(session, runs)
    if project is None:
        yield from _backlog(session, now)


def _runs(session: Session, runs: Sequence[Run], now: float) -> Iterable[Metric]:
    opened: dict[tuple[int, str], int] = {
        (run_id, severity): count
        for run_id, severity, count in session.execute(
            select(Incident.run_id, Incident.severity, func.count())
            .where(Incident.run_id.in_([r.id for r in runs]), Incident.status != "resolved")
            .group_by(Incident.run_id, Incident.severity)
        )
    }
    verdict = GaugeMetricFamily(
        "foreshock_run_verdict", "1 at the run's verdict, 0 at the others.", labels=("run", "verdict")
    )
    running = GaugeMetricFamily("foreshock_run_running", "1 while the run has not ended.", labels=("run",))
    attempt = GaugeMetricFamily("foreshock_run_attempt", "Attempt that the run is in.", labels=("run",))
    step = GaugeMetricFamily("foreshock_run_last_step", "Last evaluated step.", labels=("run",))
    silent = GaugeMetricFamily("foreshock_run_silent_seconds", "Seconds since the run was heard.", labels=("run",))
    incidents = GaugeMetricFamily(
        "foreshock_run_open_incidents", "Incidents not resolved, by severity.", labels=("run", "severity")
    )
    for run in runs:
        for name in VERDICTS:
            verdict.add_metric((run.name, name), 1.0 if run.verdict == name else 0.0)
        running.add_metric((run.name,), 0.0 if run.status in ("finished", "crashed") else 1.0)
        attempt.add_metric((run.name,), run.attempt)
        if run.last_step is not None:
            step.add_metric((run.name,), run.last_step)
        silent.add_metric((run.name,), max(0.0, now - run.last_seen_at))
        for severity in SEVERITIES:
            incidents.add_metric((run.name, severity), opened.get((run.id, severity), 0))
    return (verdict, running, attempt, step, silent, incidents)


def _signals(session: Session, runs: Sequence[Run]) -> Iterable[Metric]:
    """The last step's value of each shown signal; a missing one has no sample."""
    by_id = {run.id: run.name for run in runs}
    positions: dict[int, dict[str, int]] = {}
    names = select(SignalName.run_id, SignalName.name, SignalName.position)
    for run_id, name, position in session.execute(
        names.where(SignalName.run_id.in_(by_id), SignalName.name.in_(SIGNALS))
    ):
        positions.setdefault(run_id, {})[name] = position
    made = {
        suffix: GaugeMetricFamily(
            f"foreshock_run_signal{suffix}",
            f"Last value of a signal whose unit is {suffix.strip('_') or 'none'}; docs/prometheus.md lists them.",
            labels=("run", "signal"),
        )
        for suffix in dict.fromkeys(SUFFIXES.values())
    }
    latest = select(Point.run_id, Point.values).join(Run, Run.id == Point.run_id)
    latest = latest.where(Run.id.in_(by_id), Point.attempt == Run.attempt, Point.step == Run.last_step)
    for run_id, values in session.execute(latest):
        for name, position in sorted(positions.get(run_id, {}).items()):
            value = values[position - 1] if position <= len(values) else None
            known = catalogue.find(name)
            if value is not None and known is not None:
                made[SUFFIXES[known.unit]].add_metric((by_id[run_id], name), value)
    return [family for family in made.values() if family.samples]


def _losses(session: Session, runs: Sequence[Run]) -> Metric:
    by_id = {run.id: run.name for run in runs}
    lost: Counter[tuple[str, str]] = Counter()
    query = select(Client.run_id, Client.losses).where(Client.run_id.in_(by_id))
    for run_id, losses in session.execute(query):
        for reason, count in _counts(losses).items():
            lost[by_id[run_id], reason if reason in LOSS_REASONS else "other"] += count
    family = CounterMetricFamily(
        "foreshock_run_lost_items", "Frames and notices that collectors dropped, by reason.", labels=("run", "reason")
    )
    for labels, count in sorted(lost.items()):
        family.add_metric(labels, count)
    return family


def _counts(losses: Mapping[str, Any]) -> dict[str, int]:
    return {k: int(v) for k, v in losses.items() if isinstance(v, int | float) and math.isfinite(v)}


def _backlog(session: Session, now: float) -> Iterable[Metric]:
    waiting = (Step.evaluated_at.is_(None), Step.due_at <= now)
    overdue, due = session.execute(select(func.min(Step.due_at), func.count()).where(*waiting)).one()
    yield _single(
        "foreshock_evaluation_lag_seconds", "Age of the oldest step that is due and not evaluated.", _age(now, overdue)
    )
    yield _single("foreshock_steps_due", "Steps that are due and not evaluated.", due)
    evaluated = session.scalar(select(func.max(EvaluationState.evaluated_at)))
    yield _single(
        "foreshock_last_evaluation_timestamp_seconds", "When a step was last evaluated; 0: never.", evaluated or 0.0
    )
    # What quiet hours hold is not late: it is due in the morning.
    unsent = select(func.min(Delivery.created_at)).where(
        Delivery.state.in_(("pending", "sending")), Delivery.held_at.is_(None)
    )
    yield _single(
        "foreshock_outbox_lag_seconds", "Age of the oldest alert not yet delivered.", _age(now, session.scalar(unsent))
    )
    state = case((Delivery.held_at.is_not(None), literal_column("'held'")), else_=Delivery.state)
    by_state = session.execute(select(Delivery.channel, state, func.count()).group_by(Delivery.channel, state))
    yield _by_labels("foreshock_deliveries", "Alerts kept, by channel and state.", ("channel", "state"), by_state)
    commands = session.execute(select(CommandRow.state, func.count()).group_by(CommandRow.state))
    yield _by_labels("foreshock_commands", "Commands by state.", ("state",), commands)
    verdicts = session.execute(select(Run.status, Run.verdict, func.count()).group_by(Run.status, Run.verdict))
    yield _by_labels("foreshock_runs", "Runs by status and verdict.", ("status", "verdict"), verdicts)


def _age(now: float, then: float | None) -> float:
    return max(0.0, now - then) if then is not None else 0.0


def _single(name: str, sentence: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, sentence)
    family.add_metric((), value)
    return family


def _by_labels(name: str, sentence: str, labels: tuple[str, ...], rows: Iterable[Any]) -> Metric:
    family = GaugeMetricFamily(name, sentence, labels=labels)
    for *values, count in rows:
        family.add_metric([str(v) for v in values], count)
    return family
