"""What policy knows of an incident at a step: gathered from the store for `routes`, which is pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec
from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock_service.commands import checkpoints
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.routes import Facts, Trial
from foreshock_service.diagnosis.edges import locate
from foreshock_service.diagnosis.signature import Diagnosis, diagnose
from foreshock_service.diagnosis.window import Bands, PastStep, recent_steps
from foreshock_service.incidents import book
from foreshock_service.rules.interface import Edge, StepView
from foreshock_service.store.models import Checkpoint, CommandRow, Incident, Run

PAST_STEPS: Final = 32
"""Stored steps that are looked back at while an incident is open."""
LEVEL_STEPS: Final = 5
"""Steps that make a reward's level."""
REWARD_LOST: Final = 0.3
"""Share of the level before the onset whose loss, over three steps, means that the reward has gone."""
TIED_SHARE: Final = 0.9
"""Share of groups without any spread of rewards from which no gradient is left to speak of."""

# Built once: building a statement costs as much as running it. "_" in a kind matches itself, too.
_TRIES = (
    select(func.count())
    .select_from(CommandRow)
    .where(CommandRow.run_id == bindparam("b_run"), CommandRow.evidence_key.like(bindparam("b_like")))
)
_TRIED = (
    select(CommandRow)
    .where(
        CommandRow.run_id == bindparam("b_run"),
        CommandRow.incident_id == bindparam("b_incident"),
        CommandRow.evidence_key.is_not(None),
    )
    .order_by(CommandRow.created_at)
    .execution_options(populate_existing=True)
)


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluated step in its surroundings; read once and shared by all incidents of the step."""

    seen: StepView
    bands: Bands
    past: Sequence[PastStep] = ()
    """Oldest first, the step itself last where it is stored."""
    active: Sequence[Incident] = ()


def look(session: Session, run: Run, seen: StepView) -> Look:
    """Reads the surroundings; past and baselines only while something is open: a quiet step costs one query."""
    active = book.incidents(session, run.id, book.ACTIVE)
    past = recent_steps(session, run.id, seen.attempt, upto=seen.step, steps=PAST_STEPS) if active else []
    bands = past[-1].bands if past and past[-1].step == seen.step else {}
    return Look(seen=seen, bands=bands, past=past, active=active)


def gather(session: Session, run: Run, at: Look, incident: Incident, *, limits: Limits = DEFAULTS) -> Facts:
    """What routing needs to know of this incident."""
    announced = frozenset(str(kind) for kind in run.capabilities or ())
    upstream = upstream_of(session, incident)
    found = diagnosis_of(at, incident)
    edge: Edge | None = incident.edge  # type: ignore[assignment]
    if edge in (None, "undecided"):
        edge = locate(at.seen.values, at.bands, at.seen.missing).edge or edge
    return Facts(
        rule=incident.rule,
        edge=edge,
        announced=announced,
        reward_gone=reward_gone(at, incident),
        stale_engine=found.names("stale_engine"),
        wrong_rows=found.names("shifted_labels") or found.names("misaligned_rows"),
        only_gradients=_only_gradients(incident),
        checkpoint="rollback" in announced and rollback_target(session, run, incident, limits=limits) is not None,
        upstream=upstream.rule if upstream else None,
        upstream_edge=upstream.edge if upstream else None,  # type: ignore[arg-type]
        upstream_active=upstream is not None and any(i.id == upstream.id for i in at.active),
        trials=_trials(session, run, incident, limits),
    )


def upstream_of(session: Session, incident: Incident) -> Incident | None:
    """The incident that led here."""
    return session.get(Incident, incident.precursor_id) if incident.precursor_id else None


def diagnosis_of(at: Look, incident: Incident) -> Diagnosis:
    """Over the steps since the onset, the present one included."""
    window: list[Mapping[str, float]] = [
        p.values for p in at.past if incident.onset_step is None or incident.onset_step <= p.step < at.seen.step
    ]
    return diagnose(
        [*window, at.seen.values],
        bands=at.bands,
        missing=at.seen.missing,
        settings=at.seen.settings,
        notices=at.seen.notices,
        evidence=at.seen.evidence,
    )


def reward_gone(at: Look, incident: Incident) -> bool:
    """The reward has collapsed, lost much of its level before the onset, or ties at the bottom (no gradient there)."""
    if any(i.rule == "reward_collapse" for i in at.active):
        return True
    onset = incident.onset_step
    level = level_of([p for p in at.past if onset is None or p.step < onset], "reward.mean")
    last = [r for p in at.past if (r := p.values.get("reward.mean")) is not None and math.isfinite(r)][-3:]
    if level is None or not last:
        return False
    if len(last) == 3 and fmean(last) < level - REWARD_LOST * abs(level):
        return True
    return at.seen.values.get("group.zero_std", 0.0) >= TIED_SHARE and last[-1] < level - REWARD_LOST * abs(level)


def level_of(steps: Sequence[PastStep], signal: str) -> float | None:
    """Mean of the signal's last five values in these steps; None with fewer than three."""
    values = [v for p in steps if (v := p.values.get(signal)) is not None and math.isfinite(v)][-LEVEL_STEPS:]
    return fmean(values) if len(values) >= 3 else None


