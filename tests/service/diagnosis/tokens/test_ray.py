"""Ray Data on a real local cluster: the same report as in-process, and the same refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foreshock.monitor import Monitor
from foreshock_service.diagnosis.tokens.batches import DumpError
from foreshock_service.diagnosis.tokens.distributed import on_ray
from foreshock_service.diagnosis.tokens.report import diagnose_dump
from tests.service.diagnosis.tokens.dumps import Rows, dumped

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Our own code as the workers' own path, since they start elsewhere.
    ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_ray_data_gives_the_same_report_as_one_process(cluster: None, tmp_path: Path) -> None:
    for rank in range(2):

        def play(monitor: Monitor, rank: int = rank) -> None:
            rows = Rows(seed=rank)
            for step in range(8):
                given: dict[str, Any] = rows.observed()
                if step >= 4:
                    given["a"] = given["a"].roll(1, 0)
                monitor.observe("mismatch", **given)
                monitor.observe("policy", **rows.observed())
                monitor.end_step(step)

        dumped(tmp_path, play, rank=rank, world=2, launch="one")
    here = diagnose_dump([str(tmp_path)])
    there = diagnose_dump([str(tmp_path)], run=on_ray)
    assert here.verdict == "ill"
    assert here.files == 16
    assert msgspec.to_builtins(there) == msgspec.to_builtins(here)


def test_what_a_worker_cannot_read_is_refused_here(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "rank_0.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DumpError, match="no line of prime-rl"):
        diagnose_dump([str(tmp_path)], run=on_ray)
