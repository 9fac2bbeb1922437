"""Hold, hysteresis, cool-down, failures, and state that survives bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foreshock_service.rules.engine import EngineState, RuleEngine
from foreshock_service.rules.interface import QUIET, UNKNOWN, Observation, RuleConfig, StepView, Tick, Verdict
from foreshock_service.rules.pack import Entry, Pack, default_pack
from tests.service.rules.streams import changed, healthy, only, view


class Script(msgspec.Struct, frozen=True):
    """How often the rule was asked."""

    asked: int = 0


class Scripted:
    """Says what the view's values tell it: 1 fires, 2 fires critically, 0 does not, absent is unknown, −1 raises."""

    name = "scripted"
    title = "Scripted"
    config: type[RuleConfig] = RuleConfig
    state: type[Script] = Script
    reads: tuple[str, ...] = ("x",)
    wants_ticks = False

    def step(self, state: Script, seen: Observation, config: RuleConfig, now: float) -> tuple[Script, Verdict]:
        assert isinstance(seen, StepView)
        x = seen.values.get("x")
        if x == -1:
            raise ZeroDivisionError("scripted")
        if x is None:
            return Script(state.asked + 1), UNKNOWN
        if x == 0:
            return Script(state.asked + 1), QUIET
        verdict = Verdict(firing=True, severity="critical" if x == 2 else "warning", message=f"x is {x}")
        return Script(state.asked + 1), verdict


def scripted(**keys: Any) -> RuleEngine:
    return RuleEngine(Pack((Entry(Scripted(), RuleConfig(**keys), "h"),), {}, "p"))


def story(engine: RuleEngine, script: list[float | None]) -> list[str]:
    """`step:transition` of every finding; a reopened one with an exclamation mark."""
    state, told = engine.initial(), []
    for step, x in enumerate(script):
        state, outcome = engine.evaluate(state, view(step, {} if x is None else {"x": x}), 0.0)
        told += [f"{step}:{f.transition}{'!' if f.reopens else ''}" for f in outcome.findings]
    return told


def test_an_incident_opens_only_after_the_steps_it_must_hold() -> None:
    assert story(scripted(hold_steps=3), [0, 1, 1, 0, 1, 1, 1]) == ["6:open"]


def test_an_incident_closes_only_after_enough_clear_steps_in_a_row() -> None:
    assert story(scripted(clear_steps=3), [1, 0, 0, 1, 0, 0, 0, 0]) == ["0:open", "6:close"]


def test_unknown_steps_neither_open_nor_close_anything() -> None:
    assert story(scripted(hold_steps=2, clear_steps=2), [1, None, None, 1, 0, None, None, 0]) == ["3:open", "7:close"]


def test_within_the_cool_down_the_old_incident_is_reopened_and_after_it_a_new_one_opens() -> None:
    engine = scripted(clear_steps=1, cooldown_steps=3)
    assert story(engine, [1, 0, 0, 1, 0]) == ["0:open", "1:close", "3:open!", "4:close"]
    assert story(engine, [1, 0, 0, 0, 0, 1]) == ["0:open", "1:close", "5:open"]


def test_a_warning_that_turns_critical_escalates_once_and_never_softens() -> None:
    assert story(scripted(), [1, 2, 2, 1, 2]) == ["0:open", "1:escalate"]


def test_a_configured_severity_overrides_the_rules_own() -> None:
    engine = scripted(severity="warning")
    _, outcome = engine.evaluate(engine.initial(), view(0, {"x": 2}), 0.0)
    assert outcome.findings[0].severity == "warning"


def test_an_open_incident_is_refreshed_at_every_tenth_firing_step() -> None:
    assert story(scripted(), [1] * 21) == ["0:open", "9:update", "19:update"]


def test_the_onset_is_the_first_step_of_the_streak_where_the_rule_names_none() -> None:
    engine = scripted(hold_steps=3)
    state = engine.initial()
    for step in range(5, 8):
        state, outcome = engine.evaluate(state, view(step, {"x": 1}), 0.0)
    assert outcome.findings[0].onset_step == 5


def test_a_rule_that_raises_is_unknown_for_that_step_is_reported_and_spoils_no_other() -> None:
    good = default_pack().entries[0]
    engine = RuleEngine(Pack((Entry(Scripted(), RuleConfig(), "h"), good), {}, "p"))
    state, outcome = engine.evaluate(engine.initial(), view(0, {"x": 1}), 0.0)
    state, outcome = engine.evaluate(state, view(1, {"x": -1, "loss": float("nan")}), 0.0)
    assert outcome.errors == {"scripted": "ZeroDivisionError: scripted"}
    assert [f.rule for f in outcome.findings] == ["non_finite"]
    assert set(outcome.firing) == {"scripted", "non_finite"}
    assert state.rules["scripted"].errors == 1
    assert state.rules["scripted"].body == Script(1)


def ill_run() -> list[StepView]:
    return changed(healthy(70), 30, policy__kl_k2=lambda x: 5e3 * x, mismatch_current__kl_k2=lambda x: 1e3 * x)


