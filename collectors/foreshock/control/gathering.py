"""All ranks accept first, or nobody carries it out: the ranks' answers to one command, and what follows.

Pure and transport-free: a collective (`Executor`), or a Ray actor (`foreshock.ray`), brings the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's: `objection` is empty where it accepts. An accepting rank does not pass its next boundary before it
    knows the decision."""

    objection: str = ""
    step: int | None = None
    """The last step that it ended."""
    paused: bool = False


class Decision(NamedTuple):
    """`refused` holds the objections by rank; empty: carry out at the end of `at_step` (None: at once, all pause)."""

    refused: dict[int, str]
    at_step: int | None


def decide(answers: Mapping[int, Answer], ranks: Collection[int], at_step: int | None = None) -> Decision:
    """From the answers so far; where none objects, a rank without an answer objects by its silence.

    The step is the first that no rank has ended: each accepting rank waits at its next boundary, which is no later.
    `at_step` is what the command asked for, if later.
    """
    refused = {rank: answers[rank].objection for rank in ranks if rank in answers and answers[rank].objection}
    # One objection decides at once: the others may have had no time to answer.
    refused = refused or {rank: "did not answer" for rank in ranks if rank not in answers}
    if refused:
        return Decision(dict(sorted(refused.items())), None)
    given = [answers[rank] for rank in ranks]
    if given and all(answer.paused for answer in given):
        return Decision({}, None)
    steps = [answer.step for answer in given if answer.step is not None]
    first = max(steps) + 1 if steps else None
    if at_step is not None:
        first = at_step if first is None else max(first, at_step)
    return Decision({}, first)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it on one rank."""

    state: str
    detail: dict[str, Any] = {}
    step: int | None = None


def conclude(outcomes: Mapping[int, Outcome], ranks: Collection[int]) -> Outcome:
    """The command's outcome: `done` where it is on every rank, else `failed` with the ranks concerned."""
    absent = [rank for rank in ranks if rank not in outcomes]
    bad = {rank: o for rank, o in outcomes.items() if o.state != "done"}
    step = max((o.step for o in outcomes.values() if o.step is not None), default=None)
    if not absent and not bad:
        first = outcomes[min(ranks)]
        alike = all(o.detail == first.detail for o in outcomes.values())
        detail = first.detail if alike else {"ranks": {str(r): outcomes[r].detail for r in sorted(ranks)}}
        return Outcome(state="done", detail=detail, step=step)
    told: dict[str, Any] = {str(rank): {"state": o.state} | o.detail for rank, o in sorted(bad.items())}
    told |= {str(rank): {"state": "lost", "reason": "the rank did not answer any more"} for rank in absent}
    # Where no rank did anything the command was refused by all alike; else the ranks differ now, which is a failure.
    every = {o.state for o in outcomes.values()}
    return Outcome(
        state="refused" if every == {"refused"} and not absent else "failed", detail={"ranks": told}, step=step
    )


def refusal(refused: Mapping[int, str]) -> dict[str, Any]:
    """The detail of a command that not all ranks accepted."""
    return {"reason": "not all ranks accept", "ranks": {str(rank): why for rank, why in refused.items()}}
