"""What notices change: launches, settings, checkpoints, ends. Every notice is stored, known or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from foreshock.frames.redaction import redact
from foreshock.wire import COMMAND_KINDS, Envelope
from foreshock.wire import Notice as WireNotice
from foreshock_service.ingest.arrivals import Answer, Item
from foreshock_service.ingest.checks import BIGINT, IngestLimits
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.identities import RunInGroup, Sender, set_mode
from foreshock_service.store.flags import Flag
from foreshock_service.store.models import Notice

_PATHS_ONLY = frozenset({"checkpoint", "weights", "flush", "attempt"})
"""No configuration in them, and many: they are stored as they came."""
ENDED_WELL = frozenset({"completed", "finished", "done", "ok", "stopped"})


def apply_notice(
    session: Session,
    entry: RunInGroup,
    client: Sender,
    envelope: Envelope,
    item: Item,
    hooks: Hooks,
    limits: IngestLimits,
    answer: Answer,
    now: float,
) -> None:
    """Carries out one notice on the run's row; what belongs to a past attempt changes nothing of the present."""
    notice = item.body
    assert isinstance(notice, WireNotice)
    data = notice.data
    current = item.attempt == entry.run.attempt
    match notice.kind:
        case "started" if current:
            _started(session, entry, envelope, data, limits, answer, now)
        case "settings" if current:
            entry.run.settings = {**entry.run.settings, **redact(data)}
        case "attempt":
            attempt = entry.by_ordinal[item.attempt]
            attempt.reason = str(data.get("reason") or attempt.reason)[:64]
        case "checkpoint":
            _checkpoint(session, entry, item, notice, hooks, answer, now)
        case "finished":
            client.finished_at = now
            if current and not item.flags & Flag.REPLAYED:
                _finished(session, entry, client, envelope, data, hooks, now)
        case _:
            pass


def _started(
    session: Session,
    entry: RunInGroup,
    envelope: Envelope,
    data: dict[str, Any],
    limits: IngestLimits,
    answer: Answer,
    now: float,
) -> None:
    run = entry.run
    if isinstance(data.get("settings"), dict):
        run.settings = {**run.settings, **redact(data["settings"])}
    if isinstance(data.get("config"), dict) and data["config"]:
        run.config = redact(data["config"])
    if isinstance(data.get("labels"), dict) and data["labels"]:
        run.labels = {**run.labels, **data["labels"]}
    capabilities = data.get("capabilities")
    # The controller's word alone: what another rank can do, nobody could ask it for.
    if isinstance(capabilities, list) and envelope.controller:
        unknown = [c for c in capabilities if c not in COMMAND_KINDS]
        if unknown:
            answer.warn(f"capabilities that are no command kinds: {', '.join(map(str, unknown))[:200]}")
        run.capabilities = [c for c in COMMAND_KINDS if c in capabilities]
    warning = set_mode(session, run, data.get("mode"), limits, now)
    if warning:
        answer.warn(warning)
    entry.changed = True


def _checkpoint(
    session: Session, entry: RunInGroup, item: Item, notice: WireNotice, hooks: Hooks, answer: Answer, now: float
) -> None:
    step = notice.step if notice.step is not None else notice.data.get("step")
    path = notice.data.get("path")
    if not isinstance(step, int) or not 0 <= step <= BIGINT or not isinstance(path, str) or not path:
        answer.warn("a checkpoint notice without step and path was stored and not registered")
        return
    session.flush()
    hooks.register_checkpoint(session, entry.run, item.attempt, step, notice.data, now)
    entry.changed = True


def _finished(
    session: Session,
    entry: RunInGroup,
    client: Sender,
    envelope: Envelope,
    data: dict[str, Any],
    hooks: Hooks,
    now: float,
) -> None:
    run = entry.run
    leads = envelope.controller or client.role == "driver" or run.controller_client in (None, client.id)
    if not leads:
        return  # one rank of many said goodbye
    status = str(data.get("status") or "completed")
    run.status = "finished" if status in ENDED_WELL else "crashed"
    run.finished_at = now
    entry.changed = True
    session.flush()
    hooks.run_finished(session, run.id, now, f"the run ended: {status[:64]}")


def store_notices(session: Session, found: Sequence[tuple[int, Sender, Envelope, Item]]) -> None:
    """Inserts the notices of a group, in their order, with one statement."""
    rows = []
    for run_id, client, envelope, item in found:
        notice = item.body
        assert isinstance(notice, WireNotice)
        rows.append(
            {
                "run_id": run_id,
                "attempt": item.attempt,
                "step": notice.step,
                "at": item.event_at,
                "kind": notice.kind,
                "role": notice.role or envelope.role,
                "rank": notice.rank,
                "client_id": client.id,
                "data": notice.data if notice.kind in _PATHS_ONLY else redact(notice.data),
                "consumed": False,
            }
        )
    if rows:
        session.connection().execute(insert(Notice), rows)
