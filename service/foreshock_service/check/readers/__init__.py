"""Which reader a log needs, told from its content and never from its name; and the rows that it gives.

A folder stands for its event files, else for the one log that lies in it.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreshock_service.check.readers import (
    console,
    json_document,
    json_lines,
    table,
    tensorboard,
    wandb_offline,
)
from foreshock_service.check.readers.base import Notes, Reader, Row, Unreadable
from foreshock_service.check.readers.numbers import number, parsed_json
from foreshock_service.check.readers.source import POLL_S, Rejoined, encoding_of, opened, plain

HEAD: Final = 1 << 20
"""Bytes that are looked at to tell the format: console logs begin with long configurations."""
EXPORT: Final = "export the metrics to CSV or JSON lines first"
UNPACK: Final = "unpack it and name the log that is in it"
UNREAD: Final = (
    (b"SQLite format 3", f"a SQLite database: {EXPORT}"), (b"PAR1", f"a Parquet file: {EXPORT}"),
    (b"PK\x03\x04", f"a ZIP archive or a spreadsheet: {UNPACK}, or {EXPORT}"),
    (b"BZh", f"bzip2: {UNPACK}"), (b"\xfd7zXZ\x00", f"xz: {UNPACK}"), (b"\x28\xb5\x2f\xfd", f"Zstandard: {UNPACK}"),
    (b"7z\xbc\xaf", f"7-Zip: {UNPACK}"), (b"\x1f\x8b", f"gzip within gzip: {UNPACK}"),
)  # fmt: skip
CONTAINER: Final = re.compile(r'\s*\{"log":\s*"(?:[^"\\\n]|\\.)*",\s*"stream":\s*"std(?:out|err)"')
IN_FOLDERS: Final = ("trainer_state.json", "*.wandb", "*.jsonl", "*.csv", "*.log", "*.txt", "*.json")
"""What is looked for in a folder without event files, in this order."""


@dataclass(frozen=True)
class Log:
    """An opened log: its format, its rows in order, and notes that grow while they are read."""

    format: str
    rows: Iterator[Row]
    notes: Notes


def open_log(path: Path, *, follow_idle_s: float | None = None) -> Log:
    """Raises Unreadable, at once or while rows are taken. `follow_idle_s`: wait for more, 0 for ever."""
    notes = Notes()
    if path.is_dir():
        events = sorted(path.rglob("*.tfevents.*"))
        if len(folders := sorted({str(event.parent) for event in events})) > 1:
            some = ", ".join(folders[:5])
            raise Unreadable(f"event files of several runs ({some}): name the folder of one")
        if events:
            if follow_idle_s is not None and len(events) == 1:
                return open_log(events[0], follow_idle_s=follow_idle_s)
            return Log("tensorboard", tensorboard.merged(events, notes), notes)
        return open_log(_only_log(path), follow_idle_s=follow_idle_s)
    if follow_idle_s is not None:
        _await_line(path, follow_idle_s)
    pipe = None
    stream = opened(path, notes)
    try:
        head = stream.read(HEAD)
        if not stream.seekable() and path.is_fifo():
            pipe = io.BufferedReader(Rejoined(head, stream))
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error
    finally:
        if pipe is None:
            stream.close()
    if not head and follow_idle_s is None:
        raise Unreadable("the file is empty")
    log_format, reader = detect(head)

    def rows() -> Iterator[Row]:
        with pipe or opened(path, notes, follow_idle_s=follow_idle_s) as stream:
            yield from reader(stream, notes)

    return Log(log_format, rows(), notes)


def _await_line(path: Path, idle_s: float) -> None:
    """Waits for the first whole line of a log that is followed: half of one tells no format."""
    since = time.monotonic()
    while not (idle_s and time.monotonic() - since >= idle_s):
        try:
            with path.open("rb") as file:
                head = file.read(HEAD)
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror or error}") from error
        if b"\n" in head or b"\r" in head or len(head) >= HEAD:
            return
        time.sleep(POLL_S)


def detect(head: bytes) -> tuple[str, Reader]:
    """(format, its reader) by the first bytes. Raises Unreadable for what is no log that is known here."""
    if tensorboard.looks_like(head):
        return "tensorboard", tensorboard.rows
    if wandb_offline.looks_like(head):
        return "wandb", wandb_offline.rows
    for magic, what in UNREAD:
        if head.startswith(magic):
            raise Unreadable(what)
    if head[257:262] == b"ustar":
        raise Unreadable(f"a tar archive: {UNPACK}")
    encoding = encoding_of(head)
    text = plain(head.decode(encoding, "replace"))
    if not encoding.startswith("utf-16") and b"\x00" in head[:64] and head.count(b"\x00") > len(head) // 8:
        raise Unreadable("binary, and neither a TensorBoard event file nor a .wandb file")
    return _detect_text(text)


def _detect_text(text: str) -> tuple[str, Reader]:
    start = text.lstrip("\x1e\ufeff \t\r\n")
    if CONTAINER.match(start):
        raise Unreadable("a container's log, each line of it wrapped in JSON: unwrap it first (`jq -rj .log FILE`)")
    if start[:1] in ("{", "["):
        first = start.split("\n", 1)[0].strip()
        if start[0] == "[" and start[1:].lstrip()[:1] in ("{", "]"):
            return "json", json_document.rows
        if start[0] == "{":
            if _is_object(first):
                # One object on one line is a document only where nothing but it is there and it holds a list.
                alone = not start[len(first) :].strip()
                return ("trainer_state", json_document.rows) if alone and ": [" in first else ("jsonl", json_lines.rows)
            if "'" not in first[:3]:
                return ("trainer_state" if '"log_history"' in text else "json"), json_document.rows
    way = console.way_of(text)
    if way is not None:
        return way, console.reader(way)
    if _is_table(start):
        return "csv", table.rows
    if any(_is_object(line) for line in start.split("\n", 50)[:50]):
        return "jsonl", json_lines.rows
    return "console", console.reader(None)


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith('{"'):
        return False
    try:
        return isinstance(parsed_json(line), dict)
    except ValueError:
        return False


def _is_table(text: str) -> bool:
    """A header of names and, below it, a record of as many fields with a number in it."""
    told = [line for line in text.splitlines()[:50] if line.strip() and not line.startswith("#")]
    if not told or (delimiter := table.delimiter_of(told[0])) is None:
        return False
    header = [cell.strip().strip('"') for cell in told[0].split(delimiter)]
    if len(told) == 1:
        return all(header) and all(number(cell) is None for cell in header)
    cells = told[1].split(delimiter)
    named = sum(bool(cell) and number(cell) is None for cell in header) > len(header) // 2
    return named and any(number(cell.strip().strip('"')) is not None for cell in cells)


def _only_log(folder: Path) -> Path:
    for pattern in IN_FOLDERS:
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:5])
            raise Unreadable(f"a folder with several logs ({names}): name the one that is meant")
    # A Hugging Face output folder: the newest checkpoint knows the whole history.
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step)
    if states:
        return states[-1]
    raise Unreadable("a folder without a log that is known here")


def _checkpoint_step(path: Path) -> float:
    return number(path.parent.name.rpartition("-")[2]) or 0.0
