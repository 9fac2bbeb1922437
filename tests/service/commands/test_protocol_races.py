"""Two replicas on one PostgreSQL at the same moment: one wins, the other is told. Two real connections, two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock.wire.commands import COMMAND_KINDS, Ack, Action
from foreshock_service.commands import protocol
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Audit, CommandRow, Run

pytestmark = pytest.mark.postgres
NOW = 1_000.0
CONTROLLER = "c" * 32


@pytest.fixture
def replicas(postgres_url: str) -> Iterator[tuple[Store, Store]]:
    """Two processes' worth of stores on one database, with one run."""
    first, second = Store(postgres_url), Store(postgres_url)
    migrate.upgrade(first)
    with first.write() as session:
        run = Run(
            id=1, name="p/r", project="p", created_at=NOW, last_seen_at=NOW, mode="auto", attempt=1,
            capabilities=list(COMMAND_KINDS), controller_client=CONTROLLER, controller_until=NOW + 60,
        )  # fmt: skip
        session.add(run)
        session.flush()
        session.add(Attempt(run_id=1, ordinal=1, launch="one", generation=0, started_at=NOW))
    yield first, second
    first.close()
    second.close()


def race(stores: tuple[Store, Store], act: Callable[[Session, int], object]) -> list[object]:
    """Runs `act` in both stores at once and keeps both transactions open until each has acted or is blocked.

    The first to finish commits after a moment, so that the second really waits on its row or meets its result.
    """
    results: list[object] = [None, None]
    barrier = threading.Barrier(2)

    def replica(number: int) -> None:
        barrier.wait()
        try:
            with stores[number].write() as session:
                results[number] = act(session, number)
                threading.Event().wait(0.15)
        except protocol.CommandError as error:
            results[number] = error

    threads = [threading.Thread(target=replica, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "deadlock"
    return results


def propose(session: Session, kind: str = "resync_trainer", key: str | None = None) -> str | None:
    run = session.get_one(Run, 1)
    change = protocol.propose(session, run, [Action(kind=kind)], NOW, reason="", evidence_key=key)
    return change.command.id if change else None


def test_two_replicas_propose_on_one_evidence_once(replicas: tuple[Store, Store]) -> None:
    made = race(replicas, lambda session, _: propose(session, key="resync_trainer:i:1:0"))
    assert made.count(None) == 1
    with replicas[0].read() as session:
        assert session.scalar(select(func.count()).select_from(CommandRow)) == 1


def test_two_people_approve_two_commands_and_one_is_in_flight(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        commands = [propose(session), propose(session, "rollback")]
    results = race(replicas, lambda session, n: protocol.approve(session, str(commands[n]), f"person {n}", NOW))
    assert sorted(type(r).__name__ for r in results) == ["Busy", "CommandChange"]
    with replicas[0].read() as session:
        states = sorted(session.scalars(select(CommandRow.state)))
        assert states == ["approved", "proposed"]


def test_two_people_approve_one_command_once(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        command = str(propose(session))
    results = race(replicas, lambda session, n: protocol.approve(session, command, f"person {n}", NOW))
    assert sorted(type(r).__name__ for r in results) == ["CommandChange", "WrongState"]


def test_an_approval_and_a_rejection_do_not_both_happen(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        command = str(propose(session))

    def decide(session: Session, number: int) -> object:
        decision = protocol.approve if number else protocol.reject
        return decision(session, command, f"person {number}", NOW)

    assert sorted(type(r).__name__ for r in race(replicas, decide)) == ["CommandChange", "WrongState"]


def test_an_accept_and_an_expiry_do_not_both_happen(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        command = str(propose(session))
        protocol.approve(session, command, "ada", NOW)
        protocol.deliver(session, 1, CONTROLLER, NOW)

    def act(session: Session, number: int) -> object:
        if number:
            return [c.became for c in protocol.expire_due(session, NOW + 700)]
        return protocol.ack(session, command, Ack(state="accepted", client=CONTROLLER, attempt=1), NOW + 599).became

    accepted, expired = race(replicas, act)
    with replicas[0].read() as session:
        state = protocol.find(session, command).state
        became = session.scalars(select(Audit.became).where(Audit.subject_id == command)).all()
    assert (state == "accepted") == (accepted == "accepted")
    assert (state == "expired") == (expired == ["expired"])
    assert ("accepted" in became) != ("expired" in became)


def test_two_acceptances_of_one_client_are_one(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        command = str(propose(session))
        protocol.approve(session, command, "ada", NOW)
        protocol.deliver(session, 1, CONTROLLER, NOW)
    answer = Ack(state="accepted", client=CONTROLLER, attempt=1)
    results = race(replicas, lambda session, _: protocol.ack(session, command, answer, NOW).became)
    assert results == ["accepted", "accepted"]
    with replicas[0].read() as session:
        became = session.scalars(select(Audit.became).where(Audit.subject_id == command)).all()
        assert became.count("accepted") == 1
        assert session.get_one(Run, 1).budget == {"resync_trainer": 1}


def test_two_replicas_deliver_and_the_audit_says_so_once(replicas: tuple[Store, Store]) -> None:
    with replicas[0].write() as session:
        command = str(propose(session))
        protocol.approve(session, command, "ada", NOW)
    race(replicas, lambda session, _: [c.id for c in protocol.deliver(session, 1, CONTROLLER, NOW)])
    with replicas[0].read() as session:
        became = session.scalars(select(Audit.became).where(Audit.subject_id == command)).all()
        assert became.count("delivered") == 1
