"""JSON, one object a line: a metrics.jsonl, verl's file logger, exports of W&B and trackio, dumps of slime, NeMo-RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from foreshock_service.check.readers.base import Notes, Row
from foreshock_service.check.readers.numbers import flat, parsed_json, split_step
from foreshock_service.check.readers.source import lines


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row a line; lines that are no JSON object are skipped and counted."""
    for line in lines(stream, notes):
        if not line or line.isspace():
            continue
        try:
            said = parsed_json(line.lstrip("\x1e"))
        except ValueError:
            notes.add("A line is not JSON and was skipped.")
            continue
        if not isinstance(said, dict):
            notes.add("A line is not a JSON object and was skipped.")
            continue
        step, values = split_step(flat(said))
        if values:
            yield Row(step, values)
