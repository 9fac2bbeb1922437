"""`foreshock dashboards push` against a FAKE Grafana that checks requests by the documented API; `build` for real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock_service.dashboards import push
from tests.dashboards.conftest import RUN, Lived
from tests.dashboards.fake_grafana import TOKEN, FakeGrafana

NOW = 1_800_000_000.0
INCIDENT: dict[str, Any] = {
    "id": "i1", "run": RUN, "rule": "kl_blowup", "severity": "critical", "status": "open", "message": "up",
    "onset_step": 4, "opened_at": NOW - 60, "resolved_at": None,
}  # fmt: skip
COMMAND: dict[str, Any] = {
    "id": "c1", "run": RUN, "kind": "rollback", "state": "proposed", "verdict": None, "reason": "kl",
    "created_at": NOW - 30, "finished_at": None,
}  # fmt: skip


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    opened = FakeGrafana()
    yield opened
    opened.close()


def foreshock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foreshock_service.cli", "dashboards", *arguments]
    environment = {**os.environ, "NO_PROXY": "*", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.postgres
def test_a_push_brings_folder_sources_boards_and_annotations_and_may_be_repeated(
    grafana: FakeGrafana, lived: Lived
) -> None:
    environment = {"GRAFANA_URL": grafana.url, "GRAFANA_TOKEN": TOKEN, "FORESHOCK_URL": lived.url}
    sources = ["--postgres-url", "postgresql://graf:pa%20ss@db/foreshock", "--prometheus-url", "http://prom:9090"]
    for _ in range(2):
        done = foreshock("push", *sources, **environment)
        assert (done.returncode, done.stderr) == (0, "")
    assert set(grafana.folders) == {"foreshock"}
    assert set(grafana.sources) == {"foreshock-postgres", "foreshock-prometheus"}
    assert grafana.sources["foreshock-postgres"]["secureJsonData"] == {"password": "pa ss"}
    assert "pa ss" not in done.stdout
    boards = {"fleet", "run", "run-over-time", "incident", "pipeline"}
    assert set(grafana.boards) == {f"foreshock-{name}" for name in boards}
    assert {b["version"] for b in grafana.boards.values()} == {2}
    incidents = len(lived.rows("SELECT 1 FROM grafana_incidents"))
    commands = len(lived.rows("SELECT 1 FROM grafana_commands"))
    assert len(grafana.annotations) == incidents + commands
    assert ": 0 added" in done.stdout
    assert {tag for a in grafana.annotations.values() for tag in a["tags"] if tag.startswith("run:")} == {f"run:{RUN}"}
    routes = {route for _, route in grafana.requests}
    assert not any(r.startswith("/datasources/") and not r.startswith("/datasources/uid/") for r in routes)


def test_every_source_a_board_asks_for_is_one_that_a_push_can_bring() -> None:
    import re

    from foreshock_service.shipped import shipped

    text = "".join(p.read_text() for p in (shipped("dashboards") / "built").glob("*.json"))
    made = {
        push.postgres_source("postgresql://u:p@h/d")["uid"]: "grafana-postgresql-datasource",
        push.prometheus_source("http://p")["uid"]: "prometheus",
        "-- Grafana --": "grafana",
    }
    asked = dict(re.findall(r'"datasource": \{\s*"type": "([^"]+)",\s*"uid": "([^"]+)"', text))
    assert {uid: kind for kind, uid in asked.items()} == made


def test_an_incident_that_was_resolved_changes_its_annotation_instead_of_adding_one(grafana: FakeGrafana) -> None:
    client = push.connect(grafana.url, token=TOKEN)
    assert push.push_annotations(client, push.annotations_of([INCIDENT], [COMMAND], NOW)) == (2, 0)
    resolved = {**INCIDENT, "status": "resolved", "resolved_at": NOW - 10}
    assert push.push_annotations(client, push.annotations_of([resolved], [COMMAND], NOW + 60)) == (0, 1)
    assert grafana.annotations[1]["timeEnd"] == round((NOW - 10) * 1000)
    assert "resolved" in grafana.annotations[1]["tags"]
    assert push.push_annotations(client, push.annotations_of([resolved], [COMMAND], NOW + 90)) == (0, 0)


def test_a_user_and_password_work_as_well_as_a_token(grafana: FakeGrafana) -> None:
    assert push.push_folder(push.connect(grafana.url, user="admin", password="pa ss")) == "foreshock"


def test_refusals_are_said_in_words_without_secrets(grafana: FakeGrafana) -> None:
    done = foreshock("push", "--no-annotations", GRAFANA_URL=grafana.url, GRAFANA_TOKEN="glsa_wrong")
    assert done.returncode == 1
    assert "Grafana answered 401: Unauthorized (an editor's token is needed)" in done.stderr
    assert "glsa_wrong" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    grafana.read_only = True
    with pytest.raises(push.PushError, match="403"):
        push.push_folder(push.connect(grafana.url, token=TOKEN))
    grafana.close()
    with pytest.raises(push.PushError, match="no answer from Grafana"):
        push.push_folder(push.connect(grafana.url, token=TOKEN))


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda: push.connect("grafana:3000", token="t"), "not a URL"),
        (lambda: push.connect("http://grafana"), "GRAFANA_TOKEN"),
        (lambda: push.postgres_source("mysql://u:s3cret@h/d"), "postgresql://"),
        (lambda: push.postgres_source("postgresql://h/d"), "postgresql://"),
        (lambda: push.prometheus_source("prom:9090"), "http://"),
        (lambda: push.boards(Path("/nowhere")), "foreshock dashboards build"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(call: Any, wrong: str) -> None:
    with pytest.raises(push.PushError, match=wrong) as refused:
        call()
    assert "s3cret" not in str(refused.value)


def test_build_writes_the_boards_and_check_tells_when_they_are_stale(tmp_path: Path) -> None:
    assert foreshock("build", "--check").returncode == 0
    done = foreshock("build", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    (tmp_path / "run.json").write_text("{}")
    done = foreshock("build", "--check", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "run.json is not what the code builds" in done.stderr
