"""The command line, as processes: fast help, a service that serves and stops, tokens, REST clients."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock_service.cli.table import COMMANDS


def foreshock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foreshock_service.cli", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Served:
    """`foreshock serve` on a free port, on SQLite."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.database = f"sqlite:///{folder / 'foreshock.db'}"
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "foreshock_service.cli", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--database-url", self.database, *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.url = self._wait()

    def text(self) -> str:
        return Path(self.log.name).read_text()

    def _wait(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = re.search(r"Foreshock listens on (\S+)", self.text())
            if found:
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(self.text())

    def stop(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(30)
        self.log.close()
        return code


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    service = Served(tmp_path)
    yield service
    if service.process.poll() is None:
        service.stop(signal.SIGKILL)


def test_help_imports_no_sub_command_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from foreshock_service.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'typer', 'rich', 'httpx', 'fastapi', 'sqlalchemy', 'pydantic', 'torch', 'numpy', 'msgspec'}\n"
        "found = heavy & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(entry.help in done.stdout for entry in COMMANDS)


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda e: e.name)
def test_every_line_of_the_table_leads_somewhere(entry: Any) -> None:
    assert callable(getattr(importlib.import_module(entry.module), entry.attribute))
    done = foreshock(entry.name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"foreshock {entry.name}" in done.stdout


def test_a_slip_of_the_pen_is_met_with_a_guess() -> None:
    done = foreshock("incident")
    assert done.returncode == 2
    assert "Did you mean 'incidents'?" in done.stderr
    assert foreshock("--version").stdout.strip().count(".") == 2


def test_serve_says_where_answers_and_stops_gracefully(served: Served) -> None:
    assert httpx.get(f"{served.url}/readyz").json() == {"status": "ok"}
    assert served.stop() == 0, served.text
    again = Served(Path(served.log.name).parent)
    assert again.stop(signal.SIGINT) == 0


def test_a_waiting_trainer_does_not_hold_the_stop_up(served: Served) -> None:
    envelope = {"protocol": 1, "client": "c" * 32, "sequence": 0, "run": "math/q", "launch": "l"}
    assert httpx.post(f"{served.url}/v1/ingest", json=envelope).status_code == 200
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import httpx; print(httpx.get('{served.url}/v1/runs/math/q/health?wait=50', timeout=60))",
        ],
        stdout=subprocess.PIPE,
    )
    time.sleep(1.5)
    began = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - began < 9
    out, _ = waiting.communicate(timeout=30)
    assert b"200" in out


def test_serve_refuses_in_one_line_what_it_cannot_do(served: Served, tmp_path: Path) -> None:
    port = served.url.rpartition(":")[2]
    other = f"sqlite:///{tmp_path / 'other.db'}"
    for arguments, word in (
        (("--database-url", served.database, "--port", "0"), "in use by process"),
        (("--database-url", other, "--port", port), "cannot listen"),
        (("--database-url", other, "--host", "0.0.0.0", "--port", "0"), "without a token"),
        (("--database-url", "mysql://x", "--port", "0"), "not supported"),
        (("--database-url", other, "--rules", str(tmp_path / "none.yaml"), "--port", "0"), "cannot be read"),
        (("--database-url", other, "--log-level", "loud"), "FORESHOCK_LOG_LEVEL"),
    ):
        done = foreshock("serve", *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        said = [line for line in done.stderr.splitlines() if line.startswith("foreshock:")]
        assert len(said) == 1, done.stderr
        assert word in said[0]
        assert "Traceback" not in done.stderr


def test_with_a_token_it_listens_beyond_loopback_and_asks_for_it(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'foreshock.db'}"
    made = foreshock("token", "create", "ops", "--scope", "read", "--database-url", database)
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    service = Served(tmp_path, "--host", "0.0.0.0", FORESHOCK_TRUST_LOOPBACK="false")
    try:
        port = service.url.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        assert foreshock("runs", "list", FORESHOCK_URL=url).returncode == 1
        assert foreshock("runs", "list", FORESHOCK_URL=url, FORESHOCK_TOKEN=secret).stdout == "no runs\n"
        listed = foreshock("token", "list", "--json", "--database-url", database)
        assert secret not in listed.stdout
        token_id = re.search(r'"id": "([0-9a-f]{32})"', listed.stdout)
        assert token_id
        assert foreshock("token", "revoke", token_id[1], "--database-url", database).returncode == 0
        assert foreshock("token", "revoke", token_id[1], "--database-url", database).returncode == 1
        time.sleep(5.2)  # what another process revoked is honoured for FORESHOCK_TOKEN_CACHE_S at most
        done = foreshock("runs", "list", FORESHOCK_URL=url, FORESHOCK_TOKEN=secret)
        assert done.returncode == 1
        assert "401" in done.stderr
    finally:
        service.stop()
    assert secret not in service_log(tmp_path)


def service_log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_the_clients_show_and_change_what_the_service_holds(served: Served) -> None:
    at = {"FORESHOCK_URL": served.url}
    data = {"mode": "approve", "capabilities": ["scale_lr"], "config": {}, "settings": {}}
    frame = {"sequence": 2, "step": 1, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"loss": "nan"}}
    envelope = {
        "protocol": 1,
        "client": "c" * 32,
        "sequence": 2,
        "run": "math/q",
        "launch": "l",
        "controller": True,
        "notices": [{"sequence": 1, "kind": "started", "sealed_s": 1.0, "data": data}],
        "frames": [frame],
    }
    assert httpx.post(f"{served.url}/v1/ingest", json=envelope).status_code == 200
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not httpx.get(f"{served.url}/v1/incidents").json()["incidents"]:
        time.sleep(0.1)
    assert "math/q" in foreshock("runs", "list", **at).stdout
    assert "critical" in foreshock("runs", "show", "math/q", **at).stdout
    assert "non_finite" in foreshock("incidents", "list", **at).stdout
    assert "non_finite" in foreshock("rules", "list", **at).stdout
    assert "1 findings" in foreshock("rules", "replay", "math/q", **at).stdout
    done = foreshock("commands", "propose", "math/q", "scale_lr", "--arguments", '{"factor": 0.5}', **at)
    assert done.returncode == 0, done.stderr
    command = done.stdout.partition(":")[0]
    assert "approved" in foreshock("commands", "approve", command, **at).stdout
    assert foreshock("commands", "approve", command, **at).returncode == 1
    assert command in foreshock("commands", "list", "math/q", **at).stdout
    assert foreshock("runs", "mode", "math/q", "observe", **at).stdout == "math/q: mode observe\n"
    assert foreshock("runs", "show", "../etc/passwd", **at).returncode == 2
    assert foreshock("runs", "delete", "math/q", "--yes", **at).returncode == 0
    assert foreshock("runs", "list", **at).stdout == "no runs\n"


def test_an_absent_service_is_one_line_and_exit_2() -> None:
    done = foreshock("runs", "list", FORESHOCK_URL="http://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("foreshock: no answer from http://127.0.0.1:1")


def test_the_database_is_migrated_and_says_where_it_is(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'foreshock.db'}"
    assert foreshock("db", "current", "--database-url", database).returncode == 1
    assert foreshock("db", "upgrade", "--database-url", database).returncode == 0
    assert "accepted" in foreshock("db", "current", "--database-url", database).stdout
