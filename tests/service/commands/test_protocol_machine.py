"""Whatever people, the trainer, the sweep and new attempts do, in whatever order, the protocol keeps its promises."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from sqlalchemy import select

from foreshock.wire.commands import COMMAND_KINDS, Ack, Action
from foreshock_service.commands import protocol
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Audit, Base, CommandRow, Run

CLIENTS = ("a" * 32, "b" * 32)


class CommandMachine(RuleBasedStateMachine):
    """Two clients of which one leads, time that passes, attempts that begin."""

    commands = Bundle("commands")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(f"sqlite:///{Path(self.folder.name) / 'machine.db'}", synchronous="OFF")
        Base.metadata.create_all(self.store.engine)
        self.now = 1000.0
        with self.store.write() as session:
            run = Run(
                name="p/r", project="p", created_at=0.0, last_seen_at=0.0, mode="auto", attempt=1,
                capabilities=list(COMMAND_KINDS), controller_client=CLIENTS[0], controller_until=1e9,
            )  # fmt: skip
            session.add(run)
            session.flush()
            self.run_id = run.id
            session.add(Attempt(run_id=run.id, ordinal=1, launch="l", generation=0, started_at=0.0))

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def attempt(self, action: str, command: str, **arguments: object) -> None:
        """Calls one function of the protocol; a CommandError rolls back and is an answer like any other."""
        try:
            with self.store.write() as session:
                getattr(protocol, action)(session, command, **arguments)
        except protocol.CommandError:
            pass

    @rule(target=commands, kind=st.sampled_from(COMMAND_KINDS), key=st.sampled_from([None, "k1", "k2"]))
    def propose(self, kind: str, key: str | None) -> str:
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            change = protocol.propose(session, run, [Action(kind=kind)], self.now, reason="", evidence_key=key)
            return change.command.id if change else "0" * 32

    @rule(command=commands)
    def approve(self, command: str) -> None:
        self.attempt("approve", command, by="ada", now=self.now)

    @rule(command=commands)
    def reject(self, command: str) -> None:
        self.attempt("reject", command, by="ada", now=self.now)

    @rule(command=commands)
    def cancel(self, command: str) -> None:
        self.attempt("cancel", command, by="ada", now=self.now)

    @rule(client=st.sampled_from(CLIENTS))
    def deliver(self, client: str) -> None:
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            sent = protocol.deliver(session, self.run_id, client, self.now)
            assert len(sent) <= 1
            assert not sent or client == run.controller_client
            assert all(c.expires_in_s > 0 and c.attempt == run.attempt for c in sent)

    @rule(
        command=commands,
        state=st.sampled_from(["accepted", "done", "failed", "refused"]),
        client=st.sampled_from(CLIENTS),
        attempt=st.integers(1, 3),
    )
    def answer(self, command: str, state: str, client: str, attempt: int) -> None:
        self.attempt("ack", command, answer=Ack(state=state, client=client, attempt=attempt), now=self.now)

    @rule(seconds=st.sampled_from([1.0, 300.0, 601.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        with self.store.write() as session:
            protocol.expire_due(session, self.now)

    @rule(launch=st.sampled_from(["l", "m"]))
    def new_attempt(self, launch: str) -> None:
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            run.attempt += 1
            session.add(
                Attempt(run_id=run.id, ordinal=run.attempt, launch=launch, generation=run.attempt, started_at=0)
            )
            session.flush()
            protocol.lose_accepted(session, run.id, run.attempt, self.now)

    @rule(client=st.sampled_from(CLIENTS))
    def another_leads(self, client: str) -> None:
        with self.store.write() as session:
            session.get_one(Run, self.run_id).controller_client = client

    @invariant()
    def at_most_one_is_in_flight(self) -> None:
        with self.store.read() as session:
            states = session.scalars(select(CommandRow.state)).all()
            assert sum(s in protocol.IN_FLIGHT for s in states) <= 1

    @invariant()
    def every_change_is_a_step_of_the_machine_and_ends_where_the_row_is(self) -> None:
        with self.store.read() as session:
            for row in session.scalars(select(CommandRow)).all():
                query = (
                    select(Audit.was, Audit.became, Audit.actor).where(Audit.subject_id == row.id).order_by(Audit.id)
                )
                steps = session.execute(query).all()
                assert steps[0][:2] == (None, "proposed")
                for (_, before, _), (was, became, _) in itertools.pairwise(steps):
                    assert was == before
                    assert became in protocol.TRANSITIONS[was]
                assert steps[-1].became == row.state
                assert [s.became for s in steps].count("accepted") == (row.accepted_at is not None)
                assert row.accepted_at is None or row.accepted_at < row.expires_at

    @invariant()
    def no_evidence_key_is_used_twice(self) -> None:
        with self.store.read() as session:
            keys = session.scalars(select(CommandRow.evidence_key).where(CommandRow.evidence_key.is_not(None))).all()
            assert len(keys) == len(set(keys))


TestCommandMachine = CommandMachine.TestCase
TestCommandMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
