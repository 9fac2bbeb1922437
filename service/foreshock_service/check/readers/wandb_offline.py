"""W&B's offline file `run-<id>.wandb`: a LevelDB log (32 KiB blocks) of protobuf records, of which `history` is read.

Read without the wandb package, whose own Python reader is gone since it writes these files from Go. The format is that
of LevelDB's log with another checksum seed, and wandb's published `wandb_internal.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

from foreshock_service.check.readers import protobuf
from foreshock_service.check.readers.base import Notes, Row
from foreshock_service.check.readers.numbers import MAX_DEPTH, flat, number, parsed_json, split_step
from foreshock_service.check.readers.protobuf import blob, real, signed

MAGIC: Final = b":W&B"
BLOCK: Final = 32768
LARGEST: Final = 1 << 23
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
CUT: Final = "The .wandb file is cut or damaged; what came before was read."


def looks_like(head: bytes) -> bool:
    """True for the file's magic."""
    return head.startswith(MAGIC)


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row a history record."""
    for record in _records(stream, notes):
        try:
            for field, _, value in protobuf.fields(record):
                if field == 2:
                    row = _history(blob(value))
                    if row.values:
                        yield row
        except protobuf.Malformed:
            notes.add("A record is damaged and was skipped.")


def _records(stream: BinaryIO, notes: Notes) -> Iterator[bytes]:
    at = len(stream.read(7))
    parts: list[bytes] = []
    while True:
        room = BLOCK - at % BLOCK
        if room < 7:
            stream.read(room)
            at += room
        head = stream.read(7)
        if not head:
            if parts:
                notes.add(CUT)
            return
        if len(head) < 7:
            notes.add(CUT)
            return
        length, kind = struct.unpack("<HB", head[4:])
        data = stream.read(length)
        at += 7 + len(data)
        if len(data) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            notes.add(CUT)
            return
        if kind in (FULL, FIRST):
            parts = []
        parts.append(data)
        if sum(map(len, parts)) > LARGEST:
            notes.add("A record is too large to be a step and was skipped.")
            parts = []
        elif kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def _history(message: bytes) -> Row:
    values: dict[str, float] = {}
    step = None
    for field, _, value in protobuf.fields(message):
        if field == 1:
            values.update(_item(blob(value)))
        elif field == 2:
            for inner, _, said in protobuf.fields(blob(value)):
                step = signed(said) if inner == 1 else step
    logged, series = split_step(values)
    own = any(name in values for name in ("train/global_step", "global_step", "training/global_step", "step"))
    return Row(logged if own or step is None else step, series)


def _item(message: bytes) -> dict[str, float]:
    key, nested, told = "", list[str](), None
    document = ""
    for field, wire, value in protobuf.fields(message):
        if field == 1:
            key = blob(value).decode("utf-8", "replace")
        elif field == 2:
            nested.append(blob(value).decode("utf-8", "replace"))
        elif field == 5 and wire == protobuf.VARINT:
            told = float(signed(value))
        elif field == 6:
            told = real(value)
        elif field in (8, 16):
            document = blob(value).decode("utf-8", "replace")
    name = key or "/".join(nested[:MAX_DEPTH])
    if told is not None:
        return {name: told}
    if not document:
        return {}
    try:
        said = parsed_json(document)
    except ValueError:
        return {}
    if isinstance(said, dict):
        return {f"{name}/{inner}": value for inner, value in flat(said).items()}
    plain = number(said)
    return {} if plain is None else {name: plain}
