from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import func, select

from foreshock.stats.record import PairRecord
from foreshock.wire import Envelope, Reply
from foreshock_service.errors import Unavailable
from foreshock_service.ingest.arrivals import Arrival
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.ingest.group import store_group
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.store.engine import Store
from foreshock_service.store.flags import names
from foreshock_service.store.models import Attempt, Audit, Client, FrameRow, Notice, Run, Step


class Ingest:
    """Stores envelopes one group at a time, at the clock's time."""

    def __init__(
        self, store: Store, clock: Any, hooks: Hooks | None = None, limits: IngestLimits | None = None
    ) -> None:
        self.store, self.clock = store, clock
        self.hooks, self.limits = hooks or Hooks(), limits or IngestLimits()
        self.stepped: set[int] = set()

    def __call__(self, *envelopes: Envelope) -> list[Any]:
        with self.store.write() as session:
            arrivals = [Arrival(e, self.clock()) for e in envelopes]
            stored = store_group(session, arrivals, self.hooks, self.limits, self.clock())
        self.stepped = stored.stepped
        return stored.replies

    def rows(self, model: Any, *order: Any) -> list[Any]:
        with self.store.read() as session:
            return list(session.scalars(select(model).order_by(*order)))

    def run(self) -> Run:
        (run,) = self.rows(Run)
        return run


@pytest.fixture
def ingest(store: Store, clock: Any) -> Ingest:
    return Ingest(store, clock)


def test_frames_are_stored_once_however_often_they_are_sent(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    first = trainer.envelope(trainer.frame(1), trainer.frame(2))
    again = trainer.envelope(*first.frames, trainer.frame(3))
    assert ingest(first)[0].acknowledged == 2
    assert ingest(first)[0].acknowledged == 2
    assert ingest(again, again)[1].acknowledged == 3
    assert [f.step for f in ingest.rows(FrameRow, FrameRow.sequence)] == [1, 2, 3]


def test_one_process_serves_two_runs(ingest: Ingest, new_trainer: Any) -> None:
    one, two = new_trainer("math/one"), new_trainer("math/two")
    two.client = one.client
    ingest(one.envelope(one.frame(1)), two.envelope(two.frame(1)))
    assert len(ingest.rows(FrameRow)) == 2
    assert {run.name for run in ingest.rows(Run)} == {"math/one", "math/two"}


def test_non_finite_values_come_back_as_they_went_in(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(1, {"loss": math.nan, "reward.mean": math.inf, "grad.norm": -math.inf})))
    (frame,) = ingest.rows(FrameRow)
    import msgspec

    from foreshock.wire import Frame

    scalars = msgspec.msgpack.decode(frame.body, type=Frame).scalars
    assert math.isnan(scalars["loss"])
    assert scalars["reward.mean"] == math.inf
    assert scalars["grad.norm"] == -math.inf
    assert names(frame.flags) == ("non_finite",)


@pytest.mark.parametrize(
    ("fields", "sent_s", "flags"),
    [
        ({}, 1000.0, ()),
        ({"sealed_s": 900.0}, 1000.0, ("replayed",)),
        ({"sealed_s": 900.0}, None, ("replayed",)),
        ({"sealed_s": 5000.0}, 1000.0, ("absurd_clock",)),
        ({"sealed_s": math.nan}, 1000.0, ("absurd_clock",)),
        ({"sealed_s": -40 * 86_400.0}, 1000.0, ("absurd_clock",)),
        ({"pairs": {"policy": PairRecord(tokens=3, nonfinite=1)}}, 1000.0, ("non_finite",)),
        ({"scalars": {"grad.nonfinite": 2.0}}, 1000.0, ("non_finite",)),
    ],
)
def test_oddities_are_stored_and_flagged(
    ingest: Ingest, new_trainer: Any, clock: Any, fields: dict[str, Any], sent_s: float | None, flags: tuple[str, ...]
) -> None:
    trainer = new_trainer()
    (reply,) = ingest(trainer.envelope(trainer.frame(1, **fields), sent_s=sent_s))
    (frame,) = ingest.rows(FrameRow)
    assert names(frame.flags) == flags
    assert bool(reply.warnings) == ("absurd_clock" in flags)
    assert frame.event_at == (clock() - 100.0 if flags == ("replayed",) and sent_s else clock())


def test_steps_going_backwards_are_flagged_within_an_attempt_only(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(7), trainer.frame(8)))
    (reply,) = ingest(trainer.envelope(trainer.frame(5)))
    assert "step 5 follows a later one" in reply.warnings[0]
    trainer.generation = 1
    (reply,) = ingest(trainer.envelope(trainer.frame(3)))
    assert reply.warnings == []
    flagged = {f.step: names(f.flags) for f in ingest.rows(FrameRow)}
    assert flagged == {7: (), 8: (), 5: ("step_backwards",), 3: ()}


