"""What belongs to one process of a run: client id, sequence, attempt, losses, threads. Remade in a forked child."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from foreshock import __version__
from foreshock.control.acceptance import Acceptance
from foreshock.control.inbox import Inbox
from foreshock.control.poller import Poller
from foreshock.control.supervised import completes
from foreshock.dumps.keeper import Keeper
from foreshock.dumps.plan import Place
from foreshock.frames.builder import SealedStep
from foreshock.frames.identity import Identity
from foreshock.guard import Guard
from foreshock.settings import Settings
from foreshock.transport.clock import boot_s
from foreshock.transport.items import AckItem, Item, NoticeItem, StepItem
from foreshock.transport.losses import Losses
from foreshock.transport.sender import Sender
from foreshock.transport.spool import Header
from foreshock.transport.stream import Extras
from foreshock.wire.commands import Ack
from foreshock.wire.envelope import Reply

STARTED_HOLD_S = 0.5
"""`started` waits this long, or for the next item, so that it names the handlers registered right after `init`."""
Data = dict[str, Any] | Callable[[], dict[str, Any]]


class Consent(NamedTuple):
    """What the host agreed to, and the configuration it told."""

    capabilities: frozenset[str]
    mode: str
    config: dict[str, Any]


class Process:
    """Connects at the first item, so that a forked child that never speaks costs nothing.

    `kinds()` names the command kinds that can be carried out now.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        extras: Extras,
        consent: Consent,
        guard: Guard,
        kinds: Callable[[], set[str]],
    ) -> None:
        self.client = uuid.uuid4().hex
        self.losses = Losses()
        self.generation = 0
        """Attempts begun in this launch, beside the first."""
        self.inbox = Inbox()
        self.sender: Sender | None = None
        self.poller: Poller | None = None
        self.acceptance: Acceptance | None = None
        self.controller = extras.controller
        self.keeper: Keeper | None = None
        """Of token dumps, where they are wanted."""
        if settings.url and settings.dump_dir:
            self.keeper = Keeper(settings, self.client, consent.config, f"python-{__version__}", self.losses)
        self._identity = identity
        self._settings = settings
        self._extras = extras
        self._consent = consent
        self._guard = guard
        self._kinds = kinds
        self._told_kinds: set[str] | None = None
        self._steps = 0
        self._lock = threading.Lock()

    def connect(self) -> Sender:
        """The sender, made at first need. `started` is the first item."""
        if self.sender is None:
            me, chosen = self._identity, self._settings
            header = Header(
                client=self.client, run=me.run, launch=me.launch, role=me.role, rank=me.rank,
                url=chosen.url, sdk=f"python-{__version__}",
            )  # fmt: skip
            self.sender = Sender(chosen, header, self._extras, self.losses, self._guard, self._replied)
            if self.controller:
                self.acceptance = Acceptance(me.run, self.client, self.inbox, self.losses, self._kinds, self.put_ack)
                self.poller = Poller(chosen, me.run, self.client, self.acceptance, self._guard)
            hold_s = boot_s() + STARTED_HOLD_S
            self._tell_completed()
            self._put(lambda n: self._notice(n, "started", self._started, None, hold_s))
        return self.sender

    def _tell_completed(self) -> None:
        """Before anything else: the command that this launch carries out, which the service else takes for lost."""
        done = completes(self._identity.run)
        if done is None:
            return
        self.put_notice("attempt", {"reason": "rollback", "command": done["id"]})
        if self.controller:
            detail = dict(done.get("detail") or {})
            self.put_ack(done["id"], Ack(state="done", client=self.client, attempt=done["attempt"], detail=detail))

    def put_step(self, sealed: SealedStep) -> None:
        """Queues a sealed step."""
        generation, sealed_s, me = self.generation, boot_s(), self._identity
        self._put(lambda n: StepItem(n, generation, sealed_s, sealed, me.role, me.rank))
        self._steps += 1

    def put_notice(self, kind: str, data: Data, step: int | None = None) -> None:
        """Queues a notice."""
        self._put(lambda n: self._notice(n, kind, data, step))

    def put_ack(self, command_id: str, ack: Ack) -> None:
        """Queues the answer to a command behind everything that was sealed before it."""
        self.connect().put_unnumbered(AckItem(self.generation, boot_s(), command_id, ack))

    def saw_step(self) -> None:
        """Another process of the run ended a step: a new attempt is one again."""
        self._steps = max(1, self._steps)

    def begin_attempt(self, reason: str, command_id: str | None = None) -> bool:
        """Begins a new attempt and tells; does nothing, and returns False, before the present one has a step."""
        if not self._steps:
            return False
        with self._lock:
            self.generation += 1
            self._steps = 0
            if self.acceptance is not None:
                self.acceptance.attempt = None
        self.put_notice("attempt", {"reason": reason[:200]} | ({"command": command_id} if command_id else {}))
        return True

    def tell_kinds(self) -> None:
        """Announces kinds that came after `started`."""
        if self._told_kinds is not None and self._told_kinds != self._kinds():
            self._told_kinds = self._kinds()
            self.put_notice("started", {"capabilities": sorted(self._told_kinds), "controller": self.controller})

    def place(self) -> Place:
        """Whose steps this process ends now."""
        me = self._identity
        attempt = self.acceptance.attempt if self.acceptance is not None else None
        return Place(me.run, me.launch, self.generation, attempt, me.role, me.rank)

    def take_no_more(self) -> None:
        """No further command is accepted."""
        if self.poller is not None:
            self.poller.close()

    def close(self, data: dict[str, Any] | None, timeout_s: float) -> None:
        """Tells the end, where there is something to tell, and closes the sender within `timeout_s`."""
        self.take_no_more()
        if data is not None:
            self.connect().put(lambda n: self._notice(n, "finished", data, None))
        self.connect().close(timeout_s)

    def abandon(self) -> None:
        """In a forked child: lets the parent's descriptors go."""
        if self.sender is not None:
            self.sender.abandon()

    def _put(self, make: Callable[[int], Item]) -> None:
        self.connect().put(make)
        if self.poller is not None:
            self.poller.ensure_thread()

    def _notice(self, sequence: int, kind: str, data: Data, step: int | None, hold_until_s: float = 0.0) -> NoticeItem:
        me = self._identity
        return NoticeItem(sequence, self.generation, boot_s(), kind, data, step, me.role, me.rank, hold_until_s)

    def _started(self) -> dict[str, Any]:
        """The data of `started`, asked for when it is encoded, on the sender's thread."""
        self._told_kinds = self._kinds()
        return {
            "config": self._consent.config,
            "capabilities": sorted(self._told_kinds),
            # The controller's word alone: another rank, or an engine's plugin, was told of no mode.
            "mode": self._consent.mode if self.controller else None,
            "controller": self.controller,
            "world": self._identity.world,
        }

    def _replied(self, reply: Reply, generation: int) -> None:
        """On the sender's thread: learns the attempt's number, the verdict, and of commands."""
        if self.keeper is not None:
            self.keeper.told(reply.run_verdict)
        acceptance, sender = self.acceptance, self.sender
        if acceptance is None or sender is None:
            return
        with self._lock:
            if generation == self.generation and reply.attempt is not None:
                acceptance.attempt = reply.attempt
        if reply.commands:
            acceptance.offer(reply.commands, sender.http)
        if self.poller is not None:
            self.poller.hurry()
