"""The engine: one observation through every rule of a pack, then hold, hysteresis and cool-down, the same for all.

Nothing here is global and nothing is kept between calls but the pack: the state of a run goes in and comes out. A state
is never changed in place, so a caller whose transaction failed evaluates again from the state it had.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from foreshock_service.rules.interface import (
    UNKNOWN,
    Edge,
    Finding,
    Observation,
    Outcome,
    RuleConfig,
    Severity,
    Tick,
    Verdict,
)
from foreshock_service.rules.pack import Entry, Pack

logger = logging.getLogger(__name__)

FORMAT = 1
UPDATE_EVERY = 10
"""While an incident stays open, its finding is refreshed at every tenth firing observation."""


class RuleState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One rule on one run: what the rule folded, and where its incident stands."""

    hash: str
    body: Any
    """The rule's own state."""
    streak: int = 0
    """Consecutive observations out of range, unknown ones left out."""
    clear: int = 0
    open: Severity | None = None
    onset: int | None = None
    """First step of the excursion, as the rule said or as the streak began."""
    edge: Edge | None = None
    since_close: int | None = None
    """Observations since the last incident resolved; None before the first."""
    errors: int = 0


class EngineState(msgspec.Struct, frozen=True):
    """All rules on one run, by name. `RuleEngine.dump` makes bytes of it."""

    rules: Mapping[str, RuleState]


class _DumpedRule(msgspec.Struct, kw_only=True):
    hash: str
    body: msgspec.Raw
    streak: int = 0
    clear: int = 0
    open: Severity | None = None
    onset: int | None = None
    edge: Edge | None = None
    since_close: int | None = None
    errors: int = 0


class _Dumped(msgspec.Struct):
    format: int
    rules: dict[str, _DumpedRule]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Dumped)


class RuleEngine:
    """Evaluates a pack. Cheap to make; holds no run's state."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._entries = tuple(
            (e.rule.name, e.hash, e.config, e.rule.step, getattr(e.rule, "bands", None), e) for e in pack.entries
        )
        self._tick_entries = tuple(item for item in self._entries if item[-1].rule.wants_ticks)

    def initial(self) -> EngineState:
        """The state before the first observation."""
        return EngineState({e.rule.name: _fresh(e) for e in self.pack.entries})

    def evaluate(self, state: EngineState, seen: Observation, now: float) -> tuple[EngineState, Outcome]:
        """Folds one step (all rules) or one tick (those that want ticks). Never raises for what a rule does.

        `now` is epoch seconds of the service's clock. Findings come in the pack's order.
        """
        rules = dict(state.rules)
        findings: list[Finding] = []
        firing: list[str] = []
        told: list[Mapping[str, tuple[float, float, float]]] = []
        errors: dict[str, str] = {}
        ticking = isinstance(seen, Tick)
        for name, hashed, config, step, banded, entry in self._tick_entries if ticking else self._entries:
            before = rules.get(name)
            if before is None or before.hash != hashed:
                rules[name] = before = _fresh(entry, before)
            failed = 0
            try:
                body, verdict = step(before.body, seen, config, now)
                if banded is not None and not ticking:
                    told.append(banded(body, config))
            except Exception as error:
                # One rule's defect must not spoil the others, nor keep the run from being evaluated at all.
                logger.exception("rule %s failed on run %s, step %s", name, seen.run, seen.step)
                body, verdict, failed = before.body, UNKNOWN, 1
                errors[name] = f"{type(error).__name__}: {error}"
            if not (verdict.firing or before.streak or before.open or failed or before.errors) and (
                before.since_close is None
            ):
                # The common case, kept cheap: nothing is open, nothing begins, no cool-down is counted.
                if body is not before.body:
                    rules[name] = RuleState(hash=hashed, body=body)
                continue
            rules[name], finding = _transition(before, body, verdict, config, seen.step, failed, name)
            if rules[name].open:
                firing.append(name)
            if finding is not None:
                findings.append(finding)
        if len(rules) > len(self._entries):
            findings.extend(self._orphans_closed(rules, seen.step))
        if ticking:  # most rules were not asked, and theirs stay open
            firing = [e.rule.name for e in self.pack.entries if (r := rules.get(e.rule.name)) is not None and r.open]
        bands: dict[str, tuple[float, float, float]] = {}
        for said in reversed(told):
            bands.update(said)  # of two rules that learn one signal the first in order speaks
        return EngineState(rules), Outcome(findings=findings, firing=firing, bands=bands, errors=errors)

    def dump(self, state: EngineState) -> bytes:
        """The state as msgpack, to be committed with the outcome."""
        return _encoder.encode({"format": FORMAT, "rules": state.rules})

    def load(self, data: bytes | None) -> EngineState:
        """The state from bytes. What does not fit this pack (rule, configuration, format) starts afresh.

        An incident that was open stays open under a new configuration until the rule says otherwise.
        """
        if not data:
            return self.initial()
        try:
            dumped = _decoder.decode(data)
        except msgspec.MsgspecError:
            logger.warning("stored rule state cannot be read; every rule starts afresh")
            return self.initial()
        kept = dumped.rules if dumped.format == FORMAT else {}
        rules = {e.rule.name: _restored(e, kept.get(e.rule.name)) for e in self.pack.entries}
        for name, rule in kept.items():
            if name not in rules and rule.open:
                rules[name] = RuleState(hash="", body=None, open=rule.open, onset=rule.onset)
        return EngineState(rules)

    def _orphans_closed(self, rules: dict[str, RuleState], step: int | None) -> list[Finding]:
        """Drops the rules that this pack no longer has, closing what they had open: nobody else would."""
        present = {e.rule.name for e in self.pack.entries}
        closed = []
        for name in [n for n in rules if n not in present]:
            rule = rules.pop(name)
            if rule.open:
                message = "The rule was switched off or removed."
                closed.append(
                    Finding(
                        rule=name,
                        transition="close",
                        severity=rule.open,
                        step=step,
                        onset_step=rule.onset,
                        message=message,
                    )
                )
        return closed


def _fresh(entry: Entry, before: RuleState | None = None) -> RuleState:
    """A rule's first state; an incident that was open under another configuration stays open."""
    if before is None:
        return RuleState(hash=entry.hash, body=entry.rule.state())
    return msgspec.structs.replace(before, hash=entry.hash, body=entry.rule.state(), streak=0, clear=0)


