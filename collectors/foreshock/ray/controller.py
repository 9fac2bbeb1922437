"""The run's controller as a Ray actor: polls the service once for the run, gathers the ranks' acceptance, fans out.

service ⇄ poller → inbox → ask every rank → all accept → go at step S → every rank's outcome → one answer
                                         └→ one objects, or is silent → abort, `refused`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from logging import getLogger
from typing import Any, Final

import msgspec

from foreshock.control.gathering import Answer, Outcome, conclude, decide, refusal
from foreshock.control.inbox import Pending
from foreshock.transport.clock import boot_s

_log = getLogger("foreshock")
NAMESPACE: Final = "foreshock"
PATIENCE_S: Final = 10.0
"""A rank that has not been heard of for so long is silent."""
LISTEN_S: Final = 1.0
"""How long a rank's question stays open."""
KEPT: Final = 100
"""Messages kept for ranks that have not fetched them yet."""


def actor_name(run: str) -> str:
    """The actor's name; its namespace is `foreshock`."""
    return f"controller:{run}"


class Controller:
    """Runs inside an actor made by `start`; `world` ranks must have joined before anything can be carried out."""

    def __init__(self, run: str, world: int, patience_s: float = PATIENCE_S, **arguments: Any) -> None:
        import foreshock

        self._monitor = foreshock.init(run=run, role="driver", rank=0, controller=True, expected_ranks={}, **arguments)
        self._ranks = range(world)
        self._patience_s = patience_s
        self._heard: dict[int, float] = {}
        self._kinds: dict[int, set[str]] = {}
        self._messages: list[tuple[int, dict[str, Any]]] = []
        self._version = 0
        self._answers: dict[str, dict[int, Answer]] = {}
        self._outcomes: dict[str, dict[int, Outcome]] = {}
        self._changed: asyncio.Condition | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def start(cls, run: str, world: int, **arguments: Any) -> Any:
        """The handle of the run's actor, started where there is none yet. It lives as long as its starter's job.

        `arguments` are `foreshock.init`'s, and `patience_s`. Raises ValueError for what `init` would refuse.
        """
        import ray

        from foreshock.frames.identity import run_name

        # Any: ray's type stubs know no options of an actor here.
        actor: Any = ray.remote
        made = actor(num_cpus=0, max_concurrency=1000, max_restarts=0)(cls)
        name = actor_name(run_name(run, str(arguments.get("project") or "default")))
        return made.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote(run, world, **arguments)

    # --- what ranks call -------------------------------------------------------------------------------------------

    async def join(self, rank: int, kinds: list[str]) -> int:
        """A rank is there and can carry out `kinds`; returns the version from which it listens."""
        self._start()
        if rank not in self._ranks:
            raise ValueError(f"rank {rank} is outside a world of {len(self._ranks)}")
        self._kinds[rank] = set(kinds)
        self._heard[rank] = time.monotonic()
        if len(self._kinds) == len(self._ranks):
            # Only what every rank can do is announced. These handlers never run: this process has no boundary.
            for kind in sorted(set.intersection(*self._kinds.values())):
                self._monitor.on(kind, _never)
        return self._version

    async def listen(self, rank: int, seen: int, ended_steps: int) -> tuple[int, list[dict[str, Any]]]:
        """The messages after version `seen`; waits for one at most LISTEN_S."""
        self._start()
        self._heard[rank] = time.monotonic()
        if ended_steps:
            self._monitor._process.saw_step()
        await self._until(lambda: self._version > seen, LISTEN_S)
        self._heard[rank] = time.monotonic()
        return self._version, [message for version, message in self._messages if version > seen]

    async def answer(self, rank: int, command: str, answer: Answer) -> None:
        """A rank accepts or objects."""
        if command in self._answers:
            self._answers[command][rank] = answer
            await self._notify()

    async def outcome(self, rank: int, command: str, outcome: Outcome) -> None:
        """What became of a command on a rank."""
        if command in self._outcomes:
            self._outcomes[command][rank] = outcome
            await self._notify()

    async def client(self) -> str:
        """The client id under which the controller speaks to the service."""
        self._start()
        return self._monitor.client

    async def finish(self, status: str = "completed") -> None:
        """Ends the run at the service."""
        await asyncio.to_thread(self._monitor.finish, status)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._task is None:
            self._changed = asyncio.Condition()
            self._task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        inbox = self._monitor._process.inbox
        while True:
            await asyncio.to_thread(inbox.wait, 0.5)
            for pending in inbox.take(None):
                try:
                    outcome = await self._carry_out(pending)
                except Exception as error:
                    _log.warning("foreshock: %s could not be fanned out: %r", pending.command.kind, error)
                    outcome = Outcome(state="failed", detail={"error": f"{type(error).__name__}: {error}"})
                self._monitor._command_finished(pending.command, outcome.state, outcome.detail, outcome.step)

    async def _carry_out(self, pending: Pending) -> Outcome:
        command, left_s = pending.command, pending.expires_s - boot_s()
        if left_s <= 0:
            return Outcome(state="refused", detail={"reason": "expired"})
        answers, outcomes = self._answers.setdefault(command.id, {}), self._outcomes.setdefault(command.id, {})
        try:
            await self._say({"ask": msgspec.to_builtins(command), "left_s": left_s})
            await self._until(
                lambda: len(answers) == len(self._ranks) or any(a.objection for a in answers.values()),
                min(left_s, self._patience_s),
            )
            decision = decide(answers, self._ranks, command.at_step)
            if decision.refused or pending.expired:
                await self._say({"abort": command.id})
                why = refusal(decision.refused) if decision.refused else {"reason": "expired"}
                return Outcome(state="refused", detail=why)
            await self._say({"go": command.id, "at_step": decision.at_step})
            await self._until(lambda: self._missing(outcomes) == [], None, lambda: self._silent(outcomes))
            return conclude(outcomes, self._ranks)
        finally:
            del self._answers[command.id], self._outcomes[command.id]

    def _missing(self, outcomes: dict[int, Outcome]) -> list[int]:
        return [rank for rank in self._ranks if rank not in outcomes]

    def _silent(self, outcomes: dict[int, Outcome]) -> bool:
        """Whether every rank that still owes its outcome has gone silent."""
        long_ago = time.monotonic() - self._patience_s
        return all(self._heard.get(rank, 0.0) < long_ago for rank in self._missing(outcomes))

    async def _say(self, message: dict[str, Any]) -> None:
        self._version += 1
        self._messages = [*self._messages[-KEPT:], (self._version, message)]
        await self._notify()

    async def _notify(self) -> None:
        assert self._changed is not None
        async with self._changed:
            self._changed.notify_all()

    async def _until(
        self, condition: Callable[[], bool], seconds: float | None, or_else: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits for `condition`, at most `seconds`, or until `or_else`, which is looked at now and then."""
        assert self._changed is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        async with self._changed:
            while not condition() and not or_else():
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0:
                    return
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    continue


def _never(_: Any) -> None:
    raise RuntimeError("the controller itself carries out nothing")
