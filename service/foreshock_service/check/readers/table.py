"""CSV, TSV and the like: a metrics.csv, exports of W&B (`run - metric`, `__MIN` and `__MAX` columns) and trackio."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO, Final

from foreshock_service.check.readers.base import Notes, Row, Unreadable
from foreshock_service.check.readers.numbers import MAX_NAMES, number, split_step
from foreshock_service.check.readers.source import MAX_LINE, lines

DELIMITERS: Final = ",\t;|"


def delimiter_of(header: str) -> str | None:
    """The delimiter that a header line uses most, None where it has none."""
    best = max(DELIMITERS, key=header.count)
    return best if header.count(best) else None


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row a record. Headers that come again (files joined) are skipped."""
    source = lines(stream, notes)
    header_line = next((line for line in source if line.strip()), None)
    if header_line is None:
        raise Unreadable("the file is empty")
    delimiter = delimiter_of(header_line) or ","
    csv.field_size_limit(MAX_LINE)
    header = next(csv.reader([header_line], delimiter=delimiter), [])
    columns = _columns(header, notes)
    records = csv.reader((f"{line}\n" for line in source), delimiter=delimiter)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error:
            notes.add("A record is not CSV and was skipped.")
            continue
        if record == header:
            continue
        told = {name: number(record[i]) for i, name in columns if i < len(record)}
        step, values = split_step({name: value for name, value in told.items() if value is not None})
        if values:
            yield Row(step, values)


def _columns(header: list[str], notes: Notes) -> list[tuple[int, str]]:
    """Index and name of the columns that are read: of W&B's, the first run's value columns."""
    columns: dict[str, int] = {}
    run = None
    for i, title in enumerate(header[:MAX_NAMES]):
        name = title.strip()
        if not name or name.endswith(("__MIN", "__MAX")):
            continue
        prefix, dash, metric = name.rpartition(" - ")
        if dash:
            if run is None:
                run = prefix
            elif prefix != run:
                notes.add(f"The export holds several runs; only {run!r} was read.")
                continue
            name = metric
        columns.setdefault(name, i)
    return [(i, name) for name, i in columns.items()]
