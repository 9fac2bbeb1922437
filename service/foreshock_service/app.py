"""Introduces the rooms to each other: settings in, a FastAPI application out. The only place that knows them all."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from foreshock.wire.checks import Limits as WireLimits
from foreshock_service.alerts.base import new_client
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.alerts.registry import clicks, configured, quiet_hours
from foreshock_service.alerts.slack_app import SlackApp
from foreshock_service.api import (
    admin,
    commands,
    diagnosis,
    events,
    health,
    incidents,
    ingest,
    probes,
    rules,
    runs,
    series,
    slack,
    upkeep,
)
from foreshock_service.api import problems as problem_documents
from foreshock_service.api.encoding import FiniteJSON
from foreshock_service.api.limits import Slots
from foreshock_service.api.looks import Looks
from foreshock_service.api.middleware import INGEST, Boundary
from foreshock_service.api.rooms import Rooms
from foreshock_service.api.telemetry import Telemetry
from foreshock_service.api.tokens import TokenBook, count_live
from foreshock_service.evaluators import EvaluatorProcesses, evaluator_of
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.introductions import command_limits, ingest_hooks
from foreshock_service.rules.pack import PackFile
from foreshock_service.settings import Settings
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.web import page
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.supervisor import Supervisor, Worker
from foreshock_service.workers.upkeep import Upkeep

log = logging.getLogger(__name__)

DESCRIPTION = """Watches RL post-training of language models: frames in, verdicts, incidents and commands out.

Times are epoch seconds (`opened_at`), followed by ISO 8601 (`opened_at_iso`). Non-finite numbers are the strings
`"nan"`, `"inf"` and `"-inf"`. Errors are problem documents (RFC 9457). Lists continue with `cursor=<next>`."""
ROUTERS = (
    ingest.router,
    health.router,
    commands.router,
    runs.router,
    series.router,
    diagnosis.router,
    incidents.router,
    rules.router,
    events.router,
    upkeep.router,
    slack.router,
    admin.router,
    probes.router,
    page.router,
)


class Unprotected(RuntimeError):  # noqa: N818
    """The service would listen beyond loopback without a single token."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application. Nothing is opened before its lifespan begins; everything is closed at its end."""
    settings = settings or Settings()
    telemetry = Telemetry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        rooms, stop = await run_in_threadpool(_open, settings, telemetry)
        app.state.rooms = rooms
        try:
            yield
        finally:
            await run_in_threadpool(stop)

    app = FastAPI(
        title="Foreshock",
        version=version("foreshock"),
        description=DESCRIPTION,
        lifespan=lifespan,
        default_response_class=FiniteJSON,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # it loads its script from a CDN
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    for router in ROUTERS:
        app.include_router(router)
    problem_documents.install(app)
    direct = {("POST", INGEST): ingest.ingest}
    app.add_middleware(Boundary, settings=settings, telemetry=telemetry, direct=direct)
    return app


def _open(settings: Settings, telemetry: Telemetry) -> tuple[Rooms, Callable[[], None]]:
    """Everything that lives as long as the service does, and how to end it. Blocking."""
    store = open_store(settings)
    hub = Hub()
    pack_file = PackFile(settings.rules_path)
    limits = command_limits(settings)
    poster = new_client(private=settings.outgoing_private)
    channels = configured(settings, store, poster)
    alerts = Outbox(channels, [name for name, told in channels.items() if told.follows])
    quiet, clicked, bot = quiet_hours(settings), clicks(settings), channels.get(SlackApp.name)
    ingest_limits = IngestLimits(
        max_items=settings.max_items,
        max_signals_per_frame=settings.max_signals_per_frame,
        max_runs=settings.max_runs,
        watermark_min_s=settings.watermark_min_s,
        default_mode=settings.default_mode,
        max_mode=settings.max_mode,
    )
    writer = GroupWriter(
        store,
        hub,
        ingest_hooks(limits),
        ingest_limits,
        queue_size=settings.writer_queue,
        group_size=settings.writer_group,
    )
    # SQLite is one process's.
    apart = settings.evaluator_processes > 0 and store.dialect == "postgresql"
    evaluator = EvaluatorProcesses(settings) if apart else evaluator_of(settings, store, hub, pack_file, alerts)
    workers: list[Worker] = [
        writer,
        evaluator,
        # One a channel: a receiver that stalls holds up nobody else's alerts.
        *(
            DeliveryWorker(store, {name: told}, digest_over=settings.digest_over, quiet=quiet, name=f"alerts_{name}")
            for name, told in channels.items()
        ),
        Upkeep(
            store,
            settings.frames_retention_days,
            deliveries_days=settings.deliveries_retention_days,
            every_s=settings.upkeep_s,
        ),
    ]
    channel = None
    if store.dialect == "postgresql":
        # Here, because psycopg comes with the [postgres] extra: an embedded service runs without it.
        from foreshock_service.workers.channel import Channel

        channel = Channel(store, hub)
        workers.append(channel)
    supervisor = Supervisor(workers)
    rooms = Rooms(
        settings=settings,
        telemetry=telemetry,
        store=store,
        tokens=TokenBook(store, settings.token_cache_s),
        waiters=Slots(settings.max_waiters, "long-polls and event streams"),
        replays=Slots(settings.replay_slots, "replays"),
        limits=limits,
        pack_file=pack_file,
        announce=alerts,
        slack=slack.SlackRoom(clicked, bot) if clicked is not None and isinstance(bot, SlackApp) else None,
        hub=hub,
        looks=Looks(hub),
        writer=writer,
        wire_limits=WireLimits(
            body_bytes=settings.max_body_bytes,
            inflated_bytes=settings.max_decompressed_bytes,
            items=settings.max_items,
            signals=settings.max_signals_per_frame,
            pairs=settings.max_signals_per_frame,
        ),
        ingest_limits=ingest_limits,
        evaluator=evaluator,
        supervisor=supervisor,
    )
    supervisor.start()

    def stop() -> None:
        rooms.stopping = True
        hub.close()
        late = supervisor.stop(settings.shutdown_s)
        if channel is not None and channel.name not in late:
            channel.close()
        poster.close()
        store.close()

    return rooms, stop


def check_protected(store: Store, settings: Settings) -> None:
    """Raises `Unprotected` where anyone on the network could call a service that has no token yet."""
    if settings.listens_on_loopback:
        return
    with store.read() as session:
        if count_live(session, time.time()) == 0:
            raise Unprotected(
                f"refusing to listen on {settings.host} without a token: run `foreshock token create` first"
            )


def open_store(settings: Settings) -> Store:
    """The store, migrated or checked as the settings say. Raises `StoreError`, `Unprotected`, SQLAlchemy's errors."""
    store = Store(settings.database_url.get_secret_value(), pool_size=settings.database_pool)
    try:
        if settings.migrate:
            migrate.upgrade(store)
        migrate.require(store)
        check_protected(store, settings)
    except BaseException:
        store.close()
        raise
    return store
