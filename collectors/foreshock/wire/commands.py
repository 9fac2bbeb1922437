"""Commands as they travel: what the service asks of the trainer, and what the trainer answers."""

from __future__ import annotations

from typing import Any, Final

import msgspec

COMMAND_KINDS: Final[tuple[str, ...]] = (
    "enable_is_correction",
    "disable_is_correction",
    "rollback",
    "resync_trainer",
    "resync_engine",
    "scale_lr",
    "skip_update",
    "pause",
    "resume",
    "stop",
    "checkpoint_now",
    "probe",
)
"""Everything that may be asked of a trainer. An adapter announces the subset that it can really carry out."""

STATES: Final[tuple[str, ...]] = (
    "proposed",
    "approved",
    "rejected",
    "delivered",
    "accepted",
    "done",
    "failed",
    "refused",
    "expired",
    "cancelled",
    "lost",
)
TERMINAL_STATES: Final = frozenset({"rejected", "done", "failed", "refused", "expired", "cancelled", "lost"})
ACK_STATES: Final = frozenset({"accepted", "done", "failed", "refused"})
"""The states a trainer may answer with."""

MODES: Final[tuple[str, ...]] = ("observe", "approve", "auto")


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do. `arguments` by kind:

    `rollback` {checkpoint: str, step: int, skip_until_step: int, scope: [weights, optimizer, scheduler, rng, data]} ·
    `scale_lr` {factor: float in (0, 1]} · `skip_update` {steps: int} · `probe` {name: str} ·
    `enable_is_correction` {cap: float} · the others none.
    """

    kind: str
    arguments: dict[str, Any] = {}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Ordered actions asked of one attempt of one run. Executed at most once, at a step boundary, before it expires."""

    id: str
    run: str
    attempt: int
    actions: list[Action]
    issued_step: int | None = None
    at_step: int | None = None
    """Run at the end of this step on all ranks together; None: at the next boundary."""
    expires_in_s: float = 600.0
    """Counted from the reply that carried it, on the receiver's monotonic clock: no wall clock is trusted."""
    reason: str = ""
    incident: str | None = None

    @property
    def kind(self) -> str:
        """The first action's kind: what the command is called in lists and logs."""
        return self.actions[0].kind


class Ack(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The controller's answer, `POST /v1/commands/{id}/ack`."""

    state: str
    client: str
    attempt: int
    step: int | None = None
    detail: dict[str, Any] = {}
