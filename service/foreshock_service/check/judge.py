"""Feeds the steps of a log to the rule engine and keeps what it finds: incidents, from their opening to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from foreshock_service.check.aliases import Translator
from foreshock_service.check.assemble import RawStep
from foreshock_service.check.trace import Trace
from foreshock_service.diagnosis.signature import Diagnosis, diagnose
from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.interface import Evidence, Finding, Severity, StepView
from foreshock_service.rules.pack import Pack

RUN: Final = "check/log"
DIAGNOSED: Final = frozenset(
    {"onpolicy_disagreement", "rollout_mismatch", "stale_weights", "stale_cache", "is_degeneracy", "outlier_sequences"}
)
"""Illnesses of log-prob pairs: those that a diagnosis can explain."""
WINDOW: Final = 16
"""Steps that a diagnosis looks at."""
MAX_INCIDENTS: Final = 1000

VerdictWord = Literal["healthy", "warning", "critical", "unreadable"]


@dataclass
class Incident:
    """One illness from its opening to its end; `resolved_step` is None while it lasts."""

    rule: str
    severity: Severity
    attempt: int
    opened_step: int
    onset_step: int
    resolved_step: int | None
    explanation: str
    evidence: Sequence[Evidence] = ()
    critical_step: int | None = None
    """The step at which it became critical."""
    diagnosis: Diagnosis | None = None
    consequences: list[Incident] = field(default_factory=list)
    precursor: Incident | None = None

    @property
    def is_open(self) -> bool:
        """It lasts to the end of the log."""
        return self.resolved_step is None

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "opened_step": self.opened_step,
            "resolved_step": self.resolved_step,
            "explanation": self.explanation,
        }


@dataclass
class Report:
    """What `foreshock check` knows of one log at its end."""

    verdict: VerdictWord
    format: str | None
    steps: int
    incidents: list[Incident]
    framework: str | None = None
    attempts: int = 1
    first_step: int | None = None
    last_step: int | None = None
    signals: Mapping[str, int] = field(default_factory=dict)
    """Signal → steps that had it."""
    sources: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Signal → (the framework's name, note on its estimator)."""
    untranslated: Mapping[str, str] = field(default_factory=dict)
    always_zero: Sequence[str] = ()
    notes: Sequence[str] = ()
    trace: Trace | None = None
    problem: str = ""
    """Why it is unreadable."""

    def to_json(self) -> dict[str, Any]:
        """The machine-readable verdict."""
        return {
            "verdict": self.verdict,
            "format": self.format,
            "steps": self.steps,
            "incidents": [incident.to_json() for incident in self.incidents],
        }


class Judge:
    """One log. Memory: the engine's state, the incidents, sixteen steps and, if asked for, a bounded trace.

    `hidden`: signals that are taken for not logged, to learn what depends on them.
    """

    def __init__(self, pack: Pack, *, trace: bool = False, hidden: frozenset[str] = frozenset()) -> None:
        self.translator = Translator()
        self.incidents: list[Incident] = []
        self.steps = 0
        self.attempts: set[int] = set()
        self.trace = Trace() if trace else None
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.signals: dict[str, int] = {}
        self._engine = RuleEngine(pack)
        self._state = self._engine.initial()
        self._open: dict[str, Incident] = {}
        self._last: dict[str, Incident] = {}
        self._recent: deque[StepView] = deque(maxlen=WINDOW)
        self._missing: dict[str, str] = {}
        self._hidden = hidden

    def feed(self, raw: RawStep) -> list[tuple[str, Incident]]:
        """Judges one step. What changed: ('open' | 'escalate' | 'close', incident)."""
        values, missing = self.translator.translate(raw.values)
        if self._hidden:
            values = {signal: value for signal, value in values.items() if signal not in self._hidden}
        self._missing = missing
        view = StepView(run=RUN, attempt=raw.attempt, step=raw.step, values=values, missing=missing)
        self._state, outcome = self._engine.evaluate(self._state, view, 0.0)
        self._recent.append(view)
        self.steps += 1
        self.attempts.add(raw.attempt)
        self.first_step = raw.step if self.first_step is None else self.first_step
        self.last_step = raw.step
        for signal in values:
            self.signals[signal] = self.signals.get(signal, 0) + 1
        if self.trace is not None:
            self.trace.add(self.steps - 1, raw.step, values, outcome.bands)
        changes = [change for finding in outcome.findings if (change := self._change(finding, raw))]
        for rule, incident in self._open.items():
            # The later steps of an incident say more than its first: diagnose until the window is full of it.
            if rule in DIAGNOSED and raw.step - incident.onset_step <= WINDOW:
                incident.diagnosis = self._diagnosed(incident, outcome.bands)
        return changes

    def _change(self, finding: Finding, raw: RawStep) -> tuple[str, Incident] | None:
        step = raw.step
        if finding.transition == "open":
            last = self._last.get(finding.rule)
            if finding.reopens and last is not None and last.attempt == raw.attempt:
                incident = last
                incident.resolved_step = None
                if finding.severity == "critical" and incident.severity != "critical":
                    self._escalate(incident, finding, step)
            elif len(self.incidents) >= MAX_INCIDENTS:
                return None
            else:
                onset = finding.onset_step if finding.onset_step is not None else step
                incident = Incident(
                    rule=finding.rule,
                    severity=finding.severity,
                    attempt=raw.attempt,
                    opened_step=step,
                    onset_step=onset,
                    resolved_step=None,
                    explanation=finding.message,
                    evidence=finding.evidence,
                    critical_step=step if finding.severity == "critical" else None,
                )
                self.incidents.append(incident)
            self._open[finding.rule] = self._last[finding.rule] = incident
            return "open", incident
        known = self._open.get(finding.rule)
        if known is None:
            return None
        if finding.transition == "escalate":
            self._escalate(known, finding, step)
            return "escalate", known
        if finding.transition == "close":
            known.resolved_step = step
            del self._open[finding.rule]
            return "close", known
        return None

    def _escalate(self, incident: Incident, finding: Finding, step: int) -> None:
        incident.severity = "critical"
        incident.critical_step = step
        incident.explanation = finding.message
        incident.evidence = finding.evidence

    def _diagnosed(self, incident: Incident, bands: Mapping[str, tuple[float, float, float]]) -> Diagnosis | None:
        window = [v.values for v in self._recent if v.attempt == incident.attempt and v.step >= incident.onset_step]
        return diagnose(window, bands=bands, missing=self._missing) if window else None

    def report(self, log_format: str, notes: Sequence[str]) -> Report:
        """The verdict: critical while a critical incident lasts, a warning where there was any incident at all."""
        verdict: VerdictWord = "healthy"
        if self.incidents:
            lasting = any(i.severity == "critical" and i.is_open for i in self.incidents)
            verdict = "critical" if lasting else "warning"
        translator = self.translator
        return Report(
            verdict=verdict,
            format=log_format,
            steps=self.steps,
            incidents=self.incidents,
            framework=translator.framework,
            attempts=max(1, len(self.attempts)),
            first_step=self.first_step,
            last_step=self.last_step,
            signals=self.signals,
            sources={alias.signal: (name, alias.note) for name, alias in translator.used.items() if alias.signal},
            untranslated=translator.untranslated,
            always_zero=translator.always_zero,
            notes=notes,
            trace=self.trace,
        )
