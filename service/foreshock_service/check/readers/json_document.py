"""One JSON document: Hugging Face's `trainer_state.json` (`log_history`), a list of objects, or columns of numbers.

The list is read object by object, so that a document larger than the memory is no different from a small one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, Final

from foreshock_service.check.aliases import is_training
from foreshock_service.check.readers.base import Notes, Row, Unreadable
from foreshock_service.check.readers.numbers import flat, number, parsed_json, split_step
from foreshock_service.check.readers.source import chunks

MAX_OBJECT: Final = 1 << 23
"""Characters of one object, or of a document that is no list."""
_LIST: Final = re.compile(r'"(log_history|history|logs|rows|steps|records|data|metrics|trajectory)"\s*:\s*\[\s*(?=\{)')
_TAIL: Final = 64
"""Characters kept while looking for the list, so that its key may straddle two chunks."""


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row an object of the list."""
    text = chunks(stream)
    buffer = ""
    for piece in text:
        buffer += piece
        if buffer.lstrip()[:1] == "[":
            buffer = buffer.lstrip()[1:]
            break
        if found := _LIST.search(buffer):
            buffer = buffer[found.end() :]
            break
        if len(buffer) > MAX_OBJECT:
            # Before the list there may be a long configuration; a list must begin somewhere, though.
            buffer = buffer[-_TAIL:]
    else:
        yield from _without_list(buffer, notes)
        return
    for said in _objects(buffer, text, notes):
        if isinstance(said, dict):
            step, values = split_step(flat(said))
            if values:
                yield Row(step, values)
        else:
            notes.add("An entry of the list is not an object and was skipped.")


def _objects(buffer: str, more: Iterator[str], notes: Notes) -> Iterator[Any]:
    decode = json.JSONDecoder().raw_decode
    at, tried = 0, -1
    for piece in chain(more, [None]):
        while True:
            while at < len(buffer) and buffer[at] in " \t\r\n,":
                at += 1
            if at >= len(buffer):
                break
            if buffer[at] == "]":
                return
            try:
                said, at = decode(buffer, at)
            except (ValueError, RecursionError):
                break
            yield said
        if piece is None:
            notes.add("The JSON document is cut or damaged; what came before was read.")
            return
        buffer = buffer[at:] + piece
        at = 0
        if len(buffer) > MAX_OBJECT:
            raise Unreadable(f"an object of the list is longer than {MAX_OBJECT} characters, or is no JSON")
        tried += 1


def _without_list(text: str, notes: Notes) -> Iterator[Row]:
    try:
        said = parsed_json(text)
    except ValueError as error:
        several = [said for said in _objects(text, iter(()), notes) if isinstance(said, dict)]
        if len(several) < 2:
            raise Unreadable(f"begins like JSON and is none: {error}") from error
        # One object after another, each over several lines, as `jq .` writes them.
        for split in (split_step(flat(said)) for said in several):
            yield Row(*split)
        return
    if not isinstance(said, dict):
        raise Unreadable("a JSON document without objects")
    columns = {name: values for name, values in said.items() if isinstance(values, list) and len(values) > 1}
    step, values = split_step(flat(said))
    if not columns or is_training(values):
        if values:
            yield Row(step, values)
        return
    length = max(map(len, columns.values()))
    if any(len(values) != length for values in columns.values()):
        notes.add("Columns have different lengths; they are aligned at their start.")
    for i in range(length):
        told = {n: number(v[i]) for n, v in columns.items() if i < len(v)}
        step, values = split_step({n: x for n, x in told.items() if x is not None})
        if values:
            yield Row(step, values)
