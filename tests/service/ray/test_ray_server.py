"""`foreshock serve --ray` on a real Ray cluster of three nodes on this machine: two replicas over one PostgreSQL.

The head takes no replica and the others one each. One service for the whole file; the last test stops it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select

from benchmarks.alerts.sink import Sink
from foreshock.wire.codec import MSGPACK, encode
from foreshock_service.store.engine import Store
from foreshock_service.store.models import CommandRow, EvaluationState, FrameRow, Incident, Point, Run
from tests.servers import free_port

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PATIENCE_S = 120.0
WORLD = {"trainer": 1}


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@dataclass
class Served:
    """The running command, and what stands around it."""

    url: str
    process: subprocess.Popen[bytes]
    store: Store
    sink: Sink
    log: Path

    def client(self) -> httpx.Client:
        """Each request on a connection of its own: the nodes' proxies share the port here, and each prefers the
        replica of its own node."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, trust_env=False, timeout=PATIENCE_S, limits=limits)

    def count(self, entity: Any, run: str) -> int:
        with self.store.read() as session:
            query = select(func.count()).select_from(entity).where(entity.run_id == self.run_id(run))
            return session.scalar(query) or 0

    def run_id(self, run: str) -> int:
        with self.store.read() as session:
            found = session.scalar(select(Run.id).where(Run.name == run))
        assert found is not None
        return found

    def owner(self, run: str) -> str | None:
        with self.store.read() as session:
            return session.scalar(select(EvaluationState.owner).where(EvaluationState.run_id == self.run_id(run)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of three nodes on this machine."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    for _ in range(2):
        made.add_node(num_cpus=1, **small)
    made.wait_for_nodes()
    yield made.address
    made.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def served(cluster: str, postgres_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sink, port = Sink(), free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster,
        "PYTHONUNBUFFERED": "1",
        "FORESHOCK_DATABASE_URL": postgres_database,
        "FORESHOCK_PORT": str(port),
        "FORESHOCK_WEBHOOK_URL": f"{sink.url}/hook",
        "FORESHOCK_DIGEST_OVER": "1000",
        "FORESHOCK_LEASE_S": "2",
        "FORESHOCK_REQUEST_RATE_PER_S": "100000",
    }
    command = [sys.executable, "-m", "foreshock_service.cli", "serve", "--ray", "--replicas", "2"]
    with log.open("wb") as lines:
        process = subprocess.Popen(command, env=environment, stdout=lines, stderr=subprocess.STDOUT)
    store = Store(postgres_database)
    try:
        until(lambda: "Foreshock listens on" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield Served(f"http://127.0.0.1:{port}", process, store, sink, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        store.close()
        sink.close()


def post(client: httpx.Client, envelope: Any) -> None:
    """As the SDK does: until it is acknowledged, the same bytes again."""
    body = encode(envelope)

    def taken() -> bool:
        try:
            answer = client.post("/v1/ingest", content=body, headers={"content-type": MSGPACK})
        except httpx.TransportError:
            return False
        assert answer.status_code == 200 or answer.status_code >= 500, answer.text
        return answer.status_code == 200

    until(taken)


def start(client: httpx.Client, trainer: Any) -> None:
    data = {"mode": "auto", "capabilities": ["skip_update"], "config": {}, "settings": {}}
    post(client, trainer.envelope(trainer.notice("started", data), expected_ranks=WORLD, controller=True))


def step(client: httpx.Client, trainer: Any, number: int, ill: bool = False) -> None:
    scalars = {"reward.mean": 0.5, "grad.norm": 1.0} | ({"grad.nonfinite": 1.0} if ill else {})
    post(client, trainer.envelope(trainer.frame(number, scalars), expected_ranks=WORLD, controller=True))


def stored_by_each(client: httpx.Client) -> set[float]:
    """What the replicas say that they stored, as often as it takes to have asked both."""
    said = set()
    for _ in range(30):
        for family in text_string_to_metric_families(client.get("/metrics").text):
            said |= {s.value for s in family.samples if s.name == "foreshock_frames_stored_total"}
    return said


def test_two_replicas_share_the_load_and_each_incident_alert_and_command_happens_once(
    served: Served, new_trainer: Any
) -> None:
    runs = [f"math/share{n}" for n in range(4)]
    trainers = [new_trainer(run) for run in runs]
    with served.client() as client:
        for trainer in trainers:
            start(client, trainer)
        for number in range(1, 11):
            for trainer in trainers:
                step(client, trainer, number, ill=number == 5)
        until(lambda: all(served.count(Point, run) == 10 for run in runs))
        shares = stored_by_each(client)
    assert len(shares) == 2 or 2 * min(shares) == 40
    assert min(shares) > 0
    assert sum(shares) in (20, 40)
    assert [served.count(Incident, run) for run in runs] == [1] * 4
    assert [served.count(CommandRow, run) for run in runs] == [1] * 4
    until(lambda: len(opened(served)) >= 4)
    assert opened(served) == Counter(runs)


def opened(served: Served) -> Counter[str]:
    return Counter(body["run"] for body in served.sink.bodies() if body["event"] == "incident.opened")


def test_fifty_long_polls_at_once_neither_block_ingest_nor_miss_what_the_other_replica_saw(
    served: Served, new_trainer: Any
) -> None:
    trainer = new_trainer("math/polled")
    with served.client() as client, ThreadPoolExecutor(50) as pool:
        start(client, trainer)
        step(client, trainer, 1)
        until(lambda: served.count(Point, "math/polled") == 1)
        seen = client.get("/v1/runs/math/polled/health").json()["seen"]
        polls: list[Future[httpx.Response]] = [
            pool.submit(client.get, "/v1/runs/math/polled/health", params={"wait": 60, "seen": seen}) for _ in range(50)
        ]
        until(lambda: waiting(client) == 50)
        for number in range(2, 12):
            step(client, trainer, number)
        assert not any(poll.done() for poll in polls)
        step(client, trainer, 12, ill=True)
        answers = [poll.result(PATIENCE_S).json() for poll in polls]
    assert {answer["verdict"] for answer in answers} == {"critical"}


def waiting(client: httpx.Client) -> float:
    """Long-polls that both replicas hold."""
    held = set()
    for _ in range(12):
        for family in text_string_to_metric_families(client.get("/metrics").text):
            held |= {s.value for s in family.samples if s.name == "foreshock_waiters"}
    return sum(held) if len(held) == 2 else 2 * min(held)


def test_killing_the_replica_that_evaluates_a_run_loses_nothing_and_doubles_nothing(
    served: Served, new_trainer: Any
) -> None:
    run = "math/killed"
    trainer = new_trainer(run)
    with served.client() as client:
        start(client, trainer)
        step(client, trainer, 1)
        until(lambda: served.count(Point, run) == 1)
        owner = until(lambda: served.owner(run))
        os.kill(int(owner.split(":")[1]), signal.SIGKILL)
        for number in range(2, 13):
            step(client, trainer, number, ill=number == 6)
        until(lambda: served.count(Point, run) == 12)
    assert served.count(FrameRow, run) == 12
    assert (served.count(Incident, run), served.count(CommandRow, run)) == (1, 1)
    assert served.owner(run) != owner
    until(lambda: opened(served)[run])
    assert opened(served)[run] == 1


def owners(served: Served) -> set[str]:
    """Who holds a run."""
    with served.store.read() as session:
        return {name for name in session.scalars(select(EvaluationState.owner)) if name is not None}


def test_sigterm_answers_who_waits_gives_the_leases_back_and_takes_serve_along(
    served: Served, new_trainer: Any
) -> None:
    trainer = new_trainer("math/stopped")
    with served.client() as client, ThreadPoolExecutor(6) as pool:
        start(client, trainer)
        step(client, trainer, 1)
        until(lambda: served.count(Point, "math/stopped") == 1)
        polls = [pool.submit(client.get, "/v1/runs/math/stopped/health", params={"wait": 60}) for _ in range(6)]
        until(lambda: waiting(client) == 6)
        living = {name for name in owners(served) if os.path.exists(f"/proc/{name.split(':')[1]}")}
        assert served.owner("math/stopped") in living
        served.process.send_signal(signal.SIGTERM)
        assert {poll.result(PATIENCE_S).status_code for poll in polls} == {200}
        assert served.process.wait(PATIENCE_S) == 0, served.log.read_text()
    # What the killed one held nobody gave back: it is free since its lease ended.
    assert not owners(served) & living
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/healthz", trust_env=False)


def test_more_than_one_replica_on_sqlite_is_refused_with_what_to_do(sqlite_url: str) -> None:
    command = [sys.executable, "-m", "foreshock_service.cli", "serve", "--ray", "--replicas", "2"]
    done = subprocess.run(
        [*command, "--database-url", sqlite_url], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "2 replicas need PostgreSQL" in done.stderr
