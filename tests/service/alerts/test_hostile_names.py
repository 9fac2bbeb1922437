"""Names of runs and signals come from clients: whatever they hold, no channel makes a mention, link or header of it."""

from __future__ import annotations

import json
import re
from email.message import EmailMessage
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.alerts.fake_slack import all_text, block_errors
from benchmarks.alerts.sink import Sink
from foreshock_service.alerts import slack_blocks
from foreshock_service.alerts.alertmanager import Alertmanager
from foreshock_service.alerts.base import Message
from foreshock_service.alerts.email import Email
from foreshock_service.alerts.slack_webhook import SlackWebhook
from foreshock_service.alerts.webhook import Webhook
from foreshock_service.alerts.words import headline, paragraphs, tame

NOW = 1_000.0
HOSTILE = [
    "<!channel>", "<!here|all of you>", "<!subteam^S012|x>", "<@U0123>", "<#C0123>", "@channel", "@everyone", "@here",
    "<https://evil.example|your bank>", "https://evil.example/login", "HTTP://evil.example", "mailto:a@evil.example",
    "<javascript:alert(1)|x>", "`code` <!channel>", "x\nBcc: eve@evil.example", "x\r\nSubject: you won",
    "\u202eevil", "a\u0000b", "*bold* _it_ ~no~", "&lt;!channel&gt;", "{{ .ExternalURL }}", "<script>alert(1)</script>",
]  # fmt: skip
ALIVE = re.compile(r"<[!@#]|<[a-z]+:|(?<![\u200b])@(?:channel|here|everyone)\b|[a-z]://|[\u202a-\u202e\x00\r]", re.I)
"""What would come to life in Slack, in a mail reader, or behind Alertmanager's templates."""


def message(text: str, event: str = "incident.opened") -> Message:
    incident = {
        "id": "i1", "rule": text, "severity": "critical", "status": "open", "attempt": 1, "onset_step": 25,
        "opened_step": 27, "message": text, "acknowledged_by": text,
        "evidence": [{"signal": text, "value": 0.125, "expected": 5e-4}, {"signal": text, "value": text}],
        "causes": [{"name": text, "title": text, "score": 0.7}],
    }  # fmt: skip
    command = {"id": "c1", "kind": text, "became": "proposed", "state": "proposed", "reason": text, "decided_by": text}
    payload = {"run": text, "project": text, "mode": "approve", "path": "/runs/x", "incident": incident,
               "cause": text, "commands": [command]}  # fmt: skip
    return Message(delivery_id="d" * 32, event=event, payload=payload, created_at=NOW, line="i1")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("event", ["incident.opened", "incident.resolved", "command.proposed"])
def test_slack_makes_nothing_of_it(sink: Sink, client: httpx.Client, text: str, event: str) -> None:
    channel = SlackWebhook(client, sink.url)
    channel.send(message(text, event), NOW)
    channel.send_digest([message(text, event)] * 3, NOW)
    for body in sink.bodies():
        assert ALIVE.search(body["text"] + all_text(body["blocks"])) is None
        assert block_errors(body["blocks"]) == []
        assert all(b["text"].get("verbatim") for b in body["blocks"] if b["type"] == "section")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_mail_makes_nothing_of_it(monkeypatch: pytest.MonkeyPatch, client: httpx.Client, text: str) -> None:
    mails: list[EmailMessage] = []
    channel = Email(client, "smtp://127.0.0.1", "fs@example.org", "ada@example.org")
    monkeypatch.setattr(channel, "_send", mails.append)
    channel.send(message(text), NOW)
    channel.send_digest([message(text)] * 3, NOW)
    for mail in mails:
        assert mail["Bcc"] is None
        assert len(mail.get_all("Subject") or []) == 1
        assert ALIVE.search(mail["Subject"] + mail.get_content()) is None


@pytest.mark.parametrize("text", HOSTILE)
def test_alertmanager_hands_on_nothing_of_it(sink: Sink, client: httpx.Client, text: str) -> None:
    Alertmanager(client, sink.url).send(message(text), NOW)
    annotations = "\n".join(str(v) for v in json.loads(sink.got[0][2])[0]["annotations"].values())
    assert ALIVE.search(annotations) is None


def test_the_webhook_hands_on_data_as_it_is(sink: Sink, client: httpx.Client) -> None:
    """A program is to see what was sent, not a version of it made for people."""
    Webhook(client, sink.url, "").send(message("<!channel>"), NOW)
    assert sink.bodies()[0]["incident"]["rule"] == "<!channel>"


@given(text=st.text(max_size=6000) | st.sampled_from(HOSTILE).map(lambda t: t * 300))
@settings(max_examples=100, deadline=None)
def test_whatever_the_text_slack_would_take_the_message(text: str) -> None:
    blocks = slack_blocks.alert(message(text), "http://watch.example/runs/x?a=1&b=2", buttons=True)
    assert block_errors(blocks) == []
    assert ALIVE.search(all_text(blocks).replace("<http://watch.example", "")) is None
    assert len(all_text(blocks)) <= 12_000


@given(text=st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_taming_is_harmless_and_done_once(text: str) -> None:
    assert tame(tame(text)) == tame(text)
    assert ALIVE.search(tame(text)) is None


def test_ordinary_words_stay_as_they_are() -> None:
    for text in ("mismatch.kl_k3 < 0.5 & rising", "a <b> c", "step 3: 12 > 5", "ada@example.org", "权重过期"):
        assert tame(text) == text
    assert "usual: 0.0005" in dict(paragraphs(message("x")))["Evidence"]
    assert headline(message("x")) == "critical: x: x opened"


def test_a_digest_of_a_thousand_stays_within_slacks_limits(sink: Sink, client: httpx.Client) -> None:
    many = []
    for i in range(1000):
        told = message("x")
        names = {"run": f"lab/{'r' * 100}-{i % 400}", "incident": {"rule": f"{'x' * 60}{i % 77}"}}
        many.append(msgspec.structs.replace(told, delivery_id=f"{i:032x}", payload={**told.payload, **names}))
    SlackWebhook(client, sink.url, "http://watch.example").send_digest(many, NOW)
    blocks: list[dict[str, Any]] = sink.bodies()[0]["blocks"]
    assert block_errors(blocks) == []
    assert len(all_text(blocks)) <= 12_000
    assert "more runs" in all_text(blocks)
