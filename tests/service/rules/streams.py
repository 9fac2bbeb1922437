"""Synthetic runs for the rules' tests: deterministic noise, and what the engine found on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.interface import Finding, Observation, StepView
from foreshock_service.rules.pack import Pack, default_pack


def view(step: int, values: Mapping[str, float], **more: Any) -> StepView:
    """One complete step of attempt 1."""
    return StepView(**{"run": "lab/run", "attempt": 1, "step": step, "values": values, **more})


def noise(seed: int, sigma: float) -> Iterator[float]:
    """Log-normal factors around 1, the same for the same seed."""
    source = random.Random(seed)
    while True:
        yield math.exp(source.gauss(0.0, sigma))


def healthy_values(seed: int = 0) -> Iterator[dict[str, float]]:
    """A calm on-policy run: reward rises, entropy falls slowly, everything else is noise around a level."""
    source, step = random.Random(seed), 0
    while True:
        policy, mismatch = 2e-5 * math.exp(source.gauss(0, 0.4)), 3e-4 * math.exp(source.gauss(0, 0.4))
        yield {
            "policy.kl_k2": policy,
            "mismatch.kl_k2": mismatch,
            "mismatch.kl_k3": mismatch,
            "mismatch_current.kl_k2": mismatch + policy,
            "reward.mean": 0.35 + 0.3 * (1 - math.exp(-step / 60)) + source.gauss(0, 0.02),
            "entropy.mean": 0.6 * math.exp(-step / 400) * math.exp(source.gauss(0, 0.03)),
            "grad.norm": 0.4 * math.exp(source.gauss(0, 0.25)),
            "loss": source.gauss(0, 0.01),
            "length.mean": 500 + step + source.gauss(0, 10),
            "lr": 1e-6,
            "weights.changed_share": 1.0,
        }
        step += 1


def healthy(steps: int, seed: int = 0, first: int = 0, **more: Any) -> list[StepView]:
    """`steps` calm steps."""
    values = healthy_values(seed)
    return [view(first + i, next(values), **more) for i in range(steps)]


def changed(views: Iterable[StepView], start: int, **values: Any) -> list[StepView]:
    """The same run with values set from step `start` on; a callable gets the value that was there."""
    result = []
    for seen in views:
        new = dict(seen.values)
        if seen.step >= start:
            for name, value in values.items():
                signal = name.replace("__", ".")
                new[signal] = value(new.get(signal, 0.0)) if callable(value) else value
        result.append(view(seen.step, new, attempt=seen.attempt, segment=seen.segment, settings=seen.settings))
    return result


@dataclass
class Incident:
    """What the engine said about one rule's incident."""

    rule: str
    severity: str
    opened: int | None
    closed: int | None
    findings: list[Finding]

    @property
    def first(self) -> Finding:
        """The finding that opened it."""
        return self.findings[0]


def only(*names: str, **keys: Any) -> Pack:
    """A pack of these rules; `keys` configure the first."""
    settings: dict[str, dict[str, Any]] = {name: {} for name in default_pack().settings}
    for name in settings:
        settings[name] = {"enabled": name in names}
    settings[names[0]].update(keys)
    return default_pack().with_overrides(settings)


def incidents(views: Iterable[Observation], pack: Pack | None = None) -> list[Incident]:
    """Every incident, in order of opening; rules must not fail."""
    engine = RuleEngine(pack or default_pack())
    state, found, now = engine.initial(), list[Incident](), 1000.0
    for seen in views:
        state, outcome = engine.evaluate(state, seen, now)
        assert not outcome.errors
        now += 10.0
        for finding in outcome.findings:
            if finding.transition == "open":
                found.append(Incident(finding.rule, finding.severity, finding.step, None, [finding]))
                continue
            incident = next(i for i in reversed(found) if i.rule == finding.rule)
            incident.findings.append(finding)
            incident.severity = finding.severity
            if finding.transition == "close":
                incident.closed = finding.step
    return found


def opened(views: Iterable[Observation], name: str, **keys: Any) -> list[Incident]:
    """The incidents of one rule alone."""
    return incidents(views, only(name, **keys))
