"""Spools that dead clients of the same run left behind: locked, adopted, sent under their old names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from foreshock.transport.losses import Losses
from foreshock.transport.spool import Header, Spool, private, remove


def adopt(root: Path, run: str, url: str, max_bytes: int, keep_s: float) -> Iterator[Spool]:
    """Locked spools of `run` for the service at `url`, oldest first. Deletes abandoned ones not touched for `keep_s`.

    Spools that someone alive holds, or that belong elsewhere, stay as they are.
    """
    try:
        if not root.is_dir():
            return
        private(root)
    except OSError:
        return  # somebody else's folder: what lies there was not sealed by this user
    for folder in sorted(root.iterdir(), key=_touched):
        header = _header(folder)
        stale = time.time() - _touched(folder) > keep_s
        if not stale and (header is None or header.run != run or header.url != url):
            continue
        lock = _locked(folder)
        if lock is None:
            continue
        if stale or header is None:
            remove(folder)
            os.close(lock)
            continue
        spool = Spool(folder, header, lock, max_bytes, Losses(header.losses))
        spool.found()
        yield spool


def _header(folder: Path) -> Header | None:
    try:
        return msgspec.json.decode((folder / "header.json").read_bytes(), type=Header)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def _touched(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None where someone else does."""
    path = folder / "lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another successor may have sent it all and deleted the folder.
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
