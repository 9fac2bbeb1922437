"""`silent_run`: nothing was heard of a run that is neither finished nor paused."""

from __future__ import annotations

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import QUIET, Evidence, Observation, RuleConfig, Severity, StepView, Verdict


class Config(RuleConfig):
    """Silence is measured in the run's own median step time, and never called before the seconds given."""

    clear_steps: int = Field(1, ge=1, description="Steps heard before it resolves.")
    warn_step_times: float = Field(5.0, gt=0, description="Silence, in median step times, that warns.")
    warn_s: float = Field(300.0, gt=0, description="Seconds of silence before which it never warns.")
    critical_step_times: float = Field(20.0, gt=0, description="Silence, in median step times, that is critical.")
    critical_s: float = Field(1800.0, gt=0, description="Seconds of silence before which it is never critical.")
    first_step_s: float = Field(
        7200.0, gt=0, description="Seconds of silence allowed before the first step (loading, compiling)."
    )


class State(msgspec.Struct, frozen=True, array_like=True):
    """Nothing to remember: silence is told with each tick."""


class SilentRun:
    """Wants ticks; any step closes it."""

    name = "silent_run"
    title = "Nothing heard of the run"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = ()
    wants_ticks = True

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Warns, then is critical, the longer nothing is heard."""
        if isinstance(seen, StepView) or seen.finished or seen.paused:
            return state, QUIET
        if seen.median_step_s is None:
            warn = critical = config.first_step_s
        else:
            warn = max(config.warn_s, config.warn_step_times * seen.median_step_s)
            critical = max(config.critical_s, config.critical_step_times * seen.median_step_s, warn)
        if seen.silent_s < warn:
            return state, QUIET
        where = "before its first step" if seen.step is None else f"since step {seen.step}"
        message = f"Nothing heard for {seen.silent_s:.0f} s {where}: the job hangs, died, or cannot reach the service."
        evidence = Evidence(
            signal="time.step_s",
            value=seen.silent_s,
            expected=seen.median_step_s,
            bound=warn,
            sentence="Seconds of silence.",
        )
        severity: Severity = "critical" if seen.silent_s >= critical and seen.median_step_s is not None else "warning"
        return state, Verdict(
            firing=True, severity=severity, onset_step=seen.step, message=message, evidence=(evidence,)
        )


RULE = SilentRun()
