"""The demo's processes: the embedded service and the lab's training jobs, each a real process of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from foreshock_service.shipped import shipped

START_SECONDS = 180.0


class DemoError(RuntimeError):
    """A process of the demo died or did not start; the message ends with what it last wrote."""


@dataclass(frozen=True)
class Job:
    """One training run of the demo."""

    name: str
    """healthy, untreated or treated: the last part of the run's name, and the key of the report."""
    illness: str
    mode: str
    project: str = "demo"

    @property
    def run(self) -> str:
        """Its name at the service."""
        return f"{self.project}/{self.name}"


def clear(folder: Path) -> None:
    """Makes `folder`, and takes away what an earlier demo left there: its runs had the same names.

    Raises `DemoError` where a service still holds the database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = folder / "foreshock.db.lock"
    if held.exists():
        with held.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DemoError(f"a service holds {folder / 'foreshock.db'}: end it, or choose another --out") from None
    for leftover in ("checkpoints", "spool"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    for pattern in ("foreshock.db*", "service.log", *(f"{name}.*" for name in ("healthy", "untreated", "treated"))):
        for path in folder.glob(pattern):
            path.unlink()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """`foreshock serve` on loopback; `start` returns once it answers `/readyz`. By default on SQLite in `folder`."""

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        database_url: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "service.log"
        self._database = database_url or f"sqlite:///{(folder / 'foreshock.db').resolve()}"
        self._environment = dict(environment or {})
        """Beside what this process was given."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Also again, after `kill`. Raises `DemoError` when it does not answer within three minutes."""
        command = [sys.executable, "-m", "foreshock_service.cli", "serve", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--database-url", self._database]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self._environment}
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        self.stop()
        raise DemoError(f"the service did not start:\n{tail(self.log)}")

    def kill(self) -> None:
        """SIGKILL, and it is gone when this returns."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Asks it to end, waits, and kills it after ten seconds."""
        end(self.process)


class Training:
    """One lab job in its own process, watched by the service at `url`."""

    def __init__(self, job: Job, seed: int, onset: int, steps: int, url: str, folder: Path) -> None:
        self.job = job
        self.out = folder / f"{job.name}.json"
        self.log = folder / f"{job.name}.log"
        self._command = [sys.executable, "-m", "lab.train", "--seed", str(seed), "--illness", job.illness]
        self._command += ["--onset", str(onset), "--steps", str(steps), "--run", job.run]
        self._command += ["--mode", job.mode, "--checkpoints", str(folder / "checkpoints" / job.name)]
        self._command += ["--out", str(self.out)]
        self._environment = {
            **os.environ,
            "FORESHOCK_URL": url,
            "FORESHOCK_SPOOL_DIR": str(folder / "spool"),
            "PYTHONPATH": os.pathsep.join([str(shipped("lab").parent), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds: float | None = None
        self._started = 0.0

    def start(self) -> None:
        """Returns at once."""
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment)

    def running(self) -> bool:
        """Raises `DemoError` when the job died."""
        if self.process is None:
            return False
        status = self.process.poll()
        if status is None:
            return True
        if self.seconds is None:
            self.seconds = time.monotonic() - self._started
        if status != 0:
            raise DemoError(f"the {self.job.name} run ended with status {status}:\n{tail(self.log)}")
        return False

    def result(self) -> dict[str, Any]:
        """What the job wrote about itself."""
        read: dict[str, Any] = json.loads(self.out.read_text())
        return read


def end(process: subprocess.Popen[bytes] | None, grace_seconds: float = 10.0) -> None:
    """SIGTERM, then SIGKILL after `grace_seconds`."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, characters: int = 2000) -> str:
    """The end of a log, for messages."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""
