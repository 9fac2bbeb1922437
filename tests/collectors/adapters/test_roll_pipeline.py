"""The driver's half on ROLL's own pipeline: its real `run`, cluster dispatch, worker and checkpoints, in one process.

Needs ROLL_HOME (ROLL_HOME_BEFORE: one from before 2025-12-08) and ROLL_PYTHON, an interpreter with what ROLL imports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreshock.wire import Action, Command
from lab.roll_onpolicy.processes import run_to_end
from tests.fake_service import FakeService

pytestmark = [pytest.mark.real_source, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[3]
HOMES = ["ROLL_HOME", "ROLL_HOME_BEFORE"]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(service: FakeService, tmp_path: Path) -> Run:
    """Runs the pipeline; `action` is asked for at step `at`, once the loop stands there."""

    def start(variable: str, *options: str, action: Action | None = None, at: int = 3, **named: str) -> dict[str, Any]:
        home, python = os.environ.get(variable), os.environ.get("ROLL_PYTHON")
        if not home or not python:
            pytest.skip(f"{variable} or ROLL_PYTHON is not set")
        if action is not None:
            service.commands = [Command(id="c1", run="lab/roll", attempt=1, actions=[action], at_step=at)]
        command = [python, "-W", "ignore", str(Path(__file__).parent / "roll_pipeline.py"), "--home", home]
        command += ["--out", str(tmp_path / "out.json"), "--folder", str(tmp_path / "output")]
        command += ["--wait-at", str(at if action is not None else -1), *options]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "collectors")]),
            "FORESHOCK_URL": service.url, "FORESHOCK_RUN": "lab/roll", "FORESHOCK_RAISE": "1",
            "FORESHOCK_ROLL_DRIVER": "1", "FORESHOCK_POLL_S": "0.2", "FORESHOCK_LAB_CACHE": str(tmp_path / "cache"),
            "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"), "ROLL_LOG_DIR": str(tmp_path),
        } | named  # fmt: skip
        status, said = run_to_end(command, tmp_path, environment, 300)
        assert status == 0, said[-3000:]
        result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        assert result["errors"] == 0
        return result

    return start


def acked(service: FakeService) -> list[str]:
    return [ack.state for _, ack in service.acks]


@pytest.mark.parametrize("variable", HOMES)
def test_rollback_rewinds_rolls_own_loop_and_brings_the_weights_back(
    variable: str, run: Run, service: FakeService, tmp_path: Path
) -> None:
    path = tmp_path / "output" / "actor_train-0" / "checkpoint-2"
    action = Action(kind="rollback", arguments={"checkpoint": str(path), "step": 2})
    result = run(variable, action=action)
    assert "done" in acked(service)
    assert result["trained"] == [0, 1, 2, 3, 3, 4, 5]
    first, second = (place for place, step in enumerate(result["trained"]) if step == 3)
    assert result["digests"][second] == result["digests"][first]
    assert result["digests"][second + 1] != result["digests"][second]
    assert result["history"] == [0, 1, 2, 3, 4, 5]
    assert result["tracked"] == [0, 1, 2, 3, 3, 4, 5]
    assert result["step"] == 5


@pytest.mark.parametrize("variable", HOMES)
def test_stop_leaves_rolls_own_loop_after_the_step(variable: str, run: Run, service: FakeService) -> None:
    result = run(variable, action=Action(kind="stop"), at=2)
    assert result["trained"] == [0, 1, 2]
    assert service.notices("finished")[-1].data["status"] == "stopped"


def test_correction_reaches_the_weights_that_rolls_driver_computes(run: Run, service: FakeService) -> None:
    action = Action(kind="enable_is_correction", arguments={"cap": 1.5})
    result = run("ROLL_HOME", "--rung", "bf16 engine", "--steps", "5", action=action, at=2)
    assert "done" in acked(service)
    assert result["weights"][:3] == [0.0, 0.0, 0.0]
    assert min(result["weights"][3:]) > 1e-4


@pytest.mark.parametrize(("said", "mixed"), [("observe", 1.0), ("exact", 0.0)])
def test_rows_that_rolls_own_order_mixes_are_put_back(said: str, mixed: float, run: Run, service: FakeService) -> None:
    run("ROLL_HOME_BEFORE", "--rung", "mixed groups", "--steps", "2", FORESHOCK_ROLL_ON_POLICY=said)
    found = {f.scalars["group.mixed"] for f in service.frames() if "group.mixed" in f.scalars}
    assert found == {mixed}
    told = any("rows are put back" in str(notice.data.get("text")) for notice in service.notices("note"))
    assert told == (said == "exact")
