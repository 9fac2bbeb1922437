"""`/metrics` as Prometheus reads it: lint-free, bounded, and each run once however many replicas there are."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from foreshock_service.api import fleet
from foreshock_service.store.models import Client, Delivery, Lease, Step
from tests.servers import find_binary, free_port, prometheus, wait_for
from tests.service.replica import Replica


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Any], name: str, **labels: str) -> float | None:
    family = found.get(name.removesuffix("_total"))
    for sample in family.samples if family else ():
        if sample.name == name and labels.items() <= sample.labels.items():
            return float(sample.value)
    return None


def train(house: Any, run: str = "math/q", steps: int = 3) -> None:
    rows = {
        step: {"reward.mean": 0.4, "entropy.mean": 1.5, "length.truncated": 0.25, "time.step_s": 3.0, "my.own": 7.0}
        for step in range(1, steps + 1)
    }
    house.steps(rows, run)
    house.wait_for(lambda: f'{run}"}} {float(steps)}' in house.near.get("/metrics").text.replace("last_step{", "{"))


def test_promtool_finds_nothing_to_say(house) -> None:
    train(house)
    promtool = find_binary("promtool", "prometheus")
    text = house.near.get("/metrics").text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_signals_carry_their_unit_in_the_metric_and_hosts_own_names_stay_out(house) -> None:
    train(house)
    found = families(house.near.get("/metrics").text)
    assert value(found, "foreshock_run_signal", run="math/q", signal="reward.mean") == 0.4
    assert value(found, "foreshock_run_signal_nats", run="math/q", signal="entropy.mean") == 1.5
    assert value(found, "foreshock_run_signal_ratio", run="math/q", signal="length.truncated") == 0.25
    assert value(found, "foreshock_run_signal_seconds", run="math/q", signal="time.step_s") == 3.0
    assert "my.own" not in house.near.get("/metrics").text
    signals = {s.labels["signal"] for f in found.values() for s in f.samples if "signal" in s.labels}
    assert signals <= set(fleet.SIGNALS)


def test_every_shown_signal_is_catalogued() -> None:
    from foreshock.frames import catalogue

    assert all(catalogue.find(name) is not None for name in fleet.SIGNALS)
    assert {s.unit for s in catalogue.all_signals()} <= set(fleet.SUFFIXES)


def test_the_service_tells_of_its_own_backlog_and_losses(house) -> None:
    train(house)
    now = time.time()
    with house.rooms.store.write() as session:
        for i, state in enumerate(("dead", "dead", "pending", "sent")):
            session.add(
                Delivery(
                    id=f"d{i}", channel="webhook", event="incident.opened", dedupe_key=f"k{i}", payload={},
                    state=state, next_at=now + 9e9, created_at=now - 400,
                )
            )  # fmt: skip
        session.execute(update(Client).values(losses={"spool_full": 7, "made_up_by_a_client_7f3a": 2}))
        session.execute(update(Step).where(Step.step == 3).values(evaluated_at=None, due_at=now + 9e9))
    text = house.near.get("/metrics").text
    found = families(text)
    assert value(found, "foreshock_deliveries", channel="webhook", state="dead") == 2
    assert value(found, "foreshock_outbox_lag_seconds") == pytest.approx(400, abs=5)
    assert value(found, "foreshock_run_lost_items_total", run="math/q", reason="spool_full") == 7
    assert value(found, "foreshock_run_lost_items_total", run="math/q", reason="other") == 2
    assert "7f3a" not in text
    assert value(found, "foreshock_steps_due") == 0, "a step whose ranks are still awaited is not late"
    assert value(found, "foreshock_evaluation_lag_seconds") == 0
    assert value(found, "foreshock_worker_up", worker="writer") == 1
    assert value(found, "foreshock_writer_queue_capacity") == house.rooms.settings.writer_queue
    assert value(found, "foreshock_heartbeat_timestamp_seconds") == pytest.approx(time.time(), abs=5)


def test_without_its_database_the_page_still_comes_and_says_so(house, monkeypatch: pytest.MonkeyPatch) -> None:
    house.near.get("/metrics")

    def away(*_: Any) -> bool:
        raise OperationalError("SELECT", {}, Exception("secret host"))

    monkeypatch.setattr(fleet, "leads", away)
    found = families(house.near.get("/metrics").text)
    assert value(found, "foreshock_database_up") == 0
    assert value(found, "foreshock_run_verdict") is None
    assert value(found, "foreshock_writer_queue_length") == 0


def test_a_token_of_one_project_sees_its_own_runs_and_nothing_of_the_service(house) -> None:
    train(house)
    train(house, "other/r")
    text = house.far(house.token("read", project="math")).get("/metrics").text
    found = families(text)
    assert value(found, "foreshock_run_last_step", run="math/q") == 3
    assert "other/r" not in text
    assert "foreshock_deliveries" not in text
    assert "foreshock_evaluation_lag" not in text


@pytest.fixture
def replicas(migrated_postgres_url: str) -> Iterator[Callable[[], Replica]]:
    from tests.service.api.conftest import settings_for

    made: list[Replica] = []

    def start() -> Replica:
        made.append(Replica(settings_for(migrated_postgres_url, port=free_port())))
        return made[-1]

    yield start
    for replica in made:
        replica.stop()


@pytest.mark.postgres
def test_two_replicas_scraped_by_a_real_prometheus_show_each_run_once(
    replicas: Callable[[], Replica], tmp_path: Path, new_trainer: Any
) -> None:
    import httpx
    import msgspec

    first, second = replicas(), replicas()
    trainer = new_trainer(run="math/q")
    envelope = trainer.envelope(
        *(trainer.frame(i, {"entropy.mean": 1.5}) for i in range(1, 4)), expected_ranks={"trainer": 1}
    )
    answer = httpx.post(
        f"http://127.0.0.1:{second.port}/v1/ingest",
        content=msgspec.json.encode(envelope),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    targets = [f"127.0.0.1:{r.port}" for r in (first, second)]
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: foreshock, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    server = prometheus(tmp_path, config)
    try:

        def ask(query: str) -> list[float]:
            found = server.get("/api/v1/query", query=query)["data"]["result"]
            return sorted(float(row["value"][1]) for row in found)

        wait_for(lambda: ask('sum(foreshock_run_last_step{run="math/q"})') == [3.0])
        # Prometheus spreads the first scrapes of its targets over the interval.
        wait_for(lambda: ask('up{job="foreshock"}') == [1.0, 1.0])
        wait_for(lambda: ask("foreshock_leads") == [0.0, 1.0])
        assert ask('count(foreshock_run_signal_nats{run="math/q",signal="entropy.mean"})') == [1.0]
        assert ask("count(foreshock_evaluation_lag_seconds)") == [1.0]
        assert ask("count(foreshock_writer_queue_length)") == [2.0]
        # The leader is gone: after its lease the other shows the runs.
        store = first.app.state.rooms.store
        leader = first if ask(f'foreshock_leads{{instance="{targets[0]}"}}') == [1.0] else second
        other = second if leader is first else first
        with store.write() as session:
            session.execute(update(Lease).where(Lease.name == fleet.LEASE).values(until_at=time.time() - 1))
        leader.stop()
        wait_for(lambda: ask(f'foreshock_run_last_step{{instance="127.0.0.1:{other.port}"}}') == [3.0])
    finally:
        server.stop()
