"""The command protocol, one transition at a time, on both databases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from foreshock.wire.commands import Ack, Action
from foreshock_service.commands import protocol
from foreshock_service.commands.limits import Limits
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Audit, CommandRow, Run

NOW = 1_000.0
CONTROLLER = "c" * 32
OTHER = "d" * 32
MakeRun = Callable[..., int]


def propose(store: Store, run_id: int, kind: str = "resync_trainer", key: str | None = None, now: float = NOW) -> str:
    with store.write() as session:
        run = session.get_one(Run, run_id)
        change = protocol.propose(
            session, run, [Action(kind=kind)], now, reason="test", evidence_key=key, issued_step=7
        )
        assert change is not None
        return change.command.id


def approve(store: Store, command: str, now: float = NOW) -> None:
    with store.write() as session:
        protocol.approve(session, command, "ada", now)


def deliver(store: Store, run_id: int, client: str = CONTROLLER, now: float = NOW) -> list[str]:
    with store.write() as session:
        return [c.id for c in protocol.deliver(session, run_id, client, now)]


def ack(store: Store, command: str, state: str, client: str = CONTROLLER, attempt: int = 1, now: float = NOW) -> str:
    with store.write() as session:
        answer = Ack(state=state, client=client, attempt=attempt, step=9, detail={"said": state})
        return protocol.ack(session, command, answer, now).became


def state(store: Store, command: str) -> str:
    with store.read() as session:
        return protocol.find(session, command).state


def begin_attempt(store: Store, run_id: int, launch: str) -> None:
    with store.write() as session:
        run = session.get_one(Run, run_id)
        run.attempt += 1
        session.add(Attempt(run_id=run_id, ordinal=run.attempt, launch=launch, generation=run.attempt, started_at=NOW))


def accepted(store: Store, run_id: int, kind: str = "resync_trainer") -> str:
    command = propose(store, run_id, kind)
    approve(store, command)
    assert deliver(store, run_id) == [command]
    assert ack(store, command, "accepted") == "accepted"
    return command


def test_a_command_goes_from_proposal_to_done_and_every_change_is_audited(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    command = accepted(store, run_id)
    assert ack(store, command, "done") == "done"
    with store.read() as session:
        row = protocol.find(session, command)
        assert (row.done_step, row.accepted_by, row.decided_by, row.detail["done"]) == (
            9, CONTROLLER, "ada", {"said": "done"},
        )  # fmt: skip
        audit = session.execute(select(Audit.was, Audit.became, Audit.actor).order_by(Audit.id)).all()
        assert [tuple(a) for a in audit] == [
            (None, "proposed", "policy"),
            ("proposed", "approved", "ada"),
            ("approved", "delivered", CONTROLLER),
            ("delivered", "accepted", CONTROLLER),
            ("accepted", "done", CONTROLLER),
        ]
        assert session.get_one(Run, run_id).budget == {"resync_trainer": 1}


def test_what_the_run_did_not_announce_is_never_proposed(store: Store, make_run: MakeRun) -> None:
    run_id = make_run(capabilities=("pause",))
    with pytest.raises(protocol.Forbidden, match="did not announce rollback"):
        propose(store, run_id, "rollback")


def test_the_same_evidence_leads_to_one_command(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    propose(store, run_id, key="resync_trainer:incident:1:0")
    with store.write() as session:
        run = session.get_one(Run, run_id)
        again = protocol.propose(
            session, run, [Action(kind="resync_trainer")], NOW, reason="", evidence_key="resync_trainer:incident:1:0"
        )
        assert again is None


def test_only_one_command_is_in_flight(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    first, second = propose(store, run_id), propose(store, run_id, "rollback")
    approve(store, first)
    with pytest.raises(protocol.Busy):
        approve(store, second)
    deliver(store, run_id)
    ack(store, first, "accepted")
    with pytest.raises(protocol.Busy):
        approve(store, second)
    ack(store, first, "done")
    approve(store, second)
    assert state(store, second) == "approved"


def test_nothing_is_approved_in_observe(store: Store, make_run: MakeRun) -> None:
    run_id = make_run(mode="observe")
    command = propose(store, run_id)
    with pytest.raises(protocol.Forbidden, match="observe"):
        approve(store, command)


def test_commands_are_delivered_to_the_controller_alone_and_again_until_accepted(
    store: Store, make_run: MakeRun
) -> None:
    run_id = make_run()
    command = propose(store, run_id)
    assert deliver(store, run_id) == []
    approve(store, command)
    assert deliver(store, run_id, OTHER) == []
    assert deliver(store, run_id) == [command]
    assert deliver(store, run_id) == [command]
    ack(store, command, "accepted")
    assert deliver(store, run_id) == []


def test_a_delivered_command_says_how_long_it_is_good_for(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    command = propose(store, run_id)
    approve(store, command)
    with store.write() as session:
        (sent,) = protocol.deliver(session, run_id, CONTROLLER, NOW + 100)
    assert (sent.run, sent.attempt, sent.expires_in_s, sent.kind) == ("lab/run", 1, 500.0, "resync_trainer")
    assert sent.id == command


def test_only_the_controller_accepts(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    command = propose(store, run_id)
    approve(store, command)
    deliver(store, run_id)
    with pytest.raises(protocol.Forbidden):
        ack(store, command, "accepted", OTHER)
    assert state(store, command) == "delivered"


def test_an_accept_from_another_attempt_is_refused(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    command = propose(store, run_id)
    approve(store, command)
    deliver(store, run_id)
    with pytest.raises(protocol.WrongAttempt):
        ack(store, command, "accepted", attempt=2)
    begin_attempt(store, run_id, "two")
    with pytest.raises(protocol.WrongAttempt):
        ack(store, command, "accepted", attempt=1)


def test_an_expired_command_is_never_accepted_even_before_the_sweep(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    command = propose(store, run_id)
    approve(store, command)
    deliver(store, run_id)
    with pytest.raises(protocol.Expired):
        ack(store, command, "accepted", now=NOW + 601)
    with store.write() as session:
        assert [c.became for c in protocol.expire_due(session, NOW + 601)] == ["expired"]
    with pytest.raises(protocol.Expired):
        ack(store, command, "accepted", now=NOW + 602)


def test_repeating_an_answer_that_was_taken_confirms_it_and_changes_nothing(store: Store, make_run: MakeRun) -> None:
    command = accepted(store, make_run())
    assert ack(store, command, "accepted") == "accepted"
    assert ack(store, command, "done") == "done"
    assert ack(store, command, "done") == "done"
    with pytest.raises(protocol.WrongState):
        ack(store, command, "accepted")
    with pytest.raises(protocol.WrongState):
        ack(store, command, "failed")
    with store.read() as session:
        became = session.scalars(select(Audit.became).where(Audit.subject_id == command)).all()
        assert became.count("accepted") == became.count("done") == 1


def test_an_answer_that_is_none_is_an_error(store: Store, make_run: MakeRun) -> None:
    command = accepted(store, make_run())
    with pytest.raises(ValueError, match="state must be one of"):
        ack(store, command, "approved")


def test_a_new_attempt_loses_what_was_accepted_and_cancels_what_was_not(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    running, waiting = accepted(store, run_id), propose(store, run_id, "rollback")
    begin_attempt(store, run_id, "two")
    with store.write() as session:
        became = {c.command.id: c.became for c in protocol.lose_accepted(session, run_id, 2, NOW)}
        assert became == {running: "lost", waiting: "cancelled"}
        assert protocol.lose_accepted(session, run_id, 2, NOW) == []
    with pytest.raises(protocol.WrongState):
        ack(store, running, "done")


@pytest.mark.parametrize("named", [True, False])
def test_the_rollback_that_led_into_the_attempt_gets_its_done(store: Store, make_run: MakeRun, named: bool) -> None:
    run_id = make_run()
    rollback = accepted(store, run_id, "rollback")
    begin_attempt(store, run_id, "one")
    with store.write() as session:
        assert protocol.lose_accepted(session, run_id, 2, NOW, rollback if named else None) == []
    assert ack(store, rollback, "done", attempt=2 if named else 1) == "done"


def test_a_relaunch_loses_even_a_rollback(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    rollback = accepted(store, run_id, "rollback")
    begin_attempt(store, run_id, "another launch")
    with store.write() as session:
        assert [c.became for c in protocol.lose_accepted(session, run_id, 2, NOW)] == ["lost"]
    assert state(store, rollback) == "lost"


def test_a_trainer_that_never_answers_again_loses_its_command(store: Store, make_run: MakeRun) -> None:
    command = accepted(store, make_run())
    with store.write() as session:
        assert protocol.expire_due(session, NOW + 3599) == []
        limits = Limits(accepted_limit_s=3600)
        assert [c.became for c in protocol.expire_due(session, NOW + 3600, limits=limits)] == ["lost"]
    assert state(store, command) == "lost"


def test_a_proposal_that_nobody_decides_expires(store: Store, make_run: MakeRun) -> None:
    command = propose(store, make_run())
    with pytest.raises(protocol.Expired):
        approve(store, command, NOW + 3601)
    with store.write() as session:
        assert [c.became for c in protocol.expire_due(session, NOW + 3601)] == ["expired"]


def test_what_was_rejected_or_cancelled_is_over(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    rejected, cancelled = propose(store, run_id), propose(store, run_id)
    with store.write() as session:
        protocol.reject(session, rejected, "ada", NOW, "not now")
        protocol.cancel(session, cancelled, "ada", NOW)
    for command in (rejected, cancelled):
        with pytest.raises(protocol.WrongState):
            approve(store, command)
    with store.read() as session:
        assert protocol.pending(session, run_id) == []
        assert protocol.find(session, rejected).detail == {"rejected": "not now"}


def test_an_accepted_command_cannot_be_recalled(store: Store, make_run: MakeRun) -> None:
    command = accepted(store, make_run())
    with store.write() as session, pytest.raises(protocol.WrongState, match="accepted cannot become cancelled"):
        protocol.cancel(session, command, "ada", NOW)


def test_a_run_that_ends_leaves_nothing_waiting(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    running, waiting = accepted(store, run_id), propose(store, run_id)
    with store.write() as session:
        protocol.close_run(session, run_id, NOW, "finished")
    assert (state(store, running), state(store, waiting)) == ("lost", "cancelled")


def test_unknown_commands_and_empty_ones_are_errors(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    with store.write() as session:
        with pytest.raises(protocol.NotFound):
            protocol.find(session, "nothing")
        with pytest.raises(ValueError, match="at least one action"):
            protocol.propose(session, session.get_one(Run, run_id), [], NOW, reason="")


def test_a_reason_with_a_nul_is_stored_on_both_databases(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    with store.write() as session:
        run = session.get_one(Run, run_id)
        change = protocol.propose(session, run, [Action(kind="pause", arguments={"x": "a\x00b"})], NOW, reason="a\x00b")
        assert change is not None
    with store.read() as session:
        assert session.scalars(select(CommandRow.reason)).one() == "a\ufffdb"
