"""A service on a real PostgreSQL, scraped by a real Prometheus, and lab jobs that it watches: kept in one folder.

What is in the pictures was measured on these jobs: nothing is drawn by hand.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from foreshock_service.demo.processes import Job, Service, Training

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]  # by file: other people's packages install a `tests` of their own
from private_postgres import PrivateServer, find_binaries  # noqa: E402
from servers import Server, free_port, prometheus, wait_for  # noqa: E402

ONSET, STEPS = 25, 85
FINISHED: Sequence[tuple[Job, int]] = (
    (Job("healthy", "none", "auto"), 0),
    (Job("untreated", "stale_parameters", "observe"), 0),
    (Job("treated", "stale_parameters", "auto"), 0),
    (Job("quantised-engine", "quantised_engine", "approve", "lab"), 1),
    (Job("shifted-labels", "shifted_labels", "observe", "lab"), 2),
    (Job("seed-4", "none", "observe", "lab"), 4),
)
"""Trained to their end once; the first three are the demo's."""
UNDER_WAY: Sequence[tuple[Job, int]] = (
    (Job("stale-engine", "stale_engine", "approve", "lab"), 3),
    (Job("seed-5", "none", "observe", "lab"), 5),
)
"""Still training when the pictures are taken."""


class Sink(BaseHTTPRequestHandler):
    """Takes every alert."""

    def do_POST(self) -> None:
        """200, whatever it is."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


class KeptPostgres(PrivateServer):
    """A PostgreSQL server whose data stay in `folder` from one call to the next."""

    def __init__(self, folder: Path) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise RuntimeError("needs PostgreSQL (Debian: apt-get install postgresql)")
        self.binaries, self.folder = binaries, folder
        self.user: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self.user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self.port = free_port()
        self.url = f"postgresql://foreshock@/postgres?host={folder}&port={self.port}"

    def start(self) -> None:
        """Makes the cluster at the first call."""
        if (self.folder / "data" / "PG_VERSION").exists():
            self.launch()
        else:
            super().start()

    def halt(self) -> None:
        """Ends it in good order."""
        self._call("pg_ctl", "-D", str(self.folder / "data"), "-m", "fast", "-w", "stop")


class Life:
    """PostgreSQL, service and Prometheus on `folder`, while the block lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.postgres = KeptPostgres(folder / "pg")
        self.service = Service(folder, port=self._port(), database_url=self.postgres.url)
        self.http = httpx.Client(base_url=self.service.url, trust_env=False, timeout=60)
        self.prometheus: Server
        self.trainings: list[Training] = []
        self.began: float | None = None
        """When the jobs that are under way began."""
        self._sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)

    def _port(self) -> int:
        """The same each time: Prometheus knows the replica by its address."""
        kept = self.folder / "port"
        if not kept.exists():
            kept.write_text(str(free_port()))
        return int(kept.read_text())

    def __enter__(self) -> Self:
        self.postgres.start()
        threading.Thread(target=self._sink.serve_forever, daemon=True).start()
        os.environ["FORESHOCK_WEBHOOK_URL"] = f"http://127.0.0.1:{self._sink.server_port}/"
        self.service.start()
        config = self.folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 2s}\nscrape_configs: [{job_name: foreshock, static_configs: "
            f"[{{targets: ['127.0.0.1:{self.service.port}']}}]}}]\n"
        )
        self.prometheus = prometheus(self.folder, config)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for training in self.trainings:
            if training.process is not None and training.process.poll() is None:
                training.process.terminate()
                training.process.wait(20)
        self.http.close()
        if hasattr(self, "prometheus"):
            self.prometheus.stop()
        self.service.stop()
        self._sink.shutdown()
        self._sink.server_close()
        self.postgres.halt()

    def train(self, seconds: float = 1e9) -> bool:
        """Trains what is not trained yet, two at a time; False where time ran out before the last one was begun."""
        began = time.monotonic()
        waiting = [Training(job, seed, ONSET, STEPS, self.service.url, self.folder) for job, seed in FINISHED]
        waiting = [t for t in waiting if not t.out.exists()]
        running: list[Training] = []
        while waiting or running:
            running = [t for t in running if t.running()]
            while waiting and len(running) < 2 and time.monotonic() - began < seconds:
                running.append(waiting.pop(0))
                self.trainings.append(running[-1])
                running[-1].start()
            if waiting and not running:
                return False
            time.sleep(0.2)
        self._note()
        return True

    def _note(self) -> None:
        """When it was, for what is drawn over time."""
        (self.folder / "trained.json").write_text(json.dumps({"until": time.time()}))

    def begin(self, until_step: int = 48) -> None:
        """Starts the jobs that are under way in the pictures; returns when each is past `until_step`."""
        self.began = time.time()
        for job, seed in UNDER_WAY:
            self.http.delete(f"/v1/runs/{job.run}")
            training = Training(job, seed, ONSET, 100_000, self.service.url, self.folder)
            self.trainings.append(training)
            training.start()
        for job, _ in UNDER_WAY:
            wait_for(lambda run=job.run: (self.run(run).get("last_step") or 0) >= until_step, 240)  # type: ignore[misc]

    def run(self, name: str) -> dict[str, Any]:
        """What the service says of a run."""
        found: dict[str, Any] = self.http.get(f"/v1/runs/{name}").json()
        return found
