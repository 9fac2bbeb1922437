"""The commands that a watched rollout engine can carry out: one, where the host says how to push its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foreshock import Command

if TYPE_CHECKING:
    from foreshock.adapters.engine_watch import EngineWatch

CAPABILITIES: Final[dict[str, str]] = {
    "resync_engine": "with `resync=`: calls it (it pushes the trainer's weights and flushes the cache), then tells "
    "what the engine says of its weights",
}
_TRAINERS = "the trainer's: attach its own adapter or `monitor.on`"
IMPOSSIBLE: Final[dict[str, str]] = {
    "enable_is_correction": _TRAINERS,
    "disable_is_correction": _TRAINERS,
    "rollback": _TRAINERS,
    "resync_trainer": _TRAINERS,
    "scale_lr": _TRAINERS,
    "skip_update": _TRAINERS,
    "pause": _TRAINERS,
    "resume": _TRAINERS,
    "stop": _TRAINERS,
    "checkpoint_now": _TRAINERS,
    "probe": _TRAINERS,
}


def accept_resync(watch: EngineWatch, resync: Callable[[], Any] | None) -> None:
    """Registers `resync` for the command; its own exceptions make the command failed."""
    if resync is None:
        return

    def carry_out(command: Command) -> Any:
        answer = resync()
        watch.settle()
        return answer if isinstance(answer, str | dict) else {"pushed": True}

    watch.monitor.on("resync_engine", carry_out)
