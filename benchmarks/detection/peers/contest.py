"""Runs a contestant over runs: this project and the restated rules in this process, other tools in their own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.detection.common_stream import ENTROPIES, KINDS, stream
from benchmarks.detection.peers.table import Heard
from benchmarks.detection.watching import incidents

FEED = Path(__file__).with_name("feed.py")
Rows = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class Run:
    """A run to be judged, with what is known of it. `raw` holds its rows under the writing framework's names."""

    name: str
    kind: str
    rows: Rows
    onset: int | None = None
    raw: Rows = field(default_factory=list)


class CannotRunError(Exception):
    """A contestant can't be run here; the text is the reason."""


def stream_runs(seeds: int) -> list[Run]:
    """The common stream, seed by seed, so that a contestant that is cut short has seen all kinds alike."""
    return [
        Run(f"{kind}-{entropy}-{seed}", kind, list(stream(kind, seed, entropy)))
        for seed in range(seeds)
        for entropy in ENTROPIES
        for kind in KINDS
    ]


def foreshock(runs: Iterable[Run]) -> list[Heard]:
    """The shipped pack. An incident counts where it opens, and again where it turns critical."""
    heard = []
    for run in runs:
        begun = time.process_time()
        found = incidents(run.rows)
        spent = time.process_time() - begun
        alarms = [(i.opened, "critical" if i.critical == i.opened else "warning") for i in found]
        alarms += [(i.critical, "critical") for i in found if i.critical is not None and i.critical != i.opened]
        heard.append(Heard(run.name, run.kind, tuple(sorted(alarms)), len(run.rows), spent, run.onset))
    return heard


def restated(rule: Callable[[Rows], Iterator[int]], runs: Iterable[Run]) -> list[Heard]:
    """A rule of `rules.py`. It knows no severities: each alarm counts as critical."""
    heard = []
    for run in runs:
        begun = time.process_time()
        alarms = tuple((step, "critical") for step in rule(run.rows))
        heard.append(Heard(run.name, run.kind, alarms, len(run.rows), time.process_time() - begun, run.onset))
    return heard


def lines(runs: Iterable[Run], raw: bool) -> Iterator[str]:
    """The runs as the child reads them."""
    for run in runs:
        for step, values in run.raw if raw else run.rows:
            yield json.dumps({"run": run.name, "step": step, "values": values}) + "\n"


def heard_from(answers: Iterable[str], runs: Sequence[Run]) -> list[Heard]:
    """What the child answered. Raises ValueError for a run that was not asked about; a cut last line is left out."""
    known = {run.name: run for run in runs}
    heard = []
    for line in answers:
        if not line.endswith("\n"):
            continue
        answer: dict[str, Any] = json.loads(line)
        if answer["run"] not in known:
            raise ValueError(f"an answer about {answer['run']!r}, which was not asked about")
        run = known[answer["run"]]
        alarms = tuple((int(step), str(severity)) for step, severity, _ in answer["alarms"])
        heard.append(Heard(run.name, run.kind, alarms, answer["steps"], answer["cpu_seconds"], run.onset))
    return heard


def peer(
    interpreter: Path,
    tool: str,
    runs: Sequence[Run],
    *,
    raw: bool = False,
    every: int | None = None,
    minutes: float = 30,
) -> list[Heard]:
    """Another tool under its own interpreter. After `minutes` it is stopped and the runs that it finished count.

    Raises CannotRunError with its last words where it fails, or where it finished nothing in time.
    """
    command = [str(interpreter), str(FEED), tool] + ["--raw"] * raw + ([f"--every={every}"] if every else [])
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        (folder / "in").write_text("".join(lines(runs, raw)), encoding="utf-8")
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": name, "TMPDIR": name, "OMP_NUM_THREADS": "1"}
        with (folder / "in").open() as given, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            try:
                done = subprocess.run(
                    command,
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    cwd=name,
                    timeout=60 * minutes,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                done = None
            except OSError as error:
                raise CannotRunError(f"{interpreter}: {error.strerror}") from error
        if done is not None and done.returncode:
            said = (folder / "err").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise CannotRunError(said[-1] if said else f"exit code {done.returncode}")
        with (folder / "out").open(encoding="utf-8") as answers:
            heard = heard_from(answers, runs)
    if not heard:
        raise CannotRunError(f"finished no run in {minutes:g} minutes")
    return heard
