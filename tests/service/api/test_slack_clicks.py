"""Clicks from Slack: signed, fresh, by somebody who may; answered in time; and explained where nothing came of them."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import select

from benchmarks.alerts.fake_slack import CHANNEL, TOKEN, FakeSlack
from foreshock_service.alerts.slack_clicks import Clicks, users
from foreshock_service.api import slack as slack_routes
from foreshock_service.commands import protocol
from foreshock_service.store.models import Audit, CommandRow

SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
URL = "/v1/slack/interactions"
USERS = "U0ADA=commands:approve commands:reject; U0BOB=commands:reject; U0EVE@other=operate; U0OPS=operate"


def payload(command: str, user: str = "U0ADA", action: str = "foreshock_approve", **more: Any) -> bytes:
    """A block_actions payload, shaped as docs.slack.dev/reference/interaction-payloads/block_actions-payload has it."""
    said = {
        "type": "block_actions",
        "user": {"id": user, "username": "someone", "team_id": "T9TK3CUKW"},
        "api_app_id": "AABA1ABCD",
        "team": {"id": "T9TK3CUKW", "domain": "example"},
        "container": {"type": "message", "message_ts": "1700000000.000000", "channel_id": CHANNEL},
        "channel": {"id": CHANNEL, "name": "training"},
        "message": {"type": "message", "ts": "1700000000.000000"},
        "response_url": "https://hooks.slack.example/actions/T/1/x",
        "actions": [{"type": "button", "action_id": action, "block_id": f"command:{command}", "value": command}],
        **more,
    }
    return urlencode({"payload": json.dumps(said)}).encode()


def signed(body: bytes, *, secret: str = SECRET, at: float | None = None) -> dict[str, str]:
    stamp = str(int(time.time() if at is None else at))
    digest = hmac.new(secret.encode(), f"v0:{stamp}:".encode() + body, hashlib.sha256).hexdigest()
    return {
        "Content-Type": "application/x-www-form-urlencoded",
        "X-Slack-Request-Timestamp": stamp,
        "X-Slack-Signature": f"v0={digest}",
    }


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    opened = FakeSlack()
    yield opened
    opened.close()


@pytest.fixture
def office(make_house: Callable[..., Any], slack: FakeSlack) -> Any:
    """A service with a Slack app, and a run that asks before it acts."""
    house = make_house(
        slack_bot_token=TOKEN, slack_channel=CHANNEL, slack_signing_secret=SECRET, slack_users=USERS,
        slack_api_url=slack.url,
    )  # fmt: skip
    house.started(mode="approve")
    house.step(1, {"loss": 1.0})
    return house


def proposed(house: Any) -> str:
    action = {"kind": "scale_lr", "arguments": {"factor": 0.5}}
    answer = house.near.post("/v1/runs/math/q/commands", json={"actions": [action], "reason": "test"})
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def click(house: Any, body: bytes, **how: Any) -> Any:
    return house.far().post(URL, content=body, headers=signed(body, **how))


def state(house: Any, command: str) -> tuple[str, str | None]:
    with house.rooms.store.read() as session:
        row = session.get_one(CommandRow, command)
        return row.state, row.decided_by


@pytest.mark.parametrize(
    ("user", "action", "became"),
    [("U0ADA", "foreshock_approve", "approved"), ("U0BOB", "foreshock_reject", "rejected"),
     ("U0OPS", "foreshock_approve", "approved")],
)  # fmt: skip
def test_a_click_decides_and_the_message_says_who_did(
    office: Any, slack: FakeSlack, user: str, action: str, became: str
) -> None:
    command = proposed(office)
    office.wait_for(lambda: slack.heads and slack.heads[0].buttons)
    assert click(office, payload(command, user, action)).status_code == 200
    assert state(office, command) == (became, f"slack:{user}")
    office.wait_for(lambda: f"{became} (decided by <@{user}>)" in slack.heads[0].words)
    assert slack.heads[0].buttons == []
    assert slack.whispers == []
    with office.rooms.store.read() as session:
        actors = session.scalars(select(Audit.actor).where(Audit.subject_id == command)).all()
    assert actors == ["loopback", f"slack:{user}"]


@pytest.mark.parametrize(
    ("user", "says"),
    [("U0BOB", "may not approve"), ("U0EVE", "may not approve commands of math"), ("U0XXX", "does not know"),
     ("slack", "does not know"), ("", "does not know")],
)  # fmt: skip
def test_who_may_not_decides_nothing_and_is_told_so(office: Any, slack: FakeSlack, user: str, says: str) -> None:
    command = proposed(office)
    assert click(office, payload(command, user)).status_code == 200
    assert state(office, command) == ("proposed", None)
    office.wait_for(lambda: slack.whispers)
    assert says in slack.whispers[0]["text"]
    assert (slack.whispers[0]["channel"], slack.whispers[0]["user"]) == (CHANNEL, user)


def test_a_stale_button_is_explained_and_goes_away(office: Any, slack: FakeSlack) -> None:
    command = proposed(office)
    office.wait_for(lambda: slack.heads)
    office.near.post(f"/v1/commands/{command}/reject")
    click(office, payload(command))
    office.wait_for(lambda: slack.whispers)
    assert "the command is rejected by loopback" in slack.whispers[0]["text"]
    office.wait_for(lambda: slack.heads[0].buttons == [])


def test_an_expired_proposal_is_explained(office: Any, slack: FakeSlack) -> None:
    command = proposed(office)
    with office.rooms.store.write() as session:
        session.get_one(CommandRow, command).expires_at = time.time() - 60
    click(office, payload(command))
    office.wait_for(lambda: slack.whispers)
    assert "Too late to approve" in slack.whispers[0]["text"]


def test_a_command_of_a_deleted_run_is_explained(office: Any, slack: FakeSlack) -> None:
    click(office, payload("0" * 32))
    office.wait_for(lambda: slack.whispers)
    assert "gone" in slack.whispers[0]["text"]


def test_a_click_that_is_sent_again_changes_nothing(office: Any, slack: FakeSlack) -> None:
    command = proposed(office)
    body = payload(command)
    headers = signed(body)
    assert [office.far().post(URL, content=body, headers=headers).status_code for _ in range(2)] == [200, 200]
    assert state(office, command) == ("approved", "slack:U0ADA")
    with office.rooms.store.read() as session:
        became = session.scalars(select(Audit.became).where(Audit.subject_id == command)).all()
    assert became.count("approved") == 1


def test_what_slack_did_not_sign_lately_is_refused_and_decides_nothing(office: Any) -> None:
    command = proposed(office)
    body = payload(command)
    good = signed(body)
    wrong = [
        signed(body, secret="another"),
        signed(body, at=time.time() - 400),
        signed(body, at=time.time() + 400),
        signed(payload(command, "U0OPS")),
        {**good, "X-Slack-Signature": good["X-Slack-Signature"][:-1]},
        {**good, "X-Slack-Signature": good["X-Slack-Signature"].replace("v0=", "v1=")},
        {**good, "X-Slack-Request-Timestamp": "now"},
        {**good, "X-Slack-Request-Timestamp": "-5"},
        {k: v for k, v in good.items() if k != "X-Slack-Signature"},
        {k: v for k, v in good.items() if k != "X-Slack-Request-Timestamp"},
    ]
    assert {office.far().post(URL, content=body, headers=headers).status_code for headers in wrong} == {401}
    # Not from loopback without a signature, and not with a token that may do everything else, either.
    assert office.near.post(URL, content=body).status_code == 401
    assert office.far(office.token("admin")).post(URL, content=body).status_code == 401
    assert state(office, command) == ("proposed", None)


def test_the_example_of_slacks_documentation_is_verified() -> None:
    # docs.slack.dev/authentication/verifying-requests-from-slack
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    signature = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"
    clicks = Clicks(SECRET, {}, clock=lambda: 1531420618.0 + 299)
    assert clicks.genuine(body, "1531420618", signature)
    assert not Clicks(SECRET, {}, clock=lambda: 1531420618.0 + 301).genuine(body, "1531420618", signature)
    assert not clicks.genuine(body + b"\xff", "1531420618", signature)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"payload=", 400), (b"payload=%7B", 400), (b"payload=[]", 400), (b"\xff=\xfe", 401),
     (urlencode({"payload": '{"type": "view_submission"}'}).encode(), 200),
     (payload("x", action="something_else"), 200), (payload("../../etc"), 400), (payload("a", actions=[]), 200)],
)  # fmt: skip
def test_what_is_no_click_of_ours_does_nothing(office: Any, slack: FakeSlack, body: bytes, status: int) -> None:
    assert click(office, body).status_code == status


def test_without_a_slack_app_there_is_no_such_place(house: Any) -> None:
    body = payload("x")
    assert click(house, body).status_code == 404


def test_slack_is_answered_within_three_seconds_even_where_the_decision_takes_longer(
    office: Any, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = proposed(office)
    real, began = protocol.approve, time.monotonic()

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(1.0)
        return real(*args, **more)

    monkeypatch.setattr(slack_routes.protocol, "approve", slow)
    monkeypatch.setattr(slack_routes, "ANSWER_S", 0.2)
    clicks, room = office.rooms.slack.clicks, office.rooms.slack
    answered: list[float] = []
    assert room is not None
    import anyio
    from fastapi import BackgroundTasks
    from starlette.requests import Request

    body = payload(command)

    async def press() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(k.lower().encode(), v.encode()) for k, v in signed(body).items()]
        scope = {"type": "http", "method": "POST", "path": URL, "headers": headers, "query_string": b""}
        after = BackgroundTasks()
        answer = await slack_routes.interactions(Request(scope, receive), office.rooms, after)
        answered.append(time.monotonic() - began)
        assert answer.status_code == 200
        await after()

    anyio.run(press)
    assert answered[0] < 0.9
    assert state(office, command) == ("approved", "slack:U0ADA")
    assert clicks.person("U0ADA") is not None


def test_people_are_mapped_to_scopes_by_their_slack_id() -> None:
    known = users(USERS)
    assert known["U0ADA"].may("approve", "math")
    assert known["U0ADA"].may("reject", "math")
    assert not known["U0BOB"].may("approve", "math")
    assert known["U0EVE"].may("approve", "other")
    assert not known["U0EVE"].may("approve", "math")
    assert users("") == {}


@pytest.mark.parametrize("text", ["U0ADA", "U0ADA=", "U0ADA=admin", "ada=operate", "U0ADA=operate commands:all"])
def test_people_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Slack user"):
        users(text)
