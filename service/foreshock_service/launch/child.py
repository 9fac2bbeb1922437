"""The job as a process group of its own: started, signalled, stopped within a grace, all of it reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.02


def adopt_orphans() -> bool:
    """From now on what the job leaves behind becomes our child (Linux): it can be reaped, and ended before a restart.

    False where the system has no such thing.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


class Child:
    """One start of the job. Output and error are ours, passed through untouched."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # In a process group of its own a job cannot read a terminal without being stopped.
        closed = sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()
        self._process = subprocess.Popen(
            list(command), env=dict(environment), process_group=0, stdin=subprocess.DEVNULL if closed else None
        )
        self.started_s = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        """How it ended (negative: by that signal), None while it runs. Also reaps what else has ended."""
        code = self._process.poll()
        _reap_others(self.pid)
        return code

    def signal(self, number: int) -> None:
        """To every process of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end(self, grace_s: float) -> None:
        """SIGTERM, after `grace_s` SIGKILL; when it returns nothing of the job is left, orphans in other groups
        included where the system lets us adopt them."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        _wait_until(lambda: self.code() is not None, grace_s)
        # The leader may have gone before its ranks.
        _wait_until(lambda: not self._group_lives(), max(0.0, min(grace_s, 2.0)))
        self.signal(signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._end_orphans(min(grace_s, 5.0))

    def _group_lives(self) -> bool:
        _reap_others(self.pid)
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _end_orphans(self, grace_s: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if _wait_until(lambda: not _reaped_children(), grace_s):
                return


def children() -> list[int]:
    """Our living and unreaped children, from /proc; empty where there is none."""
    mine = os.getpid()
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in task.read_text().split()]
    return [pid for pid in found if pid != mine]


def _reaped_children() -> list[int]:
    _reap_others(0)
    return children()


def _reap_others(leader: int) -> None:
    """Reaps adopted orphans; the leader's own status is left to its Popen."""
    for pid in children():
        if pid != leader:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _wait_until(condition: object, seconds: float) -> bool:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
