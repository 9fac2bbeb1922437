from __future__ import annotations

import asyncio
import threading
import time

import pytest

from foreshock_service.store.engine import Store
from foreshock_service.workers.channel import Channel
from foreshock_service.workers.hub import ANY_RUN, Hub
from foreshock_service.workers.supervisor import Supervisor


def test_a_change_wakes_whoever_waits_for_that_run_and_no_one_else() -> None:
    hub = Hub()

    async def scene() -> list[int]:
        waits = [
            asyncio.create_task(hub.wait(1, hub.version(1), 10)),
            asyncio.create_task(hub.wait(ANY_RUN, hub.version(ANY_RUN), 10)),
            asyncio.create_task(hub.wait(2, hub.version(2), 0.2)),
        ]
        await asyncio.sleep(0)  # each task runs to its wait
        assert hub.waiting == 3
        threading.Thread(target=hub.changed, args=(1,)).start()
        return await asyncio.gather(*waits)

    assert asyncio.run(scene()) == [1, 1, 0]
    assert hub.waiting == 0


def test_a_change_between_the_look_and_the_wait_is_not_slept_through() -> None:
    hub = Hub()
    seen = hub.version(1)
    hub.changed(1)
    assert asyncio.run(hub.wait(1, seen, 10)) == 1


def test_closing_wakes_everyone() -> None:
    hub = Hub()

    async def scene() -> None:
        wait = asyncio.create_task(hub.wait(1, 0, 60))
        await asyncio.sleep(0)  # the task runs to its wait
        assert hub.waiting == 1
        hub.close()
        assert await wait == 0
        assert await hub.wait(1, 0, 60) == 0

    asyncio.run(scene())


def test_new_steps_wake_the_evaluator_and_are_told_once() -> None:
    hub = Hub()
    threading.Timer(0.05, hub.stepped, args=(7,)).start()
    assert hub.wait_stepped(10) == {7}
    assert hub.wait_stepped(0) == set()


def test_replicas_hear_each_other_and_not_themselves(migrated_postgres_url: str) -> None:
    stores = [Store(migrated_postgres_url) for _ in range(2)]
    hubs = [Hub() for _ in stores]
    channels = [Channel(store, hub) for store, hub in zip(stores, hubs, strict=True)]
    supervisors = [Supervisor([channel]) for channel in channels]
    for supervisor, channel in zip(supervisors, channels, strict=True):
        supervisor.start()
        assert channel.connected.wait(10)
    hubs[0].stepped(5)
    assert hubs[1].wait_stepped(10) == {5}
    hubs[0].changed(5)
    assert asyncio.run(hubs[1].wait(5, 0, 10)) == 1
    hubs[1].changed(6)
    assert asyncio.run(hubs[0].wait(6, 0, 10)) == 1
    assert hubs[0].version(5) == 1  # its own word did not come back to it
    for supervisor, store, channel in zip(supervisors, stores, channels, strict=True):
        assert supervisor.stop() == []
        channel.close()
        store.close()


def test_the_channel_comes_back_when_the_server_cuts_it(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import text

    monkeypatch.setattr("foreshock_service.workers.channel.RETRY_S", 0.05)
    stores = [Store(migrated_postgres_url) for _ in range(2)]
    hubs = [Hub() for _ in stores]
    channels = [Channel(store, hub) for store, hub in zip(stores, hubs, strict=True)]
    supervisors = [Supervisor([channel]) for channel in channels]
    for supervisor, channel in zip(supervisors, channels, strict=True):
        supervisor.start()
        assert channel.connected.wait(10)
    with stores[0].engine.connect() as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert len(connection.execute(text(cut)).all()) == 2
    deadline = time.monotonic() + 20
    while hubs[1].version(9) == 0:
        assert time.monotonic() < deadline
        hubs[0].changed(9)
        time.sleep(0.05)
    for supervisor, store, channel in zip(supervisors, stores, channels, strict=True):
        supervisor.stop()
        channel.close()
        store.close()
