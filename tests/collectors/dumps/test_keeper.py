"""Token dumps: what is kept and when, whole files, bounded, and never to the trainer's harm."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import torch

from foreshock.dumps import files
from foreshock.dumps.plan import Watch, sampled
from foreshock.dumps.schema import COLUMNS, METADATA_KEY, VERSION, About
from foreshock.monitor import Monitor
from foreshock.wire import Reply
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


def batch(seed: int, rows: int = 4, width: int = 6) -> dict[str, Any]:
    """Log-probs with a hole in each row and padding at its end."""
    generator = torch.Generator().manual_seed(seed)
    a = -torch.rand(rows, width, generator=generator)
    mask = torch.ones(rows, width)
    mask[:, 2] = 0
    mask[1, 4:] = 0
    return {"a": a, "b": a + 0.01 * torch.randn(rows, width, generator=generator), "mask": mask}


def train(monitor: Monitor, steps: range, **where: Any) -> None:
    for step in steps:
        monitor.observe("mismatch", **batch(step), seq_ids=torch.arange(4) + 10 * step, **where)
        monitor.end_step(step)


def settled(monitor: Monitor, count: int, service: FakeService) -> list[Path]:
    keeper = monitor._keeper
    assert keeper is not None
    service.wait_for(lambda: len(keeper.written) >= count)
    return sorted(keeper.written)


def table(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return found


def about(path: Path) -> About:
    return msgspec.json.decode(pq.read_schema(path).metadata[METADATA_KEY], type=About)


def steps_of(paths: list[Path]) -> list[int]:
    return sorted(table(path)["step"][0] for path in paths)


def test_without_a_folder_nothing_is_kept(make_monitor: MakeMonitor) -> None:
    assert make_monitor()._keeper is None


def test_all_ranks_sample_the_same_steps_and_the_share_is_kept() -> None:
    chosen = [step for step in range(10_000) if sampled("lab/x", step, 0.05)]
    assert 400 < len(chosen) < 600
    assert chosen == [step for step in range(10_000) if sampled("lab/x", step, 0.05)]
    assert all(sampled("lab/x", step, 1.0) for step in range(100))
    assert not any(sampled("lab/x", step, 0.0) for step in range(100))


def test_a_sampled_step_is_a_file_with_every_token_and_its_ids(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_share=1.0, config={"top_k": 4, "api_key": "x"}, rank=1)
    given = batch(0)
    monitor.observe(
        "mismatch", **given, seq_ids=[7, 8, 9, 10], token_ids=torch.arange(24).view(4, 6), group_ids=[0, 0, 1, 1],
        prompt_ids=[5, 5, 6, 6], advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), versions=2,
        clip_range=(0.2, 0.28),
    )  # fmt: skip
    monitor.end_step(3)
    (path,) = settled(monitor, 1, service)
    read = table(path)
    assert [c.name for c in COLUMNS] == list(read)
    assert about(path).version == VERSION
    assert about(path).config == {"top_k": 4, "api_key": "[redacted]"}
    # Row 1 ends at its last masked token (column 3); the hole at column 2 stays, masked out and without a position.
    second = [i for i, row in enumerate(read["row"]) if row == 1]
    assert [read["column"][i] for i in second] == [0, 1, 2, 3]
    assert [read["position"][i] for i in second] == [0, 1, None, 2]
    assert [read["mask"][i] for i in second] == [True, True, False, True]
    assert [read["token"][i] for i in second] == [6, 7, 8, 9]
    assert [read["old"][i] for i in second] == given["a"][1, :4].tolist()
    assert [read["rollout"][i] for i in second] == given["b"][1, :4].tolist()
    assert {read[c][second[0]] for c in ("sample", "group", "prompt")} == {8, 0, 5}
    assert (read["advantage"][second[0]], read["version_lag"][second[0]]) == (-1.0, 2)
    assert (read["clip_low"][0], read["clip_high"][0]) == (0.8, 1.28)
    assert (read["rank"][0], read["role"][0], read["run"][0], read["step"][0]) == (1, "trainer", "lab/x", 3)
    assert read["current"] == [None] * len(read["row"])


def test_packed_rows_and_narrow_floats_are_kept_exactly(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_share=1.0)
    a = torch.tensor([-0.5, -1.25, -9999.0, -3.0, -0.125], dtype=torch.bfloat16)
    monitor.observe("policy", a, a, None, cu_seqlens=[0, 2, 5], old_source="detached", optimizer_step=0)
    monitor.end_step(0)
    (path,) = settled(monitor, 1, service)
    read = table(path)
    assert read["row"] == [0, 0, 1, 1, 1]
    assert read["column"] == [0, 1, 0, 1, 2]
    assert read["current"] == [-0.5, -1.25, -9999.0, -3.0, -0.125]
    assert set(read["old_source"]) == {"detached"}


def test_with_the_ring_off_only_steps_that_will_be_kept_are_copied(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreshock.dumps import capture

    copied: list[str] = []
    real = capture.capture
    monkeypatch.setattr(capture, "capture", lambda pair, *a, **k: copied.append(pair) or real(pair, *a, **k))
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_share=0.2, dump_ring=0)
    train(monitor, range(40))
    kept = [step for step in range(40) if sampled("lab/x", step, 0.2)]
    assert steps_of(settled(monitor, len(kept), service)) == kept
    # The first step cannot be foreseen.
    assert len(copied) == len(kept) + (0 not in kept)


def test_an_incident_keeps_the_steps_before_and_after_it_and_no_others(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_ring=2, dump_after=2)
    train(monitor, range(5))
    keeper = monitor._keeper
    assert keeper is not None
    assert keeper.written == []
    monitor._process._replied(Reply(acknowledged=1, run_verdict="critical"), 0)
    monitor._process._replied(Reply(acknowledged=1, run_verdict="critical"), 0)
    train(monitor, range(5, 10))
    paths = settled(monitor, 4, service)
    assert steps_of(paths) == [3, 4, 5, 6]
    assert {(about(p).reason, about(p).verdict) for p in paths} == {("incident", "critical")}
    assert not list((tmp_path / "d").rglob("*.part"))


def test_worse_opens_another_spell_and_more_of_the_same_does_not() -> None:
    watch = Watch(after=2)
    assert watch.told("warning")
    assert not watch.told("warning")
    watch.step_ended()
    watch.step_ended()
    assert not watch.open
    assert not watch.told("healthy")
    assert watch.told("critical")
    watch.step_ended()
    watch.step_ended()
    assert not watch.told("warning"), "getting better is no news"


def test_the_host_may_ask(service: FakeService, make_monitor: MakeMonitor, tmp_path: Path) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_ring=1, dump_after=1)
    train(monitor, range(3))
    monitor.dump_tokens("looks odd")
    train(monitor, range(3, 6))
    assert steps_of(settled(monitor, 2, service)) == [2, 3]


def test_a_crash_keeps_the_ring(service: FakeService, make_monitor: MakeMonitor, tmp_path: Path) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_ring=2)
    train(monitor, range(4))
    monitor.finish("failed")
    assert monitor._keeper is not None
    assert steps_of(monitor._keeper.written) == [2, 3]


def test_memory_is_bounded_and_what_does_not_fit_is_counted(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_ring=1000, dump_memory_bytes=2000)
    train(monitor, range(50))
    keeper = monitor._keeper
    assert keeper is not None
    assert sum(step.size for step in keeper._ring) <= 2000
    assert len(monitor._process.losses.counts()) == 0
    monitor.observe("mismatch", torch.zeros(40, 40), torch.zeros(40, 40), torch.ones(40, 40))
    assert monitor.losses.counts() == {"dump_memory": 1}
    monitor.end_step(50)
    service.wait_for(lambda: len(service.frames()) == 51)


def test_disk_is_bounded_the_oldest_samples_go_and_incidents_stay(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    probe = make_monitor(dump_dir=str(tmp_path / "probe"), dump_share=1.0)
    train(probe, range(1))
    size = settled(probe, 1, service)[0].stat().st_size
    monitor = make_monitor(
        dump_dir=str(tmp_path / "d"), dump_share=1.0, dump_ring=0, dump_after=2, dump_disk_bytes=int(size * 3.5)
    )
    train(monitor, range(5))
    settled(monitor, 5, service)
    monitor.dump_tokens()
    train(monitor, range(5, 8))
    settled(monitor, 8, service)
    left = sorted((tmp_path / "d").rglob("*.parquet"))
    assert steps_of(left) == [5, 6, 7]
    assert sum(path.stat().st_size for path in left) <= size * 3.5


@pytest.mark.parametrize("broken", ["disk", "pyarrow"])
def test_a_full_disk_or_no_pyarrow_costs_the_dumps_and_nothing_else(
    broken: str, service: FakeService, make_monitor: MakeMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "disk":

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files.os, "replace", full)
    else:
        real = builtins.__import__

        def absent(name: str, *rest: Any, **more: Any) -> Any:
            if name.startswith("pyarrow"):
                raise ImportError("No module named 'pyarrow'")
            return real(name, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", absent)
    monitor = make_monitor(dump_dir=str(tmp_path / "d"), dump_share=1.0)
    for step in range(12):
        train(monitor, range(step, step + 1))
        service.wait_for(lambda step=step: len(service.frames()) == step + 1)
    keeper = monitor._keeper
    assert keeper is not None
    service.wait_for(lambda: keeper.off)
    assert monitor.guard.errors == 0
    assert monitor.losses.counts()["dump_failed"] >= 1
    assert list((tmp_path / "d").rglob("*.par*")) == []
    assert service.steps() == list(range(12))


def test_a_dump_on_or_off_leaves_the_trainer_s_tensors_and_frames_as_they_are(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    plain, dumping = make_monitor(launch="plain"), make_monitor(dump_dir=str(tmp_path / "d"), dump_share=1.0)
    given = batch(1)
    before = {name: tensor.clone() for name, tensor in given.items()}
    for monitor in (plain, dumping):
        monitor.observe("mismatch", **given)
        monitor.end_step(0)
    service.wait_for(lambda: len(service.frames()) == 2)
    one, two = (frame.pairs["mismatch"] for frame in service.frames())
    assert one == two
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_importing_foreshock_and_watching_without_dumps_needs_no_pyarrow() -> None:
    code = "import foreshock, sys; foreshock.init(run='a', url='http://127.0.0.1:9'); print('pyarrow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "FORESHOCK_EXIT_FLUSH_S": "0.1"},
    )  # fmt: skip
    assert done.stdout.strip() == "False"
