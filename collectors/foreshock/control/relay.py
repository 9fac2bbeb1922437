"""Between a monitor and somebody else who controls the run: what `Monitor.follow` takes."""

from __future__ import annotations

from typing import Any, Protocol

from foreshock.wire import commands as wire


class Relay(Protocol):
    """Puts decided commands into the process's inbox from a thread of its own."""

    def hold(self, step: int) -> None:
        """At each boundary, before commands are carried out: waits while a command is undecided. Bounded."""

    def finished(self, command: wire.Command, state: str, detail: dict[str, Any], step: int | None) -> None:
        """Told of every command's end on this rank; does not wait."""
