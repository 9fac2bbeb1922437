"""Probes and metrics: `/healthz` and `/readyz` are open and tell nothing; `/metrics` takes a `read` bearer."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel
from sqlalchemy import func, select

from foreshock_service.api.access import Reader
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Rooms
from foreshock_service.errors import Unavailable
from foreshock_service.store.models import CommandRow, Delivery, Incident, Run, Step

router = APIRouter(tags=["operations"])

VERDICTS = ("healthy", "warning", "critical", "unknown")


class Probe(BaseModel):
    """Nothing but yes."""

    status: str = "ok"


@router.get("/healthz", responses={})
async def healthz() -> Probe:
    """The process answers."""
    return Probe()


@router.get("/readyz", responses=documented())
async def readyz(rooms: InRooms) -> Probe:
    """The database answers and the workers are running; 503 otherwise."""
    if not rooms.ready() or not await run_in_threadpool(rooms.store.ping):
        raise Unavailable("Starting, stopping, or without its database.", retry_after_s=2)
    return Probe()


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        **documented(),
        200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
    },
)
def metrics(rooms: InRooms, caller: Reader) -> Response:
    """The service's own health, and gauges of the runs heard last that the token covers (bounded)."""
    rooms.telemetry.waiters.set(rooms.waiters.taken)
    own = generate_latest(rooms.telemetry.registry)
    runs = generate_latest(_Families(list(_gauges(rooms, caller.project))))  # type: ignore[arg-type]
    return Response(own + runs, media_type=CONTENT_TYPE_LATEST)


class _Families:
    """What `generate_latest` needs of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauges(rooms: Rooms, project: str | None) -> Iterable[Metric]:
    now = time.time()
    with rooms.store.read() as session:
        query = select(Run).order_by(Run.last_seen_at.desc()).limit(rooms.settings.max_metric_runs)
        if project is not None:
            query = query.where(Run.project == project)
        runs = list(session.scalars(query))
        ids = [run.id for run in runs]
        opened = dict(
            session.execute(
                select(Incident.run_id, func.count())
                .where(Incident.run_id.in_(ids), Incident.status != "resolved")
                .group_by(Incident.run_id)
            ).all()
        )
        yield from _run_gauges(runs, opened, now)
        if project is not None:
            return
        overdue = session.scalar(select(func.min(Step.due_at)).where(Step.evaluated_at.is_(None), Step.due_at <= now))
        yield _single(
            "foreshock_evaluation_lag_seconds",
            "Age of the oldest step that is due and not evaluated.",
            max(0.0, now - overdue) if overdue is not None else 0.0,
        )
        yield from _worker_counts(rooms)
        states = session.execute(select(Delivery.state, func.count()).group_by(Delivery.state))
        yield _by_label("foreshock_deliveries", "Deliveries by state.", "state", states)
        commands = session.execute(select(CommandRow.state, func.count()).group_by(CommandRow.state))
        yield _by_label("foreshock_commands", "Commands by state.", "state", commands)


def _worker_counts(rooms: Rooms) -> Iterable[Metric]:
    writer, evaluator = rooms.writer.counts, rooms.evaluator.counts
    yield _single("foreshock_writer_queue", "Envelopes waiting for the writer.", rooms.writer.waiting)
    yield _count("foreshock_writer_groups", "Transactions of the writer.", writer.groups)
    yield _count("foreshock_frames_stored", "Frames stored.", writer.frames)
    yield _count("foreshock_items_repeated", "Items that came again and were only acknowledged.", writer.repeated)
    yield _count("foreshock_envelopes_failed", "Envelopes that could not be stored.", writer.failed)
    yield _count("foreshock_envelopes_turned_away", "Envelopes refused for a full queue.", writer.refused_full)
    yield _count("foreshock_steps_evaluated", "Steps evaluated by this process.", evaluator.steps)
    yield _count("foreshock_steps_failed", "Steps passed over because their evaluation failed.", evaluator.failed_steps)
    yield _count("foreshock_leases_lost", "Evaluations rolled back for a lost lease.", evaluator.leases_lost)
    crashes = CounterMetricFamily("foreshock_worker_crashes", "Workers started again.", labels=("worker",))
    for name in rooms.supervisor.alive():
        crashes.add_metric((name,), rooms.supervisor.crashes[name])
    yield crashes


def _count(name: str, sentence: str, value: float) -> Metric:
    family = CounterMetricFamily(name, sentence)
    family.add_metric((), value)
    return family


def _run_gauges(runs: list[Run], opened: dict[int, int], now: float) -> Iterable[Metric]:
    verdict = GaugeMetricFamily(
        "foreshock_run_verdict", "1 at the run's verdict, 0 at the others.", labels=("run", "verdict")
    )
    step = GaugeMetricFamily("foreshock_run_last_step", "Last evaluated step.", labels=("run",))
    silent = GaugeMetricFamily("foreshock_run_silent_seconds", "Seconds since the run was heard.", labels=("run",))
    incidents = GaugeMetricFamily("foreshock_run_open_incidents", "Incidents not resolved.", labels=("run",))
    for run in runs:
        for name in VERDICTS:
            verdict.add_metric((run.name, name), 1.0 if run.verdict == name else 0.0)
        if run.last_step is not None:
            step.add_metric((run.name,), run.last_step)
        silent.add_metric((run.name,), max(0.0, now - run.last_seen_at))
        incidents.add_metric((run.name,), opened.get(run.id, 0))
    return (verdict, step, silent, incidents)


def _single(name: str, sentence: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, sentence)
    family.add_metric((), value)
    return family


def _by_label(name: str, sentence: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = GaugeMetricFamily(name, sentence, labels=(label,))
    for key, count in counts:
        family.add_metric((key,), count)
    return family
