"""CSV, TSV and the like: a metrics.csv, exports of W&B (`run - metric`, `__MIN` and `__MAX` columns) and trackio."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from foreshock_service.check.readers.base import Notes, Row, Unreadable
from foreshock_service.check.readers.numbers import MAX_NAMES, number, split_step
from foreshock_service.check.readers.source import MAX_LINE, lines

NAMED: Final = ("metric", "metric_name", "tag", "key", "name")
VALUED: Final = ("value", "metric_value")
MAX_STEPS: Final = 100_000
"""Steps of a table of one number a record, which must be in memory as a whole."""
DELIMITERS: Final = ",\t;|"


def delimiter_of(header: str) -> str | None:
    """The delimiter that a header line uses most, None where it has none."""
    best = max(DELIMITERS, key=header.count)
    return best if header.count(best) else None


def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
    """A row a record. Headers that come again (files joined) are skipped."""
    source = lines(stream, notes)
    header_line = next((line for line in source if line.strip() and not line.startswith("#")), None)
    if header_line is None:
        raise Unreadable("the file is empty")
    delimiter = delimiter_of(header_line) or ","
    csv.field_size_limit(MAX_LINE)
    header = next(csv.reader([header_line], delimiter=delimiter), [])
    columns = _columns(header, notes)
    spelled = number if delimiter == "," else _number
    if long := _long(columns):
        records = csv.reader((f"{line}\n" for line in source), delimiter=delimiter)
        yield from _pivoted(records, *long, spelled, notes)
        return
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
        told = {name: spelled(record[i]) for i, name in columns if i < len(record)}
        step, values = split_step({name: value for name, value in told.items() if value is not None})
        if values:
            yield Row(step, values)


def _number(said: str) -> float | None:
    """Also with a decimal comma, as spreadsheets of half the world write beside semicolons."""
    value = number(said)
    return number(said.replace(",", ".")) if value is None and said.count(",") == 1 else value


def _long(columns: list[tuple[int, str]]) -> tuple[int, int, int] | None:
    """Places of name, value and step in a table of one number a record (MLflow, TensorBoard's and other exports)."""
    places = {name.lower(): i for i, name in columns}
    named = next((places[name] for name in NAMED if name in places), None)
    valued, step = next((places[n] for n in VALUED if n in places), None), places.get("step")
    return None if named is None or valued is None or step is None else (named, valued, step)


def _pivoted(
    records: Iterator[list[str]], named: int, valued: int, step_at: int,
    spelled: Callable[[str], float | None], notes: Notes,
) -> Iterator[Row]:  # fmt: skip
    """Such tables are sorted by name as often as by step, so all of it is taken in before the first row."""
    steps: dict[int, dict[str, float]] = {}
    while True:
        try:
            record = next(records)
            step, value = spelled(record[step_at]), spelled(record[valued])
        except StopIteration:
            break
        except (csv.Error, IndexError):
            notes.add("A record is not CSV and was skipped.")
            continue
        if step is None or value is None or not 0 <= step < 2**53:
            continue
        if len(steps) >= MAX_STEPS and int(step) not in steps:
            raise Unreadable(f"a table of one number a record with more than {MAX_STEPS} steps")
        here = steps.setdefault(int(step), {})
        if len(here) < MAX_NAMES:
            here[record[named].strip()] = value
    for step in sorted(steps):
        yield Row(step, split_step(steps[step])[1])


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
