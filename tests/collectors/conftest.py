"""The fake service and monitors that talk to it."""

from __future__ import annotations

from tests.fake_service import make_monitor, service

__all__ = ["make_monitor", "service"]
