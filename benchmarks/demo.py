"""`foreshock demo` over illnesses and seeds, healthy runs shared: seen in time, rescued, and who was wrongly accused.

    python -m benchmarks.demo --illness stale_parameters --illness stale_engine --seeds 0-4 --healthy 0-9

Real jobs in processes of their own against one `foreshock serve` on SQLite, judged as `foreshock demo` judges
(`foreshock_service.demo`), and by the figures of `FIGURES` beside it. About 12 CPU seconds a run; a seed's healthy run
serves all illnesses. Exits 1 where something was not shown. `--json FILE` keeps every report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from foreshock_service.demo import report as reporting
from foreshock_service.demo.expectations import EXPECTATIONS, Check, judge
from foreshock_service.demo.processes import DemoError, Job, Service, Training, end
from foreshock_service.demo.watching import settle, train

STEPS, ONSET = 85, 25
FIGURES = {"stale_parameters": {"untreated": (0.0, 0.3), "treated": (0.8, 1.0)}}
"""illness → run → lowest and highest final reward that it must end at, beside what the demo itself checks."""


class Matrix:
    """The runs of one benchmark at one service; `folder` holds the database, logs and results."""

    def __init__(self, folder: Path, console: Console, parallel: int) -> None:
        self.folder, self.console, self.parallel = folder, console, parallel
        self.service = Service(folder)
        self.reports: list[dict[str, Any]] = []
        self._healthy: dict[int, Training] = {}

    def healthy(self, seeds: Sequence[int]) -> list[str]:
        """Runs them; returns a line for each critical incident."""
        self._healthy = {
            seed: self._training(Job("healthy", "none", "auto", f"healthy-{seed}"), seed) for seed in seeds
        }
        self._run(list(self._healthy.values()))
        reader = reporting.Reader(self.service.url)
        return [
            f"healthy seed {seed}: critical {incident['rule']} at step {incident['opened_step']}: {incident['message']}"
            for seed, training in self._healthy.items()
            for incident in reader.incidents(training.job.run)
            if incident["severity"] == "critical"
        ]

    def illness(self, name: str, seed: int) -> None:
        """The two ill runs of a demo, judged with the seed's healthy one."""
        jobs = [Job("untreated", name, "observe", f"{name}-{seed}"), Job("treated", name, "auto", f"{name}-{seed}")]
        ill = [self._training(job, seed) for job in jobs]
        self._run(ill)
        reader = reporting.Reader(self.service.url)
        report = reporting.build(name, seed, ONSET, [self._healthy[seed], *ill], reader)
        report["checks"] = [vars(check) for check in [*judge(report, "auto"), *_figures(report)]]
        self.reports.append(report)
        self.console.print(row(report), highlight=False)

    def _training(self, job: Job, seed: int) -> Training:
        folder = self.folder / job.project
        folder.mkdir(exist_ok=True)
        return Training(job, seed, ONSET, STEPS, self.service.url, folder)

    def _run(self, trainings: list[Training]) -> None:
        try:
            train(Console(quiet=True), trainings, self.service.url, STEPS, self.parallel)
            settle(self.service.url, trainings)
        finally:
            for training in trainings:
                end(training.process)


def _figures(report: dict[str, Any]) -> list[Check]:
    found = []
    for run, (low, high) in FIGURES.get(report["illness"], {}).items():
        reward = report[run]["final_reward"]
        found.append(Check(f"{run}: final reward in [{low}, {high}]", low <= reward <= high, f"{reward:.2f}"))
    return found


HEADER = """\
| illness | seed | healthy | untreated | treated | seen after | reward broke after | commands (treated) | shown |
|---|---|---|---|---|---|---|---|---|"""


def row(report: dict[str, Any]) -> str:
    """One line of the table: final reward / validation of the three runs, steps counted from the onset."""
    wanted, onset = EXPECTATIONS[report["illness"]], report["onset_step"]
    seen = {
        run: min((i["opened_step"] for i in report["incidents"] if _is(i, run, wanted.rule, onset)), default=None)
        for run in ("untreated", "treated")
    }
    broke = report["untreated"]["reward_broke_step"]
    commands = [c for c in report["commands"] if c["run"] == "treated"]
    told = ", ".join(
        f"{c['kind']} {c['state']} {_since(c['done_step'], onset)} {c['verdict'] or ''}".strip() for c in commands
    )
    cells = [report["illness"], str(report["seed"])]
    cells += [
        f"{report[r]['final_reward']:.2f} / {report[r]['final_validation']:.2f}"
        for r in ("healthy", "untreated", "treated")
    ]
    cells += [
        f"{_since(seen['untreated'], onset)}, {_since(seen['treated'], onset)}",
        _since(broke, onset),
        told or "none",
    ]
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    return f"| {' | '.join([*cells, 'NO: ' + '; '.join(failed) if failed else 'yes'])} |"


def _is(incident: dict[str, Any], run: str, rule: str, onset: int) -> bool:
    return incident["run"] == run and incident["rule"] == rule and (incident["opened_step"] or 0) >= onset


def _since(step: int | None, onset: int) -> str:
    return "–" if step is None else f"{step - onset:+d}"


def _range(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The demo over illnesses and seeds.")
    parser.add_argument("--illness", action="append", choices=sorted(EXPECTATIONS), help="repeatable; default: all")
    parser.add_argument("--seeds", type=_range, default=[0], help="as 0-4")
    parser.add_argument("--healthy", type=_range, default=[], help="healthy seeds beside those, as 0-9")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--out", type=Path, help="folder for everything; default: a temporary one, gone at the end")
    parser.add_argument("--json", type=Path, help="file for the reports")
    chosen = parser.parse_args()
    console = Console(width=250, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="foreshock-demo-") as temporary:
        folder = chosen.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        matrix = Matrix(folder, console, chosen.parallel)
        try:
            matrix.service.start()
            disturbed = matrix.healthy(sorted({*chosen.seeds, *chosen.healthy}))
            console.print(HEADER, highlight=False)
            for illness in chosen.illness or list(EXPECTATIONS):
                for seed in chosen.seeds:
                    matrix.illness(illness, seed)
        except DemoError as error:
            sys.exit(str(error))
        finally:
            matrix.service.stop()
    if chosen.json:
        chosen.json.write_text(json.dumps({"healthy_critical": disturbed, "reports": matrix.reports}, indent=1) + "\n")
    console.print(
        *disturbed or [f"healthy seeds {sorted({*chosen.seeds, *chosen.healthy})}: no critical incident"], sep="\n"
    )
    shown = all(check["passed"] for report in matrix.reports for check in report["checks"])
    sys.exit(0 if shown and not disturbed else 1)


if __name__ == "__main__":
    main()
