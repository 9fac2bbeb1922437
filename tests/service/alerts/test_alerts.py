"""From a change to a receiver: once per channel and change, signed, retried, silenced, digested. The sink is real."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from benchmarks.alerts.sink import Sink
from foreshock.wire.commands import Action
from foreshock_service.alerts.base import Later, Never
from foreshock_service.alerts.claims import LEASE_S, MAX_TRIES, back_off, due, take
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.alerts.registry import CHANNELS, AlertConfigError, clicks, configured
from foreshock_service.alerts.slack_webhook import SlackWebhook
from foreshock_service.alerts.webhook import Webhook
from foreshock_service.commands import protocol
from foreshock_service.incidents import book
from foreshock_service.rules.interface import Evidence, Finding, Outcome, StepView
from foreshock_service.settings import Settings
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery, Run, Silence

NOW = 1_000.0
MakeRun = Callable[..., int]


def tell(
    store: Store, run_id: int, rule: str = "rollout_mismatch", transition: str = "open", *,
    channels: tuple[str, ...] = ("webhook",), propose: bool = False, message: str = "engine at fault",
) -> int:  # fmt: skip
    """One evaluation that changes an incident, with its alerts in the same transaction."""
    with store.write() as session:
        run = session.get_one(Run, run_id)
        numbers = (Evidence(signal="mismatch.kl_k3", value=0.125, expected=5e-4),)
        finding = Finding(
            rule=rule, transition=transition, severity="critical", step=27, onset_step=25, message=message,  # type: ignore[arg-type]
            evidence=numbers, edge="engine",
        )  # fmt: skip
        seen = StepView(run=run.name, attempt=1, step=27, values={"mismatch.kl_k3": 0.125, "policy.kl_k2": 0.0})
        changes = book.apply(session, run, seen, Outcome(findings=[finding], firing=[rule]), NOW)
        commands = []
        if propose:
            change = protocol.propose(
                session, run, [Action(kind="resync_engine")], NOW, reason="push <weights>",
                incident_id=changes[0].incident.id,
            )  # fmt: skip
            assert change is not None
            commands.append(change)
        return Outbox(channels).enqueue(session, run, changes, commands, NOW)


def rows(store: Store) -> list[Delivery]:
    with store.read() as session:
        return list(session.scalars(select(Delivery).order_by(Delivery.channel, Delivery.created_at)))


def worker(store: Store, channel: Any, now: list[float], **more: Any) -> DeliveryWorker:
    return DeliveryWorker(store, {channel.name: channel}, clock=lambda: now[0], **more)


def test_a_change_is_one_alert_per_channel_however_often_it_is_told(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    with store.write() as session:
        run = session.get_one(Run, run_id)
        finding = Finding(rule="non_finite", transition="open", severity="critical", step=3)
        seen = StepView(run=run.name, attempt=1, step=3, values={})
        changes = book.apply(session, run, seen, Outcome(findings=[finding], firing=["non_finite"]), NOW)
        outbox = Outbox(["webhook", "slack_webhook"])
        assert [outbox(session, run, changes, [], NOW), outbox(session, run, changes, [], NOW)] == [2, 0]
    assert [(r.channel, r.event, r.state) for r in rows(store)] == [
        ("slack_webhook", "incident.opened", "pending"),
        ("webhook", "incident.opened", "pending"),
    ]


def test_an_alert_is_written_with_its_change_or_not_at_all(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()

    def evaluate_and_lose_the_lease() -> None:
        with store.write() as session:
            run = session.get_one(Run, run_id)
            finding = Finding(rule="non_finite", transition="open", severity="critical", step=3)
            seen = StepView(run=run.name, attempt=1, step=3, values={})
            changes = book.apply(session, run, seen, Outcome(findings=[finding], firing=["non_finite"]), NOW)
            assert Outbox(["webhook"]).enqueue(session, run, changes, [], NOW) == 1
            raise RuntimeError("another replica took over")

    with pytest.raises(RuntimeError, match="took over"):
        evaluate_and_lose_the_lease()
    assert rows(store) == []


def test_without_channels_nothing_is_written(store: Store, make_run: MakeRun) -> None:
    assert tell(store, make_run(), channels=()) == 0
    assert rows(store) == []


def test_the_webhook_is_signed_over_timestamp_delivery_and_body(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    tell(store, make_run(), propose=True)
    channel = Webhook(client, f"{sink.url}/hook", "s3cret", "http://watch.example")
    assert worker(store, channel, [NOW + 5]).once() == 1
    path, headers, body = sink.got[0]
    signed = f"{int(NOW + 5)}.{headers['X-Foreshock-Delivery']}.".encode() + body
    expected = "sha256=" + hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()
    assert (path, headers["X-Foreshock-Signature"]) == ("/hook", expected)
    told = sink.bodies()[0]
    (row,) = rows(store)
    assert (row.state, row.id, told["delivery_id"]) == ("sent", headers["X-Foreshock-Delivery"], row.id)
    assert (told["event"], told["run"], told["incident"]["rule"]) == ("incident.opened", "lab/run", "rollout_mismatch")
    assert told["commands"][0]["kind"] == "resync_engine"
    assert told["link"].startswith("http://watch.example/")
    assert b"s3cret" not in body


def test_slack_gets_what_since_when_why_and_what_is_done(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    tell(store, make_run(), channels=("slack_webhook",), propose=True, message="<!channel> & more")
    worker(store, SlackWebhook(client, sink.url, "http://watch.example"), [NOW]).once()
    told = sink.bodies()[0]
    text = "\n".join(b["text"]["text"] for b in told["blocks"] if "text" in b)
    assert told["blocks"][0]["type"] == "header"
    for part in ("rollout_mismatch opened", "since step 25", "`mismatch.kl_k3` = 0.125 (usual: 0.0005)",
                 "resync_engine", "push &lt;weights&gt;", "Likely cause", "|Open in Foreshock>"):  # fmt: skip
        assert part in text
    assert "<!channel>" not in text


@pytest.mark.parametrize("status", [429, 500, 503, 408])
def test_what_may_pass_is_tried_again_under_the_same_id(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client, status: int
) -> None:
    tell(store, make_run())
    now = [NOW]
    sending = worker(store, Webhook(client, sink.url, ""), now)
    sink.answers = [status]
    sending.once()
    (row,) = rows(store)
    assert (row.state, row.attempts, row.last_error) == ("pending", 1, f"answered {status}")
    assert sending.once() == 0
    now[0] += back_off(1)
    assert sending.once() == 1
    assert [body["delivery_id"] for body in sink.bodies()] == [row.id, row.id]
    assert rows(store)[0].state == "sent"


def test_the_receiver_says_how_long_to_wait(store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client) -> None:
    tell(store, make_run())
    sink.answers, sink.headers = [429], {"Retry-After": "120"}
    worker(store, Webhook(client, sink.url, ""), [NOW]).once()
    assert rows(store)[0].next_at == NOW + 120


@pytest.mark.parametrize("status", [400, 401, 404, 301, 302])
def test_what_will_never_pass_is_dead_at_once_and_shown(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client, status: int
) -> None:
    tell(store, make_run())
    sink.answers, sink.headers = [status], {"Location": sink.url}
    worker(store, Webhook(client, sink.url, ""), [NOW]).once()
    (row,) = rows(store)
    assert (row.state, row.last_error) == ("dead", f"answered {status}")
    assert len(sink.got) == 1


def test_a_receiver_that_is_away_is_tried_for_a_day_and_its_url_is_in_no_error(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    tell(store, make_run())
    url = f"{sink.url}/secret-path"
    sink.close()
    now = [NOW]
    sending = worker(store, Webhook(client, url, ""), now)
    for _ in range(MAX_TRIES + 3):
        sending.once()
        now[0] += 3601
    (row,) = rows(store)
    assert (row.state, row.attempts) == ("dead", MAX_TRIES)
    assert "secret-path" not in row.last_error
    assert "ConnectError" in row.last_error
    sink.server.server_close()


def test_a_worker_that_died_while_sending_is_taken_over_after_its_lease(store: Store, make_run: MakeRun) -> None:
    tell(store, make_run())
    with store.write() as session:
        assert len(take(session, due(session, "webhook", NOW, 10), NOW)) == 1
    with store.write() as session:
        assert due(session, "webhook", NOW + LEASE_S - 1, 10) == []
        assert len(take(session, due(session, "webhook", NOW + LEASE_S + 1, 10), NOW + LEASE_S + 1)) == 1


@pytest.mark.parametrize(
    ("silence", "state"),
    [
        ({"rule": "rollout_mismatch"}, "suppressed"),
        ({"run": "lab/run"}, "suppressed"),
        ({"project": "lab"}, "suppressed"),
        ({"project": "lab", "rule": "non_finite"}, "pending"),
        ({"run": "lab/other"}, "pending"),
        ({"rule": "rollout_mismatch", "until_at": NOW - 1}, "pending"),
    ],
)
def test_a_silence_suppresses_what_matches_every_part_of_it(
    store: Store, make_run: MakeRun, silence: dict[str, Any], state: str
) -> None:
    with store.write() as session:
        session.add(Silence(**{"id": "s", "until_at": NOW + 60, "created_at": NOW, "created_by": "ada", **silence}))
    tell(store, make_run())
    assert rows(store)[0].state == state


def test_a_silence_that_came_after_the_alert_still_holds_it_back(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    tell(store, make_run())
    with store.write() as session:
        session.add(Silence(id="s", rule="rollout_mismatch", until_at=NOW + 60, created_at=NOW, created_by="ada"))
    worker(store, Webhook(client, sink.url, ""), [NOW]).once()
    assert rows(store)[0].state == "suppressed"
    assert sink.got == []


@pytest.mark.parametrize("channel", [Webhook, SlackWebhook])
def test_a_storm_leaves_as_one_digest(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client, channel: type[Any]
) -> None:
    for i in range(4):
        tell(store, make_run(f"lab/run-{i}"), channels=(channel.name,))
    made = channel(client, sink.url, "") if channel is Webhook else channel(client, sink.url)
    now = [NOW]
    sending = worker(store, made, now, digest_over=3)
    assert sending.once() == 4
    assert len(sink.got) == 1
    assert {row.state for row in rows(store)} == {"sent"}
    told = sink.bodies()[0]
    if channel is Webhook:
        assert (told["event"], len(told["alerts"])) == ("digest", 4)
        assert {a["delivery_id"] for a in told["alerts"]} == {row.id for row in rows(store)}
    else:
        assert told["text"] == "4 alerts: 4 x incident.opened"


def test_a_digest_that_fails_is_tried_again(store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client) -> None:
    for i in range(4):
        tell(store, make_run(f"lab/run-{i}"))
    sink.answers = [500]
    now = [NOW]
    sending = worker(store, Webhook(client, sink.url, ""), now, digest_over=3)
    sending.once()
    assert {row.state for row in rows(store)} == {"pending"}
    now[0] += 10
    sending.once()
    assert {row.state for row in rows(store)} == {"sent"}
    assert sink.bodies()[0]["delivery_id"] == sink.bodies()[1]["delivery_id"]


def test_one_alert_that_is_refused_does_not_take_its_digest_along(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    for i in range(9):
        tell(store, make_run(f"lab/run-{i}"))

    class Picky(Webhook):
        def send_digest(self, messages: Any, now: float) -> None:
            if any(m.payload["run"] == "lab/run-4" for m in messages):
                raise Never("answered 400", content=True)
            super().send_digest(messages, now)

    worker(store, Picky(client, sink.url, ""), [NOW], digest_over=3).once()
    states = {row.payload["run"]: row.state for row in rows(store)}
    assert [run for run, state in states.items() if state != "sent"] == ["lab/run-4"]
    assert states["lab/run-4"] == "dead"


def test_a_digest_that_is_too_large_goes_in_parts(
    store: Store, make_run: MakeRun, sink: Sink, client: httpx.Client
) -> None:
    for i in range(8):
        tell(store, make_run(f"lab/run-{i}"))
    sink.answers = [413, 413, 200, 200, 413, 503]
    now = [NOW]
    sending = worker(store, Webhook(client, sink.url, ""), now, digest_over=3)
    sending.once()
    assert [row.state for row in rows(store)].count("sent") == 4
    now[0] += back_off(1)
    sending.once()
    assert {row.state for row in rows(store)} == {"sent"}


def test_verdicts_and_bad_ends_are_told_and_routine_is_not(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    with store.write() as session:
        run = session.get_one(Run, run_id)
        change = protocol.propose(session, run, [Action(kind="resync_engine")], NOW, reason="test")
        assert change is not None
        outbox = Outbox(["webhook"])
        assert outbox.enqueue(session, run, [], [change], NOW) == 1
        approved = protocol.approve(session, change.command.id, "ada", NOW)
        assert outbox.enqueue(session, run, [], [approved], NOW) == 0
        (expired,) = protocol.expire_due(session, NOW + 700)
        assert outbox.enqueue(session, run, [], [expired], NOW) == 1
    assert sorted(row.event for row in rows(store)) == ["command.expired", "command.proposed"]


def test_settings_say_which_channels_there_are_and_hide_their_secrets(store: Store, client: httpx.Client) -> None:
    assert configured(Settings(), store, client) == {}
    settings = Settings(
        webhook_url="http://127.0.0.1/x", webhook_secret="s3cret", slack_webhook_url="http://127.0.0.1/hook-path",  # type: ignore[arg-type]
        alertmanager_url="http://u:s3cret@127.0.0.1", smtp_url="smtp://u:s3cret@127.0.0.1",  # type: ignore[arg-type]
        email_from="fs@example.org", email_to="ada@example.org",
        slack_bot_token="xoxb-s3cret", slack_channel="C01", slack_signing_secret="s3cret",  # type: ignore[arg-type]
    )  # fmt: skip
    assert set(configured(settings, store, client)) == set(CHANNELS)
    assert {"webhook", "slack_webhook", "slack_app", "alertmanager", "email"} <= set(CHANNELS)
    assert "s3cret" not in repr(settings)
    assert "/hook-path" not in repr(settings)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"slack_channel": ""}, "SLACK_CHANNEL"),
        ({"slack_api_url": "http://slack.example/api/"}, "must be https"),
        ({"slack_users": "ada=operate"}, "SLACK_USERS"),
    ],
)
def test_a_slack_app_that_cannot_work_is_refused_by_name_without_its_secret(
    store: Store, changes: dict[str, str], wrong: str
) -> None:
    good = {"slack_bot_token": "xoxb-s3cret", "slack_channel": "C01", "slack_signing_secret": "s3cret"}
    settings = Settings(**(good | changes))  # type: ignore[arg-type]
    with pytest.raises(AlertConfigError, match=wrong) as refused:
        configured(settings, store) and clicks(settings)
    assert "s3cret" not in str(refused.value)


def test_later_and_never_are_kept_apart(client: httpx.Client) -> None:
    with pytest.raises(Later):
        Webhook(client, "http://127.0.0.1:1/", "").send_digest([], NOW)
    with pytest.raises(Never):
        Webhook(client, "ftp://127.0.0.1/", "").send_digest([], NOW)
    with pytest.raises(Never):
        Webhook(client, "http://127.0.0.1:port/", "").send_digest([], NOW)
