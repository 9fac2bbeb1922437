"""What every test stands on: the SDK's guard raises, and hypothesis is deterministic."""

from __future__ import annotations

import os

os.environ["FORESHOCK_RAISE"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, derandomize=True)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
