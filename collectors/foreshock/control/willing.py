"""Whether this rank will carry out a command: asked where all ranks accept first, before any of them begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from foreshock.wire import commands as wire

Accepts = Callable[[Mapping[str, Any]], str]
"""Of an action's arguments: why not, or ""."""
BUILT_IN: Final = frozenset({"pause", "resume"})
"""Carried out by the executor itself, before or after the host's own handler if it has one."""


class Willing:
    """`kinds()` names what can be carried out now; `asks` holds the host's own questions by kind."""

    def __init__(self, kinds: Callable[[], Collection[str]]) -> None:
        self.asks: dict[str, Accepts] = {}
        self._kinds = kinds

    def objection(self, command: wire.Command) -> str:
        """Why this rank will not carry it out; empty where it will. A question that raises is an objection."""
        for action in command.actions:
            if action.kind not in self._kinds() and action.kind not in BUILT_IN:
                return f"{action.kind} was not announced on this rank"
            ask = self.asks.get(action.kind)
            if ask is None:
                continue
            try:
                why = ask(action.arguments)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                return str(why)
        return ""
