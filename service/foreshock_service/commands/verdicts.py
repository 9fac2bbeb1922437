"""Did it help? Every carried-out command is judged afterwards, by its own kind's criterion.

- `resync_trainer`, `resync_engine`, `scale_lr`: the signal that fired is back in its band for `clean_steps` steps,
  or its rule closed the incident, within `judge_steps`: a floor rises as a run learns, and the rule allows for that.
- `skip_update`: the same; a non-finite count is back at zero.
- `rollback`: the reward (validation where there is one) is near its level before the onset and the signal is back,
  within `rollback_judge_steps`.
- `enable_is_correction`: `reward.validation` does not fall; without one undecided, since the rollout reward misleads.
- `checkpoint_now`: a checkpoint was announced.
- the others have nothing to measure: undecided.

Progress is kept in `verdict_detail`, so judging costs no look back and survives a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.commands import protocol
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.protocol import CommandChange
from foreshock_service.diagnosis.window import Bands
from foreshock_service.incidents import book
from foreshock_service.rules.interface import StepView
from foreshock_service.store.models import Checkpoint, CommandRow, Incident, Run

WORSE_RATIO: Final = 2.0
"""A signal at more than this times its value when the command was asked for is worse."""
REWARD_NEAR: Final = 0.9
"""Share of the level before the onset that counts as near it."""
REWARD_STEP: Final = 0.05
"""Differences of rewards up to this are noise."""


class Trace(msgspec.Struct, kw_only=True):
    """What has been seen since a command was carried out. Rewards are the last ones, at most eight."""

    steps: int = 0
    clean: int = 0
    value: float | None = None
    rewards: list[float] = []
    validations: list[float] = []


class Before(msgspec.Struct, kw_only=True):
    """How things stood when the command was asked for (`detail["before"]`)."""

    signal: str | None = None
    value: float | None = None
    high: float | None = None
    """Upper bound of the signal's band, or the invariant's bound."""
    reward: float | None = None
    reward_level: float | None = None
    """Level before the onset, or at the checkpoint that a rollback goes back to."""
    validation: float | None = None
    """The last one known."""
    validation_level: float | None = None


def judge(
    session: Session, run: Run, seen: StepView, bands: Bands, now: float, *, limits: Limits = DEFAULTS
) -> list[CommandChange]:
    """Adds this step to what is known of each command that is done and not judged, and gives the verdicts that are due.

    helped: the incident is mitigated until its rule closes it; no_effect or worse: it escalates.
    """
    rows = session.scalars(
        select(CommandRow).where(CommandRow.run_id == run.id, CommandRow.state == "done", CommandRow.verdict.is_(None)),
        execution_options={"populate_existing": True},
    ).all()
    changes = []
    for row in rows:
        if not _counts(row, seen):
            continue
        before = msgspec.convert(row.detail.get("before", {}), Before, strict=False)
        trace = msgspec.convert(row.verdict_detail.get("trace", {}), Trace, strict=False)
        _follow(trace, before, seen, bands)
        verdict = _verdict(session, row, before, trace, seen, limits)
        detail = {"trace": msgspec.to_builtins(trace), "attempt": seen.attempt}
        change = protocol.record_verdict(session, row, verdict, seen.step, detail, now)
        if change is not None:
            changes.append(change)
        _tell_incident(session, row, verdict, now)
    return changes


def before(
    incident: Incident,
    seen: StepView,
    bands: Bands,
    *,
    validation: float | None = None,
    reward_level: float | None = None,
    validation_level: float | None = None,
) -> Before:
    """What to keep with a command so that it can be judged; the signal is the first of the incident's evidence.

    A reward is no such signal: it is judged by its level, and rises where signals fall.
    """
    named = [e for e in incident.evidence if "signal" in e and e.get("value") is not None]
    numbers = [e for e in named if not str(e["signal"]).startswith("reward.")]
    first: Mapping[str, Any] = numbers[0] if numbers else {}
    signal = str(first["signal"]) if first else None
    band = bands.get(signal or "")
    bound = first.get("bound") if first.get("bound") is not None else first.get("expected")
    return Before(
        signal=signal,
        value=_finite(seen.values.get(signal or "")),
        high=band[2] if band else float(bound) if isinstance(bound, int | float) else None,
        reward=_finite(seen.values.get("reward.mean")),
        reward_level=reward_level,
        validation=_finite(validation),
        validation_level=validation_level,
    )


def _counts(row: CommandRow, seen: StepView) -> bool:
    """A rollback is judged in the attempt that it began, everything else in its own, after the step it was done at."""
    if row.kind == "rollback":
        return seen.attempt > row.attempt
    done_at = row.done_step if row.done_step is not None else row.issued_step
    return seen.attempt > row.attempt or done_at is None or seen.step > done_at


def _follow(trace: Trace, before: Before, seen: StepView, bands: Bands) -> None:
    trace.steps += 1
    if before.signal is not None:
        value = seen.values.get(before.signal)
        trace.value = _finite(value)
        band = bands.get(before.signal)
        high = band[2] if band else before.high
        back = value is not None and math.isfinite(value) and high is not None and value <= high
        trace.clean = trace.clean + 1 if back else 0
    for name, kept in (("reward.mean", trace.rewards), ("reward.validation", trace.validations)):
        value = _finite(seen.values.get(name))
        if value is not None:
            kept.append(value)
            del kept[:-8]


def _verdict(
    session: Session, row: CommandRow, before: Before, trace: Trace, seen: StepView, limits: Limits
) -> str | None:
    if row.kind != "rollback" and seen.attempt > row.attempt:
        return "undecided"  # its attempt ended before anything could be seen
    if row.kind == "checkpoint_now":
        return _checkpoint_came(session, row, trace, limits)
    criterion = _CRITERIA.get(row.kind)
    if criterion is _signal_back and trace.steps >= limits.clean_steps and _closed_by_its_rule(session, row):
        return "helped"
    return criterion(before, trace, limits) if criterion else "undecided"


def _closed_by_its_rule(session: Session, row: CommandRow) -> bool:
    incident = session.get(Incident, row.incident_id, populate_existing=True) if row.incident_id else None
    return incident is not None and incident.status == "resolved" and book.resolved_by_rules(session, incident)


def _signal_back(before: Before, trace: Trace, limits: Limits) -> str | None:
    if trace.clean >= limits.clean_steps:
        return "helped"
    if trace.steps < limits.judge_steps:
        return None
    if before.signal is None or trace.value is None:
        return "undecided"
    if before.value is not None and trace.value > WORSE_RATIO * before.value > 0:
        return "worse"
    return "no_effect"


def _reward_back(before: Before, trace: Trace, limits: Limits) -> str | None:
    seen: list[float]
    level: float | None
    if before.validation_level is not None and trace.validations:
        seen, level, then = trace.validations[-2:], before.validation_level, before.validation
    else:
        seen, level, then = trace.rewards[-limits.clean_steps :], before.reward_level, before.reward
    signal_back = before.signal is None or trace.clean >= limits.clean_steps
    near = level is not None and bool(seen) and _mean(seen) >= _near(level)
    # Restored weights score well at once; a fault that is still there needs its steps to show again.
    if near and signal_back and trace.steps >= limits.judge_steps:
        return "helped"
    if trace.steps < limits.rollback_judge_steps:
        return None
    if level is None or not seen:
        return "undecided"
    return "worse" if then is not None and _mean(seen) < then - REWARD_STEP else "no_effect"


def _validation_holds(before: Before, trace: Trace, limits: Limits) -> str | None:
    if trace.steps < limits.judge_steps:
        return None
    if before.validation is None or not trace.validations:
        return "undecided" if trace.steps >= limits.rollback_judge_steps else None
    lost = before.validation - _mean(trace.validations[-2:])
    if lost <= REWARD_STEP:
        return "helped"
    return "worse" if lost > 2 * REWARD_STEP else "no_effect"


_CRITERIA: Final[Mapping[str, Callable[[Before, Trace, Limits], str | None]]] = {
    "resync_trainer": _signal_back,
    "resync_engine": _signal_back,
    "scale_lr": _signal_back,
    "skip_update": _signal_back,
    "rollback": _reward_back,
    "enable_is_correction": _validation_holds,
}


def _checkpoint_came(session: Session, row: CommandRow, trace: Trace, limits: Limits) -> str | None:
    query = select(Checkpoint.id).where(Checkpoint.run_id == row.run_id, Checkpoint.registered_at >= row.created_at)
    if session.execute(query.limit(1)).first():
        return "helped"
    return "no_effect" if trace.steps >= limits.judge_steps else None


def _tell_incident(session: Session, row: CommandRow, verdict: str | None, now: float) -> None:
    if row.incident_id is None:
        return
    incident = session.get(Incident, row.incident_id, populate_existing=True)
    if incident is None or incident.status == "resolved":
        return
    by = f"command {row.kind} {row.id}"
    if verdict == "helped" or (verdict is None and row.kind == "enable_is_correction"):
        book.mitigate(session, incident, by, now)
    elif verdict in ("no_effect", "worse"):
        book.escalate(session, incident, by, now)


def _near(level: float) -> float:
    return level - max(abs(level) * (1 - REWARD_NEAR), REWARD_STEP)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
