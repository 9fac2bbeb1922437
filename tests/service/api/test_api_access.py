"""Who may call what: every route of the OpenAPI document, with every kind of wrong token."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select

from foreshock_service.api import tokens
from foreshock_service.api.limits import Buckets
from foreshock_service.api.middleware import Boundary
from foreshock_service.api.principal import digest
from foreshock_service.api.telemetry import Telemetry
from foreshock_service.settings import Settings
from foreshock_service.store.models import Token

OPEN = frozenset[str]()
READ = frozenset({"read", "operate", "admin"})
OPERATE = frozenset({"operate", "admin"})
ADMIN = frozenset({"admin"})
INGEST = frozenset({"ingest", "admin"})
TRAINER = READ | INGEST
ACK = OPERATE | INGEST
RUN = "/v1/runs/{project}/{name}"

EXPECTED: dict[tuple[str, str], frozenset[str]] = {
    ("POST", "/v1/ingest"): INGEST,
    ("GET", f"{RUN}/health"): TRAINER,
    ("POST", "/v1/commands/{command_id}/ack"): ACK,
    ("GET", "/v1/commands/{command_id}"): READ,
    ("GET", f"{RUN}/commands"): READ,
    ("POST", f"{RUN}/commands"): OPERATE,
    ("POST", "/v1/commands/{command_id}/approve"): OPERATE,
    ("POST", "/v1/commands/{command_id}/reject"): OPERATE,
    ("POST", "/v1/commands/{command_id}/cancel"): OPERATE,
    ("GET", "/v1/runs"): READ,
    ("GET", RUN): READ,
    ("PATCH", RUN): OPERATE,
    ("DELETE", RUN): ADMIN,
    ("GET", f"{RUN}/checkpoints"): READ,
    ("GET", f"{RUN}/signals"): READ,
    ("GET", f"{RUN}/series"): READ,
    ("GET", f"{RUN}/steps/{{step}}"): READ,
    ("GET", f"{RUN}/diagnosis"): READ,
    ("GET", "/v1/incidents"): READ,
    ("GET", "/v1/incidents/{incident_id}"): READ,
    ("POST", "/v1/incidents/{incident_id}/acknowledge"): OPERATE,
    ("POST", "/v1/incidents/{incident_id}/resolve"): OPERATE,
    ("GET", "/v1/rules"): READ,
    ("POST", "/v1/rules/replay"): READ,
    ("GET", "/v1/events"): READ,
    ("GET", "/v1/silences"): READ,
    ("POST", "/v1/silences"): OPERATE,
    ("DELETE", "/v1/silences/{silence_id}"): OPERATE,
    ("GET", "/v1/deliveries"): READ,
    ("POST", "/v1/deliveries/{delivery_id}/retry"): OPERATE,
    ("GET", "/v1/tokens"): ADMIN,
    ("POST", "/v1/tokens"): ADMIN,
    ("DELETE", "/v1/tokens/{token_id}"): ADMIN,
    ("GET", "/metrics"): READ,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
}
PAGE = {
    ("GET", "/"),
    ("GET", "/runs/{project}/{name}"),
    ("GET", "/login"),
    ("POST", "/login"),
    ("POST", "/logout"),
    ("POST", "/commands/{row_id}/{verb}"),
    ("POST", "/incidents/{row_id}/{verb}"),
    ("GET", "/runs/{project}/{name}/steps/{step}"),
    ("POST", "/silences"),
    ("POST", "/silences/{row_id}/end"),
    ("GET", "/static/{name:path}"),
}
"""Not in the document; test_api_page.py asks who may press what."""
SIGNED = {("POST", "/v1/slack/interactions")}
"""For Slack alone, which signs what it sends; test_slack_clicks.py asks who may click what."""
BODIES: dict[str, Any] = {
    "/v1/ingest": {
        "protocol": 1,
        "client": "a" * 32,
        "sequence": 0,
        "run": "math/q",
        "launch": "l",
    },
    f"{RUN}/commands": {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}]},
    RUN: {"labels": {}},
    "/v1/commands/{command_id}/ack": {"state": "accepted", "client": "a" * 32, "attempt": 1},
    "/v1/rules/replay": {"run": "math/q"},
    "/v1/silences": {"project": "math", "for_s": 60},
    "/v1/tokens": {"name": "new", "scopes": ["read"], "project": "math"},
}
ROUTES = sorted(EXPECTED)


def call(client: Any, method: str, path: str) -> Any:
    concrete = path.replace("{project}", "math").replace("{name}", "q").replace("{step}", "1")
    for part in ("command_id", "incident_id", "silence_id", "delivery_id", "token_id"):
        concrete = concrete.replace(f"{{{part}}}", "none")
    if path == f"{RUN}/series":
        concrete += "?signal=loss"
    if path == "/v1/events":
        concrete += "?for_s=0.01"
    return client.request(method, concrete, json=BODIES.get(path) if method in ("POST", "PATCH") else None)


@pytest.fixture
def busy(shared_house):
    """One service for the whole table, with a run that has a step."""
    if shared_house.near.get("/v1/runs/math/q/steps/1").status_code != 200:
        shared_house.begin_again("math/q")
        shared_house.step(1, {"loss": 1.0})
        shared_house.wait_for(lambda: shared_house.near.get("/v1/runs/math/q/steps/1").status_code == 200)
    return shared_house


def test_every_documented_route_is_expected_and_names_its_scopes(house) -> None:
    document = house.near.get("/v1/openapi.json").json()
    found = {(m.upper(), p): op for p, ops in document["paths"].items() for m, op in ops.items()}
    assert set(found) == set(EXPECTED)
    implied = {"ingest": {"ingest", "admin"}, "read": READ, "operate": OPERATE, "admin": ADMIN}
    for route, operation in found.items():
        named = [scope for need in operation.get("security", []) for scope in need["token"]]
        assert frozenset().union(*(implied[s] for s in named)) == EXPECTED[route], route


def test_every_route_outside_the_document_belongs_to_the_page(house) -> None:
    hidden = {
        (method, context.path)
        for context in _routes(house.app)
        if not context.include_in_schema
        for method in context.methods - {"HEAD"}
    }
    assert hidden == PAGE | SIGNED


def _routes(app: Any) -> list[APIRoute]:
    found: list[APIRoute] = []
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        else:
            waiting += getattr(getattr(route, "original_router", None), "routes", [])
    return found


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_good_token_nothing_is_answered(busy, method: str, path: str) -> None:
    if not EXPECTED[method, path]:
        assert call(busy.far(), method, path).status_code == 200
        return
    scopes = sorted(EXPECTED[method, path])
    revoked = busy.token(*scopes)
    with busy.rooms.store.write() as session:
        row = session.scalars(select(Token).where(Token.hash == digest(revoked))).one()
        assert tokens.revoke(session, row.id, actor="test")
    expired = busy.token(*scopes, expires_at=time.time() - 1)
    for token in (None, "nonsense", revoked, expired):
        answer = call(busy.far(token), method, path)
        assert answer.status_code == 401, (token, answer.text)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(("method", "path"), [r for r in ROUTES if EXPECTED[r]])
@pytest.mark.parametrize("scope", ["ingest", "read", "operate", "admin"])
def test_each_scope_opens_its_routes_and_no_other(busy, method: str, path: str, scope: str) -> None:
    answer = call(busy.far(busy.token(scope)), method, path)
    if scope in EXPECTED[method, path]:
        assert answer.status_code in (200, 201, 204, 403, 404, 409), answer.text
        assert "Needs one of these scopes" not in answer.text
    else:
        assert answer.status_code == 403, answer.text
        assert "Needs one of these scopes" in answer.json()["detail"]


@pytest.mark.parametrize(("method", "path"), [r for r in ROUTES if EXPECTED[r]])
def test_a_token_of_another_project_sees_and_changes_nothing(busy, method: str, path: str) -> None:
    answer = call(busy.far(busy.token("admin", project="other")), method, path)
    lists = {"/v1/runs", "/v1/incidents", "/v1/silences", "/v1/deliveries", "/v1/tokens"}
    if method == "GET" and path in lists:
        assert answer.json()[path.rpartition("/")[2]] == [] or path == "/v1/tokens"
        assert "math" not in answer.text
    elif path in ("/metrics", "/v1/events", "/v1/rules"):
        assert "math" not in answer.text
    else:
        assert answer.status_code in (403, 404), answer.text


def test_a_token_of_the_own_project_works_there(busy) -> None:
    far = busy.far(busy.token("ingest", "read", project="math"))
    assert call(far, "POST", "/v1/ingest").status_code == 200
    assert [r["name"] for r in far.get("/v1/runs").json()["runs"]] == ["math/q"]
    assert "math/q" in far.get("/metrics").text


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "DNS rebinding"),
        ({"Host": "localhost.evil.example"}, "DNS rebinding"),
        ({"X-Forwarded-For": "203.0.113.9"}, "a proxy on this machine"),
        ({"Forwarded": "for=203.0.113.9"}, "a proxy on this machine"),
        ({"Authorization": "Bearer wrong"}, "a wrong token is refused, near too"),
    ],
)
def test_loopback_is_not_trusted_where_someone_else_may_speak_through_it(house, headers: Any, why: str) -> None:
    assert house.near.get("/v1/runs").status_code == 200
    assert house.near.get("/v1/runs", headers=headers).status_code == 401, why


@pytest.mark.parametrize("host", ["localhost:8720", "127.0.0.1", "[::1]:8720", "LOCALHOST"])
def test_loopback_names_need_no_token(house, host: str) -> None:
    assert house.near.get("/v1/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_another_sites_page_changes_nothing_through_a_loopback_browser(house, headers: Any) -> None:
    body = {"rule": "silent_run", "for_s": 60}
    assert house.near.post("/v1/silences", json=body, headers=headers).status_code == 403
    own = {"Origin": "http://localhost:8720", "Sec-Fetch-Site": "same-origin"}
    assert house.near.post("/v1/silences", json=body, headers=own).status_code == 201


def test_loopback_trust_can_be_switched_off(make_house) -> None:
    assert make_house(trust_loopback=False).near.get("/v1/runs").status_code == 401


def test_tokens_rotate_without_downtime_and_revocation_holds_at_once(house) -> None:
    admin = house.far(house.token("admin"))
    first = admin.post("/v1/tokens", json={"name": "trainer", "scopes": ["read"]}).json()
    second = admin.post("/v1/tokens", json={"name": "trainer", "scopes": ["read"]}).json()
    assert all(house.far(t["secret"]).get("/v1/runs").status_code == 200 for t in (first, second))
    assert admin.delete(f"/v1/tokens/{first['id']}").status_code == 204
    assert house.far(first["secret"]).get("/v1/runs").status_code == 401
    assert house.far(second["secret"]).get("/v1/runs").status_code == 200
    assert admin.delete(f"/v1/tokens/{first['id']}").status_code == 409


def test_an_expiring_token_is_not_outlived_by_the_cache(make_house) -> None:
    house = make_house(token_cache_s=300)
    secret = house.token("read", expires_at=time.time() + 0.4)
    assert house.far(secret).get("/v1/runs").status_code == 200
    house.wait_for(lambda: house.far(secret).get("/v1/runs").status_code == 401, 5)


def test_only_the_hash_of_a_token_is_stored_and_its_use_is_noted(house) -> None:
    secret = house.token("read")
    house.far(secret).get("/v1/runs")
    with house.rooms.store.read() as session:
        row = session.query(Token).one()
    assert secret not in str(vars(row))
    assert len(row.hash) == 64
    assert row.last_used_at is not None
    assert "hash" not in house.near.get("/v1/tokens").text


def test_a_project_bound_admin_makes_tokens_only_for_its_project(house) -> None:
    admin = house.far(house.token("admin", project="math"))
    assert admin.post("/v1/tokens", json={"name": "x", "scopes": ["admin"]}).status_code == 403
    assert admin.post("/v1/tokens", json={"name": "x", "scopes": ["admin"], "project": "other"}).status_code == 403
    assert admin.post("/v1/tokens", json={"name": "x", "scopes": ["read"], "project": "math"}).status_code == 201


def test_access_logs_hold_no_token_and_no_query(house, caplog) -> None:
    secret = house.token("read")
    with caplog.at_level("DEBUG"):
        logging.getLogger("httpx").setLevel("WARNING")  # the caller's own log of what it asks
        house.far(secret).get(f"/v1/runs?cursor={secret}")
        house.far().get(f"/v1/runs?token={secret}")
    assert any("GET /v1/runs" in message for message in caplog.messages)
    assert secret not in caplog.text


def test_a_busy_caller_is_slowed_down_and_others_are_not() -> None:
    now = [0.0]
    buckets = Buckets(2.0, 2.0, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(4)] == [0.0] * 4
    assert buckets.take("a") == pytest.approx(0.5)
    assert buckets.take("b") == 0.0
    now[0] += 0.5
    assert buckets.take("a") == 0.0


def test_over_the_rate_the_answer_is_429_with_retry_after(sqlite_url: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    boundary = Boundary(app, Settings(database_url=sqlite_url, request_rate_per_s=1.0, rate_burst_s=2.0), Telemetry())
    seen: list[tuple[int, dict[bytes, bytes]]] = []

    async def once() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                seen.append((message["status"], dict(message["headers"])))

        scope = {"type": "http", "method": "GET", "path": "/v1/runs", "headers": [], "client": ("203.0.113.7", 1)}
        await boundary(scope, lambda: None, send)

    for _ in range(3):
        asyncio.run(once())
    assert [status for status, _ in seen] == [200, 200, 429]
    assert int(seen[-1][1][b"retry-after"]) >= 1