def test_the_second_claimant_of_a_rank_is_flagged(ingest: Ingest, new_trainer: Any) -> None:
    first, second = new_trainer(), new_trainer()
    ingest(first.envelope(first.frame(1)), second.envelope(second.frame(1)))
    (reply,) = ingest(second.envelope(second.frame(1)))
    assert "another client already reported as trainer 0 in step 1" in reply.warnings[0]
    flagged = {(f.client_id, f.sequence): names(f.flags) for f in ingest.rows(FrameRow)}
    assert flagged[(first.client, 1)] == ()
    assert flagged[(second.client, 1)] == flagged[(second.client, 2)] == ("duplicate_rank",)
    assert ingest.rows(Step)[0].reported == 1


def test_a_step_is_due_when_all_declared_ranks_have_reported(ingest: Ingest, new_trainer: Any, clock: Any) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    expected = {"trainer": 2}
    ingest(zero.envelope(zero.frame(1), expected_ranks=expected))
    (step,) = ingest.rows(Step)
    assert (step.reported, step.expected, step.due_at) == (1, 2, clock() + 5.0)
    assert not ingest.stepped
    clock.pass_s(1.0)
    ingest(one.envelope(one.frame(1), expected_ranks=expected))
    (step,) = ingest.rows(Step)
    assert (step.reported, step.expected, step.due_at) == (2, 2, clock())
    assert ingest.stepped == {step.run_id}


def test_without_a_declared_world_the_ranks_of_the_last_three_steps_are_awaited(
    ingest: Ingest, new_trainer: Any, clock: Any
) -> None:
    trainers = [new_trainer(rank=rank) for rank in range(3)]
    ingest(*(t.envelope(t.frame(1)) for t in trainers))
    for step in (2, 3, 4, 5):
        ingest(*(t.envelope(t.frame(step)) for t in trainers[:2]))
    steps = ingest.rows(Step, Step.step)
    assert [(s.reported, s.expected) for s in steps] == [(3, 3), (2, 3), (2, 3), (2, 3), (2, 2)]
    assert steps[-1].due_at == clock()


def test_a_complete_step_does_not_wait_for_earlier_ones(ingest: Ingest, new_trainer: Any, clock: Any) -> None:
    zero, one = new_trainer(rank=0), new_trainer(rank=1)
    ingest(zero.envelope(zero.frame(1), zero.frame(2), expected_ranks={"trainer": 2}))
    one.sequence = 1  # its frame of step 1 was lost
    ingest(one.envelope(one.frame(2)))
    assert [s.due_at for s in ingest.rows(Step, Step.step)] == [clock(), clock()]


def test_the_watermark_is_half_the_median_step_time_when_that_is_longer(
    ingest: Ingest, new_trainer: Any, clock: Any
) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(1), expected_ranks={"trainer": 2}))
    with ingest.store.write() as session:
        session.scalars(select(Run)).one().median_step_s = 60.0
    ingest(trainer.envelope(trainer.frame(2)))
    assert [s.due_at - clock() for s in ingest.rows(Step, Step.step)] == [5.0, 30.0]


def test_a_non_finite_frame_makes_its_step_due_at_once(ingest: Ingest, new_trainer: Any, clock: Any) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(1, {"loss": math.nan}), expected_ranks={"trainer": 64}))
    assert ingest.rows(Step)[0].due_at == clock()
    assert ingest.stepped


def test_launches_and_rollbacks_begin_attempts_numbered_as_first_seen(ingest: Ingest, new_trainer: Any) -> None:
    began: list[tuple[int, str | None]] = []
    ingest.hooks = Hooks(attempt_began=lambda session, run, attempt, now, command: began.append((attempt, command)))
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(1)))
    trainer.generation = 1
    (reply,) = ingest(
        trainer.envelope(trainer.notice("attempt", {"reason": "rollback", "command": "c1"}), trainer.frame(1))
    )
    assert reply.attempt == 2
    later = new_trainer(launch="launch-2")
    assert ingest(later.envelope(later.frame(1)))[0].attempt == 3
    attempts = ingest.rows(Attempt, Attempt.ordinal)
    assert [(a.ordinal, a.launch, a.generation, a.reason) for a in attempts] == [
        (1, "launch-1", 0, "launch"),
        (2, "launch-1", 1, "rollback"),
        (3, "launch-2", 0, "launch"),
    ]
    assert [a.ended_at is None for a in attempts] == [False, False, True]
    assert began == [(1, None), (2, "c1"), (3, None)]
    assert ingest.run().attempt == 3


def test_leftovers_of_an_earlier_launch_do_not_become_the_current_attempt(ingest: Ingest, new_trainer: Any) -> None:
    trainer, dead = new_trainer(launch="new"), new_trainer(launch="old")
    ingest(trainer.envelope(trainer.frame(1)))
    ingest(dead.envelope(dead.frame(9), sent_s=None), dead.envelope(dead.frame(10, sealed_s=0.0)))
    assert ingest.run().attempt == 1
    assert {(f.step, f.attempt) for f in ingest.rows(FrameRow)} == {(1, 1), (9, 2), (10, 2)}


