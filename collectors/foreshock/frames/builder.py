"""One rank's step, from calls of the host to a sealed frame. Sealing is cheap; the sender's thread builds."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import Any

from foreshock.frames.catalogue import PAIRS
from foreshock.frames.comparable import differences, sides
from foreshock.frames.scalars import Folded, Scalars
from foreshock.wire.envelope import Frame, Semantics

_log = getLogger("foreshock")
OLD_SOURCES = ("same_weights", "older_weights", "interpolated", "rollout", "detached")


class SealedStep:
    """What `end_step` hands to the sender: everything of a step, still unread."""

    __slots__ = ("evidence", "folded", "missing", "pairs", "semantics", "step", "step_s")

    def __init__(
        self,
        step: int,
        folded: Folded,
        pairs: dict[str, Any],
        missing: dict[str, str],
        semantics: dict[str, dict[str, Semantics]],
        step_s: float | None,
        evidence: bool = True,
    ) -> None:
        self.step = step
        self.folded = folded
        self.pairs = pairs
        self.missing = missing
        self.semantics = semantics
        self.step_s = step_s
        self.evidence = evidence

    def ready(self) -> bool:
        """True when no device is still on its way to the figures."""
        return self.folded.ready() and all(accumulator.ready() for accumulator in self.pairs.values())

    def build(self, *, sequence: int, generation: int, role: str, rank: int, sealed_s: float, waited: bool) -> Frame:
        """Reads the figures. With `waited` False, what has not arrived is missing as `not_reported`."""
        records, missing = {}, dict(self.missing)
        for key, accumulator in self.pairs.items():
            if not waited and not accumulator.ready():
                missing[key] = "not_reported"
                continue
            record = accumulator.record()
            if not self.evidence:
                record.set_evidence([])
            # A lag that no token had is no stratum.
            if "@lag" not in key or record.tokens or record.nonfinite or record.sentinels:
                records[key] = record
        scalars = self.folded.values(waited)
        return Frame(
            sequence=sequence,
            step=self.step,
            role=role,
            rank=rank,
            sealed_s=sealed_s,
            generation=generation,
            pairs=records,
            scalars=scalars,
            missing=missing,
            semantics=self.semantics,
            step_s=self.step_s,
        )


class StepBuilder:
    """Collects one step after the other. Not thread-safe: one training loop feeds it."""

    def __init__(self, max_signals: int, max_lag: int, evidence: bool) -> None:
        self.scalars = Scalars(max_signals)
        self.notes: list[str] = []
        self.errors: list[Exception] = []
        """Of sealing: the pairs concerned are missing, the frame is sealed all the same."""
        self._max_lag = max_lag
        self._evidence = evidence
        self._said: dict[str, dict[str, Semantics]] = {}
        self._differing: dict[str, bool] = {}
        self._noted: set[str] = set()
        self._last_end_s: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the step in progress."""
        self.scalars.reset()
        self._pairs: dict[str, Any] = {}
        self._missing: dict[str, str] = {}
        self._new_semantics: dict[str, dict[str, Semantics]] = {}
        self._advantage_pair: str | None = None
        self._advantages: Any = None

    def observe(
        self,
        pair: str,
        a: Any,
        b: Any,
        mask: Any,
        *,
        optimizer_step: int = 0,
        semantics: Semantics | Mapping[str, Any] | None = None,
        old_source: str = "same_weights",
        versions: Any = None,
        advantages: Any = None,
        **where: Any,
    ) -> None:
        """Adds a micro-batch of a pair. See `Monitor.observe`."""
        pair = _landing(pair, optimizer_step, old_source)
        if pair == "policy" and old_source != "same_weights":
            self._missing[pair] = old_source
            return
        if a is None or b is None:
            engine_side = pair in ("mismatch", "mismatch_current") and b is None
            self._missing[pair] = "no_rollout_logprobs" if engine_side else "not_reported"
            return
        if self._differ(pair, semantics):
            self._missing[pair] = "semantics_differ"
            return
        try:
            self._add(pair, a, b, mask, where)
            if versions is not None:
                self._add_by_lag(pair, a, b, mask, versions, where)
        except Exception:
            self._pairs.pop(pair, None)
            self._missing[pair] = "not_reported"
            raise
        if advantages is not None:
            self._add_advantages(pair, advantages, mask)

    def seal(self, step: int, now_s: float) -> SealedStep:
        """Ends the step: starts the copies to the host and hands everything over. Never waits for a device."""
        for key, accumulator in list(self._pairs.items()):
            try:
                accumulator.collect()
            except Exception as error:
                del self._pairs[key]
                self._missing[key] = "not_reported"
                self.errors.append(error)
        missing = {key: why for key, why in self._missing.items() if key not in self._pairs}
        step_s = None if self._last_end_s is None else now_s - self._last_end_s
        folded = self._fold()
        sealed = SealedStep(step, folded, self._pairs, missing, self._new_semantics, step_s, self._evidence)
        self._last_end_s = now_s
        self.reset()
        return sealed

    def restart_clock(self, now_s: float) -> None:
        """The next step's duration counts from here: after a pause or a rollback."""
        self._last_end_s = now_s

    def note_once(self, text: str) -> None:
        """Keeps a sentence for the next notice, once in the life of the process."""
        if text not in self._noted and len(self._noted) < 100:
            self._noted.add(text)
            self.notes.append(text)

    def _fold(self) -> Folded:
        try:
            if self._advantages is not None:
                self.scalars.add(self._advantages.scalars())
            return self.scalars.seal()
        except Exception as error:
            self.errors.append(error)
            return self.scalars.seal(with_devices=False)

    def _add(self, key: str, a: Any, b: Any, mask: Any, where: Mapping[str, Any]) -> None:
        accumulator = self._pairs.get(key)
        if accumulator is None:
            # Needs torch, which is the host's: imported at the first tensors, never before.
            from foreshock.stats.pair import PairAccumulator

            accumulator = self._pairs[key] = PairAccumulator()
        accumulator.observe(a, b, mask, **where)

    def _add_by_lag(self, pair: str, a: Any, b: Any, mask: Any, versions: Any, where: Mapping[str, Any]) -> None:
        from foreshock.frames.lags import by_lag

        for lag, lag_mask in by_lag(versions, mask, a, self._max_lag):
            self._add(f"{pair}@lag{lag}", a, b, lag_mask, where)

    def _add_advantages(self, pair: str, advantages: Any, mask: Any) -> None:
        """Of one pair only: a host that passes them with two would count each token twice."""
        if self._advantage_pair is None:
            from foreshock.frames.advantages import Advantages

            self._advantage_pair, self._advantages = pair, Advantages()
        if self._advantage_pair == pair:
            self._advantages.add(advantages, mask)

    def _differ(self, pair: str, semantics: Semantics | Mapping[str, Any] | None) -> bool:
        said = sides(semantics)
        if not said:
            return False
        if self._said.get(pair) != said:
            self._said[pair] = self._new_semantics[pair] = said
            self._differing[pair] = len(said) == 2 and self._note_differences(pair, said)
        return self._differing[pair]

    def _note_differences(self, pair: str, said: Mapping[str, Semantics]) -> bool:
        found = differences(said["a"], said["b"])
        if found:
            fields = "; ".join(f"{name}: {one!r} against {other!r}" for name, (one, other) in found.items())
            self.note_once(f"{pair} is not compared, its streams differ in {fields}")
        return bool(found)


def _landing(pair: str, optimizer_step: int, old_source: str) -> str:
    """The pair that an observation belongs to. Raises ValueError for an unknown pair or source."""
    if pair not in PAIRS:
        raise ValueError(f"unknown pair {pair!r}; known are {', '.join(PAIRS)}")
    if old_source not in OLD_SOURCES:
        raise ValueError(f"old_source must be one of {', '.join(OLD_SOURCES)}, not {old_source!r}")
    return "update" if pair == "policy" and optimizer_step > 0 else pair
