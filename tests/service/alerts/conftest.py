"""What the alerts' tests share: a receiver on a port, and the HTTP client that the service sends with."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from benchmarks.alerts.sink import Sink
from foreshock_service.alerts.base import new_client


@pytest.fixture
def sink() -> Iterator[Sink]:
    opened = Sink()
    yield opened
    opened.close()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with new_client() as opened:
        yield opened