def test_started_says_what_the_run_is_and_may_do(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    data = {"config": {"seed": 1}, "settings": {"lr": 1e-6}, "capabilities": ["rollback", "dance"], "mode": "auto"}
    (reply,) = ingest(trainer.envelope(trainer.notice("started", data), controller=True))
    run = ingest.run()
    assert (run.config, run.settings, run.capabilities, run.mode) == ({"seed": 1}, {"lr": 1e-6}, ["rollback"], "auto")
    assert reply.mode == "auto"
    assert reply.warnings == ["capabilities that are no command kinds: dance"]
    assert [(a.became, a.actor) for a in ingest.rows(Audit)] == [("auto", "client")]


def test_a_mode_that_a_person_set_stays(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.notice("started", {"mode": "auto"})))
    with ingest.store.write() as session:
        run = session.scalars(select(Run)).one()
        run.mode, run.mode_by = "observe", "alice"
    (reply,) = ingest(trainer.envelope(trainer.notice("started", {"mode": "auto"})))
    assert reply.mode == "observe"
    assert "alice" in reply.warnings[0]


def test_a_bolder_mode_than_the_service_allows_is_cut_down(store: Store, clock: Any, new_trainer: Any) -> None:
    ingest = Ingest(store, clock, limits=IngestLimits(max_mode="approve"))
    trainer = new_trainer()
    (reply,) = ingest(trainer.envelope(trainer.notice("started", {"mode": "auto"})))
    assert reply.mode == "approve"
    assert "not allowed" in reply.warnings[0]


def test_commands_go_to_the_one_controller(ingest: Ingest, new_trainer: Any, clock: Any) -> None:
    asked: list[str] = []

    def deliver(session: Any, run_id: int, client: str, now: float) -> list[Any]:
        asked.append(client)
        return []

    ingest.hooks = Hooks(deliver=deliver)
    one, two = new_trainer(rank=0), new_trainer(rank=1)
    ingest(one.envelope(one.frame(1), controller=True))
    ingest(two.envelope(two.frame(1), controller=True))
    assert asked == [one.client]
    clock.pass_s(61.0)
    ingest(two.envelope(two.frame(2), controller=True))
    assert asked == [one.client, two.client]


def test_a_new_launch_takes_the_controller_lease_at_once(ingest: Ingest, new_trainer: Any) -> None:
    old, new = new_trainer(launch="old"), new_trainer(launch="new")
    ingest(old.envelope(old.frame(1), controller=True))
    ingest(new.envelope(new.frame(1), controller=True))
    assert ingest.run().controller_client == new.client
    ingest(old.envelope(old.frame(2), controller=True))
    assert ingest.run().controller_client == new.client


def test_finish_ends_the_run_when_the_controller_says_so(ingest: Ingest, new_trainer: Any) -> None:
    one, two = new_trainer(rank=0), new_trainer(rank=1)
    ingest(one.envelope(one.frame(1), controller=True), two.envelope(two.frame(1)))
    ingest(two.envelope(two.notice("finished", {"status": "completed"})))
    assert ingest.run().status == "running"
    ingest(one.envelope(one.notice("finished", {"status": "failed"}), controller=True))
    assert ingest.run().status == "crashed"
    ingest(one.envelope(one.frame(2), controller=True))
    assert ingest.run().status == "running"


def test_checkpoints_are_registered_in_the_same_transaction(ingest: Ingest, new_trainer: Any) -> None:
    seen: list[Any] = []
    ingest.hooks = Hooks(register_checkpoint=lambda session, run, attempt, step, data, now: seen.append((step, data)))
    trainer = new_trainer()
    good = trainer.notice("checkpoint", {"path": "/ckpt/5"}, step=5)
    (reply,) = ingest(trainer.envelope(good, trainer.notice("checkpoint", {"path": 3}, step=6)))
    assert seen == [(5, {"path": "/ckpt/5"})]
    assert "not registered" in reply.warnings[0]


def test_notices_hold_what_json_and_postgresql_cannot(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    data = {"a\x00": "x\x00y", "nan": math.nan, "deep": [{"inf": -math.inf}], "bytes": b"raw", "lone": "\ud800"}
    ingest(trainer.envelope(trainer.notice("odd", data)))
    (notice,) = ingest.rows(Notice)
    assert notice.data["a\ufffd"] == "x\ufffdy"
    assert notice.data["nan"] == "nan"
    assert notice.data["deep"] == [{"inf": "-inf"}]


def test_losses_travel(ingest: Ingest, new_trainer: Any) -> None:
    trainer = new_trainer()
    ingest(trainer.envelope(trainer.frame(1), losses={"queue_full": 3}))
    assert ingest.rows(Client)[0].losses == {"queue_full": 3}


def test_runs_beyond_the_limit_are_answered_with_a_problem(store: Store, clock: Any, new_trainer: Any) -> None:
    ingest = Ingest(store, clock, limits=IngestLimits(max_runs=1))
    one, two = new_trainer("math/one"), new_trainer("math/two")
    replies = ingest(one.envelope(one.frame(1)), two.envelope(two.frame(1)))
    assert isinstance(replies[0], Reply)
    assert isinstance(replies[1], Unavailable)
    with store.read() as session:
        assert session.scalar(select(func.count()).select_from(Run)) == 1
