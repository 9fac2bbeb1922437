"""One transaction for many envelopes: everything between taking a group of arrivals and committing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from foreshock.wire import Envelope, Frame, Reply
from foreshock_service.errors import Problem
from foreshock_service.ingest.arrivals import REPLAYED, Answer, Arrival, Item, bad_names, fresh_items, is_non_finite
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.identities import (
    RunInGroup,
    hold_clients,
    hold_runs,
    load_attempts,
    place_item,
    too_many_runs,
)
from foreshock_service.ingest.notices import apply_notice, store_notices
from foreshock_service.ingest.steps import NON_FINITE, Placed, Seen, store_frames
from foreshock_service.store import leases
from foreshock_service.store.flags import Flag
from foreshock_service.store.models import Client


@dataclass
class Stored:
    """What came of a group: one reply or problem per arrival, in order, and whom to wake after the commit."""

    replies: list[Reply | Problem] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    frames: int = 0
    repeated: int = 0
    """Items that were stored before and only acknowledged again."""


@dataclass
class _Group:
    session: Session
    held: dict[str, RunInGroup]
    clients: dict[tuple[int, str], Client]
    hooks: Hooks
    limits: IngestLimits
    now: float
    frames: dict[str, list[Placed]] = field(default_factory=lambda: defaultdict(list))
    notices: list[tuple[int, Client, Envelope, Item]] = field(default_factory=list)
    repeated: int = 0


def store_group(
    session: Session,
    arrivals: Sequence[Arrival],
    hooks: Hooks,
    limits: IngestLimits,
    now: float,
    seen: Seen | None = None,
) -> Stored:
    """Stores every new item of `arrivals` (each checked before) and says what to answer. Commits nothing itself.

    `seen`: what earlier groups of this writer saw; to be forgotten where the transaction does not commit.
    An envelope that meets a limit gets its problem instead of a reply; any exception concerns the whole group.
    """
    held = hold_runs(session, (a.envelope.run for a in arrivals), now, limits)
    good = [a for a in arrivals if a.envelope.run in held]
    clients = hold_clients(session, held, (a.envelope for a in good), now)
    load_attempts(session, held, (a.envelope.launch for a in good))
    group = _Group(session, held, clients, hooks, limits, now)
    answers = [_take(group, arrival) for arrival in good]
    stored = Stored(repeated=group.repeated)
    for name, placed in group.frames.items():
        if store_frames(session, held[name], placed, now, limits.watermark_min_s, seen or Seen()):
            stored.stepped.add(held[name].run.id)
        stored.frames += len(placed)
    store_notices(session, group.notices)
    session.flush()
    replies = {id(a): _reply(group, a, answer) for a, answer in zip(good, answers, strict=True)}
    stored.replies = [replies.get(id(a)) or too_many_runs(limits) for a in arrivals]
    stored.changed = {entry.run.id for entry in held.values() if entry.changed}
    return stored


def _take(group: _Group, arrival: Arrival) -> Answer:
    """Advances the client and places its new items; frames and notices are only gathered."""
    envelope, entry = arrival.envelope, group.held[arrival.envelope.run]
    client = group.clients[(entry.run.id, envelope.client)]
    items = fresh_items(arrival, client.last_sequence)
    group.repeated += len(envelope.frames) + len(envelope.notices) - len(items)
    answer = Answer()
    client.last_seen_at = max(client.last_seen_at, arrival.received_at)
    entry.run.last_seen_at = max(entry.run.last_seen_at, arrival.received_at)
    client.sdk = envelope.sdk[:64].replace("\x00", "")
    if envelope.losses and envelope.losses != client.losses:
        client.losses = dict(envelope.losses)
    if (client.role, client.rank) != (envelope.role, envelope.rank):
        client.role, client.rank = envelope.role, envelope.rank
    if items:
        client.launch = envelope.launch
        client.finished_at = None
    past = _Past(client)
    for item in items:
        _place(group, entry, client, past, arrival, item, answer)
    past.keep()
    answer.acknowledged = client.last_sequence
    answer.attempt = client.last_attempt or None
    return answer


class _Past:
    """What a client's row says of its past: read once and written once an envelope, for the ORM watches every write."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.sequence, self.attempt, self.step = client.last_sequence, client.last_attempt, client.last_step

    def keep(self) -> None:
        client = self._client
        client.last_sequence, client.last_attempt, client.last_step = self.sequence, self.attempt, self.step


def _place(
    group: _Group, entry: RunInGroup, client: Client, past: _Past, arrival: Arrival, item: Item, answer: Answer
) -> None:
    envelope, session = arrival.envelope, group.session
    became_current = place_item(session, entry, envelope.launch, item)
    if envelope.expected_ranks:
        _expect(entry, envelope, item.attempt)
    body = item.body
    completed = None
    if not isinstance(body, Frame) and body.kind == "attempt":
        entry.by_ordinal[item.attempt].reason = str(body.data.get("reason") or "rollback")[:64]
        completed = str(body.data["command"]) if body.data.get("command") else None
    if became_current or completed:
        session.flush()
        group.hooks.attempt_began(session, entry.run.id, item.attempt, group.now, completed)
    if isinstance(body, Frame):
        _mark(past, body, item, answer)
        group.frames[envelope.run].append(Placed(envelope.client, body, item, arrival.received_at, answer))
        if not item.flags & REPLAYED and item.attempt == entry.run.attempt:
            _alive(entry)
    else:
        past.keep()
        group.notices.append((entry.run.id, client, envelope, item))
        apply_notice(session, entry, client, envelope, item, group.hooks, group.limits, answer, group.now)
    past.sequence, past.attempt = body.sequence, item.attempt


def _mark(past: _Past, frame: Frame, item: Item, answer: Answer) -> None:
    """Flags what the client's own history and the frame itself can tell."""
    if past.attempt != item.attempt:
        past.step = None
    if past.step is not None and frame.step < past.step:
        item.flags |= int(Flag.STEP_BACKWARDS)
    past.step = frame.step
    if is_non_finite(frame):
        item.flags |= NON_FINITE
    for name in bad_names(frame):
        answer.warn(f"{name[:128]!r} is no signal name: kept in the frame, shown nowhere")


def _alive(entry: RunInGroup) -> None:
    """A frame of the current attempt: whoever was thought dead or done is not."""
    if entry.run.status in ("silent", "finished", "crashed"):
        entry.run.status, entry.run.finished_at = "running", None
        entry.changed = True


def _expect(entry: RunInGroup, envelope: Envelope, ordinal: int) -> None:
    attempt = entry.by_ordinal[ordinal]
    if envelope.expected_ranks and attempt.expected_ranks != envelope.expected_ranks:
        attempt.expected_ranks = {**attempt.expected_ranks, **envelope.expected_ranks}


def _reply(group: _Group, arrival: Arrival, answer: Answer) -> Reply:
    envelope, session = arrival.envelope, group.session
    run = group.held[envelope.run].run
    reply = Reply(
        acknowledged=answer.acknowledged,
        run_verdict=run.verdict,
        attempt=answer.attempt,
        mode=run.mode or group.limits.default_mode,
        warnings=answer.warnings,
    )
    client = group.clients[(run.id, envelope.client)]
    if envelope.controller and leases.keep_controller(session, run, client, group.now):
        reply.commands = list(group.hooks.deliver(session, run.id, envelope.client, group.now))
    return reply
