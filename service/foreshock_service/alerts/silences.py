"""Silences: no alerts that match, until then. Incidents open all the same, and what was held back stays listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.store.models import Silence

ENDS_BY_WORD: Final = frozenset({"alertmanager"})
"""Channels where an alert goes on until it is said to be over: that word is never silenced."""


class Silences:
    """Those in force at one moment, read once for many alerts."""

    def __init__(self, rows: Sequence[Silence]) -> None:
        self._rows = rows

    def match(self, channel: str, event: str, project: str, run: str, rule: str | None) -> bool:
        """True where a silence matches in every part that it names; it names one at least."""
        if event == "incident.resolved" and channel in ENDS_BY_WORD:
            return False
        return any(
            (s.project is None or s.project == project)
            and (s.run is None or s.run == run)
            and (s.rule is None or s.rule == rule)
            for s in self._rows
        )


def in_force(session: Session, now: float) -> Silences:
    """One query, however many alerts are then held against them."""
    return Silences(session.scalars(select(Silence).where(Silence.until_at > now)).all())
