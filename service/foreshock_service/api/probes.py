"""Probes and metrics: `/healthz` and `/readyz` are open and tell nothing; `/metrics` takes a `read` bearer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from foreshock_service.api import fleet
from foreshock_service.api.access import Reader
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Rooms
from foreshock_service.errors import Unavailable

router = APIRouter(tags=["operations"])

log = logging.getLogger(__name__)


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
    """The service's own health; from the one replica that leads, also the runs that the token covers (bounded)."""
    now = time.time()
    rooms.telemetry.waiters.set(rooms.waiters.taken)
    shown = list(_fleet(rooms, caller.project, now))
    if caller.project is None:
        shown += _worker_counts(rooms)
    own = generate_latest(rooms.telemetry.registry)
    return Response(own + generate_latest(_Families(shown)), media_type=CONTENT_TYPE_LATEST)


class _Families:
    """What `generate_latest` needs of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _fleet(rooms: Rooms, project: str | None, now: float) -> Iterable[Metric]:
    """What the database says. Where it does not answer the page still comes, with `foreshock_database_up` 0."""
    telemetry = rooms.telemetry
    try:
        leading = fleet.leads(rooms.store, rooms.evaluator.owner, now)
        found: list[Metric] = []
        if leading:
            with rooms.store.read() as session:
                found = list(fleet.families(session, project, rooms.settings.max_metric_runs, now))
    except SQLAlchemyError as error:
        log.warning("the database does not answer a scrape (%s)", type(error).__name__)
        telemetry.database_up.set(0)
        telemetry.leads.set(0)
        return []
    telemetry.database_up.set(1)
    telemetry.leads.set(leading)
    if rooms.ready():
        telemetry.heartbeat.set(now)
    return found


def _worker_counts(rooms: Rooms) -> Iterable[Metric]:
    writer, evaluator = rooms.writer.counts, rooms.evaluator.counts
    yield _gauge("foreshock_writer_queue_length", "Envelopes waiting for the writer.", rooms.writer.waiting)
    yield _gauge("foreshock_writer_queue_capacity", "Envelopes that may wait for the writer.", rooms.writer.capacity)
    yield _gauge(
        "foreshock_ingest_lag_seconds", "Age of the oldest envelope that waits for the writer.", rooms.writer.lag_s()
    )
    yield _count("foreshock_writer_groups", "Transactions of the writer.", writer.groups)
    yield _count("foreshock_frames_stored", "Frames stored.", writer.frames)
    yield _count("foreshock_items_repeated", "Items that came again and were only acknowledged.", writer.repeated)
    yield _count("foreshock_envelopes_failed", "Envelopes that could not be stored.", writer.failed)
    yield _count("foreshock_envelopes_turned_away", "Envelopes refused for a full queue.", writer.refused_full)
    yield _count("foreshock_steps_evaluated", "Steps evaluated by this process.", evaluator.steps)
    yield _count("foreshock_steps_failed", "Steps passed over because their evaluation failed.", evaluator.failed_steps)
    yield _count("foreshock_leases_lost", "Evaluations rolled back for a lost lease.", evaluator.leases_lost)
    up = GaugeMetricFamily("foreshock_worker_up", "1 where the worker's thread lives.", labels=("worker",))
    crashes = CounterMetricFamily("foreshock_worker_crashes", "Workers started again.", labels=("worker",))
    for name, alive in rooms.supervisor.alive().items():
        up.add_metric((name,), 1.0 if alive else 0.0)
        crashes.add_metric((name,), rooms.supervisor.crashes[name])
    yield up
    yield crashes


def _gauge(name: str, sentence: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, sentence)
    family.add_metric((), value)
    return family


def _count(name: str, sentence: str, value: float) -> Metric:
    family = CounterMetricFamily(name, sentence)
    family.add_metric((), value)
    return family
