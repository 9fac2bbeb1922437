from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import func, select, text

from foreshock_service.errors import TooLarge, Unavailable, Unprocessable, UpgradeRequired
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Client, FrameRow, Run
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.supervisor import Supervisor


def count(store: Store, model: Any = FrameRow) -> int:
    with store.read() as session:
        return session.scalar(select(func.count()).select_from(model)) or 0


@pytest.fixture
def running(store: Store) -> Iterator[GroupWriter]:
    writer = GroupWriter(store, Hub())
    supervisor = Supervisor([writer])
    supervisor.start()
    yield writer
    supervisor.stop()


def drain(writer: GroupWriter) -> None:
    """Stores what waits, in this thread."""
    writer.interrupt()
    stop = threading.Event()
    stop.set()
    writer.run(stop)


def test_the_future_resolves_when_the_frames_can_be_read(running: GroupWriter, store: Store, new_trainer: Any) -> None:
    trainer = new_trainer()
    reply = running.submit(trainer.envelope(trainer.frame(1), trainer.frame(2))).result(10)
    assert reply.acknowledged == 2
    assert count(store) == 2


def test_waiting_envelopes_share_a_transaction(store: Store, new_trainer: Any) -> None:
    writer = GroupWriter(store, Hub())
    trainers = [new_trainer(rank=rank) for rank in range(20)]
    futures = [writer.submit(t.envelope(t.frame(1))) for t in trainers]
    drain(writer)
    assert [f.result(0).acknowledged for f in futures] == [1] * 20
    assert (writer.counts.groups, writer.counts.envelopes, writer.counts.frames) == (1, 20, 20)


def test_after_a_crowd_envelopes_gather_for_a_while(
    store: Store, new_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreshock_service.ingest.writer.GATHER_S", 1.0)
    writer = GroupWriter(store, Hub())
    trainers = [new_trainer(rank=rank) for rank in range(6)]
    crowd = [writer.submit(t.envelope(t.frame(1))) for t in trainers]
    supervisor = Supervisor([writer])
    supervisor.start()
    assert [f.result(10).acknowledged for f in crowd] == [1] * 6
    later = []
    for trainer in trainers[:3]:
        later.append(writer.submit(trainer.envelope(trainer.frame(2))))
        time.sleep(0.05)
    assert [f.result(10).acknowledged for f in later] == [2] * 3
    assert writer.counts.groups == 2
    supervisor.stop()


@pytest.mark.anyio
async def test_an_event_loop_waits_for_its_envelope_and_no_longer(running: GroupWriter, new_trainer: Any) -> None:
    trainers = [new_trainer(rank=rank) for rank in range(3)]
    replies = await asyncio.gather(*(running.store(t.envelope(t.frame(1))) for t in trainers))
    assert [reply.acknowledged for reply in replies] == [1, 1, 1]
    leaving = asyncio.ensure_future(running.store(trainers[0].envelope(trainers[0].frame(2))))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await running.store(trainers[0].envelope(trainers[0].frame(3)))).acknowledged == 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_clients_and_runs_of_one_group_keep_what_is_theirs(store: Store, new_trainer: Any) -> None:
    writer = GroupWriter(store, Hub())
    trainers = [new_trainer(f"math/run{n % 3}", rank=n) for n in range(6)]
    for t in trainers:
        writer.submit(t.envelope(t.frame(1), losses={"full": t.rank} if t.rank % 2 else {}, sdk=f"sdk {t.rank}"))
    drain(writer)
    with store.read() as session:
        clients = session.scalars(select(Client).order_by(Client.rank)).all()
        names = dict(session.execute(select(Run.id, Run.name)).all())
    assert [(names[c.run_id], c.rank, c.sdk, c.last_step) for c in clients] == [
        (f"math/run{n % 3}", n, f"sdk {n}", 1) for n in range(6)
    ]
    assert [c.losses for c in clients] == [{}, {"full": 1}, {}, {"full": 3}, {}, {"full": 5}]
    assert len({c.id for c in clients}) == 6


