"""What the database and the receiver of alerts hold, against what should be there exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from benchmarks.replicas.load import KIND, RULE, Job

OPENED = "incident.opened"
_PER_RUN = {
    "frames": "SELECT count(*) FROM frames f WHERE f.run_id = r.id",
    "doubled": "SELECT count(*) - count(DISTINCT (step, rank)) FROM frames f WHERE f.run_id = r.id",
    "steps": "SELECT count(*) FROM points p WHERE p.run_id = r.id",
    "failed": "SELECT count(*) FROM steps s WHERE s.run_id = r.id AND s.evaluated_at IS NULL",
    "incidents": f"SELECT count(*) FROM incidents i WHERE i.run_id = r.id AND i.rule = '{RULE}'",
    "commands": f"SELECT count(*) FROM commands c WHERE c.run_id = r.id AND c.kind = '{KIND}'",
}


def per_run(database_url: str) -> dict[str, dict[str, int]]:
    """Run → what is stored of it."""
    columns = ", ".join(f"({query}) AS {name}" for name, query in _PER_RUN.items())
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(f"SELECT r.name, {columns} FROM runs r ORDER BY r.name").fetchall()
    return {row[0]: dict(zip(_PER_RUN, row[1:], strict=True)) for row in rows}


def commands(database_url: str) -> dict[str, str]:
    """Run → the id of its command; of several, any."""
    query = "SELECT r.name, c.id FROM commands c JOIN runs r ON r.id = c.run_id"
    with psycopg.connect(database_url) as connection:
        return dict(connection.execute(query).fetchall())


def accepted(database_url: str) -> Counter[str]:
    """Command → how often somebody was told that it may be carried out."""
    query = "SELECT subject_id FROM audit WHERE subject = 'command' AND became = 'accepted'"
    with psycopg.connect(database_url) as connection:
        return Counter(row[0] for row in connection.execute(query))


def old_frames(database_url: str, cut: float) -> int:
    """Frames received before `cut`."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT count(*) FROM frames WHERE received_at < %s", (cut,)).fetchone()
    return int(row[0]) if row else 0


def findings(
    jobs: Sequence[Job],
    stored: Mapping[str, Mapping[str, int]],
    taken: Mapping[str, int],
    alerts: Sequence[Mapping[str, Any]],
    old: int,
) -> dict[str, bool]:
    """Promise → kept. `taken`: command → acceptances; `alerts`: bodies that the webhook got; `old`: frames past their
    retention."""
    opened = Counter(a["incident"]["id"] for a in alerts if a["event"] == OPENED)
    of_rule = Counter(a["run"] for a in alerts if a["event"] == OPENED and a["incident"]["rule"] == RULE)
    empty: dict[str, int] = dict.fromkeys(_PER_RUN, 0)
    runs = {job.name: stored.get(job.name, empty) for job in jobs}
    return {
        "each acknowledged frame there once": all(
            runs[j.name]["frames"] == j.steps * j.ranks and runs[j.name]["doubled"] == 0 for j in jobs
        ),
        "each step evaluated once": all(runs[j.name]["steps"] == j.steps and runs[j.name]["failed"] == 0 for j in jobs),
        "each incident once": all(run["incidents"] == 1 for run in runs.values()),
        "each command once": all(run["commands"] == 1 for run in runs.values()),
        "each command accepted once": len(taken) == len(jobs) and set(taken.values()) <= {1},
        "each alert sent once": set(opened.values()) == {1} and of_rule == Counter(list(runs)),
        "old frames gone": old == 0,
    }
