"""What is attacked: real `foreshock serve` processes with tokens, a run, channels whose receivers are hostile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.alerts.sink import Sink
from foreshock_service.api import tokens
from foreshock_service.demo.processes import Service
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store

CLIENT, OTHER = "c" * 32, "d" * 32
SLACK_SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
CANARY = "fsk_canarycanarycanarycanarycanary0123456789"
HEAD_S = 2.0
QUICK = {
    "FORESHOCK_TRUST_LOOPBACK": "false",
    "FORESHOCK_REQUEST_TIMEOUT_S": str(HEAD_S),
    "FORESHOCK_LOG_LEVEL": "debug",
    "FORESHOCK_TOKEN_CACHE_S": "0",
}


class Attack(NamedTuple):
    """One row of the table: what is tried and what should come of it; `run` says what did."""

    area: str
    tried: str
    expected: str
    run: Callable[[Target], str]


ATTACKS: list[Attack] = []


def attack(area: str, tried: str, expected: str) -> Callable[[Callable[[Target], str]], Callable[[Target], str]]:
    """Registers a row."""

    def register(run: Callable[[Target], str]) -> Callable[[Target], str]:
        ATTACKS.append(Attack(area, tried, expected, run))
        return run

    return register


class Target:
    """Two services: one as shipped but for short waits, one with narrow rates and a forbidden webhook."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sink = Sink()
        self.sink.answers = [302] * 1000
        self.sink.headers = {"Location": "http://169.254.169.254/latest/meta-data/"}
        wide = {"FORESHOCK_REQUEST_RATE_PER_S": "100000", "FORESHOCK_INGEST_RATE_PER_S": "100000"}
        slack = {
            "FORESHOCK_SLACK_BOT_TOKEN": "xoxb-0123456789-attack",
            "FORESHOCK_SLACK_CHANNEL": "C0123456789",
            "FORESHOCK_SLACK_SIGNING_SECRET": SLACK_SECRET,
            "FORESHOCK_SLACK_USERS": "U0ADA=operate",
            "FORESHOCK_SLACK_API_URL": f"{self.sink.url}/",
            "FORESHOCK_WEBHOOK_URL": f"{self.sink.url}/{CANARY}",
            "FORESHOCK_WEBHOOK_SECRET": CANARY,
        }
        narrow = {
            "FORESHOCK_REQUEST_RATE_PER_S": "5",
            "FORESHOCK_RATE_BURST_S": "2",
            "FORESHOCK_WEBHOOK_URL": "http://169.254.169.254/latest/meta-data/",
        }
        self.service, self.admin = self._made("wide", {**wide, **slack})
        self.narrow, self.narrow_admin = self._made("narrow", narrow)
        self.sequence = 0

    def _made(self, name: str, environment: dict[str, str]) -> tuple[Service, str]:
        folder = self.folder / name
        folder.mkdir(parents=True)
        store = Store(f"sqlite:///{folder / 'foreshock.db'}")
        migrate.upgrade(store)
        with store.write() as session:
            _, secret = tokens.create(session, name="root", scopes=["admin"], project=None, expires_at=None, actor="x")
        store.close()
        return Service(folder, None, f"sqlite:///{folder / 'foreshock.db'}", {**QUICK, **environment}), secret

    def start(self) -> Target:
        """Both services answer and a run exists when this returns."""
        self.service.start()
        self.narrow.start()
        assert self.begin("math/q").status_code == 200
        assert self.step("math/q", 1, {"loss": 1.0}).status_code == 200
        until(lambda: self.ask("GET", "/v1/runs/math/q/steps/1", self.admin).status_code == 200)
        return self

    def stop(self) -> None:
        """Ends everything."""
        self.service.stop()
        self.narrow.stop()
        self.sink.close()

    def ask(self, method: str, path: str, token: str | None = None, **arguments: Any) -> httpx.Response:
        """One request to the service as shipped. `headers` may override everything."""
        headers = ({"Authorization": f"Bearer {token}"} if token else {}) | arguments.pop("headers", {})
        url = arguments.pop("base", self.service.url) + path
        return httpx.request(method, url, headers=headers, timeout=30, trust_env=False, **arguments)

    def token(self, *scopes: str, project: str | None = None, days: float | None = None) -> tuple[str, str]:
        """(id, secret) of a new token."""
        body = {"name": "t", "scopes": list(scopes), "project": project, "days": days}
        answer = self.ask("POST", "/v1/tokens", self.admin, json={k: v for k, v in body.items() if v is not None})
        assert answer.status_code == 201, answer.text
        made = answer.json()
        return made["id"], made["secret"]

    def envelope(self, run: str, **changes: Any) -> dict[str, Any]:
        """The next envelope of the run's controller."""
        self.sequence += 1
        whole = {"protocol": 1, "client": CLIENT, "sequence": self.sequence, "run": run, "launch": "launch-1"}
        return {**whole, "controller": True, **changes}

    def begin(self, run: str, mode: str = "approve", data: dict[str, Any] | None = None) -> httpx.Response:
        """Announces a run that can scale its learning rate."""
        envelope = self.envelope(run)
        told = {"mode": mode, "capabilities": ["scale_lr"], "config": {}, **(data or {})}
        notice = {"sequence": envelope["sequence"], "kind": "started", "sealed_s": 1.0, "data": told}
        return self.ask("POST", "/v1/ingest", self.admin, json={**envelope, "notices": [notice]})

    def step(self, run: str, step: int, scalars: dict[str, Any]) -> httpx.Response:
        """One step of the run's only rank."""
        envelope = self.envelope(run)
        frame = {"sequence": envelope["sequence"], "step": step, "role": "trainer", "rank": 0, "sealed_s": 1.0}
        return self.ask("POST", "/v1/ingest", self.admin, json={**envelope, "frames": [{**frame, "scalars": scalars}]})

    def command(self, run: str = "math/q") -> str:
        """Proposes a command and leaves it waiting; the one before it is cancelled."""
        for row in self.ask("GET", f"/v1/runs/{run}/commands", self.admin).json()["commands"]:
            for verb in ("reject", "cancel"):
                self.ask("POST", f"/v1/commands/{row['id']}/{verb}", self.admin)
        body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "attack", "approve": False}
        answer = self.ask("POST", f"/v1/runs/{run}/commands", self.admin, json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def delivered(self) -> str:
        """A command that was approved and handed to the run's leader."""
        command = self.command()
        self.ask("POST", f"/v1/commands/{command}/approve", self.admin)
        answer = self.ask("GET", f"/v1/runs/math/q/health?client={CLIENT}", self.admin).json()
        assert [c["id"] for c in answer["commands"]] == [command], answer
        return command

    def state(self, command: str) -> str:
        """Where a command stands."""
        return str(self.ask("GET", f"/v1/commands/{command}", self.admin).json()["state"])

    def log(self) -> str:
        """What the service logged so far."""
        return self.service.log.read_text(errors="replace")

    def page(self, path: str) -> str:
        """A page as somebody sees it who has logged in. Raises AssertionError where it is none."""
        answer = self.ask("GET", path, headers={"Cookie": f"foreshock_session={self.admin}"})
        assert answer.status_code == 200, (path, answer.status_code)
        return answer.text

    def alive(self) -> str:
        """`, serving on` where the service still answers, and says so at once."""
        began = time.monotonic()
        good = self.ask("GET", "/readyz").status_code == 200 and time.monotonic() - began < 2
        return ", serving on" if good else ", NOT SERVING"


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` returns once it is true. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError("it did not happen in time")
