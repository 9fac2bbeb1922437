"""prime-rl, from outside: `python -m foreshock.adapters.prime_rl RUN_DIR` follows the files that a run writes.

Nothing is put into the job. `monitors.file` (on by default) writes `metrics.jsonl` of trainer and orchestrator, and
`trainer.enable_token_export` log-probs per token, `token_exports/step_N/rank_R.jsonl`, complete where `STABLE` lies
beside them. prime-rl has no old log-probs: its loss takes the engine's, so only `mismatch_current` can be measured. A
Foreshock step is the trainer's step, sealed when its metrics speak of a later one.

Legend: N tokens of all sequences of one exported line group, packed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import foreshock
from foreshock import Monitor
from foreshock.frames import names
from foreshock.guard import guarded

CAPABILITIES: Final[dict[str, str]] = {}
_OUTSIDE: Final = "nothing of ours is in the job: stop it, and start it again with `resume.step`"
IMPOSSIBLE: Final[dict[str, str]] = dict.fromkeys(
    (
        "enable_is_correction", "disable_is_correction", "rollback", "resync_trainer", "resync_engine", "scale_lr",
        "skip_update", "pause", "resume", "stop", "checkpoint_now", "probe",
    ),
    _OUTSIDE,
)  # fmt: skip
SCHEMA_VERSION: Final = 1
_TRAINERS: Final = "optim/lr"
"""A name that only the trainer logs, once a step."""


class Follower:
    """One run's folder. `poll` reads what is new; `close` seals the last step."""

    def __init__(self, folder: Path, monitor: Monitor) -> None:
        self.folder, self.monitor, self.guard = folder, monitor, monitor.guard
        self._read: dict[Path, int] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._sealed = -1
        self._trainers = -1
        """The newest step of which the trainer spoke."""

    def poll(self) -> None:
        """Takes new lines, and seals the steps that are over."""
        for path in sorted(self.folder.rglob("metrics.jsonl")):
            for row in self._new(path):
                step = row.get("step")
                if isinstance(step, int) and step > self._sealed:
                    self._rows.setdefault(step, {}).update(row)
                    if _TRAINERS in row:
                        self._trainers = max(self._trainers, step)
        self._seal(below=self._trainers)

    def close(self) -> None:
        """The trainer says no more."""
        self._seal(below=self._trainers + 1)
        self.monitor.finish("completed")

    def _new(self, path: Path) -> Iterator[dict[str, Any]]:
        """Whole lines past those read before; what is no object is passed over."""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written
                self._read[path] = self._read.get(path, 0) + len(raw)
                try:
                    row = json.loads(raw)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row

    def _seal(self, below: int) -> None:
        for step in sorted(step for step in self._rows if step < below):
            row = self._rows.pop(step)
            if _TRAINERS not in row:
                continue  # the orchestrator's alone: the trainer never came to it
            self._tell(row)
            self._tokens(step)
            self.monitor.end_step(step)
            self._sealed = step

    @guarded()
    def _tell(self, row: dict[str, Any]) -> None:
        """prime-rl's own figures, under our names."""
        self.monitor.log(names.scalars("prime-rl", row))

    @guarded()
    def _tokens(self, step: int) -> None:
        """The step's exported tokens, of all ranks; none where the export is off or not complete."""
        for folder in self.folder.rglob(f"token_exports/step_{step}"):
            if (folder / "STABLE").exists():
                for path in sorted(folder.glob("rank_*.jsonl")):
                    with path.open("rb") as file:
                        for raw in file:
                            self._sequence(json.loads(raw), path)

    def _sequence(self, line: dict[str, Any], path: Path) -> None:
        """Raises ValueError for a line of another schema."""
        import torch

        if line["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"{path}: token export of schema version {line['schema_version']} is not known")

        def column(name: str) -> Any:
            return torch.tensor(line[name], dtype=torch.float32)[None]

        self.monitor.observe(
            "mismatch_current", column("trainer_logprobs"), column("inference_logprobs"), column("loss_mask"),
            token_ids=torch.tensor(line["token_ids"])[None], advantages=column("advantages"),
        )  # fmt: skip


def main() -> None:
    """Follows until interrupted, or with `--once` reads what is there."""
    parser = argparse.ArgumentParser(prog="foreshock.adapters.prime_rl", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="the run's directory: output_dir / run.name")
    parser.add_argument("--run", help="as project/name; by default FORESHOCK_RUN")
    parser.add_argument("--once", action="store_true", help="read what is there, and end")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between looks; default 5")
    said = parser.parse_args()
    if not said.folder.is_dir():
        parser.error(f"{said.folder} is no directory")
    monitor = foreshock.init(said.run, {"host": "prime_rl", "entropy_estimator": "full_vocab"}, role="trainer", rank=0)
    follower = Follower(said.folder, monitor)
    try:
        follower.poll()
        while not said.once:
            time.sleep(said.every)
            follower.poll()
    except KeyboardInterrupt:
        pass
    finally:
        follower.close()


if __name__ == "__main__":
    main()
