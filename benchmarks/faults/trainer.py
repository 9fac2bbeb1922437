"""A training process for the faults: the lab's real job or a light loop of the real SDK, with a ledger.

    python -m benchmarks.faults.trainer --job light --steps 60 --pace 0.05 --run faults/x --ledger x.jsonl

The ledger has a line a sealed step, written after `end_step` returned, and a last one when the run has ended:
`{"client", "step", "generation", "wall_s", "cpu_s"}` … `{"ended", "client", "sealed", "losses"}`. The SDK's settings
come from the environment, as in any job.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import foreshock

COMMAND_EVERY = 15
"""Every so many steps the light loop reports a non-finite gradient, for which the service commands `skip_update`."""


class Ledger:
    """A monitor that passes everything on to the real one and writes down what was sealed."""

    def __init__(self, monitor: foreshock.Monitor, path: Path) -> None:
        self._monitor = monitor
        self._file = path.open("a", buffering=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)

    def end_step(self, step: int) -> None:
        """Seals the step and writes its line."""
        self._monitor.end_step(step)
        self.write(step=step, generation=self._monitor.generation, wall_s=time.monotonic(), cpu_s=time.process_time())

    def finish(self, status: str) -> None:
        """Ends the run, then says what the client had sealed and lost in all."""
        self._monitor.finish(status)
        sender = self._monitor._process.sender
        assert sender is not None, "the faults need a FORESHOCK_URL"
        self.write(ended=status, sealed=sender._sequence, losses=self._monitor.losses.counts())

    def write(self, **line: Any) -> None:
        """Appends one line."""
        self._file.write(json.dumps({"client": self._monitor.client, **line}) + "\n")


def light(ledger: Ledger, steps: int, first: int, pace_s: float, padding: int, jump_s: float) -> None:
    """Steps of `pace_s` seconds with 5 + `padding` scalars each. `jump_s`: the clock jumps so far at the half."""
    ledger.on("skip_update", lambda command: ledger.write(executed=command.id))
    for step in range(first, first + steps):
        if jump_s and step == first + steps // 2:
            time.clock_gettime = partial(_ahead, time.clock_gettime, jump_s)
        time.sleep(pace_s)
        bad = float(step % COMMAND_EVERY == 0)
        ledger.log({"reward.mean": 0.5, "grad.norm": 1.0, "loss": 0.1, "entropy.mean": 2.0, "grad.nonfinite": bad})
        ledger.log({f"padding_{i}": step + i / 7 for i in range(padding)})
        ledger.end_step(step)
    ledger.finish("completed")


def _ahead(real: Callable[[int], float], jump_s: float, which: int) -> float:
    """What `time.clock_gettime` says once the boot clock has jumped."""
    return real(which) + (jump_s if which == time.CLOCK_BOOTTIME else 0.0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=["lab", "light"], default="light")
    parser.add_argument("--run", required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--first", type=int, default=1, help="number of the first step (light)")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds a step (light)")
    parser.add_argument("--padding", type=int, default=20, help="further scalars a step (light)")
    parser.add_argument("--jump", type=float, default=0.0, help="seconds by which the clock jumps at the half (light)")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.job == "light":
        monitor = foreshock.init(run=chosen.run, capabilities=["skip_update"], mode="auto", world=1)
        ledger = Ledger(monitor, chosen.ledger)
        light(ledger, chosen.steps, chosen.first, chosen.pace, chosen.padding, chosen.jump)
        return
    import torch

    from lab.train import Job, RunConfig

    torch.set_num_threads(1)
    config = RunConfig(seed=chosen.seed, steps=chosen.steps, run=chosen.run)
    monitor = foreshock.init(run=chosen.run, config={"framework": "lab"}, world=1)
    Job(config, Ledger(monitor, chosen.ledger)).run()


if __name__ == "__main__":
    main()
