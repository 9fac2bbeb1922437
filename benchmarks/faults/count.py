"""What clients sealed (their ledgers) against what the service holds (its database): lost, doubled, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text

ITEM_REASONS = frozenset({
    "queue_full", "spool_full", "disk_full", "spool_unwritable", "corrupt", "refused", "too_large", "unencodable",
})  # fmt: skip
"""Reasons that count whole items: each of these is one frame or notice that is not there, and known not to be."""


@dataclass
class Ledger:
    """One process's ledger. `sealed` is None where it was killed before it could say."""

    client: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    sealed: int | None = None
    ended: str = ""

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Empty where the process never sealed a step; a last line torn by a kill is no line."""
        ledger = cls()
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith("\n"):
                continue
            entry = json.loads(line)
            ledger.client = entry["client"]
            if "step" in entry:
                ledger.steps.append(entry)
            elif "executed" in entry:
                ledger.executed.append(entry["executed"])
            else:
                ledger.sealed, ledger.ended = entry["sealed"], entry["ended"]
        return ledger


@dataclass
class Count:
    """The result for some clients together."""

    sealed: int = 0
    stored: int = 0
    lost: int = 0
    """Sealed, neither stored nor counted as lost."""
    doubled: int = 0
    counted: Counter[str] = field(default_factory=Counter)
    """What the service was told of losses, by reason."""
    executed: int = 0
    """Commands that the trainers carried out."""
    executed_twice: int = 0
    stored_all_the_same: int = 0
    """Counted as lost and stored: the answer never came, so the client could not know. No harm, and no frame twice."""

    def __add__(self, other: Count) -> Count:
        """Both together."""
        return Count(
            self.sealed + other.sealed, self.stored + other.stored, self.lost + other.lost,
            self.doubled + other.doubled, self.counted + other.counted, self.executed + other.executed,
            self.executed_twice + other.executed_twice, self.stored_all_the_same + other.stored_all_the_same,
        )  # fmt: skip


def count(database_url: str, ledgers: Iterable[Ledger]) -> Count:
    """Reads the database; whoever calls waits first until the clients have ended."""
    url = make_url(database_url)
    engine = create_engine(url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url)
    found = Count()
    with engine.connect() as connection:
        for ledger in ledgers:
            _add(found, connection, ledger)
    engine.dispose()
    return found


def _add(found: Count, connection: Any, ledger: Ledger) -> None:
    def numbers(statement: str) -> list[Any]:
        return list(connection.execute(text(statement), {"client": ledger.client}))

    keys = numbers("SELECT attempt, step, role, rank, sequence FROM frames WHERE client_id = :client")
    notices = numbers("SELECT id FROM notices WHERE client_id = :client")
    told: Counter[str] = Counter()
    for (losses,) in numbers("SELECT losses FROM clients WHERE id = :client"):
        told.update(json.loads(losses) if isinstance(losses, str) else losses)
    by_place = len(keys) - len({key[:4] for key in keys})
    by_sequence = len(keys) - len({key[4] for key in keys})
    found.doubled += max(by_place, by_sequence)
    found.counted.update(told)
    found.executed += len(set(ledger.executed))
    found.executed_twice += len(ledger.executed) - len(set(ledger.executed))
    if ledger.sealed is None:
        sealed, stored = len(ledger.steps), len(keys)
        missing = {step["step"] for step in ledger.steps} - {key[1] for key in keys}
        found.lost += len(missing)
    else:
        sealed, stored = ledger.sealed, len(keys) + len(notices)
        difference = sealed - stored - sum(n for reason, n in told.items() if reason in ITEM_REASONS)
        found.lost += max(0, difference)
        found.doubled += max(0, stored - sealed)
        found.stored_all_the_same += max(0, -difference) if stored <= sealed else 0
    found.sealed += sealed
    found.stored += stored
