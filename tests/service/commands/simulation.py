"""A trainer on strings: steps are stored, findings booked, commands considered, and answered as a real one would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from foreshock.wire.commands import COMMAND_KINDS, Ack
from foreshock_service.commands import checkpoints, policy, protocol
from foreshock_service.commands.limits import Limits
from foreshock_service.commands.protocol import CommandChange
from foreshock_service.incidents import book
from foreshock_service.rules.interface import Evidence, Finding, Outcome, StepView
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Checkpoint, CommandRow, Incident, Point, Run, SignalName

CONTROLLER = "c" * 32
SIGNALS = (
    "policy.kl_k2", "mismatch.kl_k3", "mismatch.kl_k2", "mismatch_current.kl_k2", "mismatch_current.kl_k3",
    "reward.mean", "reward.validation", "group.zero_std", "grad.nonfinite", "mismatch.slope", "mismatch.logp_pearson",
    "mismatch.abs_mean", "mismatch.delta_mean", "mismatch.kl_k1", "mismatch.positive_share", "staleness.mean",
)  # fmt: skip
BANDS: dict[str, list[float]] = {"policy.kl_k2": [1e-6, 1e-5, 1e-4], "mismatch.kl_k3": [1e-4, 5e-4, 2e-3]}
CALM = {
    "policy.kl_k2": 1e-5, "mismatch.kl_k3": 5e-4, "mismatch.kl_k2": 5e-4, "mismatch_current.kl_k2": 5e-4,
    "mismatch_current.kl_k3": 5e-4, "reward.mean": 0.8, "group.zero_std": 0.1,
}  # fmt: skip
TRAINING_FAULT = {"policy.kl_k2": 0.02, "mismatch_current.kl_k2": 0.021, "mismatch_current.kl_k3": 0.021}
SCORING_FAULT = {"policy.kl_k2": 0.02, "mismatch.kl_k2": 0.021, "mismatch.kl_k3": 0.021}
ENGINE_FAULT = {"mismatch.kl_k2": 0.1, "mismatch.kl_k3": 0.1, "mismatch_current.kl_k2": 0.1,
                "mismatch_current.kl_k3": 0.1}  # fmt: skip
STALE = {"mismatch.slope": 1.03, "mismatch.logp_pearson": 0.9, "mismatch.abs_mean": 0.1, "mismatch.delta_mean": -0.01,
         "mismatch.kl_k1": 0.01, "mismatch.positive_share": 0.5, "staleness.mean": 4.0}  # fmt: skip


class Simulation:
    """One run. `step` is one evaluated step; `finding` words become the findings of that step."""

    def __init__(
        self, store: Store, mode: str = "auto", capabilities: tuple[str, ...] = COMMAND_KINDS, **limits: Any
    ) -> None:
        self.store = store
        self.limits = Limits(**limits)
        self.at = 0
        self.attempt = 1
        self.now = 1_000.0
        self.open: set[str] = set()
        with store.write() as session:
            run = Run(
                name="lab/run", project="lab", created_at=0.0, last_seen_at=0.0, mode=mode, attempt=1,
                capabilities=list(capabilities), controller_client=CONTROLLER, controller_until=1e9,
            )  # fmt: skip
            session.add(run)
            session.flush()
            self.run_id = run.id
            session.add(Attempt(run_id=run.id, ordinal=1, launch="one", generation=0, started_at=0.0, first_step=1))
            session.add_all(SignalName(run_id=run.id, position=i, name=n) for i, n in enumerate(SIGNALS, start=1))

    def step(
        self, *findings: Finding, may_command: bool = True, bands: Mapping[str, list[float]] = BANDS, **values: Any
    ) -> list[CommandChange]:
        """One step of CALM values, overlaid with `values` (dots written as `__`)."""
        self.at += 1
        self.now += 1.0
        merged = {**CALM, **{k.replace("__", "."): v for k, v in values.items()}}
        for found in findings:
            (self.open.discard if found.transition == "close" else self.open.add)(found.rule)
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            session.add(
                Point(
                    run_id=run.id, attempt=self.attempt, step=self.at, at=self.now, bands=dict(bands),
                    values=[merged.get(n) for n in SIGNALS],
                )
            )  # fmt: skip
            session.flush()
            seen = StepView(run=run.name, attempt=self.attempt, step=self.at, values=merged)
            placed = [
                Finding(
                    rule=f.rule, transition=f.transition, severity=f.severity, step=self.at, edge=f.edge,
                    onset_step=f.onset_step or self.at, evidence=f.evidence, reopens=f.reopens,
                )
                for f in findings
            ]  # fmt: skip
            changes = book.apply(session, run, seen, Outcome(findings=placed, firing=sorted(self.open)), self.now)
            return policy.consider(session, run, seen, changes, self.now, may_command, limits=self.limits)

    def steps(self, count: int, **values: Any) -> list[CommandChange]:
        """Several alike."""
        return [change for _ in range(count) for change in self.step(**values)]

    def answer(self, state: str = "done", new_attempt_at: int | None = None) -> str:
        """Takes the waiting command as a trainer does and reports `state`; returns its kind."""
        with self.store.write() as session:
            (sent,) = protocol.deliver(session, self.run_id, CONTROLLER, self.now)
        with self.store.write() as session:
            protocol.ack(session, sent.id, Ack(state="accepted", client=CONTROLLER, attempt=sent.attempt), self.now)
        with self.store.write() as session:
            done = Ack(state=state, client=CONTROLLER, attempt=sent.attempt, step=self.at)
            protocol.ack(session, sent.id, done, self.now)
        if new_attempt_at is not None:
            self.begin_attempt(new_attempt_at)
        return sent.kind

    def begin_attempt(self, back_to: int, launch: str = "one") -> None:
        """The next step is the one after `back_to`, in a new attempt."""
        self.attempt += 1
        self.at = back_to
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            run.attempt = self.attempt
            session.add(
                Attempt(
                    run_id=run.id, ordinal=self.attempt, launch=launch, generation=self.attempt, started_at=self.now,
                    first_step=back_to + 1,
                )
            )  # fmt: skip

    def checkpoint(self, path: str | None = None) -> None:
        """As announced by the trainer after the current step."""
        with self.store.write() as session:
            run = session.get_one(Run, self.run_id)
            data = {"path": path or f"/ckpt/{self.attempt}/{self.at}", "scope": ["weights", "optimizer"]}
            checkpoints.register(session, run, self.attempt, self.at, data, self.now)

    def commands(self) -> list[tuple[str, str]]:
        """(kind, state) of every command, oldest first."""
        with self.store.read() as session:
            rows = session.scalars(select(CommandRow).order_by(CommandRow.created_at)).all()
            return [(row.kind, row.state) for row in rows]

    def row(self, kind: str) -> CommandRow:
        """The newest command of a kind."""
        with self.store.read() as session:
            query = select(CommandRow).where(CommandRow.kind == kind).order_by(CommandRow.created_at.desc())
            return session.scalars(query).first() or CommandRow()

    def incident(self, rule: str) -> Incident:
        with self.store.read() as session:
            return session.scalars(select(Incident).where(Incident.rule == rule)).one()

    def checkpoints(self) -> dict[tuple[int, int], str]:
        """(attempt, step) → status."""
        with self.store.read() as session:
            return {(c.attempt, c.step): c.status for c in session.scalars(select(Checkpoint))}


def opens(rule: str, edge: str | None = None, onset: int | None = None, severity: str = "critical") -> Finding:
    """The finding that opens `rule`, with its first number."""
    signal = {"onpolicy_disagreement": "policy.kl_k2", "rollout_mismatch": "mismatch.kl_k3"}.get(rule, "reward.mean")
    numbers = (Evidence(signal=signal, value=0.02, expected=1e-5),)
    return Finding(
        rule=rule, transition="open", severity=severity, step=None, edge=edge, onset_step=onset, evidence=numbers  # type: ignore[arg-type]
    )  # fmt: skip


def closes(rule: str) -> Finding:
    return Finding(rule=rule, transition="close", severity="critical", step=None)
