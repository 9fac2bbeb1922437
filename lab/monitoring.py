"""What the lab asks of a monitor: the part of Foreshock's public SDK that it calls, and nothing else."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor


class Command(Protocol):
    """A command as a handler receives it."""

    @property
    def kind(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...


Handler = Callable[[Any], str | dict[str, Any] | None]


class Monitor(Protocol):
    """`foreshock.init(…)` returns one; without FORESHOCK_URL it does nothing."""

    def observe(self, pair: str, a: Tensor, b: Tensor, mask: Tensor, **where: Any) -> None: ...

    def log(self, scalars: Mapping[str, float]) -> None: ...

    def checkpoint(self, path: str, step: int) -> None: ...

    def on(self, kind: str, handler: Handler) -> None: ...

    def commands(self) -> Iterable[Command]: ...

    def end_step(self, step: int) -> None: ...

    def new_attempt(self, reason: str) -> None: ...

    def finish(self, status: str) -> None: ...
