"""Alerts in a real Alertmanager: firing from opening to resolution, once however often they are sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.alerts.sink import Sink
from foreshock_service.alerts.alertmanager import Alertmanager
from foreshock_service.alerts.base import Later, Message, Never
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.incidents import book
from foreshock_service.rules.interface import Evidence, Finding, Outcome, StepView
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Run
from tests.servers import Server, alertmanager, wait_for

CONFIG = "route: {receiver: people, group_wait: 0s, group_by: [run]}\nreceivers: [{name: people}]\n"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("alertmanager")
    (folder / "alertmanager.yml").write_text(CONFIG)
    server = alertmanager(folder, folder / "alertmanager.yml")
    yield server
    server.stop()


def message(run: str, event: str = "incident.opened", delivery_id: str = "d1", **changes: Any) -> Message:
    incident = {
        "id": f"inc-{run}", "rule": "rollout_mismatch", "severity": "critical", "attempt": 1, "onset_step": 25,
        "opened_step": 27, "message": "engine at fault",
        "evidence": [{"signal": "mismatch.kl_k3", "value": 0.125, "expected": 5e-4}],
    } | changes  # fmt: skip
    payload = {
        "run": run,
        "path": f"/runs/{run}",
        "incident": incident,
        "cause": "stale engine weights",
        "commands": [],
    }
    return Message(delivery_id=delivery_id, event=event, payload=payload, created_at=time.time() - 5)


def firing(manager: Server, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manager.get("/api/v2/alerts", filter=f'run="{run}"')
    return found


def test_an_incident_of_the_rules_fires_in_a_real_alertmanager(
    store: Store, make_run: Callable[..., int], manager: Server, client: httpx.Client
) -> None:
    name = f"lab/{store.dialect}"
    run_id, now = make_run(name), time.time()
    with store.write() as session:
        run = session.get_one(Run, run_id)
        numbers = (Evidence(signal="mismatch.kl_k3", value=0.125, expected=5e-4),)
        finding = Finding(
            rule="rollout_mismatch", transition="open", severity="critical", step=27, onset_step=25,
            message="engine at fault", evidence=numbers, edge="engine",
        )  # fmt: skip
        seen = StepView(run=run.name, attempt=1, step=27, values={"mismatch.kl_k3": 0.125})
        changes = book.apply(session, run, seen, Outcome(findings=[finding], firing=["rollout_mismatch"]), now)
        Outbox(["alertmanager"]).enqueue(session, run, changes, [], now)
    channel = Alertmanager(client, manager.url, "http://foreshock.example")
    assert DeliveryWorker(store, {"alertmanager": channel}).once() == 1
    (alert,) = firing(manager, name)
    assert alert["labels"]["alertname"] == "rollout_mismatch"
    assert (alert["labels"]["severity"], alert["labels"]["project"]) == ("critical", "lab")
    assert alert["generatorURL"] == f"http://foreshock.example/runs/{name}"
    assert alert["annotations"]["evidence"] == "mismatch.kl_k3 = 0.125 (usual: 0.0005)"
    assert "engine at fault (since step 25" in alert["annotations"]["what"]


def test_the_same_alert_twice_is_one_and_its_resolution_ends_it(manager: Server, client: httpx.Client) -> None:
    channel = Alertmanager(client, manager.url)
    for _ in range(2):
        channel.send(message("lab/twice"), time.time())
    assert len(firing(manager, "lab/twice")) == 1
    channel.send(message("lab/twice", "incident.resolved", "d2"), time.time())
    wait_for(lambda: firing(manager, "lab/twice") == [])


def test_an_escalated_incident_fires_under_its_new_severity_alone(manager: Server, client: httpx.Client) -> None:
    channel = Alertmanager(client, manager.url)
    channel.send(message("lab/worse", severity="warning"), time.time())
    channel.send(message("lab/worse", "incident.escalated", "d2"), time.time())
    assert [a["labels"]["severity"] for a in wait_for(lambda: _one(firing(manager, "lab/worse")))] == ["critical"]


def _one(found: list[Any]) -> list[Any] | None:
    return found if len(found) == 1 else None


def test_a_storm_arrives_whole_in_one_request(manager: Server, client: httpx.Client) -> None:
    channel = Alertmanager(client, manager.url)
    channel.send_digest([message(f"storm/r{i}", delivery_id=f"d{i}") for i in range(300)], time.time())
    assert len(manager.get("/api/v2/alerts", filter='project="storm"')) == 300


def test_a_digest_holds_the_newest_word_on_each_alert(manager: Server, client: httpx.Client) -> None:
    channel, now = Alertmanager(client, manager.url), time.time()
    opened, resolved = message("lab/brief"), message("lab/brief", "incident.resolved", "d2")
    channel.send_digest([resolved, opened], now)
    assert firing(manager, "lab/brief") == []


def test_a_command_that_waits_fires_until_it_is_done(manager: Server, client: httpx.Client) -> None:
    def command(event: str, became: str) -> Message:
        told = {"id": "c1", "kind": "resync_engine", "became": became, "reason": "engine is stale"}
        payload = {"run": "lab/asks", "path": "/runs/lab/asks", "incident": None, "cause": None, "commands": [told]}
        return Message(delivery_id=became, event=event, payload=payload, created_at=time.time() - 5)

    channel = Alertmanager(client, manager.url)
    channel.send(command("command.proposed", "proposed"), time.time())
    (alert,) = firing(manager, "lab/asks")
    assert (alert["labels"]["command"], alert["labels"]["kind"]) == ("c1", "resync_engine")
    assert alert["annotations"]["foreshock"] == "resync_engine: proposed. engine is stale"
    channel.send(command("command.done", "done"), time.time())
    wait_for(lambda: firing(manager, "lab/asks") == [])


def test_an_alertmanager_that_is_away_is_tried_again_and_one_that_refuses_is_not(client: httpx.Client) -> None:
    sink = Sink()
    channel = Alertmanager(client, f"http://ada:pa%20ss@127.0.0.1:{sink.server.server_port}/")
    sink.answers = [503, 400]
    with pytest.raises(Later):
        channel.send(message("lab/x"), time.time())
    with pytest.raises(Never):
        channel.send(message("lab/x"), time.time())
    channel.send(message("lab/x"), time.time())
    path, headers, _ = sink.got[-1]
    assert (path, headers["Authorization"]) == ("/api/v2/alerts", "Basic YWRhOnBhIHNz")
    sink.close()
    with pytest.raises(Later):
        channel.send(message("lab/x"), time.time())


def test_the_shipped_configuration_is_good(tmp_path: Path) -> None:
    import subprocess

    from tests.servers import find_binary

    shipped = Path(__file__).parents[3] / "deploy/alertmanager/alertmanager.yml"
    amtool = find_binary("amtool", "prometheus-alertmanager")
    done = subprocess.run([amtool, "check-config", str(shipped)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
