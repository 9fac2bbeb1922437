"""Unsent records of one client on disk: append-only segments, read and deleted oldest first, bounded.

    <root>/<client>/lock            held (flock) by the process that owns it; a dead owner's lock is free
                    header.json     whose they are: run, launch, role, rank, url, boot id, and what was lost so far
                    00000001.seg    records: magic, length, CRC-32, sequence, kind, payload

A segment is either being written or being read. Records survive the death of the process as soon as `append` returns;
`fsync` happens only when a segment is closed, so a crash of the machine may lose the open segment's end (the check sum
tells). A segment is deleted when all of it was acknowledged: after a crash its first records may be sent twice, and the
service stores them once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections import deque
from pathlib import Path

import msgspec

from foreshock.transport.items import Record
from foreshock.transport.losses import Losses

MAGIC = b"FSR1"
_HEAD = struct.Struct("<4sIIQc")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MAX_RECORD = 8 << 20


class SpoolError(Exception):
    """The spool cannot be written; `reason` is `disk_full` or `spool_unwritable`."""

    def __init__(self, reason: str, error: OSError) -> None:
        super().__init__(f"{reason}: {error}")
        self.reason = reason


class Header(msgspec.Struct, kw_only=True):
    """Whose records these are."""

    client: str
    run: str
    launch: str
    role: str
    rank: int
    url: str
    sdk: str = ""
    boot: str = ""
    losses: dict[str, int] = {}


class _Segment:
    __slots__ = ("bytes", "path", "records")

    def __init__(self, path: Path, records: int, size: int) -> None:
        self.path = path
        self.records = records
        self.bytes = size


class Spool:
    """One client's folder. Used by one thread at a time."""

    def __init__(self, folder: Path, header: Header, lock: int, max_bytes: int, losses: Losses) -> None:
        self.folder = folder
        self.header = header
        self.losses = losses
        self._lock = lock
        self._max_bytes = max_bytes
        self._segment_bytes = max(1, min(1 << 20, max_bytes // 4))
        self._segments: deque[_Segment] = deque()
        self._head: deque[Record] = deque()
        self._reading = False
        self._file: int | None = None
        self._number = 0

    @classmethod
    def create(cls, root: Path, header: Header, max_bytes: int, losses: Losses) -> Spool:
        """A new folder under `root`, locked before it can be seen. Raises SpoolError."""
        made = root / f".new-{header.client}"
        lock = -1
        try:
            private(root)
            made.mkdir(mode=0o700)
            lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (made / "header.json").write_bytes(msgspec.json.encode(header))
            made.rename(root / header.client)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            remove(made)
            raise SpoolError(_reason(error), error) from error
        return cls(root / header.client, header, lock, max_bytes, losses)

    def __len__(self) -> int:
        """Records left."""
        rest = sum(segment.records for segment in self._segments)
        return rest if not self._reading else rest - self._segments[0].records + len(self._head)

    def found(self) -> None:
        """Takes over the segments that a dead client left."""
        for path in sorted(self.folder.glob("*.seg")):
            size = path.stat().st_size
            self._segments.append(_Segment(path, 1, size))  # the count is exact once it is read
            self._number = max(self._number, int(path.stem) if path.stem.isdigit() else 0)

    def append(self, records: list[Record]) -> int:
        """Appends in order; returns how many were written before the disk failed. Raises SpoolError if none was."""
        for done, record in enumerate(records):
            try:
                self._append(record)
            except OSError as error:
                self._close_file()
                if done:
                    return done
                raise SpoolError(_reason(error), error) from error
        self._trim()
        return len(records)

    def peek(self, items: int, size: int) -> list[Record]:
        """The oldest records, at least one if there is any, at most `items` and about `size` bytes."""
        while not self._head and self._segments:
            self._load()
        taken: list[Record] = []
        total = 0
        for record in self._head:
            if taken and (len(taken) >= items or total + len(record.payload) > size):
                break
            taken.append(record)
            total += len(record.payload)
        return taken

    def commit(self, count: int) -> None:
        """Forgets the `count` oldest records."""
        for _ in range(count):
            self._head.popleft()
        if self._reading and not self._head:
            self._drop_first()

    def save_losses(self, counts: dict[str, int]) -> None:
        """Keeps the counts for a successor; a failure to is not worth an error."""
        if counts == self.header.losses:
            return
        self.header.losses = counts
        part = self.folder / "header.part"
        with contextlib.suppress(OSError):
            part.write_bytes(msgspec.json.encode(self.header))
            part.replace(self.folder / "header.json")

    def close(self) -> None:
        """Gives the folder up: deletes it if nothing is left, else leaves it to a successor."""
        self._close_file()
        if not len(self):
            remove(self.folder)
        self.abandon()

    def abandon(self) -> None:
        """Closes the descriptors only. After a fork: the parent's lock lives as long as the parent's own descriptor."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None and descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._file, self._lock = None, -1

    def _append(self, record: Record) -> None:
        if self._file is None:
            self._number += 1
            path = self.folder / f"{self._number:08d}.seg"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._segments.append(_Segment(path, 0, 0))
        segment = self._segments[-1]
        data = frame(record)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            # Half a record must not stay behind; a file can always be made shorter, also on a full disk.
            os.ftruncate(self._file, segment.bytes)
            raise
        segment.records += 1
        segment.bytes += len(data)
        if segment.bytes >= self._segment_bytes:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None
            if self._segments and not self._segments[-1].records:
                with contextlib.suppress(OSError):
                    self._segments[-1].path.unlink()
                self._segments.pop()

    def _load(self) -> None:
        """Reads the first segment; what is damaged is counted, and an empty one is dropped."""
        if self._file is not None and len(self._segments) == 1:
            self._close_file()
            if not self._segments:
                return
        segment = self._segments[0]
        try:
            data = segment.path.read_bytes()
        except OSError:
            data = b""
            self.losses.add("corrupt", segment.records)
        records, damaged = parse(data)
        self.losses.add("corrupt", damaged)
        self._head, self._reading = deque(records), True
        segment.records = len(records)
        if not records:
            self._drop_first()

    def _drop_first(self) -> None:
        segment = self._segments.popleft()
        self._head.clear()
        self._reading = False
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def _trim(self) -> None:
        while len(self._segments) > 1 and sum(s.bytes for s in self._segments) > self._max_bytes:
            lost = len(self._head) if self._reading else self._segments[0].records
            self.losses.add("spool_full", lost)
            self._drop_first()


def frame(record: Record) -> bytes:
    """A record as it lies in a segment."""
    check = zlib.crc32(record.payload, zlib.crc32(record.sequence.to_bytes(8, "little") + record.kind))
    return _HEAD.pack(MAGIC, len(record.payload), check, record.sequence, record.kind) + record.payload


def parse(data: bytes) -> tuple[list[Record], int]:
    """(records whose check sum holds, damaged stretches). Looks for the next magic after a damaged one."""
    records: list[Record] = []
    at = damaged = 0
    while at < len(data):
        record = _record_at(data, at)
        if record is not None:
            records.append(record)
            at += _HEAD.size + len(record.payload)
            continue
        damaged += 1
        at = data.find(MAGIC, at + 1)
        while at != -1 and _record_at(data, at) is None:
            at = data.find(MAGIC, at + 1)
        if at == -1:
            break
    return records, damaged


def _record_at(data: bytes, at: int) -> Record | None:
    if at + _HEAD.size > len(data):
        return None
    magic, length, check, sequence, kind = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length] if length <= MAX_RECORD else b""
    if magic != MAGIC or len(payload) != length:
        return None
    whole = zlib.crc32(payload, zlib.crc32(sequence.to_bytes(8, "little") + kind))
    return Record(kind, sequence, payload) if whole == check else None


def remove(folder: Path) -> None:
    """Deletes a spool's folder and what a spool puts into one; nothing else."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.suffix in (".seg", ".json", ".part") or path.name == "lock":
                path.unlink()
        folder.rmdir()


def private(root: Path) -> None:
    """`root` exists, is ours and nobody else's: it lies in a folder that anyone may write to."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not root.is_dir() or root.is_symlink() or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise PermissionError(errno.EPERM, "is not a folder of this user", str(root))


def _reason(error: OSError) -> str:
    return "disk_full" if error.errno in _FULL else "spool_unwritable"
