"""Each page's lines in the host's real entry point (`start_lines`), where its source is at hand.

OPENRLHF_HOME, SKYRL_HOME, NEMO_RL_HOME, SLIME_HOME and PRIME_RL_HOME are checkouts. prime-rl's configuration also needs
its package prime-pydantic-config (PRIME_RL_PACKAGES: a folder that it was installed into).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGES = ROOT / "docs/hosts"
TOLD = {"FORESHOCK_URL": "http://host:8720", "FORESHOCK_RUN": "project/name"}


def follow(host: str, service: FakeService, folder: Path) -> dict[str, Any]:
    """What following the page has reached."""
    home = os.environ.get(f"{host.upper()}_HOME")
    if not home:
        pytest.skip(f"{host.upper()}_HOME is not set: {host}'s source is not here")
    paths = [home, f"{home}/src", f"{home}/packages/prime-rl-configs/src", os.environ.get("PRIME_RL_PACKAGES", "")]
    settings = {"FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIR": str(folder / "spool"), "FORESHOCK_FINISH_S": "3"}
    command = [str(HERE / "start_lines.py"), host, home, str(PAGES / f"{host}.md"), str(folder)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ | settings | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "collectors")])},
        capture_output=True, text=True, timeout=280, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.real_source
def test_openrlhfs_own_script_takes_the_pages_options_and_makes_our_actors(
    service: FakeService, tmp_path: Path
) -> None:
    reached = follow("openrlhf", service, tmp_path)
    assert reached["environment"] == TOLD
    policy, *others = reached["groups"]
    assert policy.index("WorkerWatch") < len(policy) - 1 - policy[::-1].index("PolicyModelActor")
    assert not any("WorkerWatch" in other for other in others)
    assert "DriverWatch" in reached["driver"]
    assert "BasePPOTrainer" in reached["driver"]


@pytest.mark.real_source
def test_skyrls_own_trainer_gets_our_callback(service: FakeService, tmp_path: Path) -> None:
    assert follow("skyrl", service, tmp_path) == {"trainer": "skyrl.train.trainer", "callbacks": ["SkyRLCallback"]}


@pytest.mark.real_source
def test_nemo_rls_own_example_attaches_below_setup_and_its_loop_reaches_us(
    service: FakeService, tmp_path: Path
) -> None:
    reached = follow("nemo_rl", service, tmp_path)
    assert reached == {"config": "nemo_rl.algorithms.grpo", "loggers": ["NeMoRLAdapter"]}
    assert [frame.step for frame in service.frames()] == [1, 2, 3]
    assert service.envelopes[0].run == "project/name"


@pytest.mark.real_source
def test_slimes_own_parser_takes_the_pages_arguments_and_its_look_up_finds_our_hooks(
    service: FakeService, tmp_path: Path
) -> None:
    reached = follow("slime", service, tmp_path)
    assert reached["environment"] == TOLD
    assert reached["hooks"] == ["foreshock.adapters.slime.before_train_step", "foreshock.adapters.slime.rollout_data"]


@pytest.mark.real_source
def test_prime_rls_own_configuration_takes_the_pages_option_and_writes_what_is_followed(
    service: FakeService, tmp_path: Path
) -> None:
    if not os.environ.get("PRIME_RL_PACKAGES"):
        pytest.skip("PRIME_RL_PACKAGES is not set: prime-pydantic-config is not here")
    assert follow("prime_rl", service, tmp_path) == {"export": True, "files": True}


def test_prime_rls_follower_is_started_by_the_pages_line(service: FakeService, tmp_path: Path) -> None:
    """On a finished run's files, so with `--once` beside."""
    page = (PAGES / "prime_rl.md").read_text()
    line = next(line for line in page.splitlines() if "-m foreshock.adapters.prime_rl" in line)
    words = shlex.split(re.sub(r"http://host:8720", service.url, line))
    folder = tmp_path / words[words.index("foreshock.adapters.prime_rl") + 1]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0, "optim/lr": 1e-6, "optim/grad_norm": 0.5}\n')
    variable, value = words[0].split("=", 1)
    settings = {variable: value, "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"), "FORESHOCK_FINISH_S": "5"}
    done = subprocess.run(
        [sys.executable, *words[2:], "--once"], env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    [frame] = service.frames()
    assert frame.scalars["grad.norm"] == 0.5
    assert service.envelopes[0].run == "project/name"
