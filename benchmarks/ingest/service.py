"""A real `foreshock serve` on a fresh database, and what it costs: CPU seconds, bytes on disk, steps evaluated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from benchmarks.latency.databases import database

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Service:
    """One running service and its database."""

    url: str
    pid: int
    database_url: str

    def cpu_s(self) -> float:
        """CPU seconds that the service's process and those that evaluate for it have used."""
        return sum(_cpu_s(pid) for pid in (self.pid, *_children(self.pid)))

    def memory_bytes(self) -> int:
        """Resident bytes that the service's process and its evaluators share with nobody, and a share of the rest."""
        total = 0
        for pid in (self.pid, *_children(self.pid)):
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        return total

    def disk_bytes(self) -> int:
        """What the database takes on disk, its write-ahead log left out on PostgreSQL and included on SQLite."""
        if self.database_url.startswith("sqlite"):
            path = self.database_url.removeprefix("sqlite:///")
            return sum(os.path.getsize(p) for p in (path, f"{path}-wal") if os.path.exists(p))
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        return int(row[0]) if row else 0

    def last_step(self, run: str) -> int:
        """The last evaluated step; −1 before the first."""
        with urllib.request.urlopen(f"{self.url}/v1/runs/{run}", timeout=30) as answer:
            step = json.load(answer)["last_step"]
        return -1 if step is None else int(step)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children(pid: int) -> list[int]:
    """Processes that any thread of `pid` started, and theirs."""
    direct: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                direct += [int(child) for child in file.read().split()]
        except FileNotFoundError:
            continue
    return direct + [grandchild for child in direct for grandchild in _children(child)]


@contextmanager
def service(kind: str, settings: Mapping[str, str] | None = None) -> Iterator[Service]:
    """`serving` on a fresh database."""
    with database(kind) as database_url, serving(database_url, settings) as at:
        yield at


@contextmanager
def serving(database_url: str, settings: Mapping[str, str] | None = None) -> Iterator[Service]:
    """`foreshock serve` as people start it, with the rates that guard against one busy client lifted."""
    environment = {
        # Two cores: one takes in, one evaluates. SQLite is one process's, and evaluates in a thread of it.
        "FORESHOCK_EVALUATOR_PROCESSES": "1",
        **os.environ,
        "FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_PORT": "0", "FORESHOCK_LOG_LEVEL": "warning",
        "FORESHOCK_INGEST_RATE_PER_S": "1000000", "FORESHOCK_REQUEST_RATE_PER_S": "1000000",
        **(settings or {}),
    }  # fmt: skip
    command = [sys.executable, "-m", "foreshock_service.cli", "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Service(_url(process), process.pid, database_url)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        found = re.search(r"http://[0-9.]+:\d+", line)
        if found:
            return found.group()
        if time.monotonic() > deadline:
            break
    raise SystemExit("foreshock serve did not say where it listens")
