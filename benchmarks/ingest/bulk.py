"""Many stored frames, steps and points, copied inside the database from real ones, into the very tables and indexes.

What is copied was sent, stored and evaluated by the service's own code; what the copies cost says nothing of ingest,
which is measured on top of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from foreshock_service.store.engine import Store

CHUNK = 20_000
"""Steps copied in one transaction."""
SPARE_BYTES = 15 << 30
"""What a filling must leave free on the disk."""
COPIED_FROM = 16
"""Real steps of each run, numbered from 1, that the copies repeat in turn."""
FIRST_COPY = 100_000


def copy_steps(store: Store, run: str, first: int, count: int, *, frames: bool = True) -> None:
    """Evaluated steps `first` … `first + count − 1` of `run` with their points, and their `frames`, from its real ones.

    Ends the benchmark where the disk would be left with less than `SPARE_BYTES`.
    """
    for low in range(first, first + count, CHUNK):
        high = min(low + CHUNK, first + count) - 1
        _check_space(store)
        with store.write(durable=False) as session:
            run_id = session.scalar(text("SELECT id FROM runs WHERE name = :run"), {"run": run})
            for table, own in _TABLES.items():
                if frames or table != "frames":
                    _copy(session, store.dialect, table, own, {"run": run_id, "low": low, "high": high})


def copy_run(store: Store, run: str, name: str) -> None:
    """Another run `name` with the attempt, the signals and the real points of `run`; it has finished."""
    with store.write(durable=False) as session:
        session.execute(
            text(
                "INSERT INTO runs (name, project, created_at, last_seen_at, status, verdict, capabilities, settings,"
                " config, labels, rules, attempt, budget) SELECT :name, project, created_at, last_seen_at, 'finished',"
                " verdict, capabilities, settings, config, labels, rules, attempt, budget FROM runs WHERE name = :run"
            ),
            {"run": run, "name": name},
        )
        for table, columns in {
            "attempts": "ordinal, launch, generation, started_at, reason, expected_ranks",
            "signals": "position, name",
            "points": _TABLES["points"].replace("step,", "attempt, step,"),
        }.items():
            session.execute(
                text(
                    f"INSERT INTO {table} (run_id, {columns})"
                    f" SELECT (SELECT id FROM runs WHERE name = :name), {columns}"
                    f" FROM {table} WHERE run_id = (SELECT id FROM runs WHERE name = :run)"
                    + (f" AND step <= {COPIED_FROM}" if table == "points" else "")
                ),
                {"run": run, "name": name},
            )


_TABLES = {
    "steps": "step, first_at, event_at, due_at, reported, expected, flags, evaluated_at",
    "frames": "step, role, rank, client_id, sequence, received_at, event_at, flags, body",
    "points": 'step, at, "values", missing, worst, evidence, reported, expected, segment, bands, flag',
}


def _copy(session: Session, dialect: str, table: str, columns: str, which: dict[str, object]) -> None:
    """One nested loop over the steps in order, so that pages and indexes grow as they do in a run."""
    given = columns.replace("step,", "g,", 1).replace("sequence,", "g,")
    source = f"SELECT * FROM {table} WHERE run_id = :run AND attempt = 1 AND step = 1 + g % {COPIED_FROM}"
    if dialect == "postgresql":
        rows = (
            f"generate_series(CAST(:low AS bigint), CAST(:high AS bigint)) AS s(g) CROSS JOIN LATERAL ({source}) AS t"
        )
        ending = ""
    else:
        numbers = "WITH RECURSIVE c(g) AS (SELECT :low UNION ALL SELECT g + 1 FROM c WHERE g < :high) SELECT g FROM c"
        rows = f"({numbers}) AS s CROSS JOIN {table} AS t"
        ending = f" WHERE t.run_id = :run AND t.attempt = 1 AND t.step = 1 + g % {COPIED_FROM}"
    session.execute(
        text(f"INSERT INTO {table} (run_id, attempt, {columns}) SELECT run_id, attempt, {given} FROM {rows}{ending}"),
        which,
    )


def settled(store: Store, vacuumed: str = "") -> None:
    """What follows upon much writing, done at once: statistics, what is dirty written, a table vacuumed."""
    if store.dialect == "sqlite":
        with store.engine.connect() as connection:
            connection.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"VACUUM (ANALYZE) {vacuumed}" if vacuumed else "ANALYZE"))
        connection.execute(text("CHECKPOINT"))


def _check_space(store: Store) -> None:
    """The disk on which the database lies: its file's folder, or the private server's."""
    place = Path(str(store.url.database)).parent if store.dialect == "sqlite" else store.url.query.get("host", "/")
    free = shutil.disk_usage(str(place)).free
    if free < SPARE_BYTES:
        raise SystemExit(f"only {free >> 30} GB free: not filled any further")
