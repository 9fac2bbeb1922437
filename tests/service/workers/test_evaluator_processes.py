"""Evaluators in processes of their own: the real application over a real PostgreSQL."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
import pytest

from foreshock.wire.codec import MSGPACK, encode
from foreshock_service.settings import Settings
from tests.servers import free_port
from tests.service.replica import Replica

pytestmark = pytest.mark.postgres
WORLD = {"trainer": 1}


def post(client: httpx.Client, trainer: Any, *steps: int) -> None:
    envelope = trainer.envelope(*(trainer.frame(step) for step in steps), expected_ranks=WORLD)
    answer = client.post("/v1/ingest", content=encode(envelope), headers={"content-type": MSGPACK})
    assert answer.status_code == 200, answer.text


def evaluated(client: httpx.Client, step: int, within_s: float = 40.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if client.get("/v1/runs/math/run").json()["last_step"] == step:
            return True
        time.sleep(0.05)
    return False


def counted(evaluators: Any, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if evaluators.counts.steps:
            return True
        time.sleep(0.1)
    return False


def test_a_process_apart_evaluates_and_one_that_is_killed_is_succeeded(
    migrated_postgres_url: str, new_trainer: Any
) -> None:
    settings = Settings(database_url=migrated_postgres_url, evaluator_processes=1, lease_s=1.0, port=free_port())
    replica = Replica(settings)
    evaluators = replica.app.state.rooms.evaluator
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{settings.port}") as client:
            trainer = new_trainer()
            post(client, trainer, 1, 2, 3)
            assert evaluated(client, 3)
            (first,) = evaluators.pids
            os.kill(first, signal.SIGKILL)
            post(client, trainer, 4)
            assert evaluated(client, 4)
            (second,) = evaluators.pids
            assert second != first
            assert counted(evaluators)
    finally:
        replica.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
