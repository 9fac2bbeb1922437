"""Databases for the service's tests: an SQLite file and a real PostgreSQL server, the same tests on both.

PostgreSQL: `FORESHOCK_TEST_POSTGRES` names a server (a URL whose user may create databases); otherwise a private one is
started with initdb and pg_ctl in a temporary folder, on a Unix socket. Where neither can be had the tests skip, and
fail where `FORESHOCK_REQUIRE_POSTGRES` is set, as in CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from foreshock.wire import COMMAND_KINDS, PROTOCOL, Envelope, Frame, Notice
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Run
from tests.service.private_postgres import PrivateServer, find_binaries


def _unavailable(reason: str) -> None:
    if os.environ.get("FORESHOCK_REQUIRE_POSTGRES"):
        pytest.fail(f"PostgreSQL is required here: {reason}")
    pytest.skip(f"no PostgreSQL: {reason}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a real server's maintenance database."""
    given = os.environ.get("FORESHOCK_TEST_POSTGRES")
    if given:
        yield given
        return
    binaries = find_binaries()
    if binaries is None:
        _unavailable("neither FORESHOCK_TEST_POSTGRES nor initdb was found (Debian: apt-get install postgresql)")
        return
    try:
        server = PrivateServer(binaries)
        server.start()
    except (KeyError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _unavailable(str(error))
        return
    yield server.url
    server.stop()


def _database(server: str, template: str = "") -> Iterator[str]:
    name = f"fs_{uuid.uuid4().hex[:12]}"
    url = make_url(server).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else "")))
    yield url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty database of its own on the real server."""
    yield from _database(postgres_server)


@pytest.fixture(scope="module")
def postgres_database(postgres_server: str) -> Iterator[str]:
    """An empty database for a whole file: for services that take long to start."""
    yield from _database(postgres_server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """An SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'foreshock.db'}"


DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database: each test that takes it runs on SQLite and on PostgreSQL."""
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "foreshock.db"
    opened = Store(f"sqlite:///{path}")
    migrate.upgrade(opened)
    opened.close()
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: str) -> Iterator[str]:
    for url in _database(postgres_server):
        opened = Store(url)
        migrate.upgrade(opened)
        opened.close()
        yield str(make_url(url).database)


@pytest.fixture
def migrated_postgres_url(postgres_server: str, migrated_postgres: str) -> Iterator[str]:
    """A database at head of its own on the real server: for tests with several replicas."""
    yield from _database(postgres_server, migrated_postgres)


@pytest.fixture
def migrated_sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """An SQLite file at head."""
    shutil.copy(migrated_sqlite, tmp_path / "foreshock.db")
    return f"sqlite:///{tmp_path / 'foreshock.db'}"


@pytest.fixture(params=DATABASES)
def migrated_url(request: pytest.FixtureRequest) -> str:
    """A database at head, on SQLite and on PostgreSQL."""
    fixture = "migrated_sqlite_url" if request.param == "sqlite" else "migrated_postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture
def store(migrated_url: str) -> Iterator[Store]:
    """A migrated store on either database."""
    opened = Store(migrated_url)
    yield opened
    opened.close()


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Trainer:
    """One client process as the service sees it: makes envelopes with rising sequences."""

    def __init__(
        self, run: str = "math/run", *, launch: str = "launch-1", rank: int = 0, role: str = "trainer"
    ) -> None:
        self.run, self.launch, self.rank, self.role = run, launch, rank, role
        self.client = uuid.uuid4().hex
        self.sequence = 0
        self.generation = 0
        self.boot_s = 1000.0

    def frame(self, step: int, scalars: dict[str, float] | None = None, **fields: Any) -> Frame:
        self.sequence += 1
        given: dict[str, Any] = {"sequence": self.sequence, "step": step, "role": self.role, "rank": self.rank}
        given |= {"sealed_s": self.boot_s, "generation": self.generation, "scalars": scalars or {"reward.mean": 0.5}}
        return Frame(**(given | fields))

    def notice(self, kind: str, data: dict[str, Any] | None = None, **fields: Any) -> Notice:
        self.sequence += 1
        given: dict[str, Any] = {"sequence": self.sequence, "kind": kind, "sealed_s": self.boot_s, "data": data or {}}
        given |= {"generation": self.generation, "role": self.role, "rank": self.rank}
        return Notice(**(given | fields))

    def envelope(self, *items: Frame | Notice, **fields: Any) -> Envelope:
        given: dict[str, Any] = {
            "protocol": PROTOCOL,
            "client": self.client,
            "sequence": self.sequence,
            "run": self.run,
        }
        given |= {"launch": self.launch, "role": self.role, "rank": self.rank, "sent_s": self.boot_s, "sdk": "test"}
        given |= {"frames": [i for i in items if isinstance(i, Frame)]}
        given |= {"notices": [i for i in items if isinstance(i, Notice)]}
        return Envelope(**(given | fields))


@pytest.fixture
def new_trainer() -> type[Trainer]:
    """`new_trainer(run=…, rank=…)` makes a client."""
    return Trainer


RUN_STARTED_AT = 1_000.0
CONTROLLER = "c" * 32


@pytest.fixture
def make_run(store: Store) -> Callable[..., int]:
    """Writes a run in its first attempt, led by CONTROLLER, and returns its id."""

    def make(name: str = "lab/run", mode: str = "auto", capabilities: tuple[str, ...] = COMMAND_KINDS) -> int:
        with store.write() as session:
            run = Run(
                name=name,
                project=name.partition("/")[0],
                created_at=RUN_STARTED_AT,
                last_seen_at=RUN_STARTED_AT,
                status="running",
                mode=mode,
                capabilities=list(capabilities),
                attempt=1,
                controller_client=CONTROLLER,
                controller_until=RUN_STARTED_AT + 60,
            )
            session.add(run)
            session.flush()
            first = Attempt(run_id=run.id, ordinal=1, launch="one", generation=0, started_at=RUN_STARTED_AT)
            first.first_step = 1
            session.add(first)
            return run.id

    return make
