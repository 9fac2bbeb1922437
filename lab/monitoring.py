"""What the lab asks of a monitor: the part of Foreshock's public SDK that it calls, and nothing else."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol


class Command(Protocol):
    """A command as a handler receives it."""

    @property
    def kind(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...


Handler = Callable[[Any], Any]


class Monitor(Protocol):
    """`foreshock.init(…)` returns one; without FORESHOCK_URL it does nothing. A `pause` blocks in its `end_step`."""

    def observe(self, pair: str, a: Any, b: Any, mask: Any, **where: Any) -> None: ...

    def log(self, scalars: Mapping[str, Any]) -> None: ...

    def checkpoint(self, path: str, step: int, scope: Collection[str]) -> None: ...

    def notice(self, kind: str, step: int | None = None, **data: Any) -> None: ...

    def on(self, kind: str, handler: Handler) -> None: ...

    def end_step(self, step: int) -> None: ...

    def new_attempt(self, reason: str) -> None: ...

    def finish(self, status: str) -> None: ...
