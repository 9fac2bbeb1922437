"""One transaction for many envelopes: everything between taking a group of arrivals and committing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from foreshock.wire import Envelope, Frame, Reply
from foreshock_service.errors import Problem
from foreshock_service.ingest.arrivals import REPLAYED, Answer, Arrival, Item, bad_names, fresh_items, is_non_finite
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.identities import (
    RunInGroup,
    Sender,
    Senders,
    hold_clients,
    hold_runs,
    load_attempts,
    place_item,
    save_clients,
    save_runs,
    too_many_runs,
)
from foreshock_service.ingest.notices import apply_notice, store_notices
from foreshock_service.ingest.steps import NON_FINITE, Placed, Seen, store_frames
from foreshock_service.store import leases
from foreshock_service.store.flags import Flag

STEP_BACKWARDS = int(Flag.STEP_BACKWARDS)


@dataclass
class Stored:
    """What came of a group: one reply or problem per arrival, in order, and whom to wake after the commit."""

    replies: list[Reply | Problem] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    frames: int = 0
    repeated: int = 0
    """Items that were stored before and only acknowledged again."""
    busy: set[str] = field(default_factory=set)
    """Runs whose envelopes are to be brought again: nothing of them was stored, their replies mean nothing."""


@dataclass
class _Group:
    session: Session
    held: dict[str, RunInGroup]
    clients: Senders
    hooks: Hooks
    limits: IngestLimits
    now: float
    frames: dict[str, list[Placed]] = field(default_factory=lambda: defaultdict(list))
    notices: list[tuple[int, Sender, Envelope, Item]] = field(default_factory=list)
    repeated: int = 0


def store_group(
    session: Session,
    arrivals: Sequence[Arrival],
    hooks: Hooks,
    limits: IngestLimits,
    now: float,
    seen: Seen | None = None,
    *,
    wait: bool = True,
) -> Stored:
    """Stores every new item of `arrivals` (each checked before) and says what to answer. Commits nothing itself.

    `seen`: what earlier groups of this writer saw; to be forgotten where the transaction does not commit.
    `wait`: for the rows of runs that somebody holds; without it their envelopes are left alone (`Stored.busy`).
    An envelope that meets a limit gets its problem instead of a reply; any exception concerns the whole group.
    """
    held, busy = hold_runs(session, (a.envelope.run for a in arrivals), now, limits, wait=wait)
    good = [a for a in arrivals if a.envelope.run in held]
    clients = hold_clients(session, held, (a.envelope for a in good), now)
    load_attempts(session, held, (a.envelope.launch for a in good))
    group = _Group(session, held, clients, hooks, limits, now)
    answers = [_take(group, arrival) for arrival in good]
    stored = Stored(busy=busy, repeated=group.repeated, frames=sum(map(len, group.frames.values())))
    of_runs = [(held[name], placed) for name, placed in group.frames.items()]
    stored.stepped = store_frames(session, of_runs, now, limits.watermark_min_s, seen or Seen())
    store_notices(session, group.notices)
    session.flush()
    save_clients(session, clients)
    save_runs(session, held.values())
    waited_for = _waited_for(group, good)
    replies = {id(a): _reply(group, a, answer, waited_for) for a, answer in zip(good, answers, strict=True)}
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
    entry.heard(arrival.received_at)
    client.sdk = envelope.sdk[:64].replace("\x00", "")
    if envelope.losses and envelope.losses != client.losses:
        client.losses, client.lost_more = dict(envelope.losses), True
    client.role, client.rank = envelope.role, envelope.rank
    if items:
        client.launch = envelope.launch
        client.finished_at = None
    for item in items:
        _place(group, entry, client, arrival, item, answer)
    answer.acknowledged = client.last_sequence
    answer.attempt = client.last_attempt or None
    return answer


def _place(group: _Group, entry: RunInGroup, client: Sender, arrival: Arrival, item: Item, answer: Answer) -> None:
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
        _mark(client, body, item, answer)
        group.frames[envelope.run].append(Placed(envelope.client, body, item, arrival.received_at, answer))
        if not item.flags & REPLAYED and item.attempt == entry.run.attempt:
            _alive(entry)
    else:
        group.notices.append((entry.run.id, client, envelope, item))
        apply_notice(session, entry, client, envelope, item, group.hooks, group.limits, answer, group.now)
    client.last_sequence, client.last_attempt = body.sequence, item.attempt


def _mark(client: Sender, frame: Frame, item: Item, answer: Answer) -> None:
    """Flags what the client's own history and the frame itself can tell."""
    if client.last_attempt != item.attempt:
        client.last_step = None
    if client.last_step is not None and frame.step < client.last_step:
        item.flags |= STEP_BACKWARDS
    client.last_step = frame.step
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


def _waited_for(group: _Group, arrivals: Sequence[Arrival]) -> Collection[int]:
    """The runs of controllers for which commands may wait: one look for the whole group."""
    controlled = {group.held[a.envelope.run].run.id for a in arrivals if a.envelope.controller}
    return group.hooks.waiting(group.session, sorted(controlled)) if controlled else ()


def _reply(group: _Group, arrival: Arrival, answer: Answer, waited_for: Collection[int]) -> Reply:
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
    leads = envelope.controller and leases.keep_controller(session, run, client, group.now)
    if leads and run.id in waited_for:
        reply.commands = list(group.hooks.deliver(session, run.id, envelope.client, group.now))
    return reply
