"""Bytes of a log: plain or gzip, whole or growing; and text lines made of them in bounded memory."""

from __future__ import annotations

import codecs
import io
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from foreshock_service.check.readers.base import Notes, Unreadable

CHUNK: Final = 1 << 16
MAX_LINE: Final = 1 << 22
"""Characters; a longer line is skipped with a note, so that a file without line ends cannot fill the memory."""
POLL_S: Final = 0.2
GZIP: Final = 31
"""zlib's word for a gzip header and a full window."""
_LINE_END: Final = re.compile(r"\r\n|\n|\r")
_ANSI: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Growing(io.RawIOBase):
    """A file that is still being written: at its end it waits for more, until nothing came for `idle_s` (0: for ever).

    A file that shrank was begun anew and is read from its start, as `tail -F` does.
    """

    def __init__(self, path: Path, idle_s: float) -> None:
        self._file = path.open("rb")
        self._path, self._idle_s = path, idle_s

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int:
        """At least one byte, or 0 once it was idle for too long."""
        waited_since = time.monotonic()
        while True:
            count = self._file.readinto(buffer)  # type: ignore[arg-type]
            if count:
                return count
            if self._idle_s and time.monotonic() - waited_since >= self._idle_s:
                return 0
            time.sleep(POLL_S)
            try:
                if self._path.stat().st_size < self._file.tell():
                    self._file.seek(0)
            except OSError:
                return 0

    def close(self) -> None:
        """Closes the file beneath."""
        self._file.close()
        super().close()


class Unzipped(io.RawIOBase):
    """A gzip file, decompressed as it is read. Where it is cut or damaged it ends, with a note."""

    def __init__(self, file: BinaryIO, notes: Notes) -> None:
        self._file, self._notes = file, notes
        self._member = zlib.decompressobj(GZIP)
        self._packed, self._at_end = b"", False

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int:
        """0 at the end, and where the data stops making sense."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._at_end:
            if self._member.eof:
                # Joined gzip files are one gzip file.
                self._packed = self._member.unused_data or self._file.read(CHUNK)
                self._member = zlib.decompressobj(GZIP)
                if not self._packed:
                    self._at_end = True
                    break
            packed = self._packed or self._file.read(CHUNK)
            try:
                data = self._member.decompress(packed, len(view))
            except zlib.error:
                packed = data = b""
            self._packed = b"" if self._member.eof else self._member.unconsumed_tail
            if not packed and not data:
                self._notes.add("The compressed file is cut or damaged; what came before was read.")
                self._at_end = True
            elif data:
                view[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        """Closes the file beneath."""
        self._file.close()
        super().close()


class Rejoined(io.RawIOBase):
    """A pipe whose first bytes were already taken: those, then the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int:
        """As any stream."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self._head[: len(view)] or self._rest.read(len(view))
        self._head = self._head[len(view) :]
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes the pipe."""
        self._rest.close()
        super().close()


def opened(path: Path, notes: Notes, *, follow_idle_s: float | None = None) -> BinaryIO:
    """The bytes of a file. `follow_idle_s` not None: a growing one. Raises Unreadable."""
    try:
        if follow_idle_s is not None:
            return io.BufferedReader(Growing(path, follow_idle_s), CHUNK)
        file = path.open("rb")
        if file.peek(2)[:2] == b"\x1f\x8b":
            return io.BufferedReader(Unzipped(file, notes), CHUNK)
        return file
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror or error}") from error


def encoding_of(head: bytes) -> str:
    """By the byte-order mark, or by every second byte being 0 as in UTF-16 of mostly Latin text; else UTF-8."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[:256:2], head[1:256:2]
    for zeros, others, name in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if len(head) >= 16 and zeros.count(0) > 0.8 * len(zeros) and not others.count(0):
            return name
    return "utf-8-sig"


def chunks(stream: BinaryIO) -> Iterator[str]:
    """Decoded text as it comes; bytes that are no text become U+FFFD."""
    read1 = getattr(stream, "read1", stream.read)
    decoder = None
    while True:
        try:
            data = read1(CHUNK)
        except OSError as error:
            raise Unreadable(f"reading failed: {error.strerror or error}") from error
        if decoder is None:
            decoder = codecs.getincrementaldecoder(encoding_of(data))("replace")
        text = decoder.decode(data, final=not data)
        if text:
            yield text
        if not data:
            return


def lines(stream: BinaryIO, notes: Notes) -> Iterator[str]:
    """Text lines without their ends, colours and NULs. A carriage return ends a line: progress bars use it."""
    # In pieces: looking through a line without end again with every chunk of it took minutes for a small gzip.
    pending: list[str] = []
    held, skipping = 0, False
    for text in chunks(stream):
        *whole, rest = _LINE_END.split(text)
        for line in whole:
            if not skipping:
                yield plain("".join([*pending, line]))
            pending, held, skipping = [], 0, False
        if skipping or not rest:
            continue
        pending.append(rest)
        held += len(rest)
        if held > MAX_LINE:
            notes.add(f"A line longer than {MAX_LINE} characters was skipped.")
            pending, held, skipping = [], 0, True
    if pending:
        yield plain("".join(pending))


def plain(line: str) -> str:
    """Without ANSI sequences and NULs."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return line.replace("\x00", "") if "\x00" in line else line
