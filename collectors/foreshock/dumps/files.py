"""One step → one Parquet file, whole or not at all, within the disk it may use. Runs on the dump's own thread."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshock.dumps.plan import Place
from foreshock.dumps.schema import COLUMNS, PART_SUFFIX, SUFFIX, About, arrow_schema
from foreshock.dumps.table import Array, columns

if TYPE_CHECKING:
    from foreshock.dumps.capture import Observed

GROUP_ROWS = 1 << 17
"""A row group is closed at the first end of a sequence beyond this."""


class Budget:
    """The files of one process and the bytes it may hold; the oldest sampled ones go first, incidents stay.

    `room` is False where an incident's file would not fit: what was kept first is worth most.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._files: list[tuple[Path, int, bool]] = []

    @property
    def held(self) -> int:
        return sum(size for _, size, _ in self._files)

    def room(self, size: int) -> bool:
        """Makes room for `size` bytes where deleting sampled files can."""
        while self.held + size > self._most:
            oldest = next((entry for entry in self._files if entry[2]), None)
            if oldest is None:
                return False
            self._files.remove(oldest)
            oldest[0].unlink(missing_ok=True)
        return True

    def add(self, path: Path, size: int, sampled: bool) -> None:
        """A file that was written."""
        self._files.append((path, size, sampled))


def write(
    folder: Path, step: int, place: Place, observations: list[Observed], about: About, client: str, budget: Budget
) -> Path | None:
    """Writes the file of a step and returns its path; None where the budget has no room for it.

    Raises ImportError without pyarrow, OSError for what the disk does; neither leaves a file behind.
    """
    import pyarrow.parquet as pq

    target = folder / place.run / f"step-{step:08d}-g{place.generation}-{place.role}-{place.rank}-{client[:8]}{SUFFIX}"
    part = target.with_suffix(SUFFIX + PART_SUFFIX)
    schema = arrow_schema(about)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with pq.ParquetWriter(part, schema, compression="zstd", use_dictionary=True) as writer:
            for batch, observed in enumerate(observations):
                for group in groups(observed, step, place, batch):
                    writer.write_table(as_table(group, schema), row_group_size=1 << 62)
        size = part.stat().st_size
        if not budget.room(size):
            part.unlink()
            return None
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    budget.add(target, size, about.reason == "sampled")
    return target


def groups(observed: Observed, step: int, place: Place, batch: int) -> Iterator[dict[str, Any]]:
    """The columns of an observation in row groups that end with a sequence."""
    found = columns(observed)
    rows_N: Array = found["row"]
    found |= {"step": step, "batch": batch, **place._asdict()}
    cuts = np.flatnonzero(np.diff(rows_N)) + 1
    start = 0
    while start < rows_N.size:
        later = cuts[cuts >= min(start + GROUP_ROWS, rows_N.size)]
        end = int(later[0]) if later.size else int(rows_N.size)
        yield {name: v[start:end] if isinstance(v, np.ndarray) else v for name, v in found.items()} | {
            "_rows": end - start
        }
        start = end


def as_table(group: Mapping[str, Any], schema: Any) -> Any:
    """A pyarrow table of one row group: absent columns are null, single values are repeated by dictionary."""
    import pyarrow as pa

    count = group["_rows"]
    arrays = []
    for column, declared in zip(schema, COLUMNS, strict=True):
        value = group.get(declared.name)
        if value is None:
            arrays.append(pa.nulls(count, column.type))
        elif declared.type == "text":
            indices = pa.array(np.zeros(count, dtype=np.int32))
            arrays.append(pa.DictionaryArray.from_arrays(indices, pa.array([str(value)])))
        elif not isinstance(value, np.ndarray):
            arrays.append(pa.repeat(pa.scalar(value, column.type), count))
        else:
            hidden = value < 0 if declared.name == "position" else None
            arrays.append(pa.array(value, mask=hidden).cast(column.type))
    return pa.Table.from_arrays(arrays, schema=schema)
