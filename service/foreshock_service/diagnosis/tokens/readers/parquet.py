"""Foreshock's own dumps (`foreshock.dumps.schema`), a row group at a time; also what others wrote by that schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from foreshock.dumps.schema import COLUMNS, LOG_PROBS, METADATA_KEY, VERSION, About, Column
from foreshock_service.diagnosis.tokens.batches import Array, Batch, DumpError, StepKey, Unit

SUFFIX: Final = ".parquet"
UNIT_ROWS: Final = 1 << 20
_BATCH_KEYS: Final = ("step", "launch", "generation", "role", "rank", "optimizer_step", "batch")
_TOKEN_COLUMNS: Final = ("sample", "group", "prompt", "token", "advantage", "version_lag", "mask", *LOG_PROBS)


def units(path: Path) -> list[Unit]:
    """Spans of row groups of about a million tokens each. Raises DumpError for another format or a newer version."""
    metadata = _opened(path)[0].metadata
    spans: list[Unit] = []
    start = rows = 0
    for index in range(metadata.num_row_groups):
        rows += metadata.row_group(index).num_rows
        if rows >= UNIT_ROWS or index + 1 == metadata.num_row_groups:
            spans.append(Unit(path, "foreshock", start, index + 1))
            start, rows = index + 1, 0
    return spans


def read(unit: Unit) -> Iterator[Batch]:
    """The batches of a span. Raises DumpError where a sequence is torn apart or a value cannot be what it should."""
    import pyarrow as pa

    file, about = _opened(unit.path)
    present = [c.name for c in COLUMNS if c.name in file.schema_arrow.names]
    end = file.metadata.num_row_groups if unit.end < 0 else unit.end
    for index in range(unit.start, end):
        try:
            table = file.read_row_group(index, columns=present)
        except (OSError, pa.ArrowException) as error:
            raise DumpError(f"{unit.path}: row group {index}: {error}") from None
        empty = [c.name for c in COLUMNS if c.required and table.column(c.name).null_count]
        if empty:
            raise DumpError(f"{unit.path}: row group {index}: {empty[0]} is null somewhere")
        if table.num_rows:
            yield from _batches(unit.path, table, about)


def _opened(path: Path) -> tuple[Any, About]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DumpError("reading dumps needs pyarrow: pip install 'foreshock[dumps]'") from None
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DumpError(f"{path}: {error}") from None
    about = About(version=VERSION)
    raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if raw is not None:
        try:
            about = msgspec.json.decode(raw, type=About)
        except msgspec.MsgspecError as error:
            raise DumpError(f"{path}: its metadata cannot be read: {error}") from None
    if about.version > VERSION:
        raise DumpError(f"{path}: dump version {about.version}, this Foreshock reads up to {VERSION}")
    absent = [c.name for c in COLUMNS if c.required and c.name not in file.schema_arrow.names]
    if absent:
        raise DumpError(f"{path}: no token dump: it has no column {', '.join(absent)}")
    odd = [c.name for c in COLUMNS if c.name in file.schema_arrow.names and not _fits(c, file.schema_arrow)]
    if odd:
        raise DumpError(f"{path}: column {odd[0]} is {file.schema_arrow.field(odd[0]).type}")
    return file, about


def _fits(column: Column, schema: Any) -> bool:
    import pyarrow.types as is_a

    found = schema.field(column.name).type
    if column.type == "text":
        return bool(is_a.is_dictionary(found) or is_a.is_string(found) or is_a.is_large_string(found))
    if column.type == "bool":
        return bool(is_a.is_boolean(found) or is_a.is_integer(found))
    return bool(is_a.is_integer(found) or (column.type.startswith("float") and is_a.is_floating(found)))


def _batches(path: Path, table: Any, about: About) -> Iterator[Batch]:
    keys = {name: _codes(table, name) for name in _BATCH_KEYS}
    row = _codes(table, "row")
    new_batch = np.zeros(table.num_rows, dtype=bool)
    new_batch[0] = True
    for values in keys.values():
        new_batch[1:] |= values[1:] != values[:-1]
    new_row = new_batch.copy()
    new_row[1:] |= row[1:] != row[:-1]
    mask = _values(table, "mask", bool)
    if mask is None:
        raise DumpError(f"{path}: the mask is null")
    read = {name: _values(table, name) for name in _TOKEN_COLUMNS}
    tokens: dict[str, Array] = {name: values for name, values in read.items() if values is not None} | {"mask": mask}
    valid = {name: _valid(table, name) for name in tokens}
    position = _values(table, "position")
    starts = np.flatnonzero(new_batch).tolist()
    for start, end in zip(starts, [*starts[1:], table.num_rows], strict=True):
        edges = np.concatenate([np.flatnonzero(new_row[start:end]), [end - start]])
        columns = {name: v[start:end] for name, v in tokens.items() if valid[name][start:end].any()}
        piece = bool(_one(table, "piece", start) or False)
        if not piece and position is not None:
            _check_whole(path, position[start:end], columns["mask"], edges, row[start:end])
        low, high = _one(table, "clip_low", start), _one(table, "clip_high", start)
        yield Batch(
            key=StepKey(
                str(_one(table, "launch", start) or ""), int(_one(table, "generation", start) or 0),
                int(_one(table, "step", start)),
            ),
            role=str(_one(table, "role", start) or "trainer"),
            rank=int(_one(table, "rank", start)),
            optimizer_step=int(_one(table, "optimizer_step", start)),
            edges=edges,
            columns=columns,
            about=about,
            old_source=str(_one(table, "old_source", start) or ""),
            clip=(float(low), float(high)) if low is not None and high is not None else None,
            piece=piece,
        )  # fmt: skip


def _check_whole(path: Path, position: Array, mask: Array, edges: Array, row: Array) -> None:
    """Each sequence's sampled tokens are numbered from 0 on; else it was torn apart or shuffled by another tool."""
    wanted = np.cumsum(mask) - 1
    before = np.concatenate([[0], np.cumsum(mask)])[edges[:-1]]
    wanted = wanted - np.repeat(before, np.diff(edges))
    wrong = np.flatnonzero(mask & (position != wanted))
    if wrong.size or np.unique(row[edges[:-1]]).size != edges.size - 1:
        where = int(row[wrong[0]]) if wrong.size else int(row[0])
        raise DumpError(f"{path}: the tokens of row {where} do not stand together and in order in one row group")


def _valid(table: Any, name: str) -> Array:
    """Where a column is not null."""
    valid: Array = table.column(name).is_valid().combine_chunks().to_numpy(zero_copy_only=False)
    return valid


def _codes(table: Any, name: str) -> Array:
    """Comparable integers of a key column; absent: all alike."""
    import pyarrow as pa

    if name not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.int64)
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.indices
    elif not pa.types.is_integer(column.type):
        column = column.dictionary_encode().indices
    codes: Array = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _values(table: Any, name: str, kind: type | None = None) -> Array | None:
    """A column as numpy; nulls of numbers become NaN. None where it is absent or null throughout."""
    if name not in table.column_names:
        return None
    column = table.column(name)
    if column.null_count == len(column):
        return None
    values: Array = column.to_numpy()
    return values.astype(kind) if kind is not None else values


def _one(table: Any, name: str, index: int) -> Any:
    return table.column(name)[int(index)].as_py() if name in table.column_names else None
