"""Who may come in: tokens on every documented route, Host, cookies, commands and clicks that others forge."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections import Counter
from typing import Any
from urllib.parse import urlencode

from benchmarks.attacks.target import CLIENT, OTHER, SLACK_SECRET, Target, attack
from foreshock_service.api.principal import csrf_of

OPEN = {"/healthz", "/readyz"}
LISTS = {"/v1/runs", "/v1/incidents", "/v1/silences", "/v1/deliveries", "/v1/tokens", "/v1/events", "/v1/rules"}
BODIES: dict[str, Any] = {
    "/v1/ingest": {"protocol": 1, "client": OTHER, "sequence": 0, "run": "math/q", "launch": "l"},
    "/v1/runs/math/q/commands": {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}]},
    "/v1/runs/math/q": {"labels": {}},
    "/v1/commands/none/ack": {"state": "accepted", "client": OTHER, "attempt": 1},
    "/v1/rules/replay": {"run": "math/q"},
    "/v1/silences": {"project": "math", "for_s": 60},
    "/v1/tokens": {"name": "new", "scopes": ["read"], "project": "math"},
}


def routes(target: Target) -> list[tuple[str, str]]:
    """Every (method, concrete path) of the service's own OpenAPI document that asks for a token."""
    document = target.ask("GET", "/v1/openapi.json", target.admin).json()
    found = []
    for path, methods in document["paths"].items():
        concrete = path.replace("{project}", "math").replace("{name}", "q").replace("{step}", "1")
        for part in ("command_id", "incident_id", "silence_id", "delivery_id", "token_id"):
            concrete = concrete.replace(f"{{{part}}}", "none")
        found += [(method.upper(), concrete) for method in methods if path not in OPEN]
    return found


def on_every_route(target: Target, token: str | None) -> Counter[int]:
    """Status → how many routes answered with it."""
    statuses: Counter[int] = Counter()
    for method, path in routes(target):
        query = {"/v1/runs/math/q/series": "?signal=loss", "/v1/events": "?for_s=0.01"}.get(path, "")
        body = BODIES.get(path) if method in ("POST", "PATCH") else None
        statuses[target.ask(method, path + query, token, json=body).status_code] += 1
    return statuses


def told(statuses: Counter[int]) -> str:
    """`401 on every route`, or what else there was."""
    if len(statuses) == 1 and sum(statuses.values()) > 30:
        return f"{next(iter(statuses))} on every route"
    return ", ".join(f"{status} × {n}" for status, n in sorted(statuses.items()))


@attack("tokens", "no token", "401 on every route")
def no_token(target: Target) -> str:
    return told(on_every_route(target, None))


@attack("tokens", "a wrong token", "401 on every route")
def wrong_token(target: Target) -> str:
    return told(on_every_route(target, "fsk_" + "x" * 43))


@attack("tokens", "a revoked token", "401 on every route")
def revoked_token(target: Target) -> str:
    token_id, secret = target.token("admin")
    assert target.ask("GET", "/v1/runs", secret).status_code == 200
    target.ask("DELETE", f"/v1/tokens/{token_id}", target.admin)
    return told(on_every_route(target, secret))


@attack("tokens", "an expired token", "401 on every route")
def expired_token(target: Target) -> str:
    _, secret = target.token("admin", days=1e-8)
    time.sleep(0.01)
    return told(on_every_route(target, secret))


@attack("tokens", "another project's admin token", "refused, or answered without a word of the project")
def other_project(target: Target) -> str:
    _, secret = target.token("admin", project="other")
    for method, path in routes(target):
        query = {"/v1/runs/math/q/series": "?signal=loss", "/v1/events": "?for_s=0.01"}.get(path, "")
        body = BODIES.get(path) if method in ("POST", "PATCH") else None
        answer = target.ask(method, path + query, secret, json=body)
        if answer.status_code == 200 and (path in LISTS | {"/metrics"}) and "math" not in answer.text:
            continue
        if answer.status_code not in (403, 404):
            return f"{method} {path}: {answer.status_code}"
    return "refused, or answered without a word of the project"


@attack("tokens", "an ingest token where people decide", "403, 403, 403, 403")
def narrow_scope(target: Target) -> str:
    _, secret = target.token("ingest", project="math")
    command = target.command()
    asked = [("GET", "/v1/runs"), ("POST", f"/v1/commands/{command}/approve"), ("DELETE", "/v1/runs/math/q")]
    return ", ".join(str(target.ask(m, p, secret).status_code) for m, p in [*asked, ("GET", "/v1/tokens")])


@attack("tokens", "two tokens while one is exchanged for the other", "no request refused, then the first is")
def rotation(target: Target) -> str:
    (first_id, first), (_, second) = target.token("read"), target.token("read")
    seen = [target.ask("GET", "/v1/runs", first).status_code, target.ask("GET", "/v1/runs", second).status_code]
    target.ask("DELETE", f"/v1/tokens/{first_id}", target.admin)
    seen += [target.ask("GET", "/v1/runs", second).status_code for _ in range(10)]
    last = target.ask("GET", "/v1/runs", first).status_code
    return "no request refused, then the first is" if set(seen) == {200} and last == 401 else f"{seen}, {last}"


@attack("browsers", "DNS rebinding: another Host, from loopback, without a token", "401")
def rebinding(target: Target) -> str:
    return str(target.ask("GET", "/v1/runs", headers={"Host": "evil.example"}).status_code)


