"""The fake service that the SDK's tests use."""

from __future__ import annotations

from tests.fake_service import service

__all__ = ["service"]
