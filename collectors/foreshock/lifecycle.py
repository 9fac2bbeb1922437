"""Interpreter exit and forks: every living monitor ends within a bounded time, and a forked child starts anew."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreshock.monitor import Monitor

_live: weakref.WeakSet[Monitor] = weakref.WeakSet()
_installed = False


def watch(monitor: Monitor) -> None:
    """`monitor` is finished at exit and renewed in forked children from now on."""
    global _installed
    _live.add(monitor)
    if _installed:
        return
    _installed = True
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
    # Children of multiprocessing leave by os._exit, past atexit; it runs finalizers of its own.
    util.register_after_fork(_live, lambda _: util.Finalize(None, _at_exit, exitpriority=0))


def forget(monitor: Monitor) -> None:
    """`monitor` has ended."""
    _live.discard(monitor)


def _at_exit() -> None:
    status = "crashed" if getattr(sys, "last_value", None) is not None else "completed"
    monitors = [monitor for monitor in _live if monitor.connected]
    if not monitors:
        return
    deadline = time.monotonic() + max(monitor.settings.exit_flush_s for monitor in monitors)
    for monitor in monitors:
        monitor.end(status, None, max(0.1, deadline - time.monotonic()))


def _in_child() -> None:
    for monitor in list(_live):
        monitor.after_fork()
