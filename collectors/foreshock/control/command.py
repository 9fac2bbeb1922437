"""What a handler or the loop over `commands()` receives: one action of a command, with its answer still to be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foreshock.frames.plain import plain
from foreshock.wire import commands as wire

HANDED_OVER = "handed_over"
Detail = str | Mapping[str, Any] | None


class Command:
    """One action of a command.

    A handler's return value answers it; in the loop over `commands()` call `done`, `failed` or `refused`. The first
    answer counts; after one that is not `done` the command's remaining actions are not carried out.
    """

    def __init__(
        self, command: wire.Command, index: int, step: int | None, answer: Callable[[Command], None] | None = None
    ) -> None:
        self.command = command
        self.index = index
        self.step = step
        self.state = ""
        self.detail: dict[str, Any] = {}
        self._answer = answer

    @property
    def id(self) -> str:
        return self.command.id

    @property
    def kind(self) -> str:
        return self.command.actions[self.index].kind

    @property
    def arguments(self) -> dict[str, Any]:
        return self.command.actions[self.index].arguments

    def done(self, detail: Detail = None) -> None:
        """It was carried out."""
        self._set("done", detail)

    def failed(self, detail: Detail = None) -> None:
        """It was tried and did not work."""
        self._set("failed", detail)

    def refused(self, detail: Detail = None) -> None:
        """The host will not do it."""
        self._set("refused", detail)

    def hand_over(self) -> None:
        """Somebody else carries it out and answers: the launcher, by the next launch."""
        self.state = self.state or HANDED_OVER

    def _set(self, state: str, detail: Detail) -> None:
        if self.state:
            return
        self.state, self.detail = state, as_detail(detail)
        if self._answer is not None:
            self._answer(self)

    def __repr__(self) -> str:
        return f"Command({self.kind!r}, id={self.id!r}, arguments={self.arguments!r})"


def as_detail(detail: Any) -> dict[str, Any]:
    """What a host said, as it may travel: a mapping as it is, nothing as {}, anything else as {"text": …}."""
    if detail is None:
        return {}
    if isinstance(detail, Mapping):
        return dict(plain(detail))
    return {"text": plain(detail)}
