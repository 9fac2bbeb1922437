"""Databases for the service's tests: an SQLite file and a real PostgreSQL server, the same tests on both.

PostgreSQL: `FORESHOCK_TEST_POSTGRES` names a server (a URL whose user may create databases); otherwise a private one is
started with initdb and pg_ctl in a temporary folder, on a Unix socket. Where neither can be had the tests skip, and
fail where `FORESHOCK_REQUIRE_POSTGRES` is set, as in CI.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from foreshock_service.store import migrate
from foreshock_service.store.engine import Store


def _binaries() -> Path | None:
    """The folder of initdb and pg_ctl, the newest version first."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class PrivateServer:
    """One PostgreSQL server of the test session's own, run by an unprivileged user (initdb refuses root)."""

    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="fs-pg-", dir="/tmp"))
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self.port = _free_port()
        self.url = f"postgresql://foreshock@/postgres?host={self.folder}&port={self.port}"

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.binaries / program), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            **self.user,
        )
        if done.returncode:
            log = self.folder / "log"
            raise RuntimeError(f"{program} failed: {done.stdout}\n{log.read_text() if log.exists() else ''}")

    def start(self) -> None:
        data = str(self.folder / "data")
        self._call("initdb", "-D", data, "-U", "foreshock", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N")
        options = f"-k {self.folder} -p {self.port} -c listen_addresses='' -c max_connections=100"
        self._call("pg_ctl", "-D", data, "-l", str(self.folder / "log"), "-o", options, "-w", "start")

    def stop(self) -> None:
        try:
            self._call("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


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
    binaries = _binaries()
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


@pytest.fixture()
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty database of its own on the real server."""
    name = f"fs_{uuid.uuid4().hex[:12]}"
    url = make_url(postgres_server).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture()
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'foreshock.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database: each test that takes it runs on SQLite and on PostgreSQL."""
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture()
def store(database_url: str) -> Iterator[Store]:
    """A migrated store on either database."""
    opened = Store(database_url)
    migrate.upgrade(opened)
    yield opened
    opened.close()
