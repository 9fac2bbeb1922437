"""Builds every board to JSON. The files in `built/` are committed, and a test keeps them current."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import fleet, incident, pipeline, run, run_over_time

BOARDS: Final[dict[str, Callable[[], Dashboard]]] = {
    "fleet": fleet.build,
    "run": run.build,
    "run_over_time": run_over_time.build,
    "incident": incident.build,
    "pipeline": pipeline.build,
}
BUILT: Final = Path(__file__).parent / "built"


def documents() -> dict[str, dict[str, Any]]:
    """File name without ending → the board as Grafana takes it; panels are numbered in their order."""
    found = {}
    for name, build in BOARDS.items():
        document = json.loads(json.dumps(build().build(), cls=JSONEncoder))
        for number, panel in enumerate(document["panels"], start=1):
            panel["id"] = number
        found[name] = document
    return found


def text(document: dict[str, Any]) -> str:
    """The file's text: sorted, so that a change shows as what it is."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write(folder: Path = BUILT) -> list[Path]:
    """Writes every board and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, document in documents().items():
        path = folder / f"{name}.json"
        path.write_text(text(document), encoding="utf-8")
        paths.append(path)
    return paths
