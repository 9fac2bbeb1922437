"""Quiet hours: when a channel lets people sleep. `slack_app=22:00-07:00 Europe/Berlin; email=20:00-08:00 Asia/Tokyo`.

What is not urgent waits until they end. Times are of the named zone's wall clock, so they move with its summer time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_ENTRY: Final = re.compile(r"([a-z_]+)\s*=\s*(\d\d):(\d\d)-(\d\d):(\d\d)\s+([A-Za-z0-9_+/-]+)")
GOOD_NEWS: Final = frozenset({"incident.resolved", "incident.mitigated", "command.done", "command.helped"})


@dataclass(frozen=True)
class QuietHours:
    """From `start` to `end`, over midnight where `end` is the earlier; the same time twice: the whole day."""

    start: time
    end: time
    zone: ZoneInfo

    def until(self, now: float) -> float | None:
        """When the quiet hours that `now` lies in end (epoch seconds); None outside of them."""
        here = datetime.fromtimestamp(now, self.zone)
        at = here.time().replace(tzinfo=None)
        over_midnight = self.end <= self.start
        if over_midnight and (at >= self.start or at < self.end):
            day = here.date() + timedelta(days=1 if at >= self.start else 0)
        elif self.start <= at < self.end:
            day = here.date()
        else:
            return None
        # Through UTC, or the distance would be one of wall clocks, an hour off in the night of a change.
        return datetime.combine(day, self.end, self.zone).astimezone(UTC).timestamp()


def parse(text: str) -> dict[str, QuietHours]:
    """Channel → its quiet hours. Raises ValueError, which names the entry that is wrong."""
    found: dict[str, QuietHours] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"quiet hours {entry!r}: write `channel=22:00-07:00 Area/City`")
        channel, *numbers, zone = match.groups()
        hour, minute, end_hour, end_minute = map(int, numbers)
        try:
            found[channel] = QuietHours(time(hour, minute), time(end_hour, end_minute), ZoneInfo(zone))
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"quiet hours {entry!r}: no such time or time zone") from error
    return found


def urgent(event: str, payload: Mapping[str, Any]) -> bool:
    """What wakes people: news of a critical incident, unless it is good."""
    incident = payload.get("incident") or {}
    return incident.get("severity") == "critical" and event not in GOOD_NEWS
