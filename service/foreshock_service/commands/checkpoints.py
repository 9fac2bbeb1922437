"""Checkpoints as the trainer announced them: `candidate` → `healthy` → `quarantined`, and the one to go back to.

The service never opens a checkpoint: a path is a word of the trainer's. Only with `Limits.verify_checkpoints`, where
service and trainer share a file system, it asks whether the path exists.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import uuid
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.incidents import book
from foreshock_service.incidents.causes import PRECURSORS
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.rules.interface import StepView
from foreshock_service.store.models import Attempt, Checkpoint, Incident, Run

logger = logging.getLogger(__name__)

MAX_PATH: Final = 4096
"""Characters; longer ones are no paths."""

# Built once: building a statement costs as much as running it.
_CANDIDATES = (
    select(Checkpoint)
    .where(
        Checkpoint.run_id == bindparam("b_run"),
        Checkpoint.attempt == bindparam("b_attempt"),
        Checkpoint.status == "candidate",
    )
    .execution_options(populate_existing=True)
)
_QUARANTINE = (
    update(Checkpoint.__table__)  # type: ignore[arg-type]
    .where(
        Checkpoint.run_id == bindparam("b_run"),
        Checkpoint.status.in_(bindparam("b_statuses", expanding=True)),
        ((Checkpoint.attempt == bindparam("b_attempt")) & (Checkpoint.step >= bindparam("b_first")))
        | (Checkpoint.attempt > bindparam("b_attempt")),
    )
    .values(status="quarantined", reason=bindparam("b_reason"))
)


class BadPath(ValueError):  # noqa: N818
    """What was announced cannot be a path."""


def checked_path(path: Any) -> str:
    """The path as it is. Raises BadPath for what is empty, no text, over 4096 characters, or holds a NUL or newline."""
    if not isinstance(path, str) or not path.strip():
        raise BadPath("a checkpoint's path must be a text that is not empty")
    if len(path) > MAX_PATH:
        raise BadPath(f"a checkpoint's path has at most {MAX_PATH} characters, not {len(path)}")
    if any(ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in path):
        raise BadPath("a checkpoint's path holds no control characters")
    return path


def register(session: Session, run: Run, attempt: int, step: int, data: Mapping[str, Any], now: float) -> bool:
    """Notes what a checkpoint's notice announced, {path, scope, …}, as `candidate`; True where it is new.

    Announcing it again changes nothing. What cannot be a path is left out and logged: the envelope that brought it is
    stored all the same.
    """
    try:
        path = checked_path(data.get("path"))
    except BadPath as error:
        logger.warning("run %s, attempt %d, step %d: %s", run.name, attempt, step, error)
        return False
    scope = data.get("scope")
    values = {
        "id": uuid.uuid4().hex,
        "run_id": run.id,
        "attempt": attempt,
        "step": step,
        "path": path,
        "path_hash": hashlib.sha256(path.encode()).hexdigest(),
        "scope": [str(item)[:32] for item in scope[:16]] if isinstance(scope, list) else [],
        "status": "candidate",
        "reason": "",
        "registered_at": now,
    }
    return insert_ignoring(session, Checkpoint, values)


def settle(session: Session, run: Run, seen: StepView, *, limits: Limits = DEFAULTS) -> None:
    """Judges this attempt's candidates: quarantined if saved during an illness, healthy after enough clean steps.

    Clean: no incident is open that is critical or can lead to one. While one is only mitigated, candidates stay so.
    """
    candidates = session.scalars(_CANDIDATES, {"b_run": run.id, "b_attempt": seen.attempt}).all()
    if not candidates:
        return
    ill = [i for i in book.incidents(session, run.id, book.ACTIVE) if distrusted(i)]
    for incident in ill:
        if incident.status != "mitigated":
            since = incident.onset_step if incident.attempt == seen.attempt else None
            _quarantine(session, run, incident, seen.attempt, since, ("candidate",), limits)
    if ill:
        return
    for candidate in candidates:
        if candidate.step <= seen.step - limits.promote_steps:
            candidate.status, candidate.reason = "healthy", f"followed by {limits.promote_steps} clean steps"
    session.flush()


def distrusted(incident: Incident) -> bool:
    """True where checkpoints taken during this incident are not to be gone back to.

    A scoring-pass fault touches no weights; silence and absent ranks say nothing of them.
    """
    if incident.edge == "scoring_pass" or incident.rule in ("silent_run", "missing_ranks"):
        return False
    return incident.severity == "critical" or incident.rule in PRECURSORS


def quarantine(
    session: Session, run: Run, incident: Incident, attempt: int, onset: int | None, *, limits: Limits = DEFAULTS
) -> None:
    """An illness was found: distrusts what was saved from its onset minus a margin on, even if it looked healthy.

    Nothing is deleted. Covers the attempt of the onset and later ones; illnesses that spoil no weights do nothing.
    """
    if onset is None or not distrusted(incident):
        return
    _quarantine(session, run, incident, attempt, onset, ("candidate", "healthy"), limits)


def target(session: Session, run: Run, *, before: int | None = None, limits: Limits = DEFAULTS) -> Checkpoint | None:
    """The newest healthy checkpoint in the lineage of the run's current attempt, or None.

    The lineage: all of the current attempt, then of each earlier one only what came before the step at which its
    successor began, since what followed was rolled back or never resumed from. `before` bounds the current attempt.
    """
    bound: float = math.inf if before is None else before
    for attempt, first_step in _lineage(session, run):
        query = select(Checkpoint).where(
            Checkpoint.run_id == run.id, Checkpoint.attempt == attempt, Checkpoint.status == "healthy"
        )
        if bound < math.inf:
            query = query.where(Checkpoint.step < int(bound))
        for checkpoint in session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.registered_at.desc())):
            if not limits.verify_checkpoints or os.path.exists(checkpoint.path):
                return checkpoint
        if first_step is not None:
            bound = min(bound, first_step)
    return None


def any_known(session: Session, run_id: int) -> bool:
    """True where the run has announced a checkpoint that is not quarantined."""
    query = select(Checkpoint.id).where(Checkpoint.run_id == run_id, Checkpoint.status != "quarantined")
    return session.execute(query.limit(1)).first() is not None


def _lineage(session: Session, run: Run) -> list[tuple[int, int | None]]:
    """(attempt, its first step), from the current attempt back."""
    query = select(Attempt.ordinal, Attempt.first_step).where(Attempt.run_id == run.id, Attempt.ordinal <= run.attempt)
    rows = dict(session.execute(query).all())
    return [(n, rows.get(n)) for n in range(run.attempt, 0, -1)]


def _quarantine(
    session: Session,
    run: Run,
    incident: Incident,
    attempt: int,
    onset: int | None,
    statuses: tuple[str, ...],
    limits: Limits,
) -> None:
    first = 0 if onset is None else onset - limits.onset_margin_steps
    reason = f"{incident.rule} since step {incident.onset_step} of attempt {incident.attempt}"
    which = {"b_run": run.id, "b_statuses": statuses, "b_attempt": attempt, "b_first": first, "b_reason": reason}
    session.execute(_QUARANTINE, which, execution_options={"synchronize_session": False})
