"""The trainer's question and the commands that it brings: long-polls, delivery, acknowledgement, on both databases."""

from __future__ import annotations

import threading
import time
from typing import Any

from sqlalchemy import select

from foreshock_service.commands import gates
from foreshock_service.store.models import Run

CLIENT = "c" * 32
HEALTH = "/v1/runs/math/q/health"


def propose(house: Any, approve: bool = True, **changes: Any) -> dict[str, Any]:
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "test", "approve": approve}
    answer = house.near.post("/v1/runs/math/q/commands", json={**body, **changes})
    assert answer.status_code == 201, answer.text
    command: dict[str, Any] = answer.json()
    return command


def ack(house: Any, command: str, state: str, attempt: int = 1, client: str = CLIENT, **more: Any) -> Any:
    body = {"state": state, "client": client, "attempt": attempt, **more}
    return house.near.post(f"/v1/commands/{command}/ack", json=body)


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append((call(), time.monotonic())))
    thread.start()
    return thread, found


def test_an_unknown_run_is_404(house) -> None:
    assert house.near.get(HEALTH).status_code == 404


def test_health_tells_verdict_incidents_and_pending_commands(house_on_each) -> None:
    house = house_on_each
    house.started()
    house.step(1, {"loss": float("1"), "reward.mean": "nan"})
    body = house.wait_for(lambda: (b := house.near.get(HEALTH).json())["incidents"] and b)
    assert (body["verdict"], body["last_step"], body["mode"]) == ("critical", 1, "auto")
    assert body["incidents"][0]["rule"] == "non_finite"
    assert body["incidents"][0]["evidence"][0]["value"] == "nan"
    assert body["incidents"][0]["opened_at_iso"].endswith("Z")


def test_only_the_controller_gets_commands_and_everyone_sees_them_pending(house_on_each) -> None:
    house = house_on_each
    house.started()
    command = propose(house)
    assert house.near.get(HEALTH).json()["commands"] == []
    assert house.near.get(f"{HEALTH}?client={'d' * 32}").json()["commands"] == []
    mine = house.near.get(f"{HEALTH}?client={CLIENT}").json()
    assert [c["id"] for c in mine["commands"]] == [command["id"]]
    assert mine["commands"][0]["actions"] == [{"kind": "scale_lr", "arguments": {"factor": 0.5}}]
    assert 0 < mine["commands"][0]["expires_in_s"] <= 600
    assert mine["pending"][0]["id"] == command["id"]


def test_the_reply_to_an_envelope_carries_commands_too(house) -> None:
    house.started()
    command = propose(house)
    assert [c["id"] for c in house.step(1, {"loss": 1.0})["commands"]] == [command["id"]]


def test_a_command_runs_its_whole_life(house_on_each) -> None:
    house = house_on_each
    house.started()
    proposed = propose(house, approve=False)
    assert proposed["state"] == "proposed"
    approved = house.near.post(f"/v1/commands/{proposed['id']}/approve")
    assert (approved.json()["state"], approved.json()["decided_by"]) == ("approved", "loopback")
    assert house.near.post(f"/v1/commands/{proposed['id']}/approve").status_code == 409
    assert house.near.get(f"{HEALTH}?client={CLIENT}").json()["commands"]
    assert ack(house, proposed["id"], "accepted", client="d" * 32).status_code == 409
    assert ack(house, proposed["id"], "accepted", attempt=2).status_code == 409
    for _ in range(2):  # a lost reply is asked for again
        assert ack(house, proposed["id"], "accepted").json() == {"state": "accepted"}
    assert house.near.get(f"{HEALTH}?client={CLIENT}").json()["commands"] == []
    assert house.near.post(f"/v1/commands/{proposed['id']}/cancel").status_code == 409
    assert ack(house, proposed["id"], "done", step=7, detail={"lr": float(1)}).json() == {"state": "done"}
    command = house.near.get(f"/v1/commands/{proposed['id']}").json()
    assert (command["state"], command["done_step"]) == ("done", 7)
    assert ack(house, proposed["id"], "accepted").status_code == 409
    listed = house.near.get("/v1/runs/math/q/commands?state=done").json()["commands"]
    assert [c["id"] for c in listed] == [proposed["id"]]


def test_an_expired_command_is_410_for_its_trainer(make_house) -> None:
    house = make_house(command_expiry_s=1.0)
    house.started()
    command = propose(house)
    time.sleep(1.1)
    assert ack(house, command["id"], "accepted").status_code == 410


def test_rejecting_and_cancelling_end_a_command(house) -> None:
    house.started()
    first = propose(house, approve=False)
    answer = house.near.post(f"/v1/commands/{first['id']}/reject", json={"reason": "not now"})
    assert answer.json()["state"] == "rejected"
    second = propose(house)
    assert house.near.post(f"/v1/commands/{second['id']}/cancel").json()["state"] == "cancelled"
    assert house.near.get(f"{HEALTH}?client={CLIENT}").json()["commands"] == []


def test_what_the_run_did_not_announce_cannot_be_asked(house) -> None:
    house.started()
    body = {"actions": [{"kind": "pause"}]}
    answer = house.near.post("/v1/runs/math/q/commands", json=body)
    assert answer.status_code == 409
    assert "did not announce" in answer.json()["detail"]
    assert house.near.post("/v1/runs/math/q/commands", json={"actions": [{"kind": "dance"}]}).status_code == 422