def test_an_envelope_that_fails_does_not_fail_its_group(store: Store, new_trainer: Any) -> None:
    def fail(session: Any, run: Run, *_: Any) -> None:
        if run.name == "math/bad":
            session.execute(text("SELECT nonsense"))

    writer = GroupWriter(store, Hub(), Hooks(register_checkpoint=fail))
    good, bad = new_trainer("math/good"), new_trainer("math/bad")
    first = writer.submit(good.envelope(good.frame(1)))
    spoilt = writer.submit(bad.envelope(bad.frame(1), bad.notice("checkpoint", {"path": "/x"}, step=1)))
    last = writer.submit(good.envelope(good.frame(2)))
    drain(writer)
    assert (first.result(0).acknowledged, last.result(0).acknowledged) == (1, 2)
    assert isinstance(spoilt.exception(0), (Unavailable, Unprocessable))
    assert count(store) == 2


def test_a_full_queue_says_come_again_and_stores_nothing(store: Store, new_trainer: Any) -> None:
    writer = GroupWriter(store, Hub(), queue_size=2)
    trainer = new_trainer()
    for step in (1, 2):
        writer.submit(trainer.envelope(trainer.frame(step)))
    with pytest.raises(Unavailable, match="wait"):
        writer.submit(trainer.envelope(trainer.frame(3)))
    assert writer.counts.refused_full == 1
    drain(writer)
    assert count(store) == 2


def test_stopping_stores_what_waits_and_refuses_what_comes(store: Store, new_trainer: Any) -> None:
    writer = GroupWriter(store, Hub())
    trainer = new_trainer()
    waiting = [writer.submit(trainer.envelope(trainer.frame(step))) for step in range(1, 40)]
    supervisor = Supervisor([writer])
    supervisor.start()
    assert supervisor.stop() == []
    assert [f.result(0).acknowledged for f in waiting] == list(range(1, 40))
    with pytest.raises(Unavailable, match="stopping"):
        writer.submit(trainer.envelope(trainer.frame(40)))


def test_a_caller_that_went_away_loses_nothing(store: Store, new_trainer: Any) -> None:
    writer = GroupWriter(store, Hub())
    trainer = new_trainer()
    future: Future[Any] = writer.submit(trainer.envelope(trainer.frame(1)))
    future.cancel()
    drain(writer)
    assert count(store) == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"protocol": 999}, UpgradeRequired),
        ({"run": "no-slash"}, Unprocessable),
        ({"run": "a/b/c"}, Unprocessable),
        ({"client": "x" * 33}, Unprocessable),
        ({"launch": ""}, Unprocessable),
        ({"launch": "a\x00b"}, Unprocessable),
        ({"role": "x" * 17}, Unprocessable),
        ({"rank": -1}, Unprocessable),
        ({"sequence": -1}, Unprocessable),
        ({"expected_ranks": {"trainer": 10**9}}, Unprocessable),
        ({"losses": {"x": -1}}, Unprocessable),
    ],
)
def test_what_cannot_be_stored_is_refused_before_it_waits(
    store: Store, new_trainer: Any, fields: dict[str, Any], error: type[Exception]
) -> None:
    writer = GroupWriter(store, Hub())
    trainer = new_trainer()
    with pytest.raises(error):
        writer.submit(trainer.envelope(trainer.frame(1), **fields))
    assert writer.waiting == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"step": -1}, Unprocessable),
        ({"step": 2**63}, Unprocessable),
        ({"rank": 2**31}, Unprocessable),
        ({"sequence": 0}, Unprocessable),
        ({"generation": -1}, Unprocessable),
        ({"scalars": {f"s{i}": 0.0 for i in range(513)}}, TooLarge),
    ],
)
def test_frames_that_cannot_be_stored_are_refused_whole(
    store: Store, new_trainer: Any, fields: dict[str, Any], error: type[Exception]
) -> None:
    writer = GroupWriter(store, Hub())
    trainer = new_trainer()
    with pytest.raises(error):
        writer.submit(trainer.envelope(trainer.frame(1), trainer.frame(**{"step": 2} | fields)))


def test_the_largest_numbers_that_fit_are_stored(running: GroupWriter, store: Store, new_trainer: Any) -> None:
    trainer = new_trainer()
    trainer.rank, trainer.sequence = 2**31 - 1, 2**63 - 2
    reply = running.submit(trainer.envelope(trainer.frame(2**63 - 1))).result(10)
    assert reply.acknowledged == 2**63 - 1
    assert count(store) == 1


