"""What the compose file's services run, run by hand: their command lines, their health checks, and one with the other.

Not run: Grafana, which no package source here holds. Paths, ports and host names are replaced; nothing else is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from tests.deploy.test_compose import ROOT, SERVICES
from tests.servers import Server, find_binary, free_port, wait_for
from tests.service.private_postgres import PrivateServer, find_binaries

BIN = Path(sys.executable).parent


def checked(service: str, **replaced: str) -> subprocess.CompletedProcess[str]:
    """Runs the health check of a service as the compose file has it, with hosts and ports replaced."""
    words = SERVICES[service]["healthcheck"]["test"]
    assert words[0] == "CMD"
    command = list(words[1:])
    for old, new in replaced.items():
        command = [word.replace(old.replace("_", ":"), new) for word in command]
    find_binary(command[0], "postgresql-client" if "pg_" in command[0] else command[0])
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=_environment())


def _environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FORESHOCK_") and not k.lower().endswith("_proxy")}
    return {**clean, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


class Stack:
    """PostgreSQL, tokens, Foreshock, Alertmanager, Prometheus, in the order in which compose starts them."""

    def __init__(self, folder: Path, postgres: PrivateServer) -> None:
        self.folder, self.postgres = folder, postgres
        self.tokens = folder / "tokens"
        self.tokens.mkdir()
        self.socket, self.port = str(postgres.folder), str(postgres.port)
        self.database = f"postgresql://foreshock@/foreshock?host={self.socket}&port={self.port}"
        self.running: list[Server] = []

    def start(self) -> None:
        self._database()
        self._make_tokens()
        self.alertmanager = self._start_alertmanager()
        self.foreshock = self._start_foreshock()
        self.prometheus = self._start_prometheus()

    def _database(self) -> None:
        admin = {"PGHOST": self.socket, "PGPORT": self.port}
        psql = find_binary("psql", "postgresql-client")
        made = [psql, "-U", "foreshock", "-d", "postgres", "-qc", "CREATE DATABASE foreshock"]
        subprocess.run(made, check=True, env=_environment(**admin))
        script = ROOT / "deploy/postgres/10-grafana-reader.sh"
        wanted = {"POSTGRES_USER": "foreshock", "POSTGRES_DB": "foreshock", "GRAFANA_DB_PASSWORD": "it's"}
        assert set(wanted) - {"POSTGRES_PASSWORD"} <= set(SERVICES["postgres"]["environment"])
        subprocess.run(["sh", str(script)], check=True, env=_environment(**admin, **wanted), capture_output=True)

    def _make_tokens(self) -> None:
        for _ in range(2):  # the second time, as at every later `up`, it changes nothing
            before = {p.name: p.read_text() for p in self.tokens.iterdir()}
            subprocess.run(
                ["sh", str(ROOT / "deploy/foreshock/tokens.sh")],
                check=True, capture_output=True, timeout=60,
                env=_environment(FORESHOCK_DATABASE_URL=self.database, FORESHOCK_TOKENS=str(self.tokens)),
            )  # fmt: skip
        assert before == {p.name: p.read_text() for p in self.tokens.iterdir()}

    def _start_foreshock(self) -> Server:
        port = free_port()
        environment = {k: v for k, v in SERVICES["foreshock"]["environment"].items() if v is not None}
        environment |= {
            "FORESHOCK_DATABASE_URL": self.database, "FORESHOCK_PORT": str(port), "FORESHOCK_PUBLIC_URL": "",
            "FORESHOCK_ALERTMANAGER_URL": self.alertmanager.url,
        }  # fmt: skip
        command = [find_binary("env", "coreutils"), *(f"{k}={v}" for k, v in environment.items())]
        command += [str(BIN / "foreshock"), *SERVICES["foreshock"]["command"]]
        return self._run(command, port, "/readyz")

    def _start_alertmanager(self) -> Server:
        port = free_port()
        command = [w.replace("=/etc/alertmanager/", f"={ROOT}/deploy/alertmanager/") for w in _command("alertmanager")]
        command = [w.replace("=/alertmanager", f"={self.folder}/am") for w in command]
        program = find_binary("prometheus-alertmanager", "prometheus-alertmanager")
        return self._run([program, *command, f"--web.listen-address=127.0.0.1:{port}"], port, "/-/ready")

    def _start_prometheus(self) -> Server:
        port = free_port()
        config = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
        loaded = yaml.safe_load(config)
        (job,) = [j for j in loaded["scrape_configs"] if j["job_name"] == "foreshock"]
        assert job["dns_sd_configs"][0]["names"] == ["foreshock"], "the service's name in the compose file"
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [self.foreshock.url.removeprefix("http://")]}]
        secrets, alerts = str(self.tokens), str(ROOT / "deploy/prometheus/alerts.yml")
        changed = yaml.safe_dump(loaded).replace("/etc/prometheus/secrets", secrets)
        changed = changed.replace("/etc/prometheus/alerts.yml", alerts).replace("15s", "1s")
        changed = changed.replace("alertmanager:9093", self.alertmanager.url.removeprefix("http://"))
        path = self.folder / "prometheus.yml"
        path.write_text(changed)
        done = subprocess.run([find_binary("promtool", "prometheus"), "check", "config", str(path)], check=False)
        assert done.returncode == 0
        command = [w.replace("=/etc/prometheus/prometheus.yml", f"={path}") for w in _command("prometheus")]
        command = [w.replace("=/prometheus", f"={self.folder}/tsdb") for w in command]
        # What fires before its Alertmanager is discovered is sent again after a minute by default.
        command += ["--rules.alert.resend-delay=1s", f"--web.listen-address=127.0.0.1:{port}"]
        return self._run([find_binary("prometheus", "prometheus"), *command], port, "/-/ready")

    def _run(self, command: list[str], port: int, ready: str) -> Server:
        self.running.append(Server(command, port, self.folder, ready))
        return self.running[-1]

    def token(self, name: str) -> str:
        return (self.tokens / name).read_text().strip()


def _command(service: str) -> list[str]:
    return list(SERVICES[service]["command"])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    binaries = find_binaries()
    if binaries is None:
        find_binary("initdb", "postgresql")
    assert binaries is not None
    postgres = PrivateServer(binaries)
    postgres.start()
    made = Stack(tmp_path_factory.mktemp("stack"), postgres)
    try:
        made.start()
        yield made
    finally:
        for server in reversed(made.running):
            server.stop()
        postgres.stop()


@pytest.mark.postgres
def test_every_health_check_passes_on_a_healthy_service_and_fails_on_none(stack: Stack) -> None:
    done = checked("postgres", **{"127.0.0.1": stack.socket})
    assert done.returncode != 0, "another port: nobody there"
    words = [w.replace("127.0.0.1", stack.socket) for w in SERVICES["postgres"]["healthcheck"]["test"][1:]]
    assert subprocess.run([*words, "-p", stack.port], check=False).returncode == 0
    for name, server, port in (
        ("foreshock", stack.foreshock, 8720), ("prometheus", stack.prometheus, 9090),
        ("alertmanager", stack.alertmanager, 9093),
    ):  # fmt: skip
        here = server.url.rpartition(":")[2]
        assert checked(name, **{f"127.0.0.1_{port}": f"127.0.0.1:{here}"}).returncode == 0, name
        assert checked(name, **{f"127.0.0.1_{port}": f"127.0.0.1:{free_port()}"}).returncode != 0, name


@pytest.mark.postgres
def test_the_dockerfiles_health_check_is_the_compose_files() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert SERVICES["foreshock"]["healthcheck"]["test"][-1] in text


@pytest.mark.postgres
def test_the_tokens_open_what_they_should_and_no_more(stack: Stack) -> None:
    def ask(path: str, token: str) -> int:
        # As from another machine: loopback needs no token.
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(stack.foreshock.url + path, headers=headers, trust_env=False).status_code

    assert ask("/metrics", stack.token("foreshock_read_token")) == 200
    assert ask("/v1/tokens", stack.token("foreshock_read_token")) == 403
    assert ask("/v1/tokens", stack.token("admin_token")) == 200
    modes = {p.name: p.stat().st_mode & 0o777 for p in stack.tokens.iterdir()}
    assert modes == {"foreshock_read_token": 0o444, "admin_token": 0o400}


@pytest.mark.postgres
def test_prometheus_scrapes_foreshock_and_its_alerts_reach_alertmanager(stack: Stack) -> None:
    def up() -> Any:
        return stack.prometheus.get("/api/v1/query", query='up{job="foreshock"} == 1')["data"]["result"]

    wait_for(up)
    groups = stack.prometheus.get("/api/v1/rules")["data"]["groups"]
    assert sum(len(g["rules"]) for g in groups) == 15
    wait_for(lambda: stack.alertmanager.get("/api/v2/alerts", filter='alertname="ForeshockWatchdog"'))


@pytest.mark.postgres
def test_foreshocks_own_findings_reach_alertmanager(stack: Stack) -> None:
    frame = {"sequence": 1, "step": 1, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"loss": "nan"}}
    envelope = {
        "protocol": 1, "client": "c" * 32, "sequence": 1, "run": "math/q", "launch": "l", "controller": True,
        "expected_ranks": {"trainer": 1}, "frames": [frame],
    }  # fmt: skip
    answer = httpx.post(f"{stack.foreshock.url}/v1/ingest", json=envelope, trust_env=False)
    assert answer.status_code == 200, answer.text
    (alert,) = wait_for(
        lambda: stack.alertmanager.get("/api/v2/alerts", filter=['run="math/q"', 'alertname="non_finite"'])
    )
    assert alert["labels"]["alertname"] == "non_finite"
    assert re.match(r"http://.*/runs/math/q$", alert["generatorURL"])


@pytest.mark.postgres
def test_grafanas_login_reads_the_views_and_nothing_else(stack: Stack) -> None:
    url = stack.database.replace("postgresql://foreshock@", "postgresql+psycopg://grafana_reader@")
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM grafana_runs")).scalar() is not None
        for forbidden in ("SELECT * FROM tokens", "CREATE TABLE x (a int)"):
            with pytest.raises(DBAPIError, match=r"permission denied|read-only"):
                connection.execute(text(forbidden))
            connection.rollback()
    engine.dispose()
