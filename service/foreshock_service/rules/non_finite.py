"""`non_finite`: a NaN or an infinity anywhere is an incident at once; nothing needs to be learned for that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import UNKNOWN, Evidence, Observation, RuleConfig, Severity, StepView, Verdict

VITAL: Final = frozenset({"loss", "grad.norm", "entropy.mean", "reward.mean", "norm.update_ratio", "lr"})
"""Scalars without which no update is sane. A NaN elsewhere (a deviation over one sample, say) warns."""
VITAL_PAIRS: Final = ("policy", "update", "mismatch", "mismatch_current", "reference")
TRAINER_PAIRS: Final = ("policy", "update", "reference")
COUNTS: Final = tuple(f"{pair}.{count}" for pair in VITAL_PAIRS for count in ("nonfinite", "sentinels", "overflow"))
COUNTED: Final = (*COUNTS, "grad.nonfinite")
SHOWN: Final = 8


class Config(RuleConfig):
    """No baseline: the bounds are invariants."""

    clear_steps: int = Field(5, ge=1, description="Consecutive finite steps before it resolves.")
    engine_share: float = Field(
        1e-3, ge=0, le=1, description="Share of an engine's tokens that may be non-finite with a warning only."
    )
    ignore: tuple[str, ...] = Field((), description="Signals that may be NaN by design.")


class State(msgspec.Struct, frozen=True, array_like=True):
    """Nothing to remember."""


def offenders(values: Mapping[str, float]) -> list[str]:
    """Names of the signals that are NaN or infinite. One addition a signal when all are finite."""
    if math.isfinite(sum(values.values())):
        return []
    return [name for name, value in values.items() if not math.isfinite(value)]


class NonFinite:
    """Reads every signal."""

    name = "non_finite"
    title = "NaN or infinity"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (
        "loss", "grad.norm", "grad.nonfinite", "update.skipped", "entropy.mean", "reward.mean",
        *COUNTS,
    )  # fmt: skip
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Critical for a vital signal, a trainer pass or many engine tokens; a warning for the rest."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        found = [(name, _severity(name)) for name in offenders(seen.values) if name not in config.ignore]
        evidence = [
            Evidence(signal=name, value=seen.values[name], sentence=f"{name} is {seen.values[name]}.")
            for name, _ in found
        ]
        severities = [severity for _, severity in found]
        for signal, severity, sentence in _counted(seen, config):
            severities.append(severity)
            rank = seen.worst.get(signal, (0.0, None))[1]
            evidence.append(
                Evidence(signal=signal, value=seen.values[signal], expected=0.0, rank=rank, sentence=sentence)
            )
        if not severities:
            return state, _FINITE if seen.values else UNKNOWN
        critical = "critical" in severities
        names = ", ".join(e.signal for e in evidence[:SHOWN]) + (" and others" if len(evidence) > SHOWN else "")
        message = f"Non-finite at step {seen.step}: {names}."
        return state, Verdict(
            firing=True,
            severity="critical" if critical else "warning",
            onset_step=seen.step,
            message=message,
            evidence=evidence[:SHOWN],
        )


def _severity(name: str) -> Severity:
    pair, _, statistic = name.partition(".")
    vital = name in VITAL or (statistic and pair.partition("@")[0] in VITAL_PAIRS)
    return "critical" if vital else "warning"


def _counted(seen: StepView, config: Config) -> list[tuple[str, Severity, str]]:
    """Findings from counts: these are finite numbers that say how many others were not."""
    values, found = seen.values, list[tuple[str, Severity, str]]()
    if not any(values.get(name) for name in COUNTED):
        return found
    for pair in VITAL_PAIRS:
        name = f"{pair}.nonfinite"
        count = values.get(name, 0.0)
        if count > 0 and name not in config.ignore:
            share = count / (count + values.get(f"{pair}.tokens", 0.0))
            serious = pair in TRAINER_PAIRS or share > config.engine_share
            found.append(
                (name, "critical" if serious else "warning", f"{count:.0f} counted tokens of `{pair}` are not finite.")
            )
        name = f"{pair}.sentinels"
        if (count := values.get(name, 0.0)) > 0 and name not in config.ignore:
            found.append((name, "warning", f"{count:.0f} tokens carry an engine's sentinel instead of a log-prob."))
        name = f"{pair}.overflow"
        if (count := values.get(name, 0.0)) > 0 and name not in config.ignore:
            found.append((name, "warning", f"exp(a - b) overflows on {count:.0f} tokens of `{pair}`."))
    if (count := values.get("grad.nonfinite", 0.0)) > 0 and "grad.nonfinite" not in config.ignore:
        skipped = values.get("update.skipped", 0.0) > 0
        sentence = f"{count:.0f} gradients are not finite{'; the update was skipped' if skipped else ''}."
        found.append(("grad.nonfinite", "warning" if skipped else "critical", sentence))
    return found


_FINITE = Verdict(firing=False)
RULE = NonFinite()