def last_value(steps: Sequence[PastStep], signal: str) -> float | None:
    """The last finite value of a signal that is not logged every step."""
    return next((v for p in reversed(steps) if math.isfinite(v := p.values.get(signal, math.nan))), None)


def rollback_target(session: Session, run: Run, incident: Incident, *, limits: Limits = DEFAULTS) -> Checkpoint | None:
    """The newest healthy checkpoint from before the illness, or what led to it, began (minus the margin)."""
    upstream = upstream_of(session, incident)
    onsets = [(i.attempt, i.onset_step) for i in (incident, upstream) if i is not None and i.onset_step is not None]
    attempt, step = min(onsets, default=(0, 0))
    bound = step - limits.onset_margin_steps if attempt == run.attempt else None
    return checkpoints.target(session, run, before=bound, limits=limits)


def evidence_prefix(kind: str, incident: Incident) -> str:
    """What the same kind on the same evidence shares; the number of the try follows."""
    return f"{kind}:{incident.id}:{incident.times_opened}:"


def tries(session: Session, run: Run, kind: str, incident: Incident) -> int:
    """How often the kind was proposed on this evidence."""
    which = {"b_run": run.id, "b_like": f"{evidence_prefix(kind, incident)}%"}
    return session.scalar(_TRIES, which) or 0


def _trials(session: Session, run: Run, incident: Incident, limits: Limits) -> dict[str, Trial]:
    trials: dict[str, Trial] = {}
    for row in session.scalars(_TRIED, {"b_run": run.id, "b_incident": incident.id}).all():
        if str(row.evidence_key).startswith(evidence_prefix(row.kind, incident)):
            trials[row.kind] = _trial(session, run, row, incident, limits)
    return trials


def _trial(session: Session, run: Run, row: CommandRow, incident: Incident, limits: Limits) -> Trial:
    if row.state == "done":
        if row.verdict is None or (row.verdict == "helped" and incident.status == "mitigated"):
            return "waiting"
        return "helped" if row.verdict == "helped" else "over"
    if row.state in ("failed", "refused", "lost"):
        return "over"
    if row.state in ("expired", "cancelled"):
        # What nobody decided stays undecided; what was approved, was advice or lost its attempt may be asked again.
        advised = bool(row.detail.get("advisory")) and (run.mode or "observe") != "observe"
        open_again = row.decided_by is not None or advised or row.attempt < run.attempt
        return "again" if open_again and tries(session, run, row.kind, incident) <= limits.expired_retries else "stop"
    return "stop" if row.state == "rejected" else "waiting"


def _only_gradients(incident: Incident) -> bool:
    signals = {str(e["signal"]) for e in incident.evidence if "signal" in e}
    return bool(signals) and signals <= {"grad.nonfinite", "grad.norm"}
