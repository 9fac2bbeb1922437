"""A service on a real PostgreSQL that has lived: two ranks, a fault, an incident, a command, a second attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from sqlalchemy import text

from foreshock.frames import catalogue
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import PairRecord
from foreshock.wire.commands import COMMAND_KINDS
from foreshock_service.store.models import Delivery
from tests.servers import Server, free_port, prometheus, wait_for
from tests.service.api.conftest import settings_for
from tests.service.conftest import Trainer, _database, migrated_postgres, postgres_server
from tests.service.replica import Replica

__all__ = ["migrated_postgres", "postgres_server"]

RUN = "math/qwen-7b"
OUTLIVES_SILENCE = "rules: {silent_run: {enabled: false}}"
"""The life is shared for as long as the session lasts, and nobody speaks in it: no incident may come from that."""
STEPS = 60
FAULT_AT = 40
AGAIN_AT = 50
"""First step of the second attempt; the first goes on to STEPS."""


def pair(a: torch.Tensor, sigma: float, seed: int) -> PairRecord:
    """A real record: b is a with Gaussian noise of `sigma`."""
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed)) * sigma
    accumulator = PairAccumulator()
    tokens = torch.arange(a.numel()).reshape(a.shape) % 32_000
    accumulator.observe(a, a - noise, torch.ones_like(a), clip_range=(0.8, 1.2), token_ids=tokens)
    return accumulator.record()


def scalars(step: int, ill: float) -> dict[str, float]:
    """Every catalogued scalar, healthy or not."""
    wobble = 1.0 + 0.02 * ((step * 7919) % 13 - 6) / 6
    named = {
        "reward.mean": (0.5 - 0.3 * ill) * wobble, "reward.std": 0.4, "reward.min": 0.0, "reward.max": 1.0,
        "reward.validation": 0.45 * wobble, "entropy.mean": 0.6 * wobble, "grad.norm": (0.4 + 3 * ill) * wobble,
        "length.mean": 500 * wobble, "length.max": 900 * wobble, "lr": 1e-6, "loss": 0.01 * wobble,
        "weights.version": float(step), "weights.changed_share": 1.0, "time.step_s": 12.0 * wobble,
    }  # fmt: skip
    return dict.fromkeys(catalogue.SCALARS, 0.1) | {"group.mixed": 0.0, "grad.nonfinite": 0.0} | named


def train(trainer: Trainer, first: int, last: int, *, faulty: bool = True) -> list[Any]:
    """The frames of one rank."""
    frames = []
    for step in range(first, last + 1):
        ill = 1.0 if faulty and step >= FAULT_AT and trainer.generation == 0 else 0.0
        a = -torch.rand((8, 32), generator=torch.Generator().manual_seed(step)) - 0.05
        seed = 1000 * trainer.rank + step
        pairs = {
            "policy": pair(a, 0.003 + (0.5 if trainer.rank else 0.2) * ill, seed),
            "update": pair(a, 0.02, seed + 1),
            "mismatch": pair(a, 0.02 + 0.01 * ill, seed + 2),
        }
        # A second apart, so that nothing looks like a replayed backlog.
        sealed = trainer.boot_s - 0.5 * (last - step)
        frames.append(trainer.frame(step, scalars(step, ill), pairs=pairs, sealed_s=sealed))
    return frames


class Lived:
    """The replica, and where its database is."""

    def __init__(self, database_url: str, rules: Path) -> None:
        self.database_url = database_url
        rules.write_text(OUTLIVES_SILENCE)
        settings = settings_for(
            database_url, port=free_port(), default_mode="approve", webhook_url="http://127.0.0.1:9/", rules_path=rules
        )
        self.replica = Replica(settings)
        self.url = f"http://127.0.0.1:{self.replica.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=30)
        self.since = time.time() - 900
        self._live()
        self.until = time.time() + 900

    def _live(self) -> None:
        ranks = [Trainer(RUN, rank=0), Trainer(RUN, rank=1)]
        started = {"mode": "approve", "capabilities": list(COMMAND_KINDS), "config": {}, "settings": {}}
        self.post(ranks[0], ranks[0].notice("started", started))
        self.post(ranks[0], ranks[0].notice("checkpoint", {"path": "/ckpt/10", "step": 10}, step=10))
        engine = Trainer(RUN, role="rollout")
        self.post(engine, engine.frame(1, {"time.step_s": 4.0}), losses={"spool_full": 3})
        for rank in reversed(ranks):
            self.post(rank, *train(rank, 1, STEPS))
        self.evaluated(RUN, STEPS)
        healthy = Trainer("math/healthy")
        self.post(healthy, *train(healthy, 1, 3, faulty=False), expected_ranks={"trainer": 1})
        self.evaluated("math/healthy", 3)
        self._command(ranks[0])
        for rank in reversed(ranks):
            rank.generation = 1
            self.post(rank, *train(rank, AGAIN_AT, STEPS))
        wait_for(lambda: self.rows("SELECT 1 FROM grafana_steps WHERE attempt = 2 AND step = :step", step=STEPS))
        asked = self.http.post(
            f"/v1/runs/{RUN}/commands", json={"actions": [{"kind": "pause"}], "reason": "look first"}
        )
        assert asked.is_success, asked.text
        self._dead_letter()

    def post(self, trainer: Trainer, *items: Any, **fields: Any) -> None:
        fields = {"controller": trainer.role == "trainer" and trainer.rank == 0, **fields}
        fields = {"expected_ranks": {"trainer": 2}, **fields}
        envelope = trainer.envelope(*items, **fields)
        body = msgspec.msgpack.encode(envelope)
        answer = self.http.post("/v1/ingest", content=body, headers={"Content-Type": "application/msgpack"})
        assert answer.status_code == 200, answer.text

    def rows(self, sql: str, **values: Any) -> list[Any]:
        """What Grafana's own role is answered."""
        with self.replica.app.state.rooms.store.read() as session:
            session.execute(text("SET LOCAL ROLE foreshock_grafana"))
            return list(session.execute(text(sql), values).all())

    def run(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/runs/{name}").json()
        return found

    def evaluated(self, name: str, step: int) -> None:
        wait_for(lambda: self.run(name).get("last_step") == step, 60)

    def _command(self, controller: Trainer) -> None:
        """Policy proposed one, or a person does; it is approved, accepted and done."""
        listed = self.http.get(f"/v1/runs/{RUN}/commands").json()["commands"]
        proposed = [c for c in listed if c["state"] == "proposed"]
        if not proposed:
            body = {"actions": [{"kind": "scale_lr", "factor": 0.5}], "reason": "the gradient grew"}
            answer = self.http.post(f"/v1/runs/{RUN}/commands", json=body)
            assert answer.is_success, answer.text
            proposed = [answer.json()]
        command = proposed[0]["id"]
        if proposed[0]["state"] == "proposed":
            assert self.http.post(f"/v1/commands/{command}/approve").is_success
        self.post(controller, controller.frame(STEPS, {"loss": 0.0}))
        for state in ("accepted", "done"):
            body = {"state": state, "client": controller.client, "attempt": 1, "step": STEPS}
            answer = self.http.post(f"/v1/commands/{command}/ack", json=body)
            assert answer.is_success, answer.text

    def _dead_letter(self) -> None:
        now = time.time()
        with self.replica.app.state.rooms.store.write() as session:
            session.add(
                Delivery(
                    id="dead", channel="webhook", event="incident.opened", dedupe_key="dead", payload={}, state="dead",
                    next_at=now, created_at=now,
                )
            )  # fmt: skip

    def close(self) -> None:
        self.http.close()
        self.replica.stop()


@pytest.fixture(scope="session")
def lived(postgres_server: str, migrated_postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    """One life for all tests of this folder."""
    assert os.environ.get("FORESHOCK_RAISE")
    for url in _database(postgres_server, migrated_postgres):
        found = Lived(url, tmp_path_factory.mktemp("rules") / "pack.yaml")
        yield found
        found.close()


@pytest.fixture(scope="session")
def scraped(lived: Lived, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Prometheus that has scraped it a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    target = lived.url.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: foreshock, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    server = prometheus(folder, config)
    yield_after = "count_over_time(foreshock_database_up[1m]) >= 3"
    wait_for(lambda: server.get("/api/v1/query", query=yield_after)["data"]["result"])
    yield server
    server.stop()
