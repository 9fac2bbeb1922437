"""What a training loop talks to: introduces frames, transport and control to each other.

host's loop → Monitor → Measuring → StepBuilder → Sender (thread) → service
                      ← Executor ← Inbox ← Acceptance ← Poller (thread, controller only)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from foreshock import lifecycle
from foreshock.control.command import Command
from foreshock.control.executor import Broadcast, Executor, Gather, Handler
from foreshock.control.relay import Relay
from foreshock.control.supervised import Launcher
from foreshock.control.willing import Accepts, Willing
from foreshock.frames.builder import StepBuilder
from foreshock.frames.identity import Identity
from foreshock.frames.plain import plain
from foreshock.guard import Guard, HostError, guarded
from foreshock.measuring import Measuring
from foreshock.process import Consent, Process
from foreshock.settings import Settings
from foreshock.transport.losses import Losses
from foreshock.transport.stream import Extras
from foreshock.wire import commands as wire


class Monitor(Measuring):
    """Made by `foreshock.init`; every method returns at once and raises nothing of ours.

    One loop, one monitor, one thread at a time; safe in Ray actors and forked workers (a forked child reports as a
    client of its own and starts with an empty step).
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        extras: Extras,
        consent: Consent,
        broadcast: Broadcast | None,
        gather: Gather | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.guard = Guard(settings.guard_limit, settings.raise_errors, self._switched_off)
        self.enabled = bool(settings.url)
        """False without a url, and after `finish`: nothing is measured, kept or sent."""
        self._consent = consent
        self._broadcast = broadcast
        self._gather = gather
        self._handlers: dict[str, Handler] = {}
        self.willing = Willing(self.kinds)
        self._launcher = Launcher.found(extras.controller) if self.enabled else None
        if self._launcher is not None:
            # What the host does itself it registers or announces; then it is not the launcher's.
            for kind in self._launcher.kinds - consent.capabilities:
                self._handlers[kind] = self._launcher.carry_out
            self._launcher.tell(run=identity.run, rank=identity.rank)
        self._begin(extras)
        if self.enabled:
            self._process.connect()
            lifecycle.watch(self)

    def _begin(self, extras: Extras) -> None:
        """At `init`, and again in a forked child."""
        chosen = self.settings
        self._extras = extras
        self._asked_attempt: str | None = None
        self._begin_measuring(
            StepBuilder(chosen.max_signals, chosen.max_lag, chosen.evidence),
            Process(self.identity, chosen, extras, self._consent, self.guard, self.kinds),
        )
        self._executor = Executor(
            self._process.inbox, self._handlers, extras.controller, self._broadcast,
            chosen.pause_limit_s, self._command_finished, self.willing.objection, self._gather,
        )  # fmt: skip
        self._relay: Relay | None = None

    @property
    def client(self) -> str:
        """The id under which this process posts: a UUID, another one in a forked child."""
        return self._process.client

    @property
    def losses(self) -> Losses:
        """What was lost so far, by reason."""
        return self._process.losses

    @property
    def generation(self) -> int:
        """Attempts begun in this launch, beside the first."""
        return self._process.generation

    @property
    def connected(self) -> bool:
        """Whether this process has anything to end: a forked child that never spoke has not."""
        return self._process.sender is not None

    # --- the boundary --------------------------------------------------------------------------------------------

    def end_step(self, step: int) -> None:
        """Seals the step and hands it to the sender; never waits for the network or a device.

        Then, at this boundary, carries out the commands that are due, in order, by the handlers of `on`. A `pause`
        blocks here until `resume`, `stop` or the limit; KeyboardInterrupt passes.
        """
        self._seal(step)
        if self._relay is not None:
            self._hold(self._relay, step)
        # Where ranks meet in `broadcast`, a collector that switched itself off must still come.
        if self._broadcast is not None or len(self._process.inbox) or self._executor.paused:
            self._boundary(step)

    # --- commands ------------------------------------------------------------------------------------------------

    def on(self, kind: str, handler: Handler, accepts: Accepts | None = None) -> None:
        """Registers what carries out `kind`: called inside `end_step` with a `foreshock.Command`. Announces the kind.

        What it returns (None, a text or a mapping) is the acknowledgement's detail; what it raises makes the command
        `failed` and does not reach the loop. Raises ValueError for an unknown kind. `accepts(arguments)` says why this
        rank will not carry it out, "" where it will: where ranks agree first (`gather`, `foreshock.ray`), one
        objection refuses the command for all.
        """
        if kind not in wire.COMMAND_KINDS:
            raise ValueError(f"unknown command kind {kind!r}; known are {', '.join(wire.COMMAND_KINDS)}")
        self._handlers[kind] = handler
        if accepts is not None:
            self.willing.asks[kind] = accepts
        if self.enabled:
            self._process.tell_kinds()

    @property
    def paused(self) -> bool:
        """Whether the loop waits inside `end_step` for `resume`."""
        return self._executor.paused

    def follow(self, relay: Relay) -> None:
        """Takes commands from `relay` instead of the service (`foreshock.ray`); this process is no controller."""
        self._relay = relay
        self._executor.follows = True

    @guarded(default=())
    def commands(self) -> Iterator[Command]:
        """The commands due at the last boundary that no handler took; answer each with done, failed or refused."""
        return self._executor.by_hand()

    @guarded()
    def new_attempt(self, reason: str = "rollback") -> None:
        """Begins a new attempt: step numbers may start again.

        Happens by itself when a `rollback` is done; until the next step is sealed, calling it (again) changes nothing.
        Inside a handler it takes effect once the command has been answered.
        """
        if not self.enabled:
            return
        if self._executor.in_handler:
            self._asked_attempt = reason
        else:
            self._begin_attempt(reason, None)

    def finish(self, status: str = "completed", detail: Any = None) -> None:
        """Ends the run as `completed`, `failed`, `stopped` …

        Waits at most `finish_s` for the service; what it did not take is spooled for a successor. Later calls of any
        method do nothing. Happens by itself at interpreter exit (`completed`, or `crashed`), within `exit_flush_s`.
        """
        self.end(status, detail, self.settings.finish_s)
        if self.settings.raise_errors:
            self.guard.raise_pending()

    # --- for lifecycle -------------------------------------------------------------------------------------------

    def end(self, status: str, detail: Any, timeout_s: float) -> None:
        """`finish` within `timeout_s`; also of a collector that switched itself off."""
        self._end({"status": str(status)[:64]} | ({"detail": plain(detail)} if detail is not None else {}), timeout_s)

    def _end(self, said: dict[str, Any] | None, timeout_s: float) -> None:
        """Closes everything; without `said` the run has not ended, only this process's part in it."""
        if not self.enabled:
            return
        try:
            self._executor.refuse_rest("the run has ended")
            self.enabled = False
            self._process.close(said, timeout_s)
            if self._keeper is not None:
                self._keeper.close(timeout_s, crashed=(said or {}).get("status") in ("crashed", "failed"))
        except Exception as error:
            if self.settings.raise_errors:
                raise
            self.guard.caught("finish", error)
        finally:
            self.enabled = False
            lifecycle.forget(self)

    def after_fork(self) -> None:
        """In the child: another client, no step in progress, not the controller. The parent's is left untouched."""
        self._process.abandon()
        self._begin(Extras(controller=False, expected_ranks=self._extras.expected_ranks))

    # --- inside --------------------------------------------------------------------------------------------------

    def _boundary(self, step: int) -> None:
        """Shares and carries out what is due. The host's own exceptions (its broadcast, its interrupts) pass."""
        try:
            due = self._executor.share(step)
            self._executor.carry_out(due, step)
            if self._executor.paused:
                self._executor.wait_while_paused(step)
            if due:
                self._builder.restart_clock(time.monotonic())
            if self._launcher is not None and self._launcher.leaving:
                self._leave(self._launcher)
        except HostError as carried:
            raise carried.original from None
        except Exception as error:
            if self.guard.raise_errors:
                raise
            self.guard.caught("end_step", error)

    def _leave(self, launcher: Launcher) -> None:
        """Hands in what was measured; then the launcher ends this process, and begins the next one after a rollback."""
        if launcher.leaving == "stop":
            self.end("stopped", None, self.settings.finish_s)
        else:
            self._end(None, self.settings.finish_s)
        launcher.leave()

    def _hold(self, relay: Relay, step: int) -> None:
        try:
            relay.hold(step)
        except Exception as error:
            if self.guard.raise_errors:
                raise
            self.guard.caught("hold", error)

    def kinds(self) -> set[str]:
        """The command kinds that this process can carry out: what was announced, and what has a handler."""
        return set(self._consent.capabilities) | set(self._handlers)

    def _begin_attempt(self, reason: str, command_id: str | None) -> None:
        if self._process.begin_attempt(str(reason), command_id):
            self._builder.reset()
            self._builder.restart_clock(time.monotonic())

    def _command_finished(self, command: wire.Command, state: str, detail: dict[str, Any], step: int | None) -> None:
        """Answers a command; what rolled back begins a new attempt after its answer."""
        try:
            if self._extras.controller:
                ack = wire.Ack(state=state, client=self.client, attempt=command.attempt, step=step, detail=detail)
                self._process.put_ack(command.id, ack)
            elif self._relay is not None:
                self._relay.finished(command, state, detail, step)
            elif state != "done":
                text = f"{command.kind} was {state} on this rank"
                self._process.put_notice("note", {"text": text, "command": command.id, "detail": detail}, step)
            asked, self._asked_attempt = self._asked_attempt, None
            rolled_back = state == "done" and any(action.kind == "rollback" for action in command.actions)
            if asked is not None or rolled_back:
                self._begin_attempt(asked or "rollback", command.id)
        except Exception as error:
            if self.guard.raise_errors:
                raise
            self.guard.caught("acknowledgement", error)

    def _switched_off(self) -> None:
        """The guard's last word: no more commands are taken, and the service is told why nothing more comes."""
        self._process.take_no_more()
        text = f"the collector switched itself off after {self.guard.errors} errors of its own"
        if self.connected:
            self._process.put_notice("note", {"text": text})
