"""A whole service behind its door: the real app on a real database, called in-process from near and from far."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from foreshock_service.api import tokens
from foreshock_service.api.rooms import Rooms
from foreshock_service.app import create_app
from foreshock_service.settings import Settings

with warnings.catch_warnings():
    # Starlette would like another client library; it works with this one all the same.
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

LOCAL = "http://localhost:8720"
PUBLIC = "http://foreshock.example"
CLIENT = "c" * 32


class House:
    """One running service."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.near = TestClient(app, base_url=LOCAL, client=("127.0.0.1", 50_000), follow_redirects=False)
        self._stack = ExitStack()
        self._sequences: dict[str, int] = {}

    def open(self) -> House:
        self._stack.enter_context(self.near)
        return self

    def close(self) -> None:
        self._stack.close()

    @property
    def rooms(self) -> Rooms:
        rooms: Rooms = self.app.state.rooms
        return rooms

    def far(self, token: str | None = None) -> TestClient:
        """A client from another machine. Shares the lifespan of `near`."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return TestClient(
            self.app, base_url=PUBLIC, client=("203.0.113.7", 40_000), headers=headers, follow_redirects=False
        )

    def token(self, *scopes: str, project: str | None = None, expires_at: float | None = None) -> str:
        """The secret of a new token."""
        with self.rooms.store.write() as session:
            _, secret = tokens.create(
                session, name="t", scopes=list(scopes), project=project, expires_at=expires_at, actor="test"
            )
        return secret

    @staticmethod
    def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        """What `condition` returns once it is true; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError("it did not happen in time")

    def begin_again(self, run: str) -> None:
        """Counts the run's items from one, as for a run that was deleted."""
        self._sequences.pop(run, None)

    def envelope(self, run: str = "math/q", **changes: Any) -> dict[str, Any]:
        """The next envelope of the run's controller, as JSON."""
        sequence = self._sequences[run] = self._sequences.get(run, 0) + 1
        return {
            "protocol": 1,
            "client": CLIENT,
            "sequence": sequence,
            "run": run,
            "launch": "launch-1",
            "controller": True,
            "expected_ranks": {"trainer": 1},
            **changes,
        }

    def step(self, step: int, scalars: dict[str, Any], run: str = "math/q") -> dict[str, Any]:
        """Posts one step of the run's only rank; the reply."""
        return self.steps({step: scalars}, run)

    def steps(self, rows: dict[int, dict[str, Any]], run: str = "math/q") -> dict[str, Any]:
        """Posts several steps in one envelope; the reply."""
        frames = []
        for step, scalars in rows.items():
            envelope = self.envelope(run)
            frame = {"sequence": envelope["sequence"], "step": step, "role": "trainer", "rank": 0, "sealed_s": 1.0}
            frames.append({**frame, "scalars": scalars})
        answer = self.near.post("/v1/ingest", json={**envelope, "frames": frames})
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def started(self, run: str = "math/q", mode: str = "auto", capabilities: tuple[str, ...] = ("scale_lr",)) -> None:
        """Announces the run."""
        envelope = self.envelope(run)
        data = {"mode": mode, "capabilities": list(capabilities), "config": {}, "settings": {}}
        notice = {"sequence": envelope["sequence"], "kind": "started", "sealed_s": 1.0, "data": data}
        answer = self.near.post("/v1/ingest", json={**envelope, "notices": [notice]})
        assert answer.status_code == 200, answer.text


def settings_for(database_url: str, **changes: Any) -> Settings:
    """Settings for tests: rates that do not get in the way."""
    return Settings(database_url=database_url, ingest_rate_per_s=1e5, request_rate_per_s=1e5, **changes)


@pytest.fixture
def house(sqlite_url: str) -> Iterator[House]:
    """A service on SQLite."""
    opened = House(create_app(settings_for(sqlite_url))).open()
    yield opened
    opened.close()


@pytest.fixture
def house_on_each(database_url: str) -> Iterator[House]:
    """A service on SQLite and on PostgreSQL in turn."""
    opened = House(create_app(settings_for(database_url))).open()
    yield opened
    opened.close()


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Services with settings of their own."""
    made: list[House] = []

    def make(**changes: Any) -> House:
        url = f"sqlite:///{tmp_path / f'{len(made)}.db'}"
        made.append(House(create_app(settings_for(url, **changes))).open())
        return made[-1]

    yield make
    for opened in made:
        opened.close()


@pytest.fixture(scope="module")
def shared_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One service for a whole file, on SQLite: for tables of many small questions."""
    url = f"sqlite:///{tmp_path_factory.mktemp('shared') / 'foreshock.db'}"
    opened = House(create_app(settings_for(url))).open()
    yield opened
    opened.close()
