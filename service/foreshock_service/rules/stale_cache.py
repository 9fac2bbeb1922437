"""`stale_cache`: the engine got new weights and kept the KV cache of the old ones.

Shared prefixes are then continued from states that no weights ever produced. The version span of a response still
looks clean, so the evidence is the flush that did not come, and the mismatch that grows within a job.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Track, fold_log, out_of_range
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

MISMATCH = "mismatch.kl_k3"
LOG_FLOOR = 1e-9
ENGINES = 256
"""Engines of one run that are counted apart."""


class Config(BaselineConfig):
    """Needs a host that tells of pushes and flushes."""

    unflushed: int = Field(
        1, ge=1, description="Pushes of weights without a flush that warn, once a flush was ever seen."
    )
    negligible: float = Field(1e-3, ge=0, description="mismatch.kl_k3 (nats) below which it stays a warning.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The mismatch's baseline, whether a cache was ever told of, and the pushes to each engine since its last flush."""

    track: Track = FRESH
    flushes: bool = False
    pushes: Mapping[str, int] = {}


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
        flushes, pushes, told = state.flushes, dict(state.pushes), False
        for notice in seen.notices:
            kind, data = notice.get("kind"), notice.get("data") or {}
            engine = str(data.get("engine", ""))
            if kind == "flush":
                flushes, told = True, True
                # A host that names the engine on one side only means the one that it has.
                pushes = {name: n for name, n in pushes.items() if engine and name and name != engine}
            elif kind == "weights" and data.get("side") == "engine":
                engine = engine if engine in pushes or len(pushes) < ENGINES else ""
                # `clean`: nothing was generated since the last flush, so that nothing old can be kept.
                pushes[engine], told = 0 if data.get("clean") else pushes.get(engine, 0) + 1, True
                flushes = flushes or bool(data.get("caching"))
        unflushed = max(pushes.values(), default=0)
        caching = flushes or bool(seen.settings.get("prefix_cache"))
        track, reading = state.track, None
        if caching and MISMATCH in seen.values:
            track, reading = fold_log(track, seen.values[MISMATCH], seen, config, floor=LOG_FLOOR)
        after = State(track, flushes, pushes)
        if not caching or unflushed < config.unflushed:
            return after, QUIET if told else UNKNOWN
        high = reading is not None and reading.value >= config.negligible and out_of_range(reading, config)
        late = sum(1 for n in pushes.values() if n >= config.unflushed)
        message = f"{unflushed} pushes of weights since the engine last flushed its cache."
        message += f" So with {late} engines." if late > 1 else ""
        evidence = [Evidence(signal="weights.version", value=float(unflushed), bound=0.0, sentence=message)]
        if reading is not None:
            sentence = "Out of its range as well." if high else "Still in its range."
            evidence.append(Evidence(signal=MISMATCH, value=reading.value, expected=reading.centre, sentence=sentence))
        severity = "critical" if high else "warning"
        return after, Verdict(firing=True, severity=severity, message=message, evidence=evidence, edge="engine")  # type: ignore[arg-type]


RULE = StaleCache()
