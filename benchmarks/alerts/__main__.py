"""`python -m benchmarks.alerts`: the storm and the outage of `simulation.py`, as tables. A minute or two, on SQLite."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.alerts.simulation import Figures, outage, storm
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Run


def main() -> None:
    for title, play in (("storm", storm), ("outage", outage)):
        with tempfile.TemporaryDirectory() as folder:
            store = Store(f"sqlite:///{Path(folder) / 'foreshock.db'}")
            migrate.upgrade(store)
            began = time.perf_counter()
            figures = play(store, lambda name, store=store: _run(store, name))
            seconds = time.perf_counter() - began
            store.close()
        print(f"\n{title} ({seconds:.0f} s)\n\n{table(figures)}")


def table(figures: list[Figures]) -> str:
    """Markdown."""
    lines = [
        "| channel | alerts | arrived | shown | in order | messages | requests | longest wait | after return |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{f.channel}` | {f.alerts} | {f.arrived} | {f.visible} | {'yes' if f.in_order else 'NO'} | {f.messages} "
        f"| {f.requests} | {f.longest_wait_s:.0f} s | {f'{f.after_return_s:.0f} s' if f.after_return_s else '—'} |"
        for f in figures
    ]
    return "\n".join(lines)


def _run(store: Store, name: str) -> int:
    with store.write() as session:
        run = Run(name=name, project=name.partition("/")[0], created_at=1.0, last_seen_at=1.0, mode="auto", attempt=1)
        session.add(run)
        session.flush()
        session.add(Attempt(run_id=run.id, ordinal=1, launch="one", started_at=1.0, first_step=1))
        return run.id


if __name__ == "__main__":
    main()
