"""Our own trainer path equals ROLL's functions, where a checkout of ROLL is given.

``ROLL_HOME`` is ROLL's current source, ``ROLL_HOME_BEFORE`` one from before 2025-12-08. ROLL is imported in a
process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def contract(variable: str) -> dict[str, Any]:
    home = os.environ.get(variable)
    if not home:
        pytest.skip(f"{variable} is not set: ROLL's source is not here")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "collectors")])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "lab.roll_onpolicy.contract", home], env=environment,
                          capture_output=True, text=True, timeout=280, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def assert_equal(result: dict[str, Any]) -> None:
    assert result["cases"] == 30
    assert result["partitions_that_differ"] == 0
    assert {name: worst for name, worst in result["worst"].items() if worst > 2e-6} == {}
    assert result["trajectory"]["equal_rollouts"]
    assert result["trajectory"]["grad_norm"] < 1e-5
    assert result["float32_logits_overwritten"]


@pytest.mark.real_source
def test_the_current_source_equals_ours_keeps_groups_whole_and_normalises_globally() -> None:
    result = contract("ROLL_HOME")
    assert_equal(result)
    assert (result["normalisation"], result["groups"], result["mixed"]) == ("global", "ordered", 0.0)


@pytest.mark.real_source
def test_the_source_before_2025_12_08_equals_ours_mixes_groups_and_normalises_by_micro_batch() -> None:
    result = contract("ROLL_HOME_BEFORE")
    assert_equal(result)
    assert (result["normalisation"], result["groups"]) == ("micro_batch", "mixed")
    assert result["mixed"] > 0.9
