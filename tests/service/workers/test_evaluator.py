from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

from foreshock.stats.packed import pack
from foreshock.stats.record import PairRecord
from foreshock.wire import Envelope
from foreshock_service.ingest.arrivals import Arrival
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.group import store_group
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.rules.interface import StepView, Tick
from foreshock_service.store.engine import Store
from foreshock_service.store.flags import names
from foreshock_service.store.models import CommandRow, EvaluationState, Incident, Point, Run, SignalName, Step
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.folding import make_ready
from foreshock_service.workers.holding import Memory, save
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.rooms import Rooms

Send = Any


@pytest.fixture
def send(store: Store, clock: Any) -> Send:
    def stored(*envelopes: Envelope) -> None:
        with store.write() as session:
            arrivals = [Arrival(e, clock()) for e in envelopes]
            store_group(session, arrivals, Hooks(), IngestLimits(), clock())

    return stored


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def evaluator(store: Store, hub: Hub, rooms: Rooms, clock: Any) -> Evaluator:
    return Evaluator(store, hub, rooms, owner="a", clock=clock)


def rows(store: Store, model: Any, *order: Any) -> list[Any]:
    with store.read() as session:
        return list(session.scalars(select(model).order_by(*order)))


def series(store: Store, signal: str) -> list[Any]:
    with store.read() as session:
        position = session.scalar(select(SignalName.position).where(SignalName.name == signal))
        points = session.scalars(select(Point).order_by(Point.attempt, Point.step))
        return [p.values[position - 1] if position and position <= len(p.values) else None for p in points]