def test_nothing_is_approved_for_a_run_that_only_observes(house) -> None:
    house.started(mode="observe")
    command = propose(house, approve=False)
    answer = house.near.post(f"/v1/commands/{command['id']}/approve")
    assert answer.status_code == 409
    assert "observe" in answer.json()["detail"]


def test_one_command_is_in_flight_at_a_time(house) -> None:
    house.started()
    propose(house)
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "approve": True}
    answer = house.near.post("/v1/runs/math/q/commands", json=body)
    assert answer.status_code == 409
    assert answer.json()["why"] == "Busy"
    states = [c["state"] for c in house.near.get("/v1/runs/math/q/commands").json()["commands"]]
    assert states == ["approved"], "the proposal went with its refused approval"


def test_a_long_poll_wakes_at_once_when_a_command_comes(house_on_each) -> None:
    house = house_on_each
    house.started()
    thread, found = in_background(lambda: house.near.get(f"{HEALTH}?wait=20&client={CLIENT}").json())
    house.wait_for(lambda: house.rooms.hub.waiting)
    assert house.rooms.waiters.taken == 1
    began = time.monotonic()
    command = propose(house)
    thread.join(20)
    body, ended = found[0]
    assert [c["id"] for c in body["commands"]] == [command["id"]]
    assert ended - began < 5
    assert house.rooms.waiters.taken == 0


def test_a_long_poll_without_news_ends_in_time_and_says_the_same(house) -> None:
    house.started()
    began = time.monotonic()
    first = house.near.get(HEALTH).json()
    again = house.near.get(f"{HEALTH}?wait=0.3&seen={first['seen']}").json()
    assert time.monotonic() - began >= 0.3
    assert again["seen"] == first["seen"]


def test_news_since_seen_is_told_without_waiting(house) -> None:
    house.started()
    before = house.near.get(HEALTH).json()["seen"]
    propose(house, approve=False)
    began = time.monotonic()
    after = house.near.get(f"{HEALTH}?wait=30&seen={before}").json()
    assert after["seen"] != before
    assert time.monotonic() - began < 10


def test_waiters_are_capped_with_503_and_retry_after(make_house) -> None:
    house = make_house(max_waiters=1)
    house.started()
    thread, found = in_background(lambda: house.near.get(f"{HEALTH}?wait=3"))
    house.wait_for(lambda: house.rooms.hub.waiting)
    answer = house.near.get(f"{HEALTH}?wait=3")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert house.near.get(HEALTH).status_code == 200, "who does not wait takes no place"
    thread.join(10)
    assert found[0][0].status_code == 200


def test_waiting_holds_no_database_connection(make_house) -> None:
    house = make_house(database_pool=2)
    house.started()
    threads = [in_background(lambda: house.near.get(f"{HEALTH}?wait=1.5")) for _ in range(12)]
    house.wait_for(lambda: house.rooms.hub.waiting == 12)
    assert house.rooms.store.engine.pool.checkedout() == 0
    for thread, found in threads:
        thread.join(20)
        assert found[0][0].status_code == 200


def test_an_operators_budget_binds_policy(house) -> None:
    house.started()
    house.near.patch("/v1/runs/math/q", json={"budget": {"limit": 1, "kinds": {"rollback": 0}}})
    with house.rooms.store.read() as session:
        run = session.scalars(select(Run)).one()
        assert gates.budget_of(run, house.rooms.limits)[0] == 1
        assert gates.budget_of(run, house.rooms.limits)[1]["rollback"] == 0
    house.near.patch("/v1/runs/math/q", json={"budget": None})
    with house.rooms.store.read() as session:
        run = session.scalars(select(Run)).one()
        assert gates.budget_of(run, house.rooms.limits)[0] == house.rooms.settings.budget_per_run


def test_health_of_a_quiet_run_asks_no_database_until_something_changes(house_on_each, monkeypatch) -> None:
    house = house_on_each
    house.started()
    house.step(1, {"loss": 1.0})
    house.wait_for(lambda: house.near.get(HEALTH).json()["last_step"] == 1)
    monkeypatch.setattr("foreshock_service.api.looks.FRESH_S", 60.0)
    monkeypatch.setattr("foreshock_service.api.looks.KEPT_S", 60.0)
    first = house.near.get(HEALTH)
    with monkeypatch.context() as without:
        without.setattr("foreshock_service.api.health._look", None)
        again = house.near.get(HEALTH)
    assert again.status_code == 200
    assert again.json() == first.json()
    command = propose(house)
    assert [c["id"] for c in house.near.get(HEALTH).json()["pending"]] == [command["id"]]
    assert [c["id"] for c in house.near.get(f"{HEALTH}?client={CLIENT}").json()["commands"]] == [command["id"]]
    house.near.post(f"/v1/commands/{command['id']}/cancel")
    assert house.near.get(HEALTH).json()["pending"] == []
    house.near.patch("/v1/runs/math/q", json={"mode": "observe"})
    assert house.near.get(HEALTH).json()["mode"] == "observe"
    house.near.delete("/v1/runs/math/q")
    assert house.near.get(HEALTH).status_code == 404


def test_a_kept_answer_that_is_no_longer_fresh_is_looked_for_anew(house, monkeypatch) -> None:
    house.started()
    house.step(1, {"loss": 1.0})
    house.wait_for(lambda: house.near.get(HEALTH).json()["last_step"] == 1)
    monkeypatch.setattr("foreshock_service.api.looks.KEPT_S", 60.0)
    house.step(2, {"loss": 1.0})
    house.wait_for(lambda: house.near.get(HEALTH).json()["last_step"] == 2)
