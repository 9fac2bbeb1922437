"""Slack's callback: a person approves or rejects a command by a button of an alert. Signed by Slack, not by a token."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from fastapi import APIRouter, BackgroundTasks, Request, Response
from fastapi.concurrency import run_in_threadpool

from foreshock_service.alerts.slack_app import SlackApp
from foreshock_service.alerts.slack_clicks import Click, Clicks
from foreshock_service.api.rooms import InRooms, Rooms
from foreshock_service.commands import protocol
from foreshock_service.commands.ledger import CommandError
from foreshock_service.errors import BadRequest, NotFound, Unauthenticated
from foreshock_service.store.models import CommandRow, Run

router = APIRouter(prefix="/v1/slack", include_in_schema=False)

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Slack shows the person an error after three seconds; a decision that takes longer goes on behind the answer."""


@dataclass(frozen=True)
class SlackRoom:
    """The app whose clicks come here, and the channel that shows what came of them."""

    clicks: Clicks
    app: SlackApp


@router.post("/interactions")
async def interactions(request: Request, rooms: InRooms, after: BackgroundTasks) -> Response:
    """Takes a click. 401 for what Slack did not sign, 400 for what is no interaction, 404 where no app is set up."""
    slack = rooms.slack
    if slack is None:
        raise NotFound("No Slack app is set up.")
    body = await request.body()
    signature = request.headers.get("x-slack-signature")
    if not slack.clicks.genuine(body, request.headers.get("x-slack-request-timestamp"), signature):
        raise Unauthenticated("Not signed by Slack, or not lately.")
    try:
        click = slack.clicks.read(body)
    except ValueError as error:
        raise BadRequest("Not an interaction of Slack's.") from error
    if click is None:
        return Response()
    deciding = asyncio.ensure_future(run_in_threadpool(decide, rooms, slack.clicks, click))
    await asyncio.wait({deciding}, timeout=ANSWER_S)
    after.add_task(_explain, slack, click, deciding)
    return Response()


async def _explain(slack: SlackRoom, click: Click, deciding: asyncio.Future[str | None]) -> None:
    """What the person sees where the click changed nothing. What it did change, the outbox shows in the message."""
    try:
        refusal = await deciding
    except Exception:
        log.exception("a click from Slack failed")
        refusal = "Foreshock could not take this down. Nothing was decided; try again."
    if refusal is not None:
        await run_in_threadpool(slack.app.whisper, click.conversation, click.user, refusal, click.thread_ts)
        await run_in_threadpool(slack.app.refresh_of_command, click.command_id)


def decide(rooms: Rooms, clicks: Clicks, click: Click) -> str | None:
    """Approves or rejects, in one transaction with its alert. The sentence for the person where it cannot be."""
    person = clicks.person(click.user)
    if person is None:
        return "Foreshock does not know your Slack id: an admin adds it to FORESHOCK_SLACK_USERS."
    now = time.time()
    try:
        with rooms.store.write() as session:
            command = session.get(CommandRow, click.command_id)
            run = session.get(Run, command.run_id) if command is not None else None
            if command is None or run is None:
                return "This command is gone: its run was deleted."
            if not person.may(click.verb, run.project):
                return f"You may not {click.verb} commands of {run.project}."
            if click.verb == "approve":
                change = protocol.approve(session, command.id, person.name, now, limits=rooms.limits)
            else:
                change = protocol.reject(session, command.id, person.name, now, "from Slack")
            rooms.announce(session, run, [], [change], now)
            rooms.after_commit(session, run.id)
    except CommandError as error:
        return _sentence(rooms, click, error)
    log.info("command %s: %s by %s", click.command_id, click.verb, person.name)
    return None


def _sentence(rooms: Rooms, click: Click, error: CommandError) -> str:
    if isinstance(error, protocol.Expired):
        return f"Too late to {click.verb}: {error}. If the evidence stands, Foreshock proposes again."
    if isinstance(error, protocol.WrongAttempt):
        return f"This is about an attempt that is over: {error}."
    if isinstance(error, protocol.Busy):
        return f"Not now: {error}. One command at a time."
    if isinstance(error, protocol.WrongState):
        with rooms.store.read() as session:
            row = session.get(CommandRow, click.command_id)
            by = f" by {row.decided_by}" if row is not None and row.decided_by else ""
            return f"Nothing to {click.verb}: the command is {row.state if row else 'gone'}{by}."
    return f"Foreshock cannot {click.verb} this: {error}."