def test_the_same_observations_give_the_same_findings_and_the_same_bytes() -> None:
    def once() -> tuple[list[Any], bytes]:
        engine = RuleEngine(default_pack())
        state, told = engine.initial(), []
        for seen in ill_run():
            state, outcome = engine.evaluate(state, seen, 0.0)
            told.append(outcome)
        return told, engine.dump(state)

    assert once() == once()


def test_evaluating_leaves_the_given_state_as_it_was() -> None:
    engine = RuleEngine(default_pack())
    state = engine.initial()
    for seen in ill_run()[:40]:
        state, _ = engine.evaluate(state, seen, 0.0)
    before = engine.dump(state)
    first = engine.evaluate(state, ill_run()[40], 0.0)
    assert engine.dump(state) == before
    assert engine.evaluate(state, ill_run()[40], 0.0) == first


@pytest.mark.parametrize("cut", [1, 9, 20, 31, 45])
def test_a_state_that_went_through_bytes_has_the_same_future(cut: int) -> None:
    engine = RuleEngine(default_pack())
    straight = through = engine.initial()
    for seen in ill_run()[:cut]:
        straight, _ = engine.evaluate(straight, seen, 0.0)
    through = RuleEngine(default_pack()).load(engine.dump(straight))
    for seen in ill_run()[cut:]:
        straight, expected = engine.evaluate(straight, seen, 0.0)
        through, outcome = engine.evaluate(through, seen, 0.0)
        assert outcome == expected
    assert engine.dump(through) == engine.dump(straight)


def test_a_changed_configuration_starts_that_rule_afresh_and_keeps_the_rest_and_its_open_incident() -> None:
    engine = RuleEngine(default_pack())
    state = engine.initial()
    for seen in ill_run()[:35]:
        state, outcome = engine.evaluate(state, seen, 0.0)
    assert "onpolicy_disagreement" in outcome.firing
    other = RuleEngine(default_pack().with_overrides({"onpolicy_disagreement": {"clear_steps": 2}}))
    loaded = other.load(engine.dump(state))
    assert loaded.rules["onpolicy_disagreement"].body == type(loaded.rules["onpolicy_disagreement"].body)()
    assert loaded.rules["onpolicy_disagreement"].open == "critical"
    assert loaded.rules["rollout_mismatch"] == state.rules["rollout_mismatch"]


def test_switching_a_rule_off_closes_its_open_incident() -> None:
    engine = RuleEngine(default_pack())
    state, _ = engine.evaluate(engine.initial(), view(0, {"loss": float("inf")}), 0.0)
    without = RuleEngine(default_pack().with_overrides({"non_finite": {"enabled": False}}))
    state, outcome = without.evaluate(without.load(engine.dump(state)), view(1, {"loss": 0.0}), 0.0)
    assert [(f.rule, f.transition) for f in outcome.findings] == [("non_finite", "close")]
    state, outcome = without.evaluate(state, view(2, {"loss": 0.0}), 0.0)
    assert outcome.findings == []


@pytest.mark.parametrize("data", [None, b"", b"\xc1", b"garbage", msgspec.msgpack.encode({"format": 99, "rules": {}})])
def test_bytes_that_cannot_be_read_start_afresh(data: bytes | None) -> None:
    engine = RuleEngine(default_pack())
    assert engine.dump(engine.load(data)) == engine.dump(engine.initial())


def test_the_state_does_not_grow_with_history() -> None:
    engine = RuleEngine(default_pack())
    state, sizes = engine.initial(), []
    for i, seen in enumerate(healthy(900)):
        state, _ = engine.evaluate(state, seen, 0.0)
        if i in (299, 899):
            sizes.append(len(engine.dump(state)))
    assert sizes[1] <= 1.05 * sizes[0]
    assert sizes[1] < 32_768


def test_bands_surround_the_values_of_a_calm_run() -> None:
    engine = RuleEngine(only("onpolicy_disagreement", "entropy_collapse"))
    state = engine.initial()
    for seen in healthy(60):
        state, outcome = engine.evaluate(state, seen, 0.0)
    low, centre, high = outcome.bands["policy.kl_k2"]
    assert low < 1e-5 < centre < 4e-5 < high
    assert outcome.bands["entropy.mean"][0] < seen.values["entropy.mean"] < outcome.bands["entropy.mean"][2]


def test_a_rule_without_anything_to_read_is_kept_with_the_pack_it_has_now() -> None:
    pack = default_pack()
    state, outcome = RuleEngine(pack).evaluate(EngineState({}), view(0, {}), 0.0)
    assert {name: rule.hash for name, rule in state.rules.items()} == {e.rule.name: e.hash for e in pack.entries}
    assert (outcome.firing, outcome.bands) == ([], {})


def test_a_tick_leaves_open_what_it_does_not_ask() -> None:
    engine = RuleEngine(only("non_finite", "silent_run"))
    state, outcome = engine.evaluate(engine.initial(), view(0, {"loss": float("nan")}), 0.0)
    assert outcome.firing == ["non_finite"]
    tick = Tick(run="lab/run", attempt=1, step=0, silent_s=1.0, median_step_s=None)
    assert engine.evaluate(state, tick, 1.0)[1].firing == ["non_finite"]
