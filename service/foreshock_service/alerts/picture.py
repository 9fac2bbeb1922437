"""The picture of an incident: its signals around it, drawn by what `foreshock check --plot` uses."""

from __future__ import annotations

import math
import tempfile
import threading
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from foreshock_service.check.judge import Incident as Judged
from foreshock_service.check.judge import Report
from foreshock_service.check.plot import NoPlot, plot
from foreshock_service.check.trace import Trace
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.rules.interface import Severity
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Incident, Run

BEFORE: Final = 100
AFTER: Final = 50
"""Steps shown before the onset and after the end; what lasts longer is shown from its beginning on."""
MOST: Final = 400
_drawing = threading.Lock()
"""pyplot keeps a state of its own: one thread draws at a time."""


def draw(store: Store, incident_id: str) -> tuple[bytes, str] | None:
    """(PNG, title), or None where there is nothing to draw or nothing to draw it with. About a second of one core."""
    with store.read() as session:
        incident = session.get(Incident, incident_id)
        run = session.get(Run, incident.run_id) if incident is not None else None
        if incident is None or run is None:
            return None
        report, title = _report(session, incident), f"{run.name}, {incident.rule}"
    with _drawing, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "incident.png"
        try:
            plot(report, path, title)
        except (NoPlot, KeyError):
            return None  # no steps stored, no matplotlib, or a rule of somebody's own pack
        return path.read_bytes(), title


def _report(session: Session, incident: Incident) -> Report:
    onset = incident.onset_step if incident.onset_step is not None else (incident.opened_step or 0)
    end = incident.resolved_step if incident.resolved_step is not None else incident.last_step
    last = max(onset, end if end is not None else onset) + AFTER
    shown = min(MOST, last - max(0, onset - BEFORE) + 1)
    steps = recent_steps(session, incident.run_id, incident.attempt, upto=last, steps=shown)
    trace = Trace()
    for index, past in enumerate(steps):
        bands = {s: b for s, b in past.bands.items() if all(math.isfinite(v) for v in b)}
        trace.add(index, past.step, past.values, bands)
    severity: Severity = "critical" if incident.severity == "critical" else "warning"
    judged = Judged(
        rule=incident.rule,
        severity=severity,
        attempt=incident.attempt,
        opened_step=incident.opened_step if incident.opened_step is not None else onset,
        onset_step=onset,
        resolved_step=incident.resolved_step,
        explanation=incident.message,
    )
    return Report(verdict=severity, format=None, steps=len(steps), incidents=[judged], trace=trace)
