"""The one guard at the boundary: the collector's own errors stop here; the host's exceptions pass.

Caught errors are counted, logged once per place, and beyond a limit switch the collector off. With `raise_errors`
(FORESHOCK_RAISE=1, set in tests) the guard raises instead, also what happened in a thread, at the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from logging import getLogger
from typing import Any, ParamSpec, TypeVar

_log = getLogger("foreshock")
P = ParamSpec("P")
R = TypeVar("R")


class HostError(Exception):
    """Carries an exception of the host's own code (its `broadcast`) through the guard; the host sees the original."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(str(original))
        self.original = original


class Guard:
    """Counts the collector's own errors. `on_off` is called once, when the limit is passed."""

    def __init__(self, limit: int, raise_errors: bool, on_off: Callable[[], None]) -> None:
        self.limit = limit
        self.raise_errors = raise_errors
        self.errors = 0
        self.off = False
        self._on_off = on_off
        self._seen: set[tuple[str, str]] = set()
        self._pending: Exception | None = None

    def caught(self, place: str, error: Exception) -> None:
        """Counts and logs an error of ours; called inside `except`."""
        self.errors += 1
        key = (place, type(error).__name__)
        if key not in self._seen and len(self._seen) < 100:
            self._seen.add(key)
            _log.warning("foreshock: %s failed, training goes on (logged once): %r", place, error, exc_info=error)
        if self.errors >= self.limit and not self.off:
            self.off = True
            _log.error("foreshock: switched off after %d errors of its own", self.errors)
            try:
                self._on_off()
            except Exception as last:
                _log.error("foreshock: and not even that could be told: %r", last)

    def caught_in_thread(self, place: str, error: Exception) -> None:
        """As `caught`, from a thread of ours; raised at the host's next call where the guard raises."""
        if self.raise_errors:
            self._pending = error
        self.caught(place, error)

    def raise_pending(self) -> None:
        """Raises what a thread met, where the guard raises."""
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error


def guarded(default: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method of an object with a `guard`; `default` is returned where the collector is off or failed."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        name = method.__name__

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            guard: Guard = args[0].guard  # type: ignore[attr-defined]
            if guard.off:
                return default  # type: ignore[no-any-return]
            if guard.raise_errors:
                guard.raise_pending()
            try:
                return method(*args, **kwargs)
            except HostError as carried:
                raise carried.original from None
            except Exception as error:
                if guard.raise_errors:
                    raise
                guard.caught(name, error)
                return default  # type: ignore[no-any-return]

        return call

    return decorate
