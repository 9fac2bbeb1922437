"""The child's side: drives one other tool through its documented API. Runs under an interpreter that holds that tool.

`python feed.py TOOL [--raw] [--every N]` reads JSON lines `{"run", "step", "values"}` from standard input, all lines of
a run together, and writes per run `{"run", "alarms": [[step, severity, name]], "steps", "cpu_seconds"}` when it ends.

Imports the standard library and the tool alone: this project is not installed there. An alarm counts at the step at
which the tool first says it, under the severities "warning" and "critical"; what a tool calls information is left out.
CPU time is the process's, all threads, around the tool's calls.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import random
import shutil
import struct
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

Alarm = tuple[int, str, str]
GRAVE = {"critical", "crit", "error", "high"}
SLIGHT = {"info", "low", "note"}


def severity(word: object) -> str | None:
    """The tool's own word as "critical", "warning" or, for information, None."""
    plain = str(getattr(word, "name", None) or getattr(word, "value", None) or word).lower().rsplit(".", 1)[-1]
    return "critical" if plain in GRAVE else None if plain in SLIGHT else "warning"


class Tool:
    """One run of one tool. `feed` returns what it says at this step; `close` lets go of files and threads."""

    every: ClassVar[int] = 1
    """Steps between two checks, where the tool leaves that to the caller."""

    def __init__(self, folder: Path, every: int | None) -> None:
        self.folder = folder
        self.period = every or self.every
        self.told: set[tuple[Any, ...]] = set()

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """A step under the catalogue's names."""
        raise NotImplementedError

    def feed_raw(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """A step under the names of the framework that wrote the log. Raises NotImplementedError where unsupported."""
        raise NotImplementedError

    def last(self, step: int) -> list[Alarm]:
        """A check of the whole log once it has ended, where a tool's own cadence may not reach the last rows."""
        return []

    def close(self) -> None:
        """Nothing to let go of."""

    def new(self, step: int, key: tuple[Any, ...], word: object, name: str) -> Iterator[Alarm]:
        """The alarm, unless it is information or has been told."""
        grade = severity(word)
        if grade is not None and (grade, *key) not in self.told:
            self.told.add((grade, *key))
            yield step, grade, name


class Rlwatch(Tool):
    """`rlwatch.attach(framework="manual")` and `log_step`: the alerts that a step returns."""

    kl = "reference.kl_k3"

    def __init__(self, folder: Path, every: int | None) -> None:
        super().__init__(folder, every)
        self.monitor = import_module("rlwatch").attach(
            framework="manual", run_id="run", storage={"log_dir": str(folder)}
        )

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        said = self.monitor.log_step(
            step,
            entropy=values["entropy.mean"],
            kl_divergence=values[self.kl],
            reward_mean=values["reward.mean"],
            reward_std=values["reward.std"],
            loss=values["loss"],
            clip_fraction=values["update.clip_high"],
            grad_norm=values["grad.norm"],
        )
        graded = ((severity(alert.severity), str(alert.detector)) for alert in said or ())
        return [(step, grade, name) for grade, name in graded if grade]

    def close(self) -> None:
        self.monitor.stop()


class RlwatchPolicyKl(Rlwatch):
    """The same with approxkl in its one KL slot, as someone who knows the tool would wire it."""

    kl = "policy.kl_k2"


class Rlprobe(Tool):
    """`Recorder.log_step`, and `diagnose` over the recording every 25 steps, as its TRL callback does."""

    every = 25

    def __init__(self, folder: Path, every: int | None) -> None:
        super().__init__(folder, every)
        self.diagnose = import_module("rlprobe.doctor").diagnose
        recorder = import_module("rlprobe.recorder").Recorder
        self.recorder = recorder(folder / "run", algorithm="grpo", install_handlers=False, capture_env=False)

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        self.recorder.log_step(
            step,
            reward_mean=values["reward.mean"],
            reward_std=values["reward.std"],
            kl_mean=values["reference.kl_k3"],
            entropy_mean=values["entropy.mean"],
            clip_fraction=values["update.clip_high"],
            grad_norm=values["grad.norm"],
            completion_len_mean=values["length.mean"],
            loss=values["loss"],
            approxkl=values["policy.kl_k2"],
        )
        if step == 0 or step % self.period:
            return []
        self.recorder.flush(timeout=30)
        found = self.diagnose(self.recorder.run_dir)
        return [a for f in found for a in self.new(step, (f.signature_id,), f.severity, str(f.signature_id))]

    def close(self) -> None:
        self.recorder.close()


class Rldoctor(Tool):
    """`LiveMonitor.log`, at its own cadence; real logs under the names that its alias table reads."""

    def __init__(self, folder: Path, every: int | None) -> None:
        super().__init__(folder, every)
        self.monitor = import_module("rl_doctor.live").LiveMonitor(on_finding=lambda finding: None)

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        names = {
            "reward": "reward.mean",
            "reward_std": "reward.std",
            "kl": "reference.kl_k3",
            "entropy": "entropy.mean",
            "grad_norm": "grad.norm",
            "clip_ratio/region_mean": "update.clip_high",
            "completions/mean_length": "length.mean",
            "loss": "loss",
            "approxkl": "policy.kl_k2",
        }
        return self.feed_raw(step, {name: values[signal] for name, signal in names.items()})

    def feed_raw(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        return self._graded(step, self.monitor.log(dict(values), step=step))

    def last(self, step: int) -> list[Alarm]:
        return self._graded(step, self.monitor.check())

    def _graded(self, step: int, found: list[Any]) -> list[Alarm]:
        graded = ((severity(f.severity), str(f.detector)) for f in found)
        return [(step, grade, name) for grade, name in graded if grade]


class Trainspotter(Tool):
    """`Run.add_point` and `run_all`, what its `watch` does each time the log has grown."""

    def __init__(self, folder: Path, every: int | None) -> None:
        super().__init__(folder, every)
        self.trainspotter = import_module("trainspotter")
        self.run, self.rows = self.trainspotter.Run(), 0

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        return self.feed_raw(step, {{"grad.norm": "grad_norm"}.get(name, name): x for name, x in values.items()})

    def feed_raw(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        for name, value in values.items():
            self.run.add_point({"loss": "train/loss"}.get(name, name), step, value)
        self.rows += 1
        return [] if self.rows % self.period else self.last(step)

    def last(self, step: int) -> list[Alarm]:
        found = self.trainspotter.run_all(self.run)
        keys = (((f.detector, f.metric, f.step_start), f.severity, f"{f.detector}:{f.metric}") for f in found)
        return [alarm for key, word, name in keys for alarm in self.new(step, key, word, name)]


class Martingale(Tool):
    """`Recorder` and its TRL callback. It reads tokens, so these are drawn: 4 sequences of 32, whose trainer and engine
    log-probs part by Gaussian noise with the step's approxkl as half mean square, under the weights' own digest."""

    sequences, tokens = 4, 32

    def __init__(self, folder: Path, every: int | None) -> None:
        super().__init__(folder, every)
        self.sampler = import_module("martingale.demo").SAMPLER
        self.recorder = import_module("martingale.record.recorder").Recorder(str(folder))
        monitor = import_module("martingale.integrations._trl_callback").MartingaleMonitor
        self.monitor = monitor(types.SimpleNamespace(recorder=self.recorder, stats={}), halt_on_error=False)
        self.draw, self.said = random.Random(0), 0

    def feed(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        digest = hashlib.blake2b(str(step).encode(), digest_size=32).hexdigest()
        revision = self.recorder.publish_revision(digest, b"tok", self.sampler, step=step)
        sigma = (2 * values["policy.kl_k2"]) ** 0.5
        for i in range(self.sequences):
            engine = [-self.draw.expovariate(2.0) for _ in range(self.tokens)]
            with self.recorder.sequence(actor_id=0, sequence_id=f"{step}/{i}", prompt_ids=[1, 2, i]) as sequence:
                for place, logp in enumerate(engine):
                    sequence.token(revision.digest, 100 + place, single(logp))
            trainer = [single(logp + self.draw.gauss(0, sigma)) for logp in engine]
            self.recorder.score(sequence.record.digest, revision.digest, trainer)
        self.monitor.on_step_end(step)
        new, self.said = self.monitor.alarms[self.said :], len(self.monitor.alarms)
        return [(step, grade, str(alarm.kind)) for alarm in new if (grade := severity(alarm.level))]


def single(x: float) -> float:
    """The nearest float32, which is what an engine reports."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


TOOLS: dict[str, Callable[[Path, int | None], Tool]] = {
    "rlprobe": Rlprobe,
    "rlwatch": Rlwatch,
    "rlwatch-approxkl": RlwatchPolicyKl,
    "rldoctor": Rldoctor,
    "trainspotter": Trainspotter,
    "martingale": Martingale,
}


class Running:
    """A run under way: its tool, its folder, its alarms and the CPU time that the tool took."""

    def __init__(self, name: str, make: Callable[[Path, int | None], Tool], every: int | None) -> None:
        self.name, self.alarms, self.steps = name, list[Alarm](), 0
        self.folder = Path(tempfile.mkdtemp(prefix="peer-"))
        self.tool = make(self.folder, every)
        self.cpu, self.step, self.raw = 0.0, 0, False

    def feed(self, step: int, values: Mapping[str, float], raw: bool) -> None:
        """Hands a step over and keeps what comes back."""
        begun = time.process_time()
        self.alarms += (self.tool.feed_raw if raw else self.tool.feed)(step, values)
        self.cpu += time.process_time() - begun
        self.steps += 1
        self.step, self.raw = step, raw

    def finish(self) -> dict[str, Any]:
        """Closes the tool, after a last check where the run is a log that has ended; the answer."""
        if self.raw:
            self.alarms += self.tool.last(self.step)
        self.tool.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return {"run": self.name, "alarms": self.alarms, "steps": self.steps, "cpu_seconds": self.cpu}


def answers(lines: Iterator[str], name: str, raw: bool, every: int | None) -> Iterator[dict[str, Any]]:
    """One answer per run. Raises ValueError for a line that is not of the protocol and for a run that comes twice."""
    running: Running | None = None
    done: set[str] = set()
    for line in lines:
        given = json.loads(line)
        if not isinstance(given, dict) or not {"run", "step", "values"} <= given.keys():
            raise ValueError(f"not a step: {line[:80]!r}; a line needs run, step and values")
        if running is None or running.name != given["run"]:
            if running is not None:
                yield running.finish()
            if given["run"] in done:
                raise ValueError(f"run {given['run']!r} comes in two parts")
            done.add(given["run"])
            running = Running(given["run"], TOOLS[name], every)
        running.feed(given["step"], given["values"], raw)
    if running is not None:
        yield running.finish()


def main() -> int:
    """Answers on standard output; what the tool prints goes nowhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--raw", action="store_true", help="the values bear a framework's names")
    parser.add_argument("--every", type=int, help="rows between two checks, where the tool leaves that open")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    out = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        for answer in answers(sys.stdin, given.tool, given.raw, given.every):
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