def test_steps_are_evaluated_in_order_once(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    trainer = new_trainer()
    world = {"trainer": 1}
    send(trainer.envelope(*(trainer.frame(s, {"loss": s / 100}) for s in range(1, 71)), expected_ranks=world))
    while evaluator.evaluate_due() == 0.0:
        pass
    evaluator.evaluate_due()
    assert [v.step for v in engine.views] == list(range(1, 71))
    assert series(store, "loss") == [s / 100 for s in range(1, 71)]
    (run,) = rows(store, Run)
    assert (run.last_step, run.verdict) == (70, "healthy")
    (state,) = rows(store, EvaluationState)
    assert len(engine.load(state.state).seen) == 70


def test_a_step_is_waited_for_until_its_watermark_and_marked_incomplete(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any, clock: Any
) -> None:
    trainer = new_trainer()
    send(trainer.envelope(trainer.frame(1), trainer.frame(2), expected_ranks={"trainer": 2}))
    assert evaluator.evaluate_due() > 0
    assert engine.views == []
    clock.pass_s(5.0)
    evaluator.evaluate_due()
    view = engine.views[0]
    assert (view.reported, view.expected, list(view.absent_ranks)) == (1, 2, [("trainer", 1)])
    assert [p.flag for p in rows(store, Point)] == [True, True]


def test_a_late_frame_is_stored_and_not_evaluated_again(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any, clock: Any
) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    send(zero.envelope(zero.frame(1), expected_ranks={"trainer": 2}))
    clock.pass_s(5.0)
    evaluator.evaluate_due()
    send(one.envelope(one.frame(1)))
    evaluator.evaluate_due()
    assert len(engine.views) == 1
    assert rows(store, Step)[0].reported == 2


def test_missing_nan_and_infinities_stay_apart(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any
) -> None:
    trainer = new_trainer()
    send(
        trainer.envelope(
            trainer.frame(1, {"loss": 0.5, "lr": 1e-6}),
            trainer.frame(2, {"loss": math.nan}),
            trainer.frame(3, {"loss": math.inf, "lr": -math.inf}),
            expected_ranks={"trainer": 1},
        )
    )
    evaluator.evaluate_due()
    loss, lr = series(store, "loss"), series(store, "lr")
    assert loss[0] == 0.5
    assert math.isnan(loss[1])
    assert loss[2] == math.inf
    assert lr == [1e-6, None, -math.inf]


def test_a_violation_opens_one_incident_and_one_command_and_wakes_long_polls(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, hub: Hub
) -> None:
    trainer = new_trainer()
    frames = [trainer.frame(1, {"loss": 0.1}), trainer.frame(2, {"loss": 9.0}), trainer.frame(3, {"loss": 9.0})]
    send(trainer.envelope(*frames, expected_ranks={"trainer": 1}))
    evaluator.evaluate_due()
    assert [i.rule for i in rows(store, Incident)] == ["threshold"]
    assert [c.kind for c in rows(store, CommandRow)] == ["pause"]
    (run,) = rows(store, Run)
    assert hub.version(run.id) == 1


def test_a_replayed_backlog_opens_incidents_and_no_commands(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any
) -> None:
    trainer = new_trainer()
    send(trainer.envelope(trainer.frame(1, {"loss": 9.0}, sealed_s=0.0), expected_ranks={"trainer": 1}))
    evaluator.evaluate_due()
    assert len(rows(store, Incident)) == 1
    assert rows(store, CommandRow) == []
    assert rows(store, Point)[0].flag


def test_scalars_fold_over_ranks_by_the_catalogue(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any
) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    scalars = [{"reward.mean": 0.2, "grad.norm": 1.0, "lr": 1.0}, {"reward.mean": 0.4, "grad.norm": 3.0, "lr": 2.0}]
    send(
        zero.envelope(zero.frame(1, scalars[0]), expected_ranks={"trainer": 2}),
        one.envelope(one.frame(1, scalars[1], step_s=12.0)),
    )
    evaluator.evaluate_due()
    values = {s: series(store, s)[0] for s in ("reward.mean", "grad.norm", "lr", "time.step_s")}
    assert values == {"reward.mean": pytest.approx(0.3), "grad.norm": 3.0, "lr": 2.0, "time.step_s": 12.0}


def test_a_second_claimant_of_a_rank_does_not_count_twice(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    first, second = new_trainer(), new_trainer()
    send(first.envelope(first.frame(1, {"loss": 0.2}), expected_ranks={"trainer": 2}))
    send(second.envelope(second.frame(1, {"loss": 0.8})))
    other = new_trainer(rank=1)
    send(other.envelope(other.frame(1, {"loss": 0.2})))
    evaluator.evaluate_due()
    assert series(store, "loss") == [pytest.approx(0.2)]
    assert engine.views[0].flags == ("duplicate_rank",)


def test_a_record_that_cannot_be_read_is_missing_and_the_run_goes_on(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    trainer = new_trainer()
    broken = PairRecord(tokens=5, logp=[1.0], evidence_ids=[1])
    backwards = pack(PairRecord(masked=1))[:-1] + b"\xff"
    for step, pair in enumerate((broken, backwards), start=1):
        send(trainer.envelope(trainer.frame(step, pairs={"policy": pair}), expected_ranks={"trainer": 1}))
    evaluator.evaluate_due()
    assert [view.missing["policy"] for view in engine.views] == ["malformed"] * 2


def test_a_record_of_the_first_wire_version_is_evaluated_as_its_block_is(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    """Stored frames are what a client sent: those of version 1 hold the fields of a record."""
    record = PairRecord(
        masked=8, tokens=8, logp=[-1.0, 0.01, 1.0, 0.1, 0.5, 0.0, 0.6], prob=[0.5, 0.0, 0.1, 0.0, 0.1],
        sums=[0.4, 0.1, 8.0, 8.1, 0.2], extremes=[-0.2, 0.3, 0.1], abs_sketch=[900, 5, -70, 3],
        evidence_ids=[0, 3, -1], evidence_logps=bytes(8),
    )  # fmt: skip
    trainers = [new_trainer(rank=rank) for rank in range(2)]
    for step, forms in enumerate([(record, record), (pack(record), pack(record)), (record, pack(record))]):
        for trainer, pair in zip(trainers, forms, strict=True):
            send(trainer.envelope(trainer.frame(step, pairs={"policy": pair}), expected_ranks={"trainer": 2}))
    evaluator.evaluate_due()
    first, *others = engine.views
    assert first.values["policy.tokens"] == 16
    assert first.values["policy.abs_q999"] > 0
    for view in others:
        assert (view.values, view.worst, view.missing, view.evidence) == (
            first.values, first.worst, first.missing, first.evidence
        )  # fmt: skip


def test_a_step_that_cannot_be_evaluated_is_marked_and_passed_over(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    engine.fails_on = 2
    trainer = new_trainer()
    send(trainer.envelope(*(trainer.frame(s) for s in (1, 2, 3)), expected_ranks={"trainer": 1}))
    for _ in range(4):
        evaluator.evaluate_due()
    flags = {s.step: names(s.flags) for s in rows(store, Step)}
    assert flags == {1: (), 2: ("evaluation_failed",), 3: ()}
    assert [p.step for p in rows(store, Point, Point.step)] == [1, 3]
    assert evaluator.counts.failed_steps == 1


def test_a_new_attempt_and_a_changed_setting_begin_a_segment(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    trainer = new_trainer()
    send(
        trainer.envelope(
            trainer.notice("started", {"settings": {"lr": 1e-6}}),
            trainer.frame(1),
            trainer.frame(2),
            trainer.notice("settings", {"lr": 2e-6}, step=3),
            trainer.frame(3),
            trainer.notice("settings", {"lr": 2e-6}, step=4),
            trainer.frame(4),
            expected_ranks={"trainer": 1},
        )
    )
    trainer.generation = 1
    send(trainer.envelope(trainer.frame(3), expected_ranks={"trainer": 1}))
    evaluator.evaluate_due()
    views = [v for v in engine.views if isinstance(v, StepView)]
    assert [(v.attempt, v.step, v.segment) for v in views] == [(1, 1, 1), (1, 2, 1), (1, 3, 2), (1, 4, 2), (2, 3, 3)]
    assert [v.settings["lr"] for v in views] == [1e-6, 1e-6, 2e-6, 2e-6, 2e-6]
    assert [[n["kind"] for n in v.notices] for v in views] == [["started"], [], ["settings"], ["settings"], []]


def test_a_finished_step_teaches_the_median_step_time(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, clock: Any
) -> None:
    trainer = new_trainer()
    for step in range(1, 6):
        send(trainer.envelope(trainer.frame(step), expected_ranks={"trainer": 1}))
        clock.pass_s(40.0)
    evaluator.evaluate_due()
    assert rows(store, Run)[0].median_step_s == pytest.approx(40.0)


def test_ticks_tell_of_silence_until_the_run_has_ended(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any, clock: Any
) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    send(zero.envelope(zero.frame(1), expected_ranks={"trainer": 2}), one.envelope(one.frame(1)))
    evaluator.evaluate_due()
    clock.pass_s(200.0)
    send(zero.envelope())
    evaluator.tick()
    evaluator.tick()
    (tick,) = [v for v in engine.views if isinstance(v, Tick)]
    assert (tick.silent_s, tick.step, list(tick.silent_ranks)) == (0.0, 1, [("trainer", 1, 200.0)])
    clock.pass_s(150.0)
    evaluator.tick()
    assert rows(store, Run)[0].status == "silent"
    send(zero.envelope(zero.notice("finished", {"status": "completed"}), controller=True))
    clock.pass_s(15.0)
    evaluator.tick()
    assert engine.views[-1].finished
    clock.pass_s(15.0)
    before = len(engine.views)
    evaluator.tick()
    assert len(engine.views) == before


def test_another_replica_waits_for_the_lease_and_then_takes_over(
    store: Store, evaluator: Evaluator, rooms: Rooms, hub: Hub, send: Send, new_trainer: Any, clock: Any
) -> None:
    other = Evaluator(store, hub, rooms, owner="b", clock=clock)
    trainer = new_trainer()
    send(trainer.envelope(trainer.frame(1), expected_ranks={"trainer": 1}))
    evaluator.evaluate_due()
    send(trainer.envelope(trainer.frame(2)))
    other.evaluate_due()
    assert [p.step for p in rows(store, Point)] == [1]
    clock.pass_s(10.5)
    other.evaluate_due()
    assert [p.step for p in rows(store, Point, Point.step)] == [1, 2]
    (state,) = rows(store, EvaluationState)
    assert (state.owner, state.fence) == ("b", 2)


def test_a_replica_whose_fence_has_gone_commits_nothing(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreshock_service.workers import evaluator as module

    trainer = new_trainer()
    send(trainer.envelope(trainer.frame(1, {"loss": 9.0}), expected_ranks={"trainer": 1}))
    commit = save

    def overtaken(session: Any, rooms: Any, held: Any, owner: str, now: float, lease_s: float) -> None:
        session.flush()
        session.execute(update(EvaluationState).values(fence=99).execution_options(synchronize_session=False))
        commit(session, rooms, held, owner, now, lease_s)

    monkeypatch.setattr(module, "save", overtaken)
    evaluator.evaluate_due()
    assert evaluator.counts.leases_lost == 1
    assert rows(store, Point) == rows(store, Incident) == rows(store, CommandRow) == []


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """`while_read(act)`: at the next evaluation `act` happens between the reading of its frames and the lock."""
    from foreshock_service.workers import evaluator as module

    def arrange(act: Callable[[], None]) -> None:
        def reading(*arguments: Any) -> Any:
            found = make_ready(*arguments)
            monkeypatch.setattr(module, "make_ready", make_ready)
            act()
            return found

        monkeypatch.setattr(module, "make_ready", reading)

    return arrange


def test_a_frame_that_comes_while_its_step_is_read_counts(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, clock: Any, while_read: Any
) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    send(zero.envelope(zero.frame(1, {"loss": 1.0}), expected_ranks={"trainer": 2}))
    clock.pass_s(6)
    while_read(lambda: send(one.envelope(one.frame(1, {"loss": 3.0}), expected_ranks={"trainer": 2})))
    evaluator.evaluate_due()
    assert series(store, "loss") == [2.0]
    assert [p.reported for p in rows(store, Point)] == [2]


def test_a_frame_that_comes_while_its_step_is_folded_ahead_counts(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, while_read: Any
) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    for step in (1, 2):
        send(zero.envelope(zero.frame(step, {"loss": 0.2}), expected_ranks={"trainer": 1}))
        if step == 1:
            evaluator.evaluate_due()
    while_read(lambda: send(one.envelope(one.frame(2, {"loss": 0.6}), expected_ranks={"trainer": 1})))
    evaluator.evaluate_due()
    assert series(store, "loss") == [0.2, 0.4]
    assert [p.reported for p in rows(store, Point, Point.step)] == [1, 2]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each transaction evaluated."""
    from foreshock_service.workers import evaluator as module

    found: list[int] = []

    def saving(session: Any, rooms: Any, held: Any, *rest: Any) -> None:
        found.append(len(held))
        save(session, rooms, held, *rest)

    monkeypatch.setattr(module, "save", saving)
    return found


def nothing_open(session: Any, run: Run, _seen: Any) -> bool:
    return session.scalar(select(Incident.id).where(Incident.run_id == run.id).limit(1)) is None


@pytest.fixture
def calm_evaluator(store: Store, hub: Hub, rooms: Rooms, clock: Any) -> Evaluator:
    """Knows which runs are quiet."""
    return Evaluator(store, hub, replace(rooms, quiet=nothing_open), owner="a", clock=clock)


def test_the_due_steps_of_many_runs_are_one_transaction(
    store: Store, calm_evaluator: Evaluator, send: Send, new_trainer: Any, sizes: list[int]
) -> None:
    trainers = [new_trainer(f"math/run{n}") for n in range(5)]
    for step in (1, 2):
        send(*(t.envelope(t.frame(step, {"loss": step / 10}), expected_ranks={"trainer": 1}) for t in trainers))
        calm_evaluator.evaluate_due()
    assert sizes == [5, 5]
    assert [(p.run_id, p.step) for p in rows(store, Point, Point.run_id, Point.step)] == [
        (run.id, step) for run in rows(store, Run, Run.id) for step in (1, 2)
    ]
    assert {run.last_step for run in rows(store, Run)} == {2}


def test_a_run_of_which_something_follows_is_evaluated_alone(
    store: Store, calm_evaluator: Evaluator, send: Send, new_trainer: Any, sizes: list[int]
) -> None:
    trainers = [new_trainer(f"math/run{n}") for n in range(5)]
    for step in (1, 2, 3):
        losses = [9.0 if n == 3 and step > 1 else 0.5 for n in range(5)]
        send(
            *(
                t.envelope(t.frame(step, {"loss": loss}), expected_ranks={"trainer": 1})
                for t, loss in zip(trainers, losses, strict=True)
            )
        )
        calm_evaluator.evaluate_due()
    # At step 2 the rules find something ahead of the lock; at step 3 something is open.
    assert sizes == [5, 4, 1, 4, 1]
    assert [(i.run_id, i.attempt) for i in rows(store, Incident)] == [(rows(store, Run, Run.id)[3].id, 1)]
    assert len(rows(store, Point)) == 15


def test_steps_folded_ahead_of_the_lock_leave_what_steps_folded_behind_it_do(
    store: Store, calm_evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with the same frames, one of them folded ahead: complete steps, a new signal, a notice."""
    ahead, behind = new_trainer("math/ahead"), new_trainer("math/behind")
    fold = Memory.fold_ahead
    folded: list[int] = []

    def folding(memory: Memory, *rest: Any) -> None:
        if memory.name != "math/behind":
            fold(memory, *rest)
            folded.append(len(memory.ahead))

    monkeypatch.setattr(Memory, "fold_ahead", folding)
    for step in range(1, 40):
        values = {"loss": 0.01 * step} | ({"reward.mean": 0.3} if step > 20 else {})
        for trainer in (ahead, behind):
            if step == 30:
                send(trainer.envelope(trainer.notice("settings", {"lr": 1e-5}, step=30)))
            send(trainer.envelope(trainer.frame(step, values), expected_ranks={"trainer": 1}))
        if step % 3 == 0:
            calm_evaluator.evaluate_due()
    assert max(folded) == 3
    assert 0 in folded
    states = {engine.load(row.state).firing for row in rows(store, EvaluationState)}
    assert states == {False}
    of_run: dict[int, list[Any]] = {}
    for p in rows(store, Point, Point.run_id, Point.step):
        of_run.setdefault(p.run_id, []).append((p.step, list(p.values), p.segment, p.bands, p.reported, p.flag))
    one, other = of_run.values()
    assert one == other
    assert {segment for _, _, segment, *_ in one[30:]} != {one[0][2]}


def test_a_setting_that_changes_while_steps_are_folded_ahead_counts(
    store: Store, calm_evaluator: Evaluator, send: Send, new_trainer: Any, while_read: Any
) -> None:
    trainer = new_trainer()
    send(trainer.envelope(trainer.frame(1, {"loss": 0.5}), expected_ranks={"trainer": 1}))
    calm_evaluator.evaluate_due()
    send(trainer.envelope(trainer.frame(2, {"loss": 0.5}), expected_ranks={"trainer": 1}))
    while_read(lambda: send(trainer.envelope(trainer.notice("settings", {"lr": 1e-5}, step=2))))
    calm_evaluator.evaluate_due()
    first, second = rows(store, Point, Point.step)
    assert second.segment == first.segment + 1
    (state,) = rows(store, EvaluationState)
    assert state.settings == {"lr": 1e-5}


def test_a_transaction_takes_no_more_frames_than_its_runs_may_wait_for(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreshock_service.workers import evaluator as module

    monkeypatch.setattr(module, "MANY_FRAMES", 5)
    trainers = [new_trainer(f"math/run{n}") for n in range(4)]
    for step in (1, 2, 3):
        send(*(t.envelope(t.frame(step), expected_ranks={"trainer": 1}) for t in trainers))
    assert evaluator.evaluate_due() > 0.0
    assert evaluator.counts.steps == len(rows(store, Point)) == 12


def test_a_run_that_cannot_be_evaluated_holds_up_none_of_the_others(
    store: Store, evaluator: Evaluator, engine: Any, send: Send, new_trainer: Any
) -> None:
    engine.fails_on = 7
    good, bad = new_trainer("math/good"), new_trainer("math/bad")
    send(good.envelope(good.frame(1), expected_ranks={"trainer": 1}))
    send(bad.envelope(bad.frame(7), bad.frame(8), expected_ranks={"trainer": 1}))
    for _ in range(2):
        evaluator.evaluate_due()
    by_name = {run.name: run.id for run in rows(store, Run)}
    assert {(p.run_id, p.step) for p in rows(store, Point)} == {(by_name["math/good"], 1), (by_name["math/bad"], 8)}
    assert evaluator.counts.failed_steps == 1


def test_a_run_that_another_replica_took_over_is_the_only_one_rolled_back(
    store: Store, evaluator: Evaluator, send: Send, new_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreshock_service.workers import evaluator as module

    trainers = [new_trainer(f"math/run{n}") for n in range(3)]
    send(*(t.envelope(t.frame(1), expected_ranks={"trainer": 1}) for t in trainers))
    lost = next(run.id for run in rows(store, Run) if run.name == "math/run1")

    def overtaken(session: Any, rooms: Any, held: Any, *rest: Any) -> None:
        session.flush()
        if lost in [one.run.id for one in held]:
            taken = update(EvaluationState).where(EvaluationState.run_id == lost).values(fence=99)
            session.execute(taken.execution_options(synchronize_session=False))
        save(session, rooms, held, *rest)

    monkeypatch.setattr(module, "save", overtaken)
    evaluator.evaluate_due()
    assert {p.run_id for p in rows(store, Point)} == {run.id for run in rows(store, Run)} - {lost}
    assert evaluator.counts.leases_lost == 1
