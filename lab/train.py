"""One run of the lab: `python -m lab.train --seed 0 --illness stale_parameters --run lab/ill --out ill.json`.

With FORESHOCK_URL set it is watched and takes commands; without, it trains alone, bit for bit the same.
Steps count from 1; the checkpoint of step 0 is the state before the first.
"""

import argparse
import json
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import foreshock

from . import checkpoints
from .control import Control
from .faults import ILLNESSES, fault_named
from .monitoring import Monitor
from .trainer import Trainer
from .warmup import warm_weights

CHECKPOINT_EVERY = 5
CAPABILITIES = (
    "enable_is_correction", "disable_is_correction", "rollback", "resync_trainer", "resync_engine", "scale_lr",
    "skip_update", "pause", "resume", "stop", "checkpoint_now",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """What to run. `illness` is a name of `faults.ILLNESSES` or `none`; it strikes before step `onset`."""

    seed: int = 0
    illness: str = "none"
    onset: int = 25
    steps: int = 85
    run: str = "lab/run"
    mode: str = "observe"
    checkpoints: str = ""
    progress: bool = False
    resume: str = ""
    """Checkpoint to go on from, in a new process: a fault of the old one is not there any more."""
    kinds: str = ""
    """The commands that the job itself can carry out, by commas; empty: all. A launcher may do the others."""


@dataclass
class Result:
    """What came of it. `final_reward` is the mean of the last ten steps, `final_validation` of the last three."""

    config: RunConfig
    final_reward: float
    final_validation: float
    steps: int
    attempts: int
    status: str
    cpu_seconds: float
    commands: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """With `illness`, `seed` and `onset_step` on top; non-finite numbers as null."""
        flat = asdict(self)
        flat |= {"illness": self.config.illness, "seed": self.config.seed, "onset_step": self.config.onset}
        finite: dict[str, Any] = _finite(flat)
        return finite


class Job:
    """The loop around the trainer: faults, checkpoints, commands, attempts."""

    def __init__(self, config: RunConfig, monitor: Monitor) -> None:
        self.config, self.monitor = config, monitor
        self.trainer = Trainer(warm_weights(config.seed), config.seed)
        self.step, self.attempt = 0, 1
        self.stopping = False
        self.control = Control(self)
        self.history: list[dict[str, float]] = []
        self._fault = None if config.resume else fault_named(config.illness)
        self._ill_steps = -1
        self._back_to: int | None = None
        self._temporary = None if config.checkpoints else tempfile.TemporaryDirectory(prefix="foreshock-lab-")
        self._folder = Path(self._temporary.name if self._temporary else config.checkpoints)

    def run(self) -> Result:
        """Trains to the last step, or to a `stop`; closes the monitor either way, as `failed` when an error passes."""
        started = time.process_time()
        self.control.bind(self.monitor, kinds_of(self.config))
        try:
            if self.config.resume:
                self._resume(Path(self.config.resume))
            else:
                self.save_checkpoint()
            while self.step < self.config.steps and not self.stopping:
                self.one_step()
        except BaseException:
            self.monitor.finish("failed")
            raise
        finally:
            if self._temporary:
                self._temporary.cleanup()
        status = "stopped" if self.stopping else "completed"
        self.monitor.finish(status)
        rewards = [entry["reward.mean"] for entry in self.history]
        validations = [entry["reward.validation"] for entry in self.history if "reward.validation" in entry]
        return Result(
            config=self.config,
            final_reward=_mean(rewards[-10:]),
            final_validation=_mean(validations[-3:]),
            steps=self.step,
            attempts=self.attempt,
            status=status,
            cpu_seconds=time.process_time() - started,
            commands=self.control.carried_out,
            history=self.history,
        )

    def one_step(self) -> None:
        """A step, its checkpoint if one is due, and the commands that wait at its boundary."""
        started = time.perf_counter()
        self.step += 1
        self._strike()
        scalars = self.trainer.step(self.step, self.monitor)
        if self.step % CHECKPOINT_EVERY == 0:
            self.save_checkpoint()
        self.monitor.log({"time.step_s": time.perf_counter() - started})
        self.history.append({"step": float(self.step), "attempt": float(self.attempt)} | scalars)
        if self.config.progress:
            self._print_progress(scalars)
        self.monitor.end_step(self.step)
        if self._back_to is not None:
            self.step, self._back_to = self._back_to, None
            self.attempt += 1
            self.monitor.new_attempt(reason="rollback")

    def rolled_back_to(self, step: int) -> None:
        """The next step is the one after `step`, in a new attempt."""
        self._back_to = step

    def save_checkpoint(self) -> Path:
        """Saves the state after the current step and announces it."""
        path = checkpoints.save(self.trainer, self._folder / f"attempt-{self.attempt}", self.step)
        self.monitor.checkpoint(str(path), self.step, checkpoints.SCOPE)
        return path

    def _resume(self, path: Path) -> None:
        """Goes on behind the checkpoint, past the batches that a launcher says to skip."""
        self.step = checkpoints.restore(self.trainer, path)
        told = foreshock.resumed()
        if told is not None:
            self.trainer.data_position += told.skip_steps
            self.attempt += told.restarts

    def _strike(self) -> None:
        if self._fault is None:
            return
        if self._ill_steps < 0 and self.step >= self.config.onset:
            self._fault.strike(self.trainer)
            self._ill_steps = 0
        elif self._ill_steps >= 0:
            self._ill_steps += 1
            self._fault.progress(self.trainer, self._ill_steps)

    def _print_progress(self, scalars: dict[str, float]) -> None:
        shown = {"run": self.config.run, "step": self.step, "attempt": self.attempt}
        kept = ("reward.mean", "reward.validation", "policy.kl_k2", "mismatch.kl_k3")
        print(json.dumps(shown | {key: scalars[key] for key in kept if key in scalars}), flush=True)


def run(config: RunConfig, monitor: Monitor | None = None) -> Result:
    """Runs in this process on one thread. The monitor is `foreshock.init`'s unless one is given."""
    torch.set_num_threads(1)
    if monitor is None:
        settings = {
            "framework": "lab", "seed": config.seed, "illness": config.illness, "onset": config.onset,
            "steps": config.steps, "old_source": "same_weights", "clip_range": [0.2, 0.28],
        }  # fmt: skip
        monitor = foreshock.init(
            run=config.run, config=settings, capabilities=kinds_of(config), mode=config.mode, world=1
        )
    return Job(config, monitor).run()


def kinds_of(config: RunConfig) -> list[str]:
    """The capabilities that the job announces."""
    return config.kinds.split(",") if config.kinds else list(CAPABILITIES)


def main() -> None:
    """The command line; `--out` receives the result as JSON."""
    parser = argparse.ArgumentParser(description="One run of the lab.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--illness", choices=["none", *sorted(ILLNESSES)], default="none")
    parser.add_argument("--onset", type=int, default=25, help="first ill step")
    parser.add_argument("--steps", type=int, default=85)
    parser.add_argument("--run", default="lab/run", help="project/name under which Foreshock sees it")
    parser.add_argument("--mode", choices=["observe", "approve", "auto"], default="observe")
    parser.add_argument("--checkpoints", default="", help="folder; default: a temporary one, gone at the end")
    parser.add_argument("--resume", default="", help="checkpoint to go on from")
    parser.add_argument("--kinds", default="", help="commands that the job itself can do, by commas; default: all")
    parser.add_argument("--out", help="file for the result")
    parser.add_argument("--progress", action="store_true", help="one JSON line a step on standard output")
    options = vars(parser.parse_args())
    out = options.pop("out")
    result = run(RunConfig(**options))
    if out:
        part = Path(f"{out}.part")
        part.write_text(json.dumps(result.as_json()))
        os.replace(part, out)
    summary = f"{result.status} at step {result.steps}, {result.attempts} attempt(s), {result.cpu_seconds:.1f} CPU-s"
    print(f"reward {result.final_reward:.2f}, validation {result.final_validation:.2f}; {summary}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
