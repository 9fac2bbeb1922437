"""The evaluator: claims runs, folds their due steps through the rules in order, ticks, and sweeps what has expired.

One thread. Woken by the hub at once when a step is complete, else by the next watermark, else every second. After a
round it rests four times as long as the round took, `REST_MOST_S` at most, so that under load the steps of many runs
gather for one transaction, which costs as much for one step as for ten. Each transaction holds the lease rows of its
runs; a replica that lost its lease finds another fence there and rolls everything
back, so every step is evaluated once and every incident and command written once. Evaluations do not wait for the disk:
after a power cut they are repeated from the frames, and whatever leaves the service (an acceptance, an alert) is behind
a durable commit of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.exc import DBAPIError

from foreshock_service.store import leases
from foreshock_service.store.engine import Store
from foreshock_service.store.flags import Flag
from foreshock_service.store.models import CommandRow, EvaluationState, Step
from foreshock_service.workers.evaluation import evaluate_steps, follow, quiet, take
from foreshock_service.workers.folding import Ready, make_ready
from foreshock_service.workers.holding import LeaseLostError, Memories, Memory, hold, may_hold, save
from foreshock_service.workers.hub import Hub
from foreshock_service.workers.reading import BATCH, DueStep, Key, due_steps
from foreshock_service.workers.rooms import Rooms
from foreshock_service.workers.ticks import runs_to_tick, tick_of

logger = logging.getLogger(__name__)

POLL_S = 1.0
SWEEP_S = 5.0
REST_MOST_S = 0.15
MANY_RUNS = 64
MANY_FRAMES = 512
"""Frames of other runs beyond which a run is left for the next transaction: each holds its runs' rows."""
UNEASY_BATCH = 8
"""Steps in one transaction of a run of which something may follow: some milliseconds each, its row held."""
EXPIRING = ("proposed", "approved", "delivered", "accepted")
_WAITING = select(Step.run_id, func.min(Step.due_at)).where(Step.evaluated_at.is_(None)).group_by(Step.run_id)


@dataclass
class EvaluatorCounts:
    """What the evaluator did since it was made; read by `/metrics`."""

    steps: int = 0
    ticks: int = 0
    failed_steps: int = 0
    leases_lost: int = 0


