"""Runs, incidents, silences, deliveries and the probes, as people and Prometheus read them."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select

from foreshock_service.store.models import Audit, Base, Delivery, Run

RUN = "/v1/runs/math/q"


def test_lists_continue_by_cursor_without_gap_or_repeat(house_on_each) -> None:
    house = house_on_each
    for i in range(7):
        house.step(1, {"loss": 1.0}, run=f"p{i % 2}/r{i}")
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = house.near.get("/v1/runs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        seen += [r["name"] for r in page["runs"]]
        cursor = page["next"]
    assert seen == [f"p{i % 2}/r{i}" for i in reversed(range(7))]
    assert [r["name"] for r in house.near.get("/v1/runs?project=p1&limit=2").json()["runs"]] == ["p1/r5", "p1/r3"]


@pytest.mark.parametrize("cursor", ["x", "bm9uc2Vuc2U", "WzEsMiwzXQ", "W10", "WzFlOTk5XQ", "A" * 256])
def test_a_foreign_cursor_is_refused(house, cursor: str) -> None:
    for path in ("/v1/runs", "/v1/incidents", "/v1/silences"):
        answer = house.near.get(path, params={"cursor": cursor})
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("name", ["a b/c", "math/..%2f..%2fetc", "math/%00", "math/" + "x" * 129, "ma<th/q"])
def test_a_bad_run_name_never_reaches_the_store(house, name: str) -> None:
    assert house.near.get(f"/v1/runs/{name}").status_code in (404, 422)


def test_a_run_shows_what_it_announced_and_lost(house_on_each) -> None:
    house = house_on_each
    house.started(capabilities=("scale_lr", "pause"))
    envelope = house.envelope(losses={"spool_full": 3})
    assert house.near.post("/v1/ingest", json=envelope).status_code == 200
    body = house.near.get(RUN).json()
    assert body["capabilities"] == ["scale_lr", "pause"]
    assert body["clients"][0]["losses"] == {"spool_full": 3}
    assert body["attempts"][0]["launch"] == "launch-1"
    assert body["created_at_iso"].endswith("Z")


def test_what_an_operator_changes_is_kept_and_audited(house_on_each) -> None:
    house = house_on_each
    house.started(mode="observe")
    change = {"mode": "approve", "labels": {"team": "a"}, "rules": {"silent_run": {"enabled": False}}}
    body = house.near.patch(RUN, json={**change, "budget": {"limit": 2, "kinds": {"rollback": 1}}}).json()
    assert (body["mode"], body["labels"], body["rules"]) == ("approve", {"team": "a"}, change["rules"])
    assert body["budget"] == {"limit": 2, "kinds": {"rollback": 1}}
    house.step(2, {"loss": 1.0})
    assert house.near.get(RUN).json()["mode"] == "approve", "a person's word outlasts the client's"
    with house.rooms.store.read() as session:
        audited = session.scalars(select(Audit).where(Audit.subject == "run")).all()
    assert {a.detail["field"] for a in audited if a.actor == "loopback"} == {"mode", "labels", "rules", "budget"}


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "yolo"},
        {"rules": {"no_such_rule": {}}},
        {"rules": {"silent_run": {"no_such_key": 1}}},
        {"labels": {"a b": "c"}},
        {"budget": {"kinds": {"dance": 1}}},
        {"budget": {"limit": -1}},
        {"name": "other/name"},
    ],
)
def test_a_wrong_change_changes_nothing(house, change: dict[str, Any]) -> None:
    house.started(mode="observe")
    before = house.near.get(RUN).json()
    assert house.near.patch(RUN, json=change).status_code == 422
    assert house.near.get(RUN).json() == before


def test_no_run_may_be_bolder_than_the_service_allows(make_house) -> None:
    house = make_house(max_mode="approve")
    house.started(mode="auto")
    assert house.near.get(RUN).json()["mode"] == "approve"
    assert house.near.patch(RUN, json={"mode": "auto"}).status_code == 422


def test_deleting_a_run_leaves_nothing_of_it(house_on_each) -> None:
    house = house_on_each
    house.started()
    house.step(2, {"loss": "nan"})
    house.wait_for(lambda: house.near.get("/v1/incidents").json()["incidents"])
    version = house.rooms.hub.version(0)
    assert house.near.delete(RUN).status_code == 204
    assert house.rooms.hub.version(0) > version, "pages and long-polls learn of it"
    assert house.near.delete(RUN).status_code == 404
    with house.rooms.store.read() as session:
        for table in Base.metadata.sorted_tables:
            if table.name not in ("audit", "leases", "tokens"):
                assert session.scalar(select(func.count()).select_from(table)) == 0, table.name
    house.begin_again("math/q")
    house.step(1, {"loss": 1.0})
    assert house.near.get(RUN).json()["attempt"] == 1


def test_incidents_are_listed_acknowledged_and_resolved(house_on_each) -> None:
    house = house_on_each
    house.started()
    house.step(2, {"loss": "nan"})
    found = house.wait_for(
        lambda: house.near.get("/v1/incidents?status=unresolved&severity=critical").json()["incidents"]
    )
    url = f"/v1/incidents/{found[0]['id']}"
    assert house.near.get("/v1/incidents?run=math/other").json()["incidents"] == []
    answer = house.near.post(f"{url}/acknowledge").json()
    assert (answer["status"], answer["acknowledged_by"]) == ("acknowledged", "loopback")
    assert house.near.post(f"{url}/acknowledge").status_code == 409
    assert house.near.post(f"{url}/resolve").json()["status"] == "resolved"
    assert house.near.get(RUN).json()["verdict"] in ("healthy", "unknown")
    assert house.near.get("/v1/incidents/none").status_code == 404


def test_silences_come_and_go(house_on_each) -> None:
    near = house_on_each.near
    made = near.post("/v1/silences", json={"run": "math/q", "for_s": 60, "reason": "moving"}).json()
    assert made["until_at"] - made["created_at"] == pytest.approx(60)
    assert [s["id"] for s in near.get("/v1/silences").json()["silences"]] == [made["id"]]
    assert near.delete(f"/v1/silences/{made['id']}").status_code == 204
    assert near.get("/v1/silences").json()["silences"] == []
    assert len(near.get("/v1/silences?active=false").json()["silences"]) == 1
    for wrong in ({"for_s": 60}, {"rule": "x", "for_s": 0}, {"rule": "x", "for_s": 1e12}, {"rule": "<b>", "for_s": 1}):
        assert near.post("/v1/silences", json=wrong).status_code == 422


def test_a_dead_delivery_is_shown_and_retried_under_its_own_id(house_on_each) -> None:
    house = house_on_each
    house.started()
    with house.rooms.store.write() as session:
        run_id = session.scalars(select(Run.id)).one()
        row = Delivery(
            id=uuid4().hex,
            run_id=run_id,
            channel="gone",
            event="incident.opened",
            dedupe_key="k",
            payload={"secret": "hidden"},
            state="dead",
            attempts=12,
            next_at=0.0,
            created_at=time.time(),
            last_error="410",
        )
        session.add(row)
        session.flush()
        delivery = row.id
    listed = house.near.get("/v1/deliveries?state=dead")
    assert [d["id"] for d in listed.json()["deliveries"]] == [delivery]
    assert "hidden" not in listed.text
    answer = house.near.post(f"/v1/deliveries/{delivery}/retry").json()
    assert (answer["id"], answer["state"], answer["run"]) == (delivery, "pending", "math/q")
    assert house.near.post(f"/v1/deliveries/{delivery}/retry").status_code == 409


def test_metrics_parse_and_stay_bounded(make_house) -> None:
    house = make_house(max_metric_runs=2)
    for i in range(4):
        house.step(1, {"loss": 1.0}, run=f"math/r{i}")
    house.near.get("/v1/no/such/path/7f3a")
    text = house.near.get("/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    runs = {s.labels["run"] for s in families["foreshock_run_verdict"].samples}
    assert runs == {"math/r2", "math/r3"}
    assert all(
        sum(s.value for s in families["foreshock_run_verdict"].samples if s.labels["run"] == r) == 1 for r in runs
    )
    assert "7f3a" not in text, "labels are templates, never what was asked for"
    stored = families["foreshock_ingest_envelopes"].samples
    assert [s.value for s in stored if s.labels.get("outcome") == "stored" and s.name.endswith("_total")] == [4.0]


def test_readiness_follows_the_database_and_the_workers(house, monkeypatch) -> None:
    assert house.near.get("/readyz").json() == {"status": "ok"}
    with monkeypatch.context() as patched:
        patched.setattr(house.rooms.store, "ping", lambda: False)
        answer = house.near.get("/readyz")
        assert answer.status_code == 503
        assert "sqlite" not in answer.text
    monkeypatch.setattr(house.rooms, "stopping", True)
    assert house.near.get("/readyz").status_code == 503
    assert house.near.get("/healthz").status_code == 200


def test_the_diagnosis_names_a_cause_or_abstains(house) -> None:
    house.step(1, {"loss": 1.0})
    house.wait_for(lambda: house.near.get(RUN).json()["last_step"] == 1)
    body = house.near.get(f"{RUN}/diagnosis").json()
    assert body["abstains"] is True
    assert body["causes"] == []
    assert body["sentence"]
    assert house.near.get(f"{RUN}/diagnosis?attempt=5").status_code == 404


def test_every_answer_carries_the_security_headers(house) -> None:
    for path in ("/v1/runs", "/v1/nothing", "/healthz", "/metrics"):
        headers = house.near.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
    assert house.near.get("/v1/runs").headers["cache-control"] == "no-store"
