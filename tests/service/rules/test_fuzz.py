"""Whatever a run reports, no rule fails, every state goes through bytes, and nothing grows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreshock.frames.catalogue import SCALARS
from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.illnesses import all_rules
from foreshock_service.rules.interface import Observation, StepView, Tick
from foreshock_service.rules.pack import default_pack

READ = sorted({signal for rule in all_rules() for signal in rule.reads} | set(SCALARS))
numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, -1.0, 1e-12, 1e300, -0.0]),
    st.floats(0, 1),
)
values = st.dictionaries(st.sampled_from(READ), numbers, max_size=40)
loose = st.one_of(st.none(), st.booleans(), st.integers(), numbers, st.text(max_size=5))
notices = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["weights", "flush", "semantics", "settings", "note"]),
            "data": st.dictionaries(
                st.sampled_from(["side", "version", "checksum", "changed_share", "ok", "detail"]),
                st.one_of(loose, st.sampled_from(["trainer", "engine"])),
                max_size=5,
            ),
        }
    ),
    max_size=3,
)
settings = st.dictionaries(
    st.sampled_from(["dtype", "moe", "floors", "max_staleness", "prefix_cache"]),
    st.one_of(loose, st.dictionaries(st.just("policy.kl_k2"), loose)),
    max_size=4,
)


@st.composite
def steps(draw: st.DrawFn) -> StepView:
    """Any step: backwards, repeated, another attempt, ranks missing, nonsense in notices and settings."""
    seen: dict[str, Any] = draw(values)
    worst = {
        name: (draw(numbers), draw(st.integers(0, 63))) for name in draw(st.sets(st.sampled_from(READ), max_size=3))
    }
    return StepView(
        run="lab/run",
        attempt=draw(st.integers(1, 3)),
        step=draw(st.integers(0, 40)),
        values=seen,
        worst=worst,
        missing=draw(
            st.dictionaries(st.sampled_from(READ), st.sampled_from(["semantics_differ", "detached"]), max_size=2)
        ),
        reported=draw(st.integers(0, 9)),
        expected=draw(st.integers(0, 9)),
        segment=draw(st.integers(0, 2)),
        notices=draw(notices),
        settings=draw(settings),
    )


ticks = st.builds(
    Tick,
    run=st.just("lab/run"),
    attempt=st.integers(1, 3),
    step=st.one_of(st.none(), st.integers(0, 40)),
    silent_s=st.floats(0, 1e9),
    median_step_s=st.one_of(st.none(), st.floats(0, 1e6)),
    silent_ranks=st.lists(
        st.tuples(st.sampled_from(["trainer", "rollout"]), st.integers(0, 9), st.floats(0, 1e9)), max_size=3
    ),
)


@given(st.lists(st.one_of(steps(), steps(), steps(), ticks), max_size=30))
def test_no_observation_makes_a_rule_fail_and_every_state_survives_bytes(observations: list[Observation]) -> None:
    engine = RuleEngine(default_pack())
    state = engine.initial()
    for seen in observations:
        state, outcome = engine.evaluate(state, seen, 0.0)
        assert outcome.errors == {}
        data = engine.dump(state)
        assert engine.dump(engine.load(data)) == data
        assert len(data) < 65_536


@given(steps(), st.integers(30, 60))
def test_one_and_the_same_step_again_and_again_makes_no_rule_fail(seen: StepView, times: int) -> None:
    engine = RuleEngine(default_pack())
    state = engine.initial()
    for i in range(times):
        state, outcome = engine.evaluate(state, StepView(run="lab/run", attempt=1, step=i, values=seen.values), 0.0)
        assert outcome.errors == {}
