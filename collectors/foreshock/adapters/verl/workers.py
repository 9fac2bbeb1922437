"""The driver's way to every actor worker: verl's own `execute_with_func_generator`, which runs a function there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Workers:
    """A worker group. `tell` does not wait; what became of it is looked at a step later."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._told: list[Any] = []

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(worker, *arguments)` returns on each worker, by global rank. Raises what one raises."""
        return list(self.group.execute_all_sync(self._method(), function, *arguments))

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """The same in the background, after whatever was asked of the workers before."""
        self._told += self.group.execute_all_async(self._method(), function, *arguments)

    def failures(self) -> list[Exception]:
        """What told functions raised since the last look. Never waits."""
        import ray

        refs, self._told = [ref for ref in self._told if isinstance(ref, ray.ObjectRef)], []
        done, self._told = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        found = []
        for ref in done:
            try:
                ray.get(ref)
            except Exception as error:
                found.append(error)
        return found

    def reporting(self) -> int:
        """Data-parallel ranks of the actor, each of which is to report; 0 where verl does not say."""
        try:
            return int(max(self.group._query_dispatch_info("actor"))) + 1
        except (AttributeError, AssertionError, TypeError, ValueError):
            return 0

    def _method(self) -> str:
        """The function's name on the Ray actor: colocated workers share one, behind a prefix for each role."""
        return type(self.group.execute_with_func_generator).__name__
