"""The labelled real runs as contestants are fed them: under their framework's names, and under the catalogue's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.detection import cases
from benchmarks.detection.peers.contest import Run
from benchmarks.detection.peers.table import Heard
from foreshock_service.check.aliases import Translator
from foreshock_service.rules.pack import default_pack


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
    """Numbers of rows with a step, the non-finite among them."""
    rows: list[tuple[int, Mapping[str, float]]] = []
    with path.open(encoding="utf-8") as log:
        for line in log:
            row = json.loads(line)
            step = row.pop("step", None)
            if isinstance(step, int | float) and not isinstance(step, bool):
                rows.append((int(step), {name: float(x) for name, x in row.items() if _is_number(x)}))
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def heard_by_check(folder: Path) -> list[Heard]:
    """What `foreshock check` found, in the contest's terms. CPU time, reading included, is spread evenly over steps."""
    begun = time.process_time()
    measured = cases.measure(folder, default_pack())
    a_step = (time.process_time() - begun) / max(1, sum(case.steps for case in measured))
    heard = []
    for case in measured:
        alarms = tuple((i["opened_step"], i["severity"]) for i in case.found())
        heard.append(Heard(case.id, case.label, alarms, case.steps, a_step * case.steps, case.onset))
    return heard
