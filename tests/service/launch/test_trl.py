"""A real TRL GRPO run under the launcher: after a crash and after a rollback it ends as an uninterrupted run does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foreshock.wire import Action, Command
from tests.fake_service import FakeService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]
JOB = str(Path(__file__).with_name("trl_job.py"))
STEPS = 6


def run(folder: Path, url: str = "", launched: bool = True, **play: int) -> tuple[dict[str, Any], str]:
    """The job's last words, and the launcher's."""
    job = [
        sys.executable, JOB, "--output_dir", str(folder / "out"), "--per_device_train_batch_size", "4",
        "--num_generations", "4", "--max_completion_length", "8", "--learning_rate", "1e-2", "--max_steps", str(STEPS),
        "--logging_steps", "1", "--report_to", "none", "--save_strategy", "steps", "--save_steps", "2",
        "--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true",
    ]  # fmt: skip
    job += [word for name, value in play.items() for word in (f"--{name}", str(value))]
    launch = [sys.executable, "-m", "foreshock_service.cli", "launch", "--host", "trl", "--backoff-s", "0.1", "--"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FORESHOCK_")}
    environment |= {"FORESHOCK_URL": url, "FORESHOCK_SPOOL_DIR": str(folder / "spool"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*(launch if launched else []), *job], capture_output=True, text=True, check=False, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told, done.stderr


@cache
def uninterrupted(folder: Path) -> list[Any]:
    history: list[Any] = run(folder, launched=False)[0]["history"]
    return history


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return uninterrupted(tmp_path_factory.mktemp("plain"))


def test_after_a_crash_it_goes_on_at_the_last_checkpoint_and_ends_alike(
    plain: list[Any], service: FakeService, tmp_path: Path
) -> None:
    told, words = run(tmp_path, service.url, crash_at=6)
    assert told["from"] == str(tmp_path / "out" / "checkpoint-4")
    assert told["step"] == STEPS
    assert told["history"] == plain, "to the bit: weights, optimizer, random state and data position"
    assert "ended with 9" in words
    assert len({envelope.launch for envelope in service.envelopes}) == 2


def test_a_rollback_is_a_restart_at_its_checkpoint_and_completes_the_command(
    plain: list[Any], service: FakeService, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "out" / "checkpoint-2")

    def ask() -> None:
        service.wait_for(lambda: 4 in service.steps(), 200)
        arguments = {"checkpoint": checkpoint, "step": 2, "skip_until_step": 4}
        with service.changed:
            action = Action(kind="rollback", arguments=arguments)
            service.commands = [Command(id="c1", run="lab/trl", attempt=1, actions=[action])]

    asking = threading.Thread(target=ask)
    asking.start()
    told, _ = run(tmp_path, service.url, wait_at=5)
    asking.join()
    assert told["from"] == checkpoint
    assert told["history"] == plain
    acks = [(ack.state, ack.client) for name, ack in service.acks if name == "c1"]
    assert [state for state, _ in acks] == ["accepted", "done"]
    assert acks[0][1] != acks[1][1], "the next launch answers"
    attempts = service.notices("attempt")
    assert [n.data for n in attempts] == [{"reason": "rollback", "command": "c1"}]
    assert [n.data["status"] for n in service.notices("finished")] == ["completed"], (
        "the first launch did not end the run"
    )
    assert max(step for step in service.steps()) == STEPS
