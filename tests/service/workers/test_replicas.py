"""Two replicas on one real PostgreSQL: every step evaluated once, every incident and command written once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.rules.interface import StepView
from foreshock_service.store.engine import Store
from foreshock_service.store.models import CommandRow, EvaluationState, Incident, Point
from foreshock_service.workers.channel import Channel
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.rooms import Rooms
from foreshock_service.workers.supervisor import Supervisor


class Replica:
    """A service process's store, hub and workers, without its HTTP."""

    def __init__(self, url: str, rooms: Rooms, lease_s: float = 2.0) -> None:
        self.store, self.hub = Store(url), Hub()
        self.writer = GroupWriter(self.store, self.hub)
        self.evaluator = Evaluator(self.store, self.hub, rooms, lease_s=lease_s)
        self.channel = Channel(self.store, self.hub)
        self.supervisor = Supervisor([self.writer, self.evaluator, self.channel])
        self.supervisor.start()

    def stop(self) -> None:
        self.hub.close()
        assert self.supervisor.stop() == []
        self.channel.close()
        self.store.close()


def points(store: Store) -> int:
    with store.read() as session:
        return session.scalar(select(func.count()).select_from(Point)) or 0


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_each_step_incident_and_command_once(
    migrated_postgres_url: str, engine: Any, rooms: Rooms, new_trainer: Any
) -> None:
    replicas = [Replica(migrated_postgres_url, rooms) for _ in range(2)]
    trainers = [new_trainer(f"math/run{r}", rank=rank) for r in range(4) for rank in range(2)]
    futures = []
    for step in range(1, 26):
        for n, trainer in enumerate(trainers):
            envelope = trainer.envelope(
                trainer.frame(step, {"loss": 9.0 * (step % 5 == 0)}), expected_ranks={"trainer": 2}
            )
            futures.append(replicas[(n + step) % 2].writer.submit(envelope))
    for future in futures:
        future.result(60)
    until(lambda: points(replicas[0].store) == 100)
    committed = sum(replica.evaluator.counts.steps for replica in replicas)
    with replicas[0].store.read() as session:
        incidents = Counter(i.run_id for i in session.scalars(select(Incident)))
        commands = Counter(c.run_id for c in session.scalars(select(CommandRow)))
        states = session.scalars(select(EvaluationState)).all()
        folded = [engine.load(state.state).seen for state in states]
    assert committed == 100
    assert set(incidents.values()) == set(commands.values()) == {5}
    assert folded == [[(1, step) for step in range(1, 26)]] * 4
    assert sum(isinstance(view, StepView) for view in engine.views) >= 100
    for replica in replicas:
        replica.stop()


HELPER = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from conftest import Threshold, rooms_with
from foreshock_service.store.engine import Store
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.hub import Hub

evaluator = Evaluator(Store(sys.argv[1]), Hub(), rooms_with(Threshold()), owner="doomed", lease_s=2.0)
print("ready", flush=True)
evaluator.run(threading.Event())
"""


def test_a_killed_replica_is_succeeded_when_its_lease_ends(
    migrated_postgres_url: str, engine: Any, rooms: Rooms, new_trainer: Any
) -> None:
    here = str(Path(__file__).parent)
    trainer = new_trainer()
    command = [sys.executable, "-c", HELPER, migrated_postgres_url, here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "ready\n"
        store, hub = Store(migrated_postgres_url), Hub()
        writer = Supervisor([w := GroupWriter(store, hub)])
        writer.start()
        for step in (1, 2, 3):
            w.submit(trainer.envelope(trainer.frame(step), expected_ranks={"trainer": 1})).result(30)
        until(lambda: points(store) == 3)
        os.kill(doomed.pid, signal.SIGKILL)
    successor = Replica(migrated_postgres_url, rooms)
    for step in (4, 5):
        w.submit(trainer.envelope(trainer.frame(step, {"loss": 9.0}))).result(30)
    until(lambda: points(store) == 5)
    with store.read() as session:
        state = session.scalars(select(EvaluationState)).one()
        assert session.scalar(select(func.count()).select_from(Incident)) == 1
    assert (state.owner, state.fence) == (successor.evaluator.owner, 2)
    assert engine.load(state.state).seen == [(1, step) for step in range(1, 6)]
    successor.stop()
    writer.stop()
    store.close()


def test_stopping_gives_the_leases_back(migrated_postgres_url: str, rooms: Rooms, new_trainer: Any) -> None:
    replica = Replica(migrated_postgres_url, rooms, lease_s=600.0)
    trainer = new_trainer()
    replica.writer.submit(trainer.envelope(trainer.frame(1), expected_ranks={"trainer": 1})).result(30)
    until(lambda: points(replica.store) == 1)
    replica.stop()
    store = Store(migrated_postgres_url)
    with store.read() as session:
        assert session.scalars(select(EvaluationState.owner)).one() is None
    store.close()


@pytest.mark.parametrize("kind", ["SIGTERM of the server's connections"])
def test_a_cut_connection_loses_no_acknowledged_frame(
    kind: str, migrated_postgres_url: str, rooms: Rooms, new_trainer: Any
) -> None:
    from sqlalchemy import text

    from foreshock_service.errors import Unavailable

    replica = Replica(migrated_postgres_url, rooms)
    admin = Store(migrated_postgres_url)
    trainer = new_trainer()
    step = 0
    for round_ in range(6):
        if round_ % 2:
            with admin.write() as session:
                session.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                        " AND datname = current_database()"
                    )
                )
        step += 1
        envelope = trainer.envelope(trainer.frame(step), expected_ranks={"trainer": 1})
        while True:
            try:
                assert replica.writer.submit(envelope).result(30).acknowledged == step
                break
            except Unavailable:
                continue
    until(lambda: points(admin) == 6)
    assert kind
    replica.stop()
    admin.close()
