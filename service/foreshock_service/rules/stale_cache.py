"""`stale_cache`: the engine got new weights and kept the KV cache of the old ones.

Shared prefixes are then continued from states that no weights ever produced. The version span of a response still
looks clean, so the evidence is the flush that did not come, and the mismatch that grows within a job.
"""

from __future__ import annotations

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, fold_log, out_of_range
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

MISMATCH = "mismatch.kl_k3"
LOG_FLOOR = 1e-9


class Config(BaselineConfig):
    """Needs a host that tells of pushes and flushes."""

    unflushed: int = Field(
        1, ge=1, description="Pushes of weights without a flush that warn, once a flush was ever seen."
    )
    negligible: float = Field(1e-3, ge=0, description="mismatch.kl_k3 (nats) below which it stays a warning.")


class State(msgspec.Struct, frozen=True, array_like=True):
    """The mismatch's baseline, whether the host ever told of a flush, and pushes since the last one."""

    track: Track = FRESH
    flushes: bool = False
    unflushed: int = 0


class StaleCache:
    """Warns; critical when the mismatch is out of its range as well."""

    name = "stale_cache"
    title = "The engine's KV cache outlived its weights"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (MISMATCH,)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Counts `weights` notices of the engine's side against `flush` notices, in their order."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        flushes, unflushed, told = state.flushes, state.unflushed, False
        for notice in seen.notices:
            kind = notice.get("kind")
            if kind == "flush":
                flushes, unflushed, told = True, 0, True
            elif kind == "weights" and (notice.get("data") or {}).get("side") == "engine":
                unflushed, told = unflushed + 1, True
        caching = flushes or bool(seen.settings.get("prefix_cache"))
        track, reading = state.track, None
        if caching and MISMATCH in seen.values:
            track, reading = fold_log(track, seen.values[MISMATCH], seen, config, floor=LOG_FLOOR)
        after = State(track, flushes, unflushed)
        if not caching or unflushed < config.unflushed:
            return after, QUIET if told else UNKNOWN
        high = reading is not None and reading.value >= config.negligible and out_of_range(reading, config)
        message = f"{unflushed} pushes of weights since the engine last flushed its cache."
        evidence = [Evidence(signal="weights.version", value=float(unflushed), bound=0.0, sentence=message)]
        if reading is not None:
            sentence = "Out of its range as well." if high else "Still in its range."
            evidence.append(Evidence(signal=MISMATCH, value=reading.value, expected=reading.centre, sentence=sentence))
        severity = "critical" if high else "warning"
        return after, Verdict(firing=True, severity=severity, message=message, evidence=evidence, edge="engine")  # type: ignore[arg-type]


RULE = StaleCache()
