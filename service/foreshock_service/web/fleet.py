"""What the first page shows: runs by their health, what waits for a person, what is open."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Row, Select, case, func, select
from sqlalchemy.orm import Session

from foreshock.wire import TERMINAL_STATES
from foreshock_service.api.bodies import CommandBody, IncidentBody, command_body, incident_body
from foreshock_service.api.principal import Principal
from foreshock_service.store.models import CommandRow, Incident, Run, Silence
from foreshock_service.web.figures import curve, told
from foreshock_service.web.recent import positions, recent

LEADING: Final[Mapping[str, bool]] = {
    "policy.kl_k2": True,
    "mismatch.kl_k3": True,
    "reward.mean": False,
    "entropy.mean": False,
}
"""Signals with a curve beside each run → drawn on a logarithmic scale."""
CURVE_STEPS: Final = 60
MAX_LISTED: Final = 100
MAX_DRAWN: Final = 2000
VERDICTS: Final = ("critical", "warning", "unknown", "healthy")
_GRAVITY = case({v: i for i, v in enumerate(VERDICTS)}, value=Run.verdict, else_=len(VERDICTS))
SORTS: Final[Mapping[str, tuple[str, Any]]] = {
    "health": ("worst first", (_GRAVITY, Run.last_seen_at.desc())),
    "heard": ("last heard", (Run.last_seen_at.desc(),)),
    "name": ("name", (Run.name,)),
    "started": ("newest", (Run.created_at.desc(),)),
    "step": ("most steps", (Run.last_step.desc().nulls_last(),)),
}


class Wanted(BaseModel):
    """The filter, as it stands in the address. An unknown word is as good as none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    q: str = ""
    verdict: str = ""
    status: str = ""
    sort: str = "health"
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        page = query.get("page", "1")
        return cls(
            q=query.get("q", "").strip()[:200],
            verdict=query.get("verdict", "") if query.get("verdict") in VERDICTS else "",
            status=query.get("status", "") if query.get("status") in ("live", "over", "silent") else "",
            sort=query.get("sort", "health") if query.get("sort") in SORTS else "health",
            page=min(int(page), 100_000) if page.isascii() and page.isdigit() and len(page) < 7 and int(page) else 1,
        )

    def address(self, **changes: Any) -> str:
        """The page under a changed filter; from its first sheet, unless a page is named."""
        fields = {**self.model_dump(), "page": 1, **changes}
        plain = Wanted()
        kept = {k: v for k, v in fields.items() if v != getattr(plain, k)}
        return "/?" + urlencode(kept) if kept else "/"

    @property
    def narrows(self) -> bool:
        """True where it leaves runs out."""
        return bool(self.q or self.verdict or self.status)


@dataclass(frozen=True, slots=True)
class Cell:
    """One leading signal of one run."""

    signal: str
    now: float | None
    drawing: Markup
    severity: str
    """Of the gravest open incident that went by this signal; empty: none did."""


Cells = Sequence[Cell | None]


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the table."""

    run: Row[Any]
    cells: Cells
    open: Sequence[tuple[str, str]]
    """(rule, severity) of what is not resolved, the gravest first."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything on the page."""

    rows: Sequence[RunRow]
    counts: Mapping[str, int]
    """verdict → runs under way and over, whatever the filter."""
    found: int
    more: bool
    incidents: Sequence[IncidentBody]
    commands: Sequence[CommandBody]
    silences: Sequence[Silence]


