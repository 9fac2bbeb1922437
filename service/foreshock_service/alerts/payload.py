"""What an alert says, as data: the same for every channel. It holds no secret and no text of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from foreshock_service.store.models import CommandRow, Incident, Run

SHOWN_CAUSES: Final = 3
SHOWN_EVIDENCE: Final = 16


def payload(
    run: Run, incident: Incident | None, commands: Sequence[tuple[CommandRow, str]], now: float
) -> dict[str, Any]:
    """Of one run, at most one incident, and some commands with what became of each; of one command the last word."""
    latest = {row.id: (row, became) for row, became in commands}
    return {
        "run": run.name,
        "project": run.project,
        "at": now,
        "mode": run.mode or "observe",
        "path": f"/runs/{run.name}",
        "incident": _incident(incident) if incident is not None else None,
        "cause": (incident.diagnosis or {}).get("sentence") if incident is not None else None,
        "commands": [_command(row, became) for row, became in latest.values()],
    }


def _incident(incident: Incident) -> dict[str, Any]:
    causes = (incident.diagnosis or {}).get("causes") or []
    return {
        "id": incident.id,
        "rule": incident.rule,
        "severity": incident.severity,
        "status": incident.status,
        "attempt": incident.attempt,
        "onset_step": incident.onset_step,
        "opened_step": incident.opened_step,
        "resolved_step": incident.resolved_step,
        "acknowledged_by": incident.acknowledged_by,
        "message": incident.message,
        "edge": incident.edge,
        "evidence": list(incident.evidence)[:SHOWN_EVIDENCE],
        "causes": [{k: c.get(k) for k in ("name", "score", "title")} for c in causes[:SHOWN_CAUSES]],
        "precursor_id": incident.precursor_id,
    }


def _command(row: CommandRow, became: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "kind": row.kind,
        "became": became,
        "state": row.state,
        "reason": row.reason,
        "advisory": bool((row.detail or {}).get("advisory")),
        "decided_by": row.decided_by,
        "step": row.issued_step,
        "done_step": row.done_step,
        "verdict": row.verdict,
    }
