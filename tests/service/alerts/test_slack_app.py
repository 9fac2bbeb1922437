"""The Slack app against a fake Slack: one head an incident, everything else in its thread, told once, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from sqlalchemy import select

from benchmarks.alerts import fake_slack
from benchmarks.alerts.fake_slack import CHANNEL, TOKEN, FakeSlack
from benchmarks.alerts.story import Story
from foreshock_service.alerts.base import Later, Never, new_client
from foreshock_service.alerts.claims import back_off
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.slack_api import SlackApi, SlackGone
from foreshock_service.alerts.slack_app import SlackApp
from foreshock_service.store.engine import Store
from foreshock_service.store.models import AlertThread, Point, SignalName

NOW = 1_000.0
MakeRun = Callable[..., int]


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    opened = FakeSlack()
    yield opened
    opened.close()


class Desk:
    """One Slack app on one store, with a clock."""

    def __init__(self, store: Store, slack: FakeSlack, *, timeout_s: float = 5.0, digest_over: int = 1000) -> None:
        self.now = NOW
        self.story = Story(store, ("slack_app",))
        self.app = SlackApp(
            new_client(), SlackApi(TOKEN, slack.url, timeout_s), store, CHANNEL, "http://watch.example", buttons=True
        )
        self.worker = DeliveryWorker(store, {"slack_app": self.app}, clock=lambda: self.now, digest_over=digest_over)

    def send(self, *, after_s: float = 0.0, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.now += after_s
            self.worker.once()


def measured(store: Store, run_id: int, steps: Sequence[int]) -> None:
    """Some steps of a signal, as the evaluator stores them."""
    with store.write() as session:
        session.add(SignalName(run_id=run_id, position=1, name="mismatch.kl_k3"))
        for step in steps:
            value = 5e-4 if step < steps[len(steps) // 2] else 0.1
            session.add(Point(run_id=run_id, attempt=1, step=step, at=NOW, values=[value]))


def test_an_incident_is_one_message_that_is_edited_and_a_thread_that_tells_its_story(
    store: Store, make_run: MakeRun, slack: FakeSlack
) -> None:
    desk, run = Desk(store, slack), make_run()
    desk.story.happen(run, "open", NOW, severity="warning")
    desk.send()
    (head,) = slack.heads
    assert head.text == ":warning: lab/run: rollout_mismatch opened"
    for part in ("*warning* since step", "engine at fault", "Likely cause", "`mismatch.kl_k3` = 0.125 (usual: 0.0005)",
                 "http://watch.example/runs/lab/run|Open in Foreshock"):  # fmt: skip
        assert part in head.words
    desk.story.happen(run, "escalate", NOW + 1)
    desk.story.happen(run, "close", NOW + 2)
    desk.send(after_s=5)
    assert slack.heads == [head]
    assert [p.text for p in slack.thread(head.ts)] == [
        ":rotating_light: lab/run: rollout_mismatch escalated",
        ":white_check_mark: lab/run: rollout_mismatch resolved",
    ]
    assert (head.edits, head.text) == (2, ":white_check_mark: lab/run: rollout_mismatch resolved")
    assert "resolved at step" in head.words
    assert {row.state for row in desk.story.rows()} == {"sent"}


def test_two_incidents_have_two_threads(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk, run = Desk(store, slack), make_run()
    desk.story.happen(run, "open", NOW)
    desk.story.happen(run, "open", NOW, rule="non_finite")
    desk.story.happen(run, "close", NOW)
    desk.send()
    first, second = slack.heads
    assert [len(slack.thread(first.ts)), len(slack.thread(second.ts))] == [1, 0]


def test_a_command_that_waits_has_buttons_until_somebody_decides(
    store: Store, make_run: MakeRun, slack: FakeSlack
) -> None:
    desk, run = Desk(store, slack), make_run(mode="approve")
    _, command = desk.story.happen(run, "open", NOW, propose="resync_engine")
    desk.send()
    (head,) = slack.heads
    assert [(b["text"]["text"], b["value"]) for b in head.buttons] == [
        ("Approve resync_engine", command), ("Reject", command)
    ]  # fmt: skip
    assert "push &lt;weights&gt;" in head.words
    assert command is not None
    desk.story.decide(command, "approve", "slack:U0AAA", NOW + 1)
    desk.send(after_s=2)
    assert head.buttons == []
    assert "approved (decided by <@U0AAA>)" in head.words
    assert [p.text for p in slack.thread(head.ts)] == ["lab/run: command resync_engine approved for rollout_mismatch"]


def test_who_decided_elsewhere_and_what_expired_shows_as_well(
    store: Store, make_run: MakeRun, slack: FakeSlack
) -> None:
    desk, first, second = Desk(store, slack), make_run("lab/a", mode="approve"), make_run("lab/b", mode="approve")
    _, rejected = desk.story.happen(first, "open", NOW, propose="resync_engine")
    desk.story.happen(second, "open", NOW, propose="resync_engine")
    desk.send()
    assert rejected is not None
    desk.story.decide(rejected, "reject", "ada <script>", NOW + 1)
    desk.story.expire(NOW + 100_000)
    desk.send(after_s=100_001)
    by_run = {p.text.split()[1].rstrip(":"): p for p in slack.heads}
    assert "rejected (decided by ada &lt;script&gt;)" in by_run["lab/a"].words
    assert "`resync_engine`: expired" in by_run["lab/b"].words
    assert [p.buttons for p in slack.heads] == [[], []]


@pytest.mark.parametrize(("mode", "buttons"), [("observe", 0), ("approve", 2)])
def test_a_run_that_only_observes_gets_no_buttons(
    store: Store, make_run: MakeRun, slack: FakeSlack, mode: str, buttons: int
) -> None:
    desk = Desk(store, slack)
    desk.story.happen(make_run(mode=mode), "open", NOW, propose="resync_engine")
    desk.send()
    assert len(slack.heads[0].buttons) == buttons


def test_the_picture_follows_into_the_thread(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk, run = Desk(store, slack), make_run()
    measured(store, run, range(1, 40))
    incident, _ = desk.story.happen(run, "open", NOW)
    desk.send()
    (file,) = slack.files
    assert (file["channel"], file["thread_ts"]) == (CHANNEL, slack.heads[0].ts)
    assert file["filename"] == f"{incident}.png"
    assert file["data"].find(b"\x89PNG\r\n\x1a\n") >= 0


def test_a_picture_that_cannot_be_shown_holds_nothing_up(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk, run = Desk(store, slack), make_run()
    measured(store, run, range(1, 40))
    slack.refuse["files.getUploadURLExternal"] = "missing_scope"
    desk.story.happen(run, "open", NOW)
    desk.send()
    assert (desk.story.states(), slack.files) == ([("incident.opened", "sent")], [])


@pytest.mark.parametrize(
    "trouble",
    [fake_slack.status(500), fake_slack.status(503), fake_slack.reset, fake_slack.lost, fake_slack.stall(1.0),
     "internal_error", "ratelimited", "invalid_auth", "channel_not_found", fake_slack.rate_limited(7)],
)  # fmt: skip
def test_whatever_slack_does_the_story_arrives_once_it_is_back(
    store: Store, make_run: MakeRun, slack: FakeSlack, trouble: object
) -> None:
    desk, run = Desk(store, slack, timeout_s=0.3), make_run()
    slack.trouble.extend([trouble] * 2)
    desk.story.happen(run, "open", NOW)
    desk.story.happen(run, "close", NOW)
    desk.send()
    assert slack.posts == []
    desk.send(after_s=60, rounds=4)
    (head,) = slack.heads
    assert [p.text for p in slack.thread(head.ts)] == [":white_check_mark: lab/run: rollout_mismatch resolved"]
    assert {row.state for row in desk.story.rows()} == {"sent"}


def test_slack_is_left_alone_for_as_long_as_it_asks(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk = Desk(store, slack)
    slack.trouble.append(fake_slack.rate_limited(30))
    for i in range(3):
        desk.story.happen(make_run(f"lab/run-{i}"), "open", NOW)
    desk.send()
    assert slack.calls == ["chat.postMessage"]
    desk.send(after_s=29.0)
    assert len(slack.calls) == 1
    desk.send(after_s=1.5)
    assert len(slack.heads) == 3
    assert [row.attempts for row in desk.story.rows()] == [2, 1, 1]


def test_a_reply_that_was_told_is_not_told_again_when_the_edit_behind_it_fails(
    store: Store, make_run: MakeRun, slack: FakeSlack
) -> None:
    desk, run = Desk(store, slack), make_run()
    desk.story.happen(run, "open", NOW)
    desk.send()
    slack.refuse["chat.update"] = fake_slack.status(503)
    desk.story.happen(run, "close", NOW)
    desk.send()
    desk.send(after_s=back_off(1))
    del slack.refuse["chat.update"]
    desk.send(after_s=back_off(2))
    (head,) = slack.heads
    assert (len(slack.thread(head.ts)), head.edits) == (1, 1)
    assert {row.state for row in desk.story.rows()} == {"sent"}


def test_a_head_that_was_deleted_is_begun_anew(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk, run = Desk(store, slack), make_run()
    desk.story.happen(run, "open", NOW, severity="warning")
    desk.send()
    slack.posts.clear()
    desk.story.happen(run, "escalate", NOW)
    desk.send()
    desk.story.happen(run, "close", NOW)
    desk.send()
    assert {row.state for row in desk.story.rows()} == {"sent"}
    (head,) = slack.heads
    assert [p.text for p in slack.thread(head.ts)] == [":white_check_mark: lab/run: rollout_mismatch resolved"]


def test_a_storm_is_a_digest_and_what_has_a_thread_stays_in_it(
    store: Store, make_run: MakeRun, slack: FakeSlack
) -> None:
    desk, run = Desk(store, slack, digest_over=2), make_run()
    desk.story.happen(run, "open", NOW)
    desk.send()
    for i in range(20):
        desk.story.happen(make_run(f"lab/run-{i}"), "open", NOW)
    desk.story.happen(run, "close", NOW)
    desk.send(after_s=1)
    head, digest = slack.heads
    assert digest.text == "20 alerts: 20 x incident.opened"
    assert all(f"*lab/run-{i}*" in digest.words for i in range(20))
    assert len(slack.thread(head.ts)) == 1
    assert {row.left_in for row in desk.story.rows()} == {None, "thread", digest.words.split("digest ")[1].strip()}


def test_threads_go_with_their_run(store: Store, make_run: MakeRun, slack: FakeSlack) -> None:
    desk, run = Desk(store, slack), make_run()
    desk.story.happen(run, "open", NOW)
    desk.send()
    with store.write() as session:
        from foreshock_service.store.models import Run

        session.delete(session.get_one(Run, run))
    with store.read() as session:
        assert session.scalars(select(AlertThread)).all() == []


def test_the_words_of_slack_are_later_or_never(slack: FakeSlack) -> None:
    api = SlackApi(TOKEN, slack.url, 1.0)
    slack.trouble.extend(["invalid_blocks", "message_not_found", "<script> xoxb", fake_slack.rate_limited(12)])
    with pytest.raises(Never, match="answered invalid_blocks"):
        api.post(CHANNEL, "x", [])
    with pytest.raises(SlackGone):
        api.edit(CHANNEL, "1.0", "x", [])
    with pytest.raises(Later, match="without a name"):
        api.post(CHANNEL, "x", [])
    with pytest.raises(Later) as told:
        api.post(CHANNEL, "x", [])
    assert (told.value.after_s, told.value.whole_channel) == (12.0, True)


@pytest.mark.parametrize("trouble", [fake_slack.status(500), fake_slack.reset, fake_slack.lost, "invalid_auth"])
def test_the_token_is_in_no_row_and_no_log(
    store: Store, make_run: MakeRun, slack: FakeSlack, caplog: pytest.LogCaptureFixture, trouble: object
) -> None:
    caplog.set_level(logging.DEBUG)
    desk = Desk(store, slack)
    slack.trouble.extend([trouble] * 3)
    desk.story.happen(make_run(), "open", NOW)
    desk.send(after_s=30, rounds=3)
    rows = " ".join(f"{row.last_error} {row.payload}" for row in desk.story.rows())
    assert TOKEN not in rows + caplog.text
    assert slack.root not in rows + caplog.text


def test_a_slack_that_stalls_is_given_up_on_in_time(slack: FakeSlack) -> None:
    slack.trouble.append(fake_slack.stall(2.0))
    started = time.monotonic()
    with pytest.raises(Later):
        SlackApi(TOKEN, slack.url, 0.2).post(CHANNEL, "x", [])
    assert time.monotonic() - started < 1.5