def _restored(entry: Entry, dumped: _DumpedRule | None) -> RuleState:
    if dumped is None:
        return _fresh(entry)
    fields = {
        name: getattr(dumped, name) for name in ("streak", "clear", "open", "onset", "edge", "since_close", "errors")
    }
    stored = RuleState(hash=dumped.hash, body=None, **fields)
    if dumped.hash == entry.hash:
        try:
            body = msgspec.msgpack.decode(dumped.body, type=entry.rule.state)
            return msgspec.structs.replace(stored, body=body)
        except msgspec.MsgspecError:
            logger.warning("stored state of rule %s cannot be read; it starts afresh", entry.rule.name)
    return _fresh(entry, stored)


def _transition(
    before: RuleState, body: Any, verdict: Verdict, config: RuleConfig, step: int | None, failed: int, name: str
) -> tuple[RuleState, Finding | None]:
    """Hold, hysteresis, cool-down: where the incident stands after this verdict, and what changed."""
    streak, clear, opened, onset, edge = before.streak, before.clear, before.open, before.onset, before.edge
    since = before.since_close
    change: Literal["open", "update", "escalate", "close"] | None = None
    reopens = False
    if since is not None and opened is None:
        since += 1
    if verdict.firing:
        streak, clear = streak + 1, 0
        severity: Severity = config.severity or verdict.severity
        if streak == 1 and opened is None:
            onset = step
        if verdict.onset_step is not None and opened is None:
            onset = verdict.onset_step
        if opened is None and streak >= config.hold_steps:
            reopens = since is not None and since <= config.cooldown_steps
            change, opened, edge = "open", severity, verdict.edge
        elif opened == "warning" and severity == "critical":
            change, opened, edge = "escalate", severity, verdict.edge
        elif opened is not None and (verdict.edge != edge or streak % UPDATE_EVERY == 0):
            change, edge = "update", verdict.edge
    elif verdict.firing is False:
        streak = 0
        if opened is None:
            onset = None
        else:
            clear += 1
            if clear >= config.clear_steps:
                change = "close"
    finding = None
    if change is not None and opened is not None:
        finding = Finding(
            rule=name,
            transition=change,
            severity=opened,
            step=step,
            onset_step=onset,
            message=verdict.message,
            evidence=verdict.evidence,
            edge=edge,
            reopens=reopens,
        )
    if change == "close":
        clear, opened, onset, edge, since = 0, None, None, None, 0
    after = RuleState(
        hash=before.hash,
        body=body,
        streak=streak,
        clear=clear,
        open=opened,
        onset=onset,
        edge=edge,
        since_close=since,
        errors=before.errors + failed,
    )
    return after, finding
