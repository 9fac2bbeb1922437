"""`missing_ranks`: ranks that were expected did not report a step, or fell silent while others speak."""

from __future__ import annotations

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, Tick, Verdict

SHOWN = 8


class Config(RuleConfig):
    """Two steps in a row by default: one late rank is no finding."""

    hold_steps: int = Field(2, ge=1, description="Consecutive steps (or ticks) with ranks missing before it opens.")
    clear_steps: int = Field(2, ge=1, description="Consecutive complete steps before it resolves.")
    silent_step_times: float = Field(5.0, gt=0, description="Silence of one rank, in median step times, that counts.")
    silent_s: float = Field(120.0, gt=0, description="Seconds of a rank's silence before which it never counts.")


class State(msgspec.Struct, frozen=True, array_like=True):
    """The step since which ranks have been missing."""

    since: int | None = None


class MissingRanks:
    """Steps tell who was absent at the watermark; ticks tell who fell silent in between."""

    name = "missing_ranks"
    title = "Ranks that do not report"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = ()
    wants_ticks = True

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """A warning: the merged figures are those of the ranks that did report."""
        if isinstance(seen, Tick):
            return state, self._tick(seen, config)
        if seen.reported >= seen.expected and not seen.absent_ranks:
            return State(), QUIET
        since = state.since if state.since is not None and state.since <= seen.step else seen.step
        who = _named([(role, rank) for role, rank in seen.absent_ranks])
        message = f"{seen.reported} of {seen.expected} ranks reported step {seen.step}; missing: {who}."
        evidence = Evidence(
            signal="ranks.reported", value=float(seen.reported), expected=float(seen.expected), sentence=message
        )
        return State(since), Verdict(firing=True, onset_step=since, message=message, evidence=(evidence,))

    def _tick(self, seen: Tick, config: Config) -> Verdict:
        limit = max(config.silent_s, config.silent_step_times * (seen.median_step_s or 0.0))
        silent = [(role, rank) for role, rank, seconds in seen.silent_ranks if seconds >= limit]
        # When nobody speaks the whole run is silent, which is another rule's finding; and ticks close nothing.
        if not silent or seen.finished or seen.paused or seen.silent_s >= limit:
            return UNKNOWN
        message = f"Silent for more than {limit:.0f} s while others report: {_named(silent)}."
        evidence = Evidence(signal="ranks.silent", value=float(len(silent)), expected=0.0, sentence=message)
        return Verdict(firing=True, onset_step=seen.step, message=message, evidence=(evidence,))


def _named(ranks: list[tuple[str, int]]) -> str:
    words = [f"{role} {rank}" for role, rank in ranks[:SHOWN]] or ["not said which"]
    return ", ".join(words) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")


RULE = MissingRanks()
