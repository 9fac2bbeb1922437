"""The labelled real runs as contestants are fed them: under their framework's names, and under the catalogue's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.detection.cases import Case
from benchmarks.detection.peers.contest import Run
from benchmarks.detection.peers.table import Heard
from foreshock_service.check.aliases import Translator


def case_runs(folder: Path) -> list[Run]:
    """Every run of `index.json` that has numbered rows of numbers."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    runs = []
    for entry in index:
        raw = _rows(folder / entry["file"])
        translator = Translator()
        rows = [(step, translator.translate(values)[0]) for step, values in raw]
        runs.append(Run(entry["id"], entry["label"], rows, entry["onset_step"], raw))
    return runs


def _rows(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Numbers of rows with a step; other tools are spared non-finite values, on which several raise."""
    rows: list[tuple[int, Mapping[str, float]]] = []
    with path.open(encoding="utf-8") as log:
        for line in log:
            row = json.loads(line)
            step = row.pop("step", None)
            if isinstance(step, int | float) and not isinstance(step, bool):
                rows.append((int(step), {name: float(x) for name, x in row.items() if _is_number(x)}))
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def heard_by_check(cases: list[Case]) -> list[Heard]:
    """What `foreshock check` found, in the contest's terms. Its cost is in README.md's section on cost."""
    heard = []
    for case in cases:
        alarms = tuple((i["opened_step"], i["severity"]) for i in case.incidents if i["severity"] != "info")
        heard.append(Heard(case.id, case.label, alarms, case.steps, math.nan, case.onset))
    return heard
