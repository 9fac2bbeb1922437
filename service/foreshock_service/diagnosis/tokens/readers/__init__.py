"""Files → batches: one reader a format, found by what the file is. `sources` lists, `units` divides, `read` yields."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from foreshock_service.diagnosis.tokens.batches import Batch, DumpError, Unit
from foreshock_service.diagnosis.tokens.readers import parquet, prime_rl

READERS: Final[dict[str, ModuleType]] = {"foreshock": parquet, "prime_rl": prime_rl}
"""Each has SUFFIX, `units(path)` and `read(unit)`."""


def sources(named: Sequence[str]) -> list[Path]:
    """The dump files among paths, folders and globs, sorted. Raises DumpError where there is none."""
    found: set[Path] = set()
    for name in named:
        path = Path(name)
        if path.is_file():
            found.add(path)
            continue
        suffixes = tuple(reader.SUFFIX for reader in READERS.values())
        if path.is_dir():
            inside = {p for suffix in suffixes for p in path.rglob(f"*{suffix}") if p.is_file()}
        else:
            inside = {Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file()}
        if not inside:
            raise DumpError(f"{name}: no dump there ({', '.join(suffixes)})")
        found |= inside
    return sorted(found)


def units(paths: Sequence[Path]) -> list[Unit]:
    """The units of all files, in order. Raises DumpError for a file of no known format."""
    return [unit for path in paths for unit in _reader_of(path).units(path)]


def read(unit: Unit) -> Iterator[Batch]:
    """The batches of a unit. Raises DumpError for what cannot be read."""
    yield from READERS[unit.format].read(unit)


def _reader_of(path: Path) -> ModuleType:
    for reader in READERS.values():
        if path.name.endswith(reader.SUFFIX):
            return reader
    raise DumpError(f"{path}: neither a Parquet file nor prime-rl's token export (.jsonl)")
