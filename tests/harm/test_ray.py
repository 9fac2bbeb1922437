"""Inside real Ray actors: off the main thread, one client per process, nothing left to the actor's shutdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_service import FakeService

ray = pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_monitor_works_in_a_ray_actor(service: FakeService, tmp_path: Path) -> None:
    class Worker:
        def __init__(self, rank: int) -> None:
            import foreshock

            self.monitor = foreshock.init(
                run="lab/x", url=service_url, spool_dir=spool, rank=rank, world=2, backoff_s=0.02
            )

        def train(self, steps: int) -> tuple[str, str]:
            for step in range(steps):
                self.monitor.log({"reward.mean": float(step)})
                self.monitor.end_step(step)
            return self.monitor.client, self.monitor.identity.launch

        def finish(self) -> dict[str, int]:
            self.monitor.finish()
            return self.monitor.losses.counts()

    service_url, spool = service.url, str(tmp_path / "spool")
    ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        actor: Any = ray.remote(num_cpus=0, max_concurrency=2)(Worker)
        workers = [actor.remote(rank) for rank in range(2)]
        told = ray.get([worker.train.remote(5) for worker in workers], timeout=60)
        clients, launches = {client for client, _ in told}, {launch for _, launch in told}
        assert len(clients) == 2
        assert len(launches) == 1, "Ray's job is the launch of all its workers"
        assert "session" in next(iter(launches)), "and another session's first job is another launch"
        service.wait_for(lambda: len(service.frames()) == 10)
        assert ray.get(workers[0].finish.remote(), timeout=20) == {}
        assert {frame.rank for frame in service.frames()} == {0, 1}
        ray.kill(workers[1])
    finally:
        ray.shutdown()
