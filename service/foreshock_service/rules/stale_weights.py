"""`stale_weights`: the engine samples from weights that are not the trainer's.

One stale step at a small learning rate, or one missed layer, hides under the rounding of the log-probs; checksums,
changed shares and versions do not. Version labels alone prove nothing: a channel that delivers an older buffer labels
it as the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, band_linear, fold_linear
from foreshock_service.rules.interface import UNKNOWN, Evidence, Observation, RuleConfig, Severity, StepView, Verdict

STALENESS = "staleness.max"
ENGINES = 256
"""Engines of one run whose labels and checksums are remembered."""
UNLABELLED = ("", "default")
"""What engines call weights that nobody labels."""


class Config(BaselineConfig):
    """Staleness is counted in versions, linear."""

    hold_steps: int = Field(1, ge=1, description="Consecutive findings before it opens.")
    min_spread: float = Field(0.5, gt=0, description="Smallest spread (sigma) of the staleness believed, in versions.")
    rise: float = Field(2.0, gt=0, description="Versions above the run's usual staleness that warn, if also large_z.")
    large_z: float = Field(4.0, gt=0, description="Sigmas above the run's usual staleness that count.")
    partial: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Engine's share of moved tensors over the trainer's below which a sync was partial.",
    )


class State(msgspec.Struct, frozen=True, array_like=True):
    """The usual staleness; what trainer and engine last said of their weights."""

    track: Track = FRESH
    trainer_version: str = ""
    trainer_checksum: str = ""
    trainer_moved: float = -1.0
    engines: Mapping[str, tuple[str, str]] = {}
    """Engine → label and checksum that it last told."""


class StaleWeights:
    """Critical where a checksum or a failed push proves it; else a warning."""

    name = "stale_weights"
    title = "The engine's weights are not the trainer's"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (STALENESS, "weights.version", "weights.changed_share")
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Notices of kind `weights` first, then the versions between sampling and training."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        version, checksum, moved = state.trainer_version, state.trainer_checksum, state.trainer_moved
        findings: list[tuple[Severity, Evidence]] = []
        engines = dict(state.engines)
        told = False
        for notice in seen.notices:
            if notice.get("kind") != "weights":
                continue
            data: Mapping[str, Any] = notice.get("data") or {}
            if data.get("side") == "trainer":
                version, checksum = str(data.get("version", "")), str(data.get("checksum", ""))
                moved = _share(data)
            elif data.get("side") == "engine":
                told = True
                findings += _engine(data, version, checksum, moved, config)
                findings += _against_its_last(data, engines, checksum, moved)
        track, value = state.track, seen.values.get(STALENESS)
        reading = None
        if value is not None:
            track, reading = fold_linear(track, value, seen, config, survives=True)
        after = State(track, version, checksum, moved, engines)
        if reading is not None:
            told = True
            limit = seen.settings.get("max_staleness")
            above = isinstance(limit, int | float) and reading.value > limit
            if above or (reading.calibrated and reading.excess >= config.rise and reading.z >= config.large_z):
                sentence = (
                    f"{reading.value:.0f} versions between sampling and training, {reading.centre:.0f} are usual."
                )
                findings.append(
                    (
                        "warning",
                        Evidence(signal=STALENESS, value=reading.value, expected=reading.centre, sentence=sentence),
                    )
                )
        if not findings:
            return after, Verdict(firing=False) if told else UNKNOWN
        critical = any(severity == "critical" for severity, _ in findings)
        message = " ".join(evidence.sentence for _, evidence in findings[:4])
        evidence = [evidence for _, evidence in findings[:8]]
        return after, Verdict(
            firing=True,
            severity="critical" if critical else "warning",
            message=message,
            evidence=evidence,
            edge="engine",
        )

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The usual staleness."""
        band = band_linear(state.track, config)
        return {STALENESS: band} if band else {}


def _share(data: Mapping[str, Any]) -> float:
    share = data.get("changed_share")
    return float(share) if isinstance(share, int | float) else -1.0


def _engine(
    data: Mapping[str, Any], version: str, checksum: str, moved: float, config: Config
) -> list[tuple[Severity, Evidence]]:
    """What one notice of the engine's side says against the trainer's last."""
    found: list[tuple[Severity, Evidence]] = []
    signal = "weights.version"
    if data.get("ok") is False:
        found.append(("critical", Evidence(signal=signal, value=None, sentence="The engine did not take the weights.")))
    theirs, label = str(data.get("checksum", "")), str(data.get("version", ""))
    if theirs and checksum and theirs != checksum and label == version:
        sentence = f"Checksums of version {label} differ: engine {theirs}, trainer {checksum}."
        found.append(("critical", Evidence(signal=signal, value=None, sentence=sentence)))
    share = _share(data)
    if share >= 0 and moved > 0 and share < config.partial * moved:
        severity: Severity = "critical" if share == 0 else "warning"
        sentence = f"{moved:.0%} of the trainer's tensors moved and {share:.0%} of the engine's: the sync was partial."
        found.append(
            (severity, Evidence(signal="weights.changed_share", value=share, expected=moved, sentence=sentence))
        )
    return found


def _against_its_last(
    data: Mapping[str, Any], engines: dict[str, tuple[str, str]], trainers: str, moved: float
) -> list[tuple[Severity, Evidence]]:
    """Label and checksum of an engine against what it told after its last push, which this one replaces.

    A checksum that is the trainer's proves health, whatever the labels do; a trainer of which nothing moved explains
    an engine of which nothing moved.
    """
    name, label, checksum = str(data.get("engine", "")), str(data.get("version", "")), str(data.get("checksum", ""))
    pushed = data.get("pushed")
    found: list[tuple[Severity, Evidence]] = []
    if not checksum:
        # Weights may return, after a rollback: only pushes in a row are held against each other.
        engines.pop(name, None)
        return found
    known = engines.get(name)
    if known is not None or len(engines) < ENGINES:
        engines[name] = (label, checksum)
    if checksum == trainers:
        return found
    signal = "weights.version"
    if known is not None and known[1] == checksum and known[0] != label and moved != 0:
        sentence = f"The engine's label went from {known[0]} to {label} and not one of its tensors moved."
        found.append(("critical", Evidence(signal=signal, value=None, sentence=sentence)))
    elif known is not None and known[1] != checksum and known[0] == label and label not in UNLABELLED:
        sentence = f"The engine's weights moved under the old label {label}: what it samples bears the wrong version."
        found.append(("warning", Evidence(signal=signal, value=None, sentence=sentence)))
    elif pushed is not None and label and str(pushed) != label:
        sentence = f"The engine was pushed version {pushed} and labels it {label}."
        found.append(("warning", Evidence(signal=signal, value=None, sentence=sentence)))
    return found


RULE = StaleWeights()
