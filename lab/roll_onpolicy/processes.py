"""Processes that run ROLL's source, to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_to_end(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float | None = None
) -> tuple[int, str]:
    """Exit status, and what was said. Raises `subprocess.TimeoutExpired`; nothing that was started is left behind.

    What is said goes to a file in `folder` and through no pipe: ROLL's own manager processes outlive the one that made
    them, and a pipe that they hold open would be waited for without end.
    """
    with (
        tempfile.TemporaryFile("w+", dir=folder, encoding="utf-8", errors="replace") as said,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return status, said.read()
