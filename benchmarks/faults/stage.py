"""Where the faults happen: a real `foreshock serve` on a database of its own, trainers as processes, their ledgers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text

from benchmarks.faults.count import Count, Ledger, count
from foreshock_service.demo.processes import Service, end, free_port, tail
from foreshock_service.store.flags import Flag

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "service"))

from private_postgres import PrivateServer, find_binaries  # noqa: E402

PATIENCE_S = 300.0
QUICK = {"FORESHOCK_TIMEOUT_S": "1", "FORESHOCK_BACKOFF_S": "0.05", "FORESHOCK_BACKOFF_MAX_S": "0.5"}
"""The light jobs' settings: everything happens in a few seconds instead of minutes. The lab's job has the defaults."""


class Trainer:
    """One trainer process and its ledger."""

    def __init__(self, folder: Path, name: str, run: str, url: str, options: dict[str, Any]) -> None:
        self.path, self.log = folder / f"{name}.jsonl", folder / f"{name}.log"
        environment: dict[str, str] = options.pop("environment", None) or {}
        within: list[str] = options.pop("within", None) or []
        self.killed = False
        command = [*within, sys.executable, "-m", "benchmarks.faults.trainer", "--run", run, "--ledger", str(self.path)]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith("FORESHOCK_") or k == "FORESHOCK_LAB_CACHE"
        }
        self._log = self.log.open("wb")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT,
            env=inherited | {"OMP_NUM_THREADS": "1", "FORESHOCK_URL": url} | environment,
        )  # fmt: skip

    @property
    def ledger(self) -> Ledger:
        """What it wrote so far."""
        return Ledger.read(self.path)

    def until_step(self, steps: int) -> None:
        """Waits until it has sealed so many steps."""
        wait_for(lambda: len(self.ledger.steps) >= steps or self.process.poll() is not None, "a trainer's steps")

    def kill(self) -> None:
        """SIGKILL, on purpose: it need not end normally."""
        self.killed = True
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self) -> str:
        """Waits for its end; what was wrong with it, empty if nothing."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            end(self.process)
            return f"did not end within {PATIENCE_S:.0f} s"
        finally:
            self._log.close()
        if not self.killed and (status != 0 or self.ledger.ended != "completed"):
            return f"ended with status {status}: {tail(self.log, 400)}"
        return ""


class Stage:
    """A service on a fresh database; trials one after another, each a run of its own."""

    def __init__(self, folder: Path, postgres: PrivateServer | None) -> None:
        self.folder, self.postgres = folder, postgres
        folder.mkdir(parents=True, exist_ok=True)
        self.database_url = _fresh_database(postgres) if postgres else f"sqlite:///{folder / 'foreshock.db'}"
        self.service = Service(folder, free_port(), self.database_url)
        self._trainers: list[Trainer] = []
        self.run = self.spool = ""

    def begin(self, fault: str) -> None:
        """A new run and an empty spool for the next trial."""
        name = f"{fault}-{uuid.uuid4().hex[:8]}"
        self.run, self.spool = f"faults/{name}", str(self.folder / name / "spool")
        Path(self.spool).parent.mkdir()
        self._trainers = []

    def train(self, url: str | None = None, spool: str | None = None, **options: Any) -> Trainer:
        """Starts a trainer of the current run. Options are those of `benchmarks.faults.trainer`; `within` is a command
        to run it under, `environment` adds variables."""
        environment = {"FORESHOCK_SPOOL_DIR": spool or self.spool, "FORESHOCK_LAUNCH": f"launch-{len(self._trainers)}"}
        if options.get("job") != "lab":
            environment |= QUICK
        options["environment"] = environment | (options.get("environment") or {})
        folder = Path(self.spool).parent
        trainer = Trainer(folder, f"trainer-{len(self._trainers)}", self.run, url or self.service.url, options)
        self._trainers.append(trainer)
        return trainer

    def forget(self, trainer: Trainer) -> None:
        """Leaves a trainer that reported to another service out of the count."""
        self._trainers.remove(trainer)

    def succeed(self, url: str | None = None) -> None:
        """A successor of the run: takes over what the others left on disk, one step, ends."""
        self.train(url, steps=1, first=10_000, environment={"FORESHOCK_FINISH_S": "60"}).wait()

    def spooled(self) -> bool:
        """Whether somebody left something on disk."""
        return Path(self.spool).is_dir() and any(Path(self.spool).iterdir())

    def conclude(self, url: str | None = None) -> tuple[Count, list[str]]:
        """Waits for all, lets a successor send what is left, and counts; (the count, what was wrong)."""
        wrong = [text for trainer in self._trainers if (text := trainer.wait())]
        if self.spooled():
            self.succeed(url)
            if self.spooled():
                wrong.append("a spool was left behind by the successor")
        return count(self.database_url, [trainer.ledger for trainer in self._trainers]), wrong

    def events_apart(self) -> float:
        """Largest |event time − receipt| over the frames of the current run, in seconds."""
        return float(self._ask("SELECT max(abs(f.event_at - f.received_at))") or 0.0)

    def flagged(self, flag: Flag) -> int:
        """Frames of the current run that the store flagged so."""
        return int(self._ask("SELECT count(*)", f" AND f.flags & {int(flag)} <> 0") or 0)

    def _ask(self, select: str, condition: str = "") -> float | None:
        url = make_url(self.database_url)
        engine = create_engine(url.set(drivername="postgresql+psycopg") if self.postgres else url)
        statement = f"{select} FROM frames f JOIN runs r ON r.id = f.run_id WHERE r.name = :run{condition}"
        with engine.connect() as connection:
            found: float | None = connection.execute(text(statement), {"run": self.run}).scalar()
        engine.dispose()
        return found

    def close(self) -> None:
        """Ends everything that still runs."""
        for trainer in self._trainers:
            end(trainer.process)
        self.service.stop()


@contextmanager
def postgres() -> Iterator[PrivateServer | None]:
    """A private PostgreSQL server; None where none is installed."""
    binaries = find_binaries()
    if binaries is None:
        yield None
        return
    server = PrivateServer(binaries)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Polls; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


def _fresh_database(server: PrivateServer) -> str:
    name = f"faults_{uuid.uuid4().hex[:10]}"
    url = make_url(server.url).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
