"""Merged steps into the store: the position of each signal, and one row of values a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.store.models import SignalName
from foreshock_service.store.upsert import insert_new

_KNOWN = select(SignalName.name, SignalName.position).where(SignalName.run_id == bindparam("b_run"))


class Positions:
    """Signal → position (from 1) in a run's rows, append-only. The caller holds the run's row while names are added."""

    def __init__(self, session: Session, run_id: int, most: int, known: dict[str, int] | None = None) -> None:
        """`known`: what an earlier transaction of the same holder left in `known`, which spares reading it again."""
        self._session = session
        self._run_id = run_id
        self._most = most
        if known is None:
            known = dict(session.connection().execute(_KNOWN, {"b_run": run_id}).all())
        self.known = known

    def row(self, values: Mapping[str, float]) -> tuple[list[float | None], list[str]]:
        """`values` in their positions (None where missing), and the names left out because the run has its `most`."""
        left_out = self._add([name for name in values if name not in self.known])
        row: list[float | None] = [None] * max((self.known.get(name, 0) for name in values), default=0)
        for name, value in values.items():
            if name in self.known:
                row[self.known[name] - 1] = value
        return row, left_out

    def _add(self, names: Collection[str]) -> list[str]:
        fresh = sorted(names)
        room = max(0, self._most - len(self.known))
        rows = []
        for name in fresh[:room]:
            self.known[name] = len(self.known) + 1
            rows.append({"run_id": self._run_id, "position": self.known[name], "name": name})
        insert_new(self._session, SignalName, rows)
        return fresh[room:]
