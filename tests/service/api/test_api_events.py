"""The event stream tells how things stand, then what changes, within the caller's project."""

from __future__ import annotations

import json
import threading
from typing import Any


def parsed(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def listen(client: Any, query: str) -> tuple[threading.Thread, list[Any]]:
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(client.get(f"/v1/events?{query}")))
    thread.start()
    return thread, heard


def test_the_stream_begins_with_the_state_and_goes_on_with_changes(house) -> None:
    house.started()
    thread, heard = listen(house.near, "for_s=4")
    house.wait_for(lambda: house.rooms.hub.waiting)
    assert house.rooms.waiters.taken == 1
    house.step(2, {"loss": "nan"})
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}]}
    assert house.near.post("/v1/runs/math/q/commands", json=body).status_code == 201
    thread.join(30)
    answer = heard[0]
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parsed(answer.text)
    assert events[0] == ("run", {**events[0][1], "id": "math/q", "verdict": "unknown"})
    assert "critical" in [e["verdict"] for kind, e in events if kind == "run"]
    assert "non_finite" in [e["rule"] for kind, e in events if kind == "incident"]
    assert "proposed" in [e["state"] for kind, e in events if kind == "command"]
    assert house.rooms.waiters.taken == 0


def test_a_stream_tells_nothing_of_other_projects_or_runs(house) -> None:
    house.step(1, {"loss": "nan"}, run="math/q")
    house.step(1, {"loss": 1.0}, run="other/r")
    house.wait_for(lambda: house.near.get("/v1/incidents").json()["incidents"])
    far = house.far(house.token("read", project="other"))
    assert {e["id"] for _, e in parsed(far.get("/v1/events?for_s=0.01").text)} == {"other/r"}
    assert far.get("/v1/events?run=math/q").status_code == 403
    one = parsed(house.near.get("/v1/events?for_s=0.01&run=other/r").text)
    assert {e["id"] for _, e in one} == {"other/r"}


def test_streams_are_capped(make_house) -> None:
    house = make_house(max_waiters=1)
    thread, heard = listen(house.near, "for_s=2")
    house.wait_for(lambda: house.rooms.waiters.taken == 1)
    assert house.near.get("/v1/events?for_s=1").status_code == 503
    thread.join(20)
    assert heard[0].status_code == 200
