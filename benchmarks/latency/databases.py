"""The two databases of these benchmarks: a fresh SQLite file and a fresh real PostgreSQL, both with their defaults."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "service"))


@contextmanager
def database(kind: str) -> Iterator[str]:
    """The URL of an empty database: `sqlite`, or `postgresql` (FORESHOCK_TEST_POSTGRES, else a private server)."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/foreshock.db"
        return
    given = os.environ.get("FORESHOCK_TEST_POSTGRES")
    if given:
        yield given
        return
    from private_postgres import PrivateServer, find_binaries

    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("no PostgreSQL: set FORESHOCK_TEST_POSTGRES or install it")
    server = PrivateServer(binaries)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
