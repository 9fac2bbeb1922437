"""`slack_app`: one message an incident, edited as it goes on, with everything that happens in the thread below it.

The head shows the present state: severity, cause, evidence, commands, and buttons while a command waits for a person.
Each alert is one reply, told once even where a try failed half-way. The picture of the incident's signals follows its
opening and its resolution; it is worth a few tries and never holds anything up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

import httpx
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.alerts import slack_blocks
from foreshock_service.alerts.base import Channel, ChannelError, Later, Message, digest_id
from foreshock_service.alerts.outbox import FOLLOWED
from foreshock_service.alerts.payload import payload
from foreshock_service.alerts.picture import draw
from foreshock_service.alerts.slack_api import SlackApi, SlackGone
from foreshock_service.alerts.threads import ThreadBook
from foreshock_service.store.engine import Store
from foreshock_service.store.models import CommandRow, Incident, Run

logger = logging.getLogger(__name__)

PICTURED: Final = frozenset({"incident.opened", "incident.reopened", "incident.resolved"})
PICTURE_TRIES: Final = 3
SHOWN_COMMANDS: Final = 5


class SlackApp(Channel):
    """One bot in one conversation. `buttons`: clicks come back, so a waiting command gets them."""

    name = "slack_app"
    follows = True

    def __init__(
        self,
        client: httpx.Client,
        api: SlackApi,
        store: Store,
        conversation: str,
        public_url: str = "",
        *,
        buttons: bool = False,
    ) -> None:
        super().__init__(client, public_url)
        self._api = api
        self._store = store
        self._conversation = conversation
        self._buttons = buttons
        self._threads = ThreadBook(store, self.name)

    def in_thread(self, session: Session, lines: Collection[str]) -> set[str]:
        """The lines that have a head message."""
        return self._threads.known(session, lines)

    def send(self, message: Message, now: float) -> None:
        """The head of its line, or a reply below it and the head brought up to date; then the picture."""
        place = self._reply(message, now) or self._begin(message, now)
        if place is not None and message.event in PICTURED:
            self._show(message, *place)

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """One list, a line a run; heads that stand already are brought up to date as well as can be."""
        told = [m for m in messages if m.event not in FOLLOWED]
        if told:
            text, blocks = slack_blocks.digest(told, digest_id(messages), self.public_url or None)
            self._api.post(self._conversation, text, blocks)
        for line, message in {m.line: m for m in messages}.items():
            self.refresh(line, message)

    def refresh(self, line: str, message: Message | None = None) -> None:
        """Edits the head of a line to the present state, if it has one; a failure is only logged."""
        thread = self._threads.find(line)
        if thread is None:
            return
        try:
            self._edit(line, thread.conversation, thread.ts, message)
        except ChannelError as error:
            logger.warning("the head of %s in Slack stays as it was: %s", line, error)

    def refresh_of_command(self, command_id: str) -> None:
        """The same for the line that a command is told in: a click on what was stale brings it up to date."""
        with self._store.read() as session:
            row = session.get(CommandRow, command_id)
            line = (row.incident_id or row.id) if row is not None else None
        if line is not None:
            self.refresh(line)

    def whisper(self, conversation: str, user: str, text: str, thread_ts: str | None) -> None:
        """Tells one person why nothing came of their click; a failure is only logged."""
        try:
            self._api.whisper(conversation or self._conversation, user, text, thread_ts)
        except ChannelError as error:
            logger.warning("no answer to a click could be given: %s", error)

    def _begin(self, message: Message, now: float) -> tuple[str, str] | None:
        if message.event in FOLLOWED:
            return None  # it was never shown here: nothing has become wrong
        told = self._present(message.line, message) or message
        blocks = slack_blocks.alert(told, self.link(told.payload), buttons=self._buttons)
        place = self._api.post(self._conversation, slack_blocks.headline(told), blocks)
        self._threads.begin(message.line, *place, message.delivery_id, now)
        return place

    def _reply(self, message: Message, now: float) -> tuple[str, str] | None:
        thread = self._threads.find(message.line)
        if thread is None:
            return None
        if thread.last_delivery != message.delivery_id:
            told = slack_blocks.alert(message, None)
            try:
                self._api.post(thread.conversation, slack_blocks.headline(message), told, thread_ts=thread.ts)
            except SlackGone:
                self._threads.forget(message.line)
                return None
            self._threads.told(message.line, message.delivery_id, now)
        self._edit(message.line, thread.conversation, thread.ts, message)
        return thread.conversation, thread.ts

    def _edit(self, line: str, conversation: str, ts: str, message: Message | None) -> None:
        told = self._present(line, message)
        if told is None:
            return
        blocks = slack_blocks.alert(told, self.link(told.payload), buttons=self._buttons)
        try:
            self._api.edit(conversation, ts, slack_blocks.headline(told), blocks)
        except SlackGone:
            self._threads.forget(line)

    def _present(self, line: str, message: Message | None) -> Message | None:
        """The line as it stands now in the database; the message as it was where nothing of it is left."""
        with self._store.read() as session:
            incident = session.get(Incident, line)
            query = select(CommandRow).where(CommandRow.incident_id == line if incident else CommandRow.id == line)
            newest = query.order_by(CommandRow.created_at.desc()).limit(SHOWN_COMMANDS)
            commands = list(session.scalars(newest))[::-1]
            of_run = incident.run_id if incident else (commands[0].run_id if commands else None)
            run = session.get(Run, of_run) if of_run is not None else None
            if run is None:
                return message
            event = f"command.{commands[-1].state}" if incident is None else f"incident.{_verb(incident)}"
            shown = payload(run, incident, [(row, _became(row)) for row in commands], 0.0)
        return Message(
            delivery_id=message.delivery_id if message else line, event=event, payload=shown, created_at=0.0, line=line
        )

    def _show(self, message: Message, conversation: str, ts: str) -> None:
        found = draw(self._store, message.line)
        if found is None:
            return
        picture, title = found
        try:
            self._api.upload(conversation, picture, f"{message.line}.png", title, ts)
        except ChannelError as error:
            if isinstance(error, Later) and error.after_s is not None and message.attempt < PICTURE_TRIES:
                raise
            logger.warning("the picture of %s is left out: %s", message.line, error)


def _verb(incident: Incident) -> str:
    if incident.status == "open":
        return "reopened" if incident.times_opened > 1 else "opened"
    return incident.status


def _became(row: CommandRow) -> str:
    """What a person wants to read: `done, helped` rather than `done`."""
    return f"{row.state}, {row.verdict.replace('_', ' ')}" if row.verdict else row.state
