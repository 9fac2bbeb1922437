"""The database behind one object: `Store.read()` and `Store.write()` hand out sessions in a transaction.

SQLite: WAL, `synchronous=FULL` (a commit is on disk when it returns, also through a power cut; group commit pays for
it; evaluations, which can be repeated, commit with NORMAL), foreign keys on, one process at a time (a file lock beside
the database), one writer at a time in it (a lock in memory: SQLite's own busy handler polls, which costs up to 100 ms).
PostgreSQL: psycopg 3, pooled; durability is the server's `synchronous_commit` and `fsync`.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import Session

from foreshock_service.store.types import dump_json

BUSY_TIMEOUT_MS = 10_000
IDLE_S = 1.0


class StoreError(Exception):
    """Base of what the store raises of its own accord."""


class DatabaseUrlError(StoreError):
    """The URL names no database that Foreshock runs on."""


class StoreInUseError(StoreError):
    """Another process holds this SQLite file."""


def normalise_url(url: str | URL) -> URL:
    """`sqlite:///path` or `postgresql://…` (any psycopg spelling, `postgres://` too). Raises `DatabaseUrlError`."""
    if isinstance(url, str) and url.startswith("postgres://"):
        url = "postgresql://" + url.removeprefix("postgres://")
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise DatabaseUrlError("not a database URL: expected sqlite:///FILE or postgresql://USER@HOST/NAME") from error
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise DatabaseUrlError(f"{backend!r} is not supported: expected sqlite or postgresql")
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise DatabaseUrlError("SQLite needs a file, as sqlite:///foreshock.db: every thread must see the same data")
    return parsed.set(drivername="sqlite+pysqlite")


class Store:
    """One database. `dialect` is "sqlite" or "postgresql"."""

    def __init__(
        self,
        url: str | URL,
        *,
        pool_size: int = 10,
        exclusive: bool = True,
        synchronous: str = "FULL",
    ) -> None:
        """Opens the database; SQLite files (and their folders) are created, and locked unless `exclusive` is False.

        Raises `DatabaseUrlError`, `StoreInUseError`. Connects lazily: an unreachable server shows at first use.
        """
        self.url = normalise_url(url)
        self.dialect = self.url.get_backend_name()
        self._write_lock = threading.Lock()
        self._writer: int | None = None
        self._lock_file: int | None = None
        if self.dialect == "sqlite":
            path = Path(str(self.url.database))
            path.parent.mkdir(parents=True, exist_ok=True)
            if exclusive:
                self._lock_file = _lock(path)
            self.engine = _sqlite_engine(self.url, pool_size, synchronous)
        else:
            self.engine = create_engine(
                self.url,
                pool_size=pool_size,
                max_overflow=pool_size,
                pool_recycle=1800,
                json_serializer=dump_json,
                connect_args={"connect_timeout": 10, "application_name": "foreshock"},
            )
            _ping_idle(self.engine)
        self._relaxed = self.engine.execution_options(foreshock_synchronous="NORMAL")
        self._reader = self.engine.execution_options(foreshock_begin="DEFERRED")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading: never waits for a writer; whatever it wrote is rolled back."""
        with Session(self._reader, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Session]:
        """A session in a transaction that commits at the end of the block, and rolls back on any exception.

        With `durable=False` the commit does not wait for the disk: a power cut may undo it, never without undoing
        everything later, and never after a durable commit that followed. For what can be worked out again from what is
        durable; a kill of the process alone loses nothing either way.
        Not to be nested in one thread: on SQLite the inner would wait for the outer for ever; it raises RuntimeError.
        """
        if self.dialect != "sqlite":
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                if not durable:
                    session.connection().exec_driver_sql("SET LOCAL synchronous_commit = off")
                yield session
            return
        if self._writer == threading.get_ident():
            raise RuntimeError("Store.write() inside Store.write(): pass the session on instead")
        with self._write_lock:
            self._writer = threading.get_ident()
            try:
                engine = self.engine if durable else self._relaxed
                with Session(engine, expire_on_commit=False) as session, session.begin():
                    yield session
            finally:
                self._writer = None

    def ping(self) -> bool:
        """True where the database answers. Costs one round trip."""
        try:
            with self.read() as session:
                session.connection().exec_driver_sql("SELECT 1")
        except OperationalError:
            return False
        return True

    def close(self) -> None:
        """Closes the pool and gives the file lock back. The store is unusable afterwards."""
        self.engine.dispose()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _ping_idle(engine: Engine) -> None:
    """Asks a connection that was idle for `IDLE_S` whether it still lives, before it is used.

    SQLAlchemy's own `pool_pre_ping` asks always, which is a round trip a transaction. A connection that breaks sooner
    after its last use shows as an error, which every caller bears: envelopes are kept, evaluations repeated.
    """

    @event.listens_for(engine, "checkin")
    def note(_connection: Any, record: Any) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: Any, _proxy: Any) -> None:
        since = record.info.get("idle_since")
        if since is None or time.monotonic() - since < IDLE_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            if not engine.dialect.is_disconnect(error, connection, None):
                raise
            raise InvalidatePoolError from error  # what is as old is dead as well: all are made anew


def _lock(path: Path) -> int:
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        os.close(handle)
        raise StoreInUseError(
            f"{path} is in use by process {holder or 'unknown'}: SQLite serves one process; use PostgreSQL for more"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
    return handle


class _Connection(sqlite3.Connection):
    """Knows its living cursors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        made = super().cursor(*args, **kwargs)
        self.cursors.add(made)
        return made


def _sqlite_engine(url: URL, pool_size: int, synchronous: str) -> Engine:
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size,
        json_serializer=dump_json,
        connect_args={
            "check_same_thread": False,
            "timeout": BUSY_TIMEOUT_MS / 1000,
            "factory": _Connection,
            "cached_statements": 512,
        },
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # pysqlite begins transactions by itself and late: SELECT-then-UPDATE then fails with "database is locked".
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "wal_autocheckpoint=2000",
            "cache_size=-32000",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "reset")
    def close_cursors(connection: Any, _record: Any, _state: Any) -> None:
        # A result that was not read to its end, kept alive by a traceback, would hold its snapshot of the database in
        # the pooled connection: later readers would see the past, and the WAL could not be checkpointed.
        for cursor in list(connection.cursors):
            cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        options = connection.get_execution_options()
        how = options.get("foreshock_begin", "IMMEDIATE")
        if how == "IMMEDIATE":
            connection.exec_driver_sql(f"PRAGMA synchronous={options.get('foreshock_synchronous', synchronous)}")
        connection.exec_driver_sql(f"BEGIN {how}")

    return engine