@attack("browsers", "CSRF: a form of another site with the login's cookie", "403, nothing decided")
def csrf(target: Target) -> str:
    command = target.command()
    headers = {"Cookie": f"foreshock_session={target.admin}", "Origin": "https://evil.example"}
    headers["Content-Type"] = "application/x-www-form-urlencoded"
    answer = target.ask("POST", f"/commands/{command}/approve", headers=headers, content=b"csrf=x")
    return f"{answer.status_code}, {'nothing decided' if target.state(command) == 'proposed' else 'decided'}"


@attack("browsers", "the same from its own origin, without the CSRF value", "403, nothing decided")
def csrf_near(target: Target) -> str:
    command = target.command()
    headers = {"Cookie": f"foreshock_session={target.admin}", "Origin": target.service.url}
    answer = target.ask("POST", f"/commands/{command}/approve", headers=headers)
    return f"{answer.status_code}, {'nothing decided' if target.state(command) == 'proposed' else 'decided'}"


@attack("browsers", "the page's own routes without a login", "none answered")
def page_without_login(target: Target) -> str:
    command = target.command()
    tried = [("GET", path) for path in ("/", "/runs/math/q", "/runs/math/q/steps/1", "/docs")]
    tried += [("POST", path) for path in (f"/commands/{command}/approve", "/incidents/x/resolve", "/silences",
                                          "/silences/x/end")]  # fmt: skip
    answers = {f"{method} {path}": target.ask(method, path) for method, path in tried}
    open_ones = {name: a.status_code for name, a in answers.items() if a.is_success or "math/q" in a.text}
    return "none answered" if not open_ones and target.state(command) == "proposed" else str(open_ones)


@attack("browsers", "a form that asks to be sent on to another site afterwards", "303 to /, 303 to /")
def open_redirect(target: Target) -> str:
    got = []
    for back in ("https://evil.example/", "//evil.example/x"):
        command = target.command()
        headers = {"Cookie": f"foreshock_session={target.admin}", "Origin": target.service.url}
        form = {"csrf": csrf_of(target.admin), "back": back}
        answer = target.ask("POST", f"/commands/{command}/reject", headers=headers, data=form)
        got.append(f"{answer.status_code} to {answer.headers.get('location')}")
    return ", ".join(got)


@attack("browsers", "framing, sniffing, foreign scripts", "DENY, nosniff, default-src 'none'")
def headers(target: Target) -> str:
    got = target.ask("GET", "/v1/runs", target.admin).headers
    policy = got["content-security-policy"].partition(";")[0]
    return f"{got['x-frame-options']}, {got['x-content-type-options']}, {policy}"


@attack("commands", "an ack by a client that does not lead the run", "409, still delivered")
def foreign_ack(target: Target) -> str:
    command = target.delivered()
    body = {"state": "accepted", "client": OTHER, "attempt": 1}
    answer = target.ask("POST", f"/v1/commands/{command}/ack", target.admin, json=body)
    return f"{answer.status_code}, still {target.state(command)}"


@attack("commands", "an ack of another project's command, by its leader's name", "404, still delivered")
def ack_across(target: Target) -> str:
    command = target.delivered()
    _, secret = target.token("ingest", project="other")
    body = {"state": "accepted", "client": CLIENT, "attempt": 1}
    answer = target.ask("POST", f"/v1/commands/{command}/ack", secret, json=body)
    return f"{answer.status_code}, still {target.state(command)}"


@attack("commands", "`done` without `accepted`, then for another attempt", "409, 409")
def out_of_order(target: Target) -> str:
    command = target.delivered()
    got = []
    for state, attempt in (("done", 1), ("accepted", 7)):
        body = {"state": state, "client": CLIENT, "attempt": attempt}
        got.append(str(target.ask("POST", f"/v1/commands/{command}/ack", target.admin, json=body).status_code))
    return ", ".join(got)


def click(target: Target, command: str, *, user: str = "U0ADA", age_s: float = 0, secret: str = SLACK_SECRET) -> int:
    """The status that a click gets."""
    action = {"type": "button", "action_id": "foreshock_approve", "value": command}
    said = {"type": "block_actions", "user": {"id": user}, "channel": {"id": "C0123456789"}, "actions": [action]}
    said |= {"container": {"type": "message", "message_ts": "1.0", "channel_id": "C0123456789"}}
    body = urlencode({"payload": json.dumps(said)}).encode()
    stamp = str(int(time.time() - age_s))
    signed = hmac.new(secret.encode(), f"v0:{stamp}:".encode() + body, hashlib.sha256).hexdigest()
    head = {"X-Slack-Request-Timestamp": stamp, "X-Slack-Signature": f"v0={signed}"}
    head["Content-Type"] = "application/x-www-form-urlencoded"
    return target.ask("POST", "/v1/slack/interactions", headers=head, content=body).status_code


@attack("commands", "a Slack click: wrong key; ten minutes old; a stranger's", "401, 401, 200; proposed")
def forged_clicks(target: Target) -> str:
    command = target.command()
    got = [
        click(target, command, secret="x" * 32),
        click(target, command, age_s=600),
        click(target, command, user="U9"),
    ]
    return f"{', '.join(map(str, got))}; {target.state(command)}"


@attack("commands", "a good Slack click, sent again after the command was rejected", "approved, rejected, rejected")
def replayed_click(target: Target) -> str:
    command = target.command()
    states = []
    for step in ("click", "reject", "click"):
        if step == "click":
            click(target, command)
        else:
            answer = target.ask("POST", f"/v1/commands/{command}/cancel", target.admin)
            answer = target.ask("POST", f"/v1/commands/{command}/reject", target.admin) if answer.is_error else answer
        states.append(target.state(command).replace("cancelled", "rejected"))
    return ", ".join(states)
