"""prime-rl's files followed from outside; with PRIME_RL_HOME its source writes what is read."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreshock.adapters.prime_rl import Follower
from foreshock.monitor import Monitor
from foreshock.stats.merge import statistics
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(60)
HOME = os.environ.get("PRIME_RL_HOME")
real_source = pytest.mark.skipif(not HOME, reason="PRIME_RL_HOME is not set: prime-rl's source is not here")


def append(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def trained(run: Path, step: int) -> None:
    """What the trainer's monitors write of a step, in their order."""
    append(
        run / "trainer/metrics.jsonl",
        {"step": step, "time": 1.0, "perf/mfu": 0.4},
        {"step": step, "time": 1.0, "optim/lr": 1e-6, "optim/grad_norm": 0.5},
        {"step": step, "time": 1.0, "loss/mean": 0.1, "entropy/all/mean": 0.3, "mismatch_kl/all/mean": 0.001},
        {"step": step, "time": 1.0, "time/step": 2.0},
    )


def exported(run: Path, step: int, rank: int, stable: bool = True) -> None:
    """Two sequences of 2 prompt and 3 sampled tokens."""
    folder = run / f"trainer/token_exports/step_{step}"
    line = {
        "schema_version": 1, "step": step, "rank": rank, "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [False, False, True, True, True], "advantages": [0.0, 0.0, 1.0, 1.0, 1.0],
        "trainer_logprobs": [0.0, 0.0, -1.0, -0.5, -0.25], "inference_logprobs": [0.0, 0.0, -1.1, -0.6, -0.35],
    }  # fmt: skip
    append(folder / f"rank_{rank}.jsonl", line, line)
    if stable:
        (folder / "STABLE").touch()


def test_a_step_is_sealed_when_the_trainer_speaks_of_a_later_one(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    follower = Follower(tmp_path, make_monitor())
    append(tmp_path / "orchestrator/metrics.jsonl", {"step": 0, "reward/all/mean": 0.2})
    append(
        tmp_path / "orchestrator/metrics.jsonl", {"step": 1, "reward/all/mean": 0.3}, {"step": 2, "reward/mean": 0.4}
    )
    trained(tmp_path, 0)
    follower.poll()
    trained(tmp_path, 1)
    follower.poll()
    follower.poll()
    follower.close()
    frames = service.frames()
    assert [frame.step for frame in frames] == [0, 1]  # the orchestrator is ahead: its step 2 is no step yet
    for frame in frames:
        assert {"reward.mean", "lr", "grad.norm", "loss", "entropy.mean"} <= set(frame.scalars)
    assert service.notices("finished")[0].data["status"] == "completed"


def test_exported_tokens_give_the_pair_that_prime_rl_has(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    for rank in (0, 1):
        exported(tmp_path, 0, rank)
    exported(tmp_path, 1, 0, stable=False)
    trained(tmp_path, 0)
    trained(tmp_path, 1)
    follower = Follower(tmp_path, make_monitor())
    follower.poll()
    follower.close()
    first, second = service.frames()
    assert set(first.pairs) == {"mismatch_current"}
    values = statistics(first.pairs["mismatch_current"]).values
    assert (values["tokens"], values["sequences"]) == (12, 4)
    assert math.isclose(values["delta_mean"], 0.1, rel_tol=1e-5)
    assert second.pairs == {}  # not complete, so not read


def test_a_line_that_is_still_written_waits_and_broken_ones_are_passed_over(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    follower = Follower(tmp_path, make_monitor())
    append(tmp_path / "metrics.jsonl", {"step": 0, "optim/lr": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('not json\n[1]\n{"step": 0, "loss')
    follower.poll()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('/mean": 0.5}\n')
    follower.poll()
    follower.close()
    [frame] = service.frames()
    assert {"lr", "loss"} <= set(frame.scalars)


def test_the_command_reads_a_run_that_is_over(service: FakeService, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in range(3):
        trained(run, step)
        exported(run, step, 0)
    env = os.environ | {"FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIR": str(tmp_path), "FORESHOCK_FINISH_S": "5"}
    command = [sys.executable, "-m", "foreshock.adapters.prime_rl", str(run), "--run", "lab/x", "--once"]
    subprocess.run(command, env=env, check=True, timeout=50)
    assert [frame.step for frame in service.frames()] == [0, 1, 2]
    absent = [*command[:3], str(tmp_path / "absent")]
    wrong = subprocess.run(absent, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert wrong.returncode == 2
    assert "is no directory" in wrong.stderr


def source(path: str) -> str:
    return ast.unparse(ast.parse((Path(HOME or "") / path).read_text()))


@real_source
def test_the_real_source_writes_what_is_read() -> None:
    export = source("src/prime_rl/trainer/rl/token_export.py")
    columns = ("token_ids", "loss_mask", "advantages", "inference_logprobs", "trainer_logprobs")
    pieces = [
        "SCHEMA_VERSION = 1", "output_dir / 'token_exports'", "f'step_{step}'", "f'rank_{self.rank}.jsonl'",
        "(stable_dir / 'STABLE').touch()", "'schema_version': SCHEMA_VERSION", *(f"'{name}': " for name in columns),
    ]  # fmt: skip
    assert [piece for piece in pieces if piece not in export] == []
    monitor = source("src/prime_rl/monitors/file.py")
    assert "row = {'step': step, 'time': time.time(), **sanitized}" in monitor
    assert "json.dumps(row) + '\\n'" in monitor
    assert "Path('metrics.jsonl')" in source("packages/prime-rl-configs/src/prime_rl/configs/monitors.py")
    train = source("src/prime_rl/trainer/rl/train.py")
    assert "'optim/lr': current_lr" in train
    assert train.index("token_exporter.mark_stable()") < train.index("'optim/lr': current_lr")
