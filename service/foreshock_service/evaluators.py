"""Who evaluates: a thread of the process that answers, or processes of their own beside it (PostgreSQL).

Rules are Python, and one interpreter runs one thread at a time. Processes of their own let a service take in frames on
one core and evaluate on the others; each is a replica without a door, under the same leases as any.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from foreshock_service.alerts.base import new_client
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.alerts.registry import configured
from foreshock_service.heap import settle
from foreshock_service.introductions import Alerts, Engines, command_limits, evaluator_rooms
from foreshock_service.rules.pack import PackFile
from foreshock_service.settings import Settings
from foreshock_service.store import leases
from foreshock_service.store.engine import Store
from foreshock_service.terminal import log_lines
from foreshock_service.workers.evaluator import Evaluator, EvaluatorCounts
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

REPORT_S = 1.0
STOP_S = 10.0


def evaluator_of(settings: Settings, store: Store, hub: Hub, pack_file: PackFile, alerts: Alerts) -> Evaluator:
    """The evaluator as the settings say, a worker for this process."""
    return Evaluator(
        store,
        hub,
        evaluator_rooms(Engines(pack_file), command_limits(settings), alerts),
        lease_s=settings.lease_s,
        tick_s=settings.tick_s,
        max_signals_per_run=settings.max_signals_per_run,
    )


class EvaluatorProcesses:
    """A worker: keeps `settings.evaluator_processes` processes alive. One that dies is started again, with the others.

    What a killed one held is free when its leases end, as with any replica.
    """

    name = "evaluators"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wake, self._woken = multiprocessing.Pipe()
        self._ended = EvaluatorCounts()
        self._reported: dict[Connection, EvaluatorCounts] = {}
        self.owner = leases.owner_name()
        self.pids: Sequence[int] = ()

    @property
    def counts(self) -> EvaluatorCounts:
        """What all of them did since this was made, as they last reported."""
        every = [self._ended, *self._reported.values()]
        return EvaluatorCounts(**{f.name: sum(getattr(c, f.name) for c in every) for f in fields(EvaluatorCounts)})

    def run(self, stop: threading.Event) -> None:
        """Starts them and listens until `stop` is set; raises RuntimeError when one dies, after stopping the others."""
        context = multiprocessing.get_context("spawn")
        children: dict[Connection, BaseProcess] = {}
        for number in range(self._settings.evaluator_processes):
            mine, theirs = context.Pipe()
            child = context.Process(
                target=evaluate_for, args=(self._settings, theirs), name=f"foreshock-evaluator-{number}", daemon=True
            )
            child.start()
            theirs.close()
            children[mine] = child
        self.pids = [child.pid or 0 for child in children.values()]
        try:
            self._listen(children, stop)
        finally:
            _end(children)
            for counts in self._reported.values():
                self._ended = EvaluatorCounts(
                    **{name: value + getattr(self._ended, name) for name, value in asdict(counts).items()}
                )
            self._reported.clear()

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._wake.send(None)

    def _listen(self, children: dict[Connection, BaseProcess], stop: threading.Event) -> None:
        while not stop.is_set():
            for ready in wait([*children, self._woken], timeout=REPORT_S):
                assert isinstance(ready, Connection)
                try:
                    said = ready.recv()
                except EOFError:
                    raise RuntimeError("an evaluator process has died") from None
                if ready in children:
                    self._reported[ready] = said


def _end(children: dict[Connection, BaseProcess]) -> None:
    for child in children.values():
        child.terminate()
    for pipe, child in children.items():
        child.join(STOP_S)
        if child.is_alive():
            log.warning("%s did not stop in time", child.name)
            child.kill()
        pipe.close()


def evaluate_for(settings: Settings, pipe: Connection) -> None:
    """The process: evaluates until told to stop, or until whoever started it is gone; reports its counts."""
    from foreshock_service.workers.channel import Channel

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; who started this one says when to stop
    log_lines(settings.log_level)
    store = Store(settings.database_url.get_secret_value(), pool_size=settings.database_pool)
    hub = Hub()
    poster = new_client(private=settings.outgoing_private)
    channels = configured(settings, store, poster)
    alerts = Outbox(channels, [name for name, told in channels.items() if told.follows])
    evaluator = evaluator_of(settings, store, hub, PackFile(settings.rules_path), alerts)
    channel = Channel(store, hub)
    supervisor = Supervisor([evaluator, channel])
    settle()
    supervisor.start()
    try:
        while not stop.wait(REPORT_S):
            pipe.send(evaluator.counts)
    except OSError:
        log.warning("whoever started this evaluator is gone: it ends")
    finally:
        hub.close()
        supervisor.stop(settings.shutdown_s)
        channel.close()
        poster.close()
        store.close()