class Evaluator:
    """Evaluates whatever is due. A worker: `run(stop)` is its thread; `evaluate_due()` does one round, for tests."""

    name = "evaluator"

    def __init__(
        self,
        store: Store,
        hub: Hub,
        rooms: Rooms,
        *,
        owner: str | None = None,
        lease_s: float = 10.0,
        tick_s: float = 10.0,
        max_signals_per_run: int = 4096,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._hub = hub
        self._rooms = rooms
        self.owner = owner or leases.owner_name()
        self._lease_s = lease_s
        self._tick_s = tick_s
        self._most = max_signals_per_run
        self._clock = clock
        self._memories = Memories()
        self._ticked: dict[int, float] = {}
        """Run → its last tick, which is written down only where it changed something."""
        self.counts = EvaluatorCounts()

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set, then gives its leases back."""
        next_tick = next_sweep = next_look = 0.0
        while not stop.is_set():
            named = self._hub.wait_stepped(next_look - time.monotonic())
            if stop.is_set():
                break
            began = time.monotonic()
            # Runs that were named are evaluated without looking around first.
            if self.evaluate_runs(sorted(named - {0})):
                next_look = 0.0
            if time.monotonic() >= next_look:
                next_look = self.evaluate_due() + time.monotonic()
            now = time.monotonic()
            if now >= next_tick:
                self.tick()
                next_tick = now + min(self._tick_s, 5.0)
            if now >= next_sweep:
                self.sweep()
                next_sweep = now + SWEEP_S
            if next_look > time.monotonic():
                stop.wait(min(REST_MOST_S, 4 * (now - began)))
        with self._store.write() as session:
            leases.release_evaluations(session, self.owner)

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._hub.hear("stepped", 0)

    def evaluate_due(self) -> float:
        """Evaluates everything due now, a batch of each run in turn; returns the seconds until the next step is due."""
        now = self._clock()
        with self._store.read() as session:
            due_at = dict(session.connection().execute(_WAITING).all())
        if self.evaluate_runs([run_id for run_id, at in due_at.items() if at <= now]):
            return 0.0
        later = [at for at in due_at.values() if at > now]
        return min([POLL_S, *(max(0.01, at - now) for at in later)])

    def evaluate_runs(self, run_ids: Sequence[int]) -> bool:
        """Evaluates the runs' due steps, a batch of each at most; True where there may be more. Raises for no step."""
        more = False
        left, uneasy = self._by_calm(run_ids)
        while left or uneasy:
            taken, most = left[:MANY_RUNS], BATCH
            if not left:
                taken, most = [uneasy.pop()], UNEASY_BATCH
            left = left[MANY_RUNS:]
            try:
                done, put_off = self._evaluate(taken, most)
            except Exception as error:
                if len(taken) == 1:
                    self._evaluate_with_care(taken[0], error)
                    continue
                if not isinstance(error, LeaseLostError | DBAPIError):
                    logger.warning("a batch of %d runs failed, trying one by one: %r", len(taken), error)
                for run_id in taken:
                    more |= self.evaluate_runs([run_id])
                continue
            more |= any(steps >= most for steps in done.values())
            calm, stirred = self._by_calm(put_off)
            left, uneasy = calm + left, stirred + uneasy
        return more

    def _by_calm(self, run_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Runs of which nothing but points is expected; and those that are evaluated alone, for the others would wait
        while incidents, commands and alerts are followed."""
        calm, uneasy = list[int](), list[int]()
        for run_id in run_ids:
            (calm if self._memories.calm(run_id) else uneasy).append(run_id)
        return calm, uneasy[::-1]

    def _evaluate_with_care(self, run_id: int, error: Exception) -> None:
        """After a run's batch failed: its first step alone, which is marked and passed over where it fails as well."""
        if isinstance(error, LeaseLostError):
            self.counts.leases_lost += 1
            return
        if isinstance(error, DBAPIError):
            logger.warning("run %d not evaluated now: %s", run_id, error.orig)
            return
        logger.error("a batch of run %d failed; trying its first step alone", run_id, exc_info=error)
        try:
            self._evaluate([run_id], 1)
        except LeaseLostError:
            self.counts.leases_lost += 1
        except Exception:
            logger.exception("a step of run %d cannot be evaluated and is passed over", run_id)
            self._pass_over(run_id)

    def _evaluate(self, run_ids: Sequence[int], most: int) -> tuple[dict[int, int], list[int]]:
        """Evaluates in one transaction; returns how many steps of each run, and the runs that had to be put off."""
        now = self._clock()
        with self._store.read() as session:
            # No lock yet: whoever sends frames of these runs meanwhile does not wait.
            waiting = due_steps(session, may_hold(session, run_ids, self.owner, now), now, most)
            put_off = _bounded(waiting)
            if not waiting:
                return {}, []
            ready = make_ready(session, [step for steps in waiting.values() for step in steps])
        memories, stirred = self._fold_ahead(waiting, ready, now)
        put_off += stirred
        if not memories:
            return {}, put_off
        with self._store.write(durable=False) as session:
            held = hold(session, self._rooms, memories, self.owner, now)
            # Read behind the lock: another replica may have evaluated them before it was had. What has become due
            # since is the next round's, for it would be read and merged while others wait.
            due = {
                run_id: list(takewhile(lambda step: step.key in ready, steps))
                for run_id, steps in due_steps(session, list(held), now, most).items()
            }
            held = {run_id: one for run_id, one in held.items() if due.get(run_id)}
            if not held:
                return {}, put_off
            work = [(one, due[run_id]) for run_id, one in held.items()]
            evaluate_steps(session, self._rooms, work, now, self._most, ready)
            save(session, self._rooms, held.values(), self.owner, now, self._lease_s)
        done = {run_id: len(due[run_id]) for run_id in held}
        self.counts.steps += sum(done.values())
        for run_id, one in held.items():
            self._memories.keep(run_id, one.memory)
            if one.notify:
                self._hub.changed(run_id)
        return done, put_off

    def _fold_ahead(
        self, waiting: Mapping[int, Sequence[DueStep]], ready: Mapping[Key, Ready], now: float
    ) -> tuple[dict[int, Memory], list[int]]:
        """What is remembered of the runs, with their steps folded as far as can be; and, where there are several, which
        turned out to be no company for the others."""
        memories = {run_id: self._memories.take(run_id) for run_id in waiting}
        for run_id, steps in waiting.items():
            memories[run_id].fold_ahead(self._store.dialect, steps, ready, now)
        stirred = [run_id for run_id, memory in memories.items() if not memory.calm] if len(memories) > 1 else []
        for run_id in stirred:
            self._memories.keep(run_id, memories.pop(run_id))
        return memories, stirred

    def _pass_over(self, run_id: int) -> None:
        now = self._clock()
        with self._store.write() as session:
            steps = due_steps(session, [run_id], now, 1).get(run_id, [])
            for step in steps:
                session.execute(
                    update(Step)
                    .where(Step.run_id == run_id, Step.attempt == step.attempt, Step.step == step.step)
                    .values(evaluated_at=now, flags=step.flags | int(Flag.EVALUATION_FAILED))
                    .execution_options(synchronize_session=False)
                )
        self.counts.failed_steps += len(steps)

    def tick(self) -> None:
        """One tick for every run that is due one and that this replica may hold."""
        now = self._clock()
        with self._store.read() as session:
            run_ids = runs_to_tick(session, self.owner, now, self._tick_s)
        self._ticked = {run_id: at for run_id in run_ids if (at := self._ticked.get(run_id)) is not None}
        for run_id in run_ids:
            if now - self._ticked.get(run_id, -math.inf) < self._tick_s:
                continue
            try:
                self._tick(run_id, now)
            except LeaseLostError:
                self.counts.leases_lost += 1
            except Exception:
                logger.exception("the tick of run %d failed", run_id)

    def _tick(self, run_id: int, now: float) -> None:
        memory = self._memories.take(run_id)
        with self._store.write(durable=False) as session:
            held = hold(session, self._rooms, {run_id: memory}, self.owner, now).get(run_id)
            if held is None:
                return
            seen = tick_of(session, held.run, held.row.step, now)
            held.calibrated = held.run.verdict != "unknown"
            state, outcome = held.engine.evaluate(held.state, seen, now)
            take(held, state, outcome)
            if not quiet(session, self._rooms, held, seen, outcome):
                follow(session, self._rooms, held, seen, outcome, now, may_command=True)
            if not held.quiet or held.changed or held.state != held.before or seen.finished:
                held.row.ticked_at = now
                save(session, self._rooms, [held], self.owner, now, self._lease_s)
        self._memories.keep(run_id, held.memory)
        self._ticked[run_id] = now
        self.counts.ticks += 1
        if held.notify:
            self._hub.changed(run_id)

    def sweep(self) -> None:
        """Lets commands expire whose time has passed. Safe on every replica: each change is a conditional update."""
        with self._store.read() as session:
            open_commands = session.scalar(select(CommandRow.id).where(CommandRow.state.in_(EXPIRING)).limit(1))
        if open_commands is None:
            return
        try:
            with self._store.write() as session:
                touched = list(self._rooms.expire(session, self._clock()))
        except Exception:
            logger.exception("the sweep of expired commands failed")
            return
        for run_id in touched:
            self._hub.changed(run_id)


def _bounded(waiting: dict[int, list[Any]]) -> list[int]:
    """Cuts `waiting` down to what one transaction should take, whole runs and one at least; returns the others."""
    frames, cut = 0, []
    for run_id, steps in list(waiting.items()):
        if frames and frames + sum(step.reported for step in steps) > MANY_FRAMES:
            cut.append(run_id)
            del waiting[run_id]
        else:
            frames += sum(step.reported for step in steps)
    return cut


def holder(store: Store, run_id: int) -> str | None:
    """Which replica evaluates the run; None where nobody does."""
    with store.read() as session:
        return session.scalar(select(EvaluationState.owner).where(EvaluationState.run_id == run_id))