KILLED = """
import sys, threading
from foreshock.wire import Envelope, Frame
from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.store.engine import Store
from foreshock_service.workers.hub import Hub

writer = GroupWriter(Store(sys.argv[1]), Hub())
threading.Thread(target=writer.run, args=(threading.Event(),), daemon=True).start()
for n in range(1, 100_000):
    frame = Frame(sequence=n, step=n, role="trainer", rank=0, sealed_s=1.0, scalars={"loss": 0.5})
    envelope = Envelope(protocol=1, client="c", sequence=n, run="a/b", launch="l", sent_s=1.0, frames=[frame])
    print(writer.submit(envelope).result(30).acknowledged, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(migrated_url: str) -> None:
    """SIGKILL in the middle of a stream: every acknowledged frame is there, and at most one that was not."""
    with subprocess.Popen([sys.executable, "-c", KILLED, migrated_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = 0
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged == 50:
                os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert acknowledged >= 50
    store = Store(migrated_url)
    with store.read() as session:
        steps = list(session.scalars(select(FrameRow.step).order_by(FrameRow.step)))
    assert steps[:acknowledged] == list(range(1, acknowledged + 1))
    assert len(steps) <= acknowledged + 1
    store.close()


def test_two_writers_on_one_postgresql_store_each_item_once(migrated_postgres_url: str, new_trainer: Any) -> None:
    """The same envelopes through two replicas at once, from many clients of one run."""
    stores = [Store(migrated_postgres_url) for _ in range(2)]
    writers = [GroupWriter(s, Hub(), group_size=8) for s in stores]
    supervisors = [Supervisor([w]) for w in writers]
    trainers = [new_trainer(rank=rank) for rank in range(8)]
    for supervisor in supervisors:
        supervisor.start()
    futures = []
    for step in range(1, 11):
        for trainer in trainers:
            envelope = trainer.envelope(trainer.frame(step), expected_ranks={"trainer": 8})
            futures += [writer.submit(envelope) for writer in writers]
    replies = [f.result(60) for f in futures]
    assert [r.acknowledged for r in replies[-2:]] == [10, 10]
    assert count(stores[0]) == 80
    with stores[0].read() as session:
        from foreshock_service.store.models import Step

        assert {(s.reported, s.expected) for s in session.scalars(select(Step))} == {(8, 8)}
    for supervisor, store in zip(supervisors, stores, strict=True):
        supervisor.stop()
        store.close()


def test_a_run_that_is_held_holds_up_no_other_and_keeps_its_order(migrated_postgres_url: str, new_trainer: Any) -> None:
    """An evaluation holds the row of one run: the envelopes of another in the same group are stored meanwhile."""
    store = Store(migrated_postgres_url)
    writer = GroupWriter(store, Hub())
    held, free = new_trainer("p/held"), new_trainer("p/free")
    first = [writer.submit(t.envelope(t.frame(1))) for t in (held, free)]
    drain(writer)
    assert [f.result(0).acknowledged for f in first] == [1, 1]
    writer = GroupWriter(store, Hub())
    with store.write() as session:
        session.execute(select(Run.id).where(Run.name == "p/held").with_for_update())
        futures = [writer.submit(t.envelope(t.frame(step))) for step in (2, 3) for t in (held, free)]
        supervisor = Supervisor([writer])
        supervisor.start()
        assert [f.result(10).acknowledged for f in futures[1::2]] == [2, 3]
        assert not any(f.done() for f in futures[::2])
    assert [f.result(10).acknowledged for f in futures[::2]] == [2, 3]
    assert (writer.counts.envelopes, writer.counts.repeated, writer.waiting) == (4, 0, 0)
    supervisor.stop()
    with store.read() as session:
        steps = session.execute(
            select(Run.name, FrameRow.step).join(Run, Run.id == FrameRow.run_id).order_by(Run.name, FrameRow.step)
        ).all()
    assert [tuple(row) for row in steps] == [(run, step) for run in ("p/free", "p/held") for step in (1, 2, 3)]
    store.close()
