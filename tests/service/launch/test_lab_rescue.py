"""For real: a service that acts, a lab job without any rollback of its own, and the launcher between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock_service.demo.processes import Service


@pytest.mark.slow
def test_a_rollback_of_a_job_that_has_none_is_a_restart_and_the_run_recovers(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.start()
    try:
        job = [
            sys.executable, "-m", "lab.train", "--illness", "stale_parameters", "--onset", "15", "--steps", "32",
            "--run", "lab/launched", "--mode", "auto", "--kinds", "checkpoint_now",
            "--checkpoints", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "result.json"),
        ]  # fmt: skip
        options = ["--resume-arg", "--resume {checkpoint}", "--grace-s", "10"]
        done = subprocess.run(
            [sys.executable, "-m", "foreshock_service.cli", "launch", *options, "--", *job],
            capture_output=True, text=True, check=False, timeout=280,
            env={**os.environ, "FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"),
                 "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "foreshock launch: rollback of step" in done.stderr
        commands: list[dict[str, Any]] = httpx.get(f"{service.url}/v1/runs/lab/launched/commands").json()["commands"]
        rollback = next(c for c in commands if c["kind"] == "rollback")
        assert rollback["state"] == "done", rollback
        assert rollback["detail"]["done"]["by"] == "foreshock launch"
        run = httpx.get(f"{service.url}/v1/runs/lab/launched").json()
        assert (run["attempt"], run["status"], run["last_step"]) == (2, "finished", 32)
        assert "rollback" in run["capabilities"]
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["final_reward"] > 0.7
        resumed = rollback["actions"][0]["arguments"]
        assert resumed["step"] < 15
        assert result["history"][0]["step"] == resumed["step"] + 1
    finally:
        service.stop()
