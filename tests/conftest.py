"""What every test stands on: the SDK's guard raises, and hypothesis is deterministic."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

os.environ["FORESHOCK_RAISE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

STARTS_RAY = {"test_openrlhf"}
"""Files that start Ray without saying so in their name or their folder's."""

settings.register_profile("dev", deadline=None, derandomize=True)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="module", autouse=True)
def _one_ray_at_a_time(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files that start Ray wait for each other: a second `ray.init` on a machine would join the first one's cluster."""
    path = request.path
    if not ("ray" in path.stem.split("_") or path.parent.name == "ray" or path.stem in STARTS_RAY):
        yield
        return
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with (shared / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
