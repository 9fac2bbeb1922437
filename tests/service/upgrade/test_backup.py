"""Backups made while frames come in: what was acknowledged before one began is in it, and nothing doubles after it."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select

from foreshock_service.app import create_app
from foreshock_service.store import migrate
from foreshock_service.store.models import FrameRow
from tests.service.api.conftest import CLIENT, House, settings_for
from tests.service.conftest import _database
from tests.service.private_postgres import find_binaries

BEFORE, AFTER = 150, 100


class Collector:
    """A client that posts one frame after the other, in a thread of its own, and knows what was acknowledged."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.acknowledged = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def until(self, sequence: int) -> None:
        deadline = time.monotonic() + 60
        while self.acknowledged < sequence:
            assert time.monotonic() < deadline, self.acknowledged
            time.sleep(0.005)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.acknowledged = self._house.step(self.acknowledged + 1, {"loss": 1.0})["acknowledged"]


def stored(house: House) -> list[int]:
    with house.rooms.store.read() as session:
        return sorted(session.scalars(select(FrameRow.sequence)))


def copy_sqlite(url: str, copy: Path) -> None:
    """What `sqlite3 foreshock.db ".backup copy.db"` does."""
    source = sqlite3.connect(make_url(url).database or "")
    target = sqlite3.connect(copy)
    source.backup(target, pages=16, sleep=0.002)
    source.close()
    target.close()


def postgres_program(program: str, url: str, *arguments: str) -> None:
    binaries = find_binaries()
    assert binaries is not None
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    done = subprocess.run(
        [str(binaries / program), "-d", plain, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def databases(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, str, Callable[[], None], Callable[[], None]]]:
    """(the live one, the one to restore into, how to back up, how to restore)."""
    copy = tmp_path / "copy"
    if request.param == "sqlite":
        live, new = f"sqlite:///{tmp_path / 'live.db'}", f"sqlite:///{copy}"
        yield live, new, lambda: copy_sqlite(live, copy), lambda: None
        return
    server = request.getfixturevalue("postgres_server")
    with contextlib.ExitStack() as stack:
        live, new = (stack.enter_context(contextlib.contextmanager(_database)(server)) for _ in range(2))
        yield (
            live,
            new,
            lambda: postgres_program("pg_dump", live, "--format=custom", f"--file={copy}"),
            lambda: postgres_program("pg_restore", new, "--no-owner", "--exit-on-error", str(copy)),
        )


def test_nothing_acknowledged_before_a_backup_is_lost_and_what_is_sent_again_is_stored_once(databases: Any) -> None:
    live, new, back_up, restore = databases
    house = House(create_app(settings_for(live))).open()
    house.started()
    with Collector(house) as collector:
        collector.acknowledged = 1
        collector.until(BEFORE)
        safe = collector.acknowledged
        back_up()
        collector.until(collector.acknowledged + AFTER)
    told = collector.acknowledged
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "after", "approve": True}
    late = house.near.post("/v1/runs/math/q/commands", json=body).json()["id"]
    house.close()

    restore()
    restored = House(create_app(settings_for(new))).open()
    try:
        assert migrate.differences(restored.rooms.store) == []
        sequences = stored(restored)
        last = sequences[-1]
        assert sequences == list(range(2, last + 1)), "a hole, or a double, in the backup"
        assert safe <= last < told

        # The collector repeats what was not acknowledged, some of it twice; then it goes on.
        for sequence in (last - 5, last, told + 1, told + 1, told + 2):
            restored._sequences["math/q"] = sequence - 1
            restored.step(sequence, {"loss": 2.0})
        assert stored(restored) == [*range(2, last + 1), told + 1, told + 2]
        run = restored.wait_for(lambda: _reached(restored, told + 2), 20)
        assert run["status"] == "running"
        done = {"state": "done", "client": CLIENT, "attempt": 1}
        assert restored.near.post(f"/v1/commands/{late}/ack", json=done).status_code == 404
    finally:
        restored.close()


def _reached(house: House, step: int) -> Any:
    run = house.near.get("/v1/runs/math/q").json()
    return run if run["last_step"] == step else None