class _Drawn:
    """Curves that were drawn before, for each database: most runs have no new step since the last look."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: WeakKeyDictionary[Any, OrderedDict[Hashable, Cells]] = WeakKeyDictionary()

    def get(self, session: Session, key: Hashable) -> Cells | None:
        with self._lock:
            kept = self._kept.get(session.get_bind())
            return kept.get(key) if kept is not None else None

    def keep(self, session: Session, key: Hashable, cells: Cells) -> None:
        with self._lock:
            kept = self._kept.setdefault(session.get_bind(), OrderedDict())
            kept[key] = cells
            while len(kept) > MAX_DRAWN:
                kept.popitem(last=False)


_DRAWN: Final = _Drawn()
_SHOWN = (
    Run.id, Run.name, Run.project, Run.verdict, Run.status, Run.mode, Run.attempt, Run.last_step, Run.last_seen_at,
    Run.labels,
)  # fmt: skip


def read_fleet(session: Session, dialect: str, visitor: Principal, wanted: Wanted, size: int = 200) -> Fleet:
    """One sheet of `size` runs, and what is open in all that the visitor covers.

    Some 0.8 ms a run for the curves that were not drawn yet.
    """
    query = _matching(_covered(select(*_SHOWN), visitor), wanted)
    order = (*SORTS[wanted.sort][1], Run.id)
    rows = session.execute(query.order_by(*order).offset((wanted.page - 1) * size).limit(size + 1)).all()
    page = rows[:size]
    found = session.scalar(_matching(_covered(select(func.count()).select_from(Run), visitor), wanted)) or 0
    counted = session.execute(_covered(select(Run.verdict, func.count()), visitor).group_by(Run.verdict))
    counts = dict.fromkeys(VERDICTS, 0) | dict(map(tuple, counted))
    return Fleet(
        rows=_with_curves(session, dialect, page),
        counts=counts,
        found=found,
        more=len(rows) > size,
        incidents=_incidents(session, visitor),
        commands=_commands(session, visitor),
        silences=active_silences(session, visitor),
    )


def _covered(query: Any, visitor: Principal) -> Any:
    return query if visitor.project is None else query.where(Run.project == visitor.project)


def _matching(query: Select[Any], wanted: Wanted) -> Select[Any]:
    if wanted.q:
        rules = select(Incident.run_id).where(
            Incident.status != "resolved", Incident.rule.contains(wanted.q.lower(), autoescape=True)
        )
        query = query.where(Run.name.icontains(wanted.q, autoescape=True) | Run.id.in_(rules))
    if wanted.verdict:
        query = query.where(Run.verdict == wanted.verdict)
    if wanted.status:
        over = Run.status.in_(("finished", "crashed"))
        query = query.where({"over": over, "live": ~over, "silent": Run.status == "silent"}[wanted.status])
    return query


def _with_curves(session: Session, dialect: str, page: Sequence[Row[Any]]) -> list[RunRow]:
    ids = [run.id for run in page]
    places = positions(session, ids, list(LEADING))
    opened: dict[int, list[tuple[str, str]]] = {run_id: [] for run_id in ids}
    accused: dict[tuple[int, str], str] = {}
    query = select(Incident.run_id, Incident.rule, Incident.severity, Incident.evidence)
    query = query.where(Incident.run_id.in_(ids), Incident.status != "resolved")
    for run_id, rule, severity, evidence in session.execute(query.order_by(Incident.severity, Incident.opened_at)):
        opened[run_id].append((rule, severity))
        # The first number is what the rule went by; those after it are there for comparison.
        leading = next((str(item["signal"]) for item in evidence if "signal" in item), "")
        accused.setdefault((run_id, leading), severity)
    rows = []
    for run in page:
        severities = tuple(accused.get((run.id, signal), "") for signal in LEADING)
        key = (run.id, run.attempt, run.last_step, run.last_seen_at, severities)
        cells = _DRAWN.get(session, key)
        if cells is None:
            past = recent(session, dialect, run.id, places[run.id], CURVE_STEPS)
            drawn = zip(LEADING.items(), severities, strict=True)
            cells = [_cell(signal, past.columns.get(signal, ()), log, severity) for (signal, log), severity in drawn]
            _DRAWN.keep(session, key, cells)
        rows.append(RunRow(run, cells, opened[run.id]))
    return rows


def _cell(signal: str, values: Sequence[float | None], log: bool, severity: str) -> Cell | None:
    there = [v for v in values if v is not None]
    if not there:
        return None
    words = told(signal, values) + (f", {severity}" if severity else "")
    return Cell(signal, there[-1], curve(values, words, log=log), severity)


def _incidents(session: Session, visitor: Principal) -> list[IncidentBody]:
    query = _covered(select(Incident, Run.name).join(Run, Run.id == Incident.run_id), visitor)
    query = query.where(Incident.status != "resolved")
    acknowledged = case((Incident.status == "open", 0), else_=1)
    rows = session.execute(query.order_by(acknowledged, Incident.severity, Incident.opened_at.desc()).limit(MAX_LISTED))
    return [incident_body(incident, name) for incident, name in rows]


def _commands(session: Session, visitor: Principal) -> list[CommandBody]:
    query = _covered(select(CommandRow, Run.name).join(Run, Run.id == CommandRow.run_id), visitor)
    query = query.where(CommandRow.state.not_in(TERMINAL_STATES))
    waiting = case((CommandRow.state == "proposed", 0), else_=1)
    rows = session.execute(query.order_by(waiting, CommandRow.created_at.desc()).limit(MAX_LISTED))
    return [command_body(command, name) for command, name in rows]


def active_silences(session: Session, visitor: Principal, run: str | None = None) -> list[Silence]:
    """Silences that are not over and that the visitor covers; of one run: those that name it."""
    query = select(Silence).where(Silence.until_at > time.time())
    if visitor.project is not None:
        mine = Silence.run.startswith(f"{visitor.project}/", autoescape=True)
        query = query.where((Silence.project == visitor.project) | mine)
    if run is not None:
        query = query.where(Silence.run == run)
    return list(session.scalars(query.order_by(Silence.until_at).limit(MAX_LISTED)))
