"""Merged steps into the store: the position of each signal, and one row of values a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.store.models import SignalName
from foreshock_service.store.types import packed
from foreshock_service.store.upsert import insert_new

_KNOWN = select(SignalName.name, SignalName.position).where(SignalName.run_id == bindparam("b_run"))


class Places:
    """Signal → position (from 1) in a run's rows, append-only, as far as they are known."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = known
        self._last: tuple[tuple[str, ...], NDArray[np.intp], list[str]] | None = None

    def row(self, values: Mapping[str, float]) -> tuple[NDArray[np.float64], list[str]]:
        """`values` in their positions (`types.packed`), and the names left out because they have none."""
        names = tuple(values)
        if self._last is None or self._last[0] != names:
            left_out = self._place([name for name in names if name not in self.known])
            places = np.array([self.known[name] - 1 for name in names if name in self.known], dtype=np.intp)
            self._last = (names, places, left_out)
        names, places, left_out = self._last
        given = [values[name] for name in names if name in self.known] if left_out else list(values.values())
        return packed(places, given, int(places.max(initial=-1)) + 1), left_out

    def _place(self, names: list[str]) -> list[str]:
        return names


class Positions(Places):
    """Places that new signals get as they come, up to the run's `most`. The caller holds the run's row meanwhile."""

    known: dict[str, int]

    def __init__(self, session: Session, run_id: int, most: int, known: dict[str, int] | None = None) -> None:
        """`known`: what an earlier transaction of the same holder left in `known`, which spares reading it again."""
        if known is None:
            known = dict(session.connection().execute(_KNOWN, {"b_run": run_id}).all())
        super().__init__(known)
        self._session = session
        self._run_id = run_id
        self._most = most

    def _place(self, names: list[str]) -> list[str]:
        fresh = sorted(names)
        room = max(0, self._most - len(self.known))
        rows = []
        for name in fresh[:room]:
            self.known[name] = len(self.known) + 1
            rows.append({"run_id": self._run_id, "position": self.known[name], "name": name})
        insert_new(self._session, SignalName, rows)
        return fresh[room:]
