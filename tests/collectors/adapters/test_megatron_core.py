"""Real megatron-core on the CPU over gloo, each rank a process of its own, posting to one fake service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foreshock.adapters import megatron_core as adapter
from foreshock.adapters import megatron_parallel as parallel
from foreshock.stats.merge import merge, statistics
from foreshock.stats.record import PairRecord
from foreshock.wire import Frame
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(450)
HERE = Path(__file__).parent
PAIRS = ("policy", "mismatch", "mismatch_current")


class World:
    """Scenarios of `megatron_world.py` on `size` ranks, all in one set of processes."""

    def __init__(self, folder: Path, size: int, setup: dict[str, int], *scenarios: str) -> None:
        service = FakeService()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | {
            "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIR": str(folder / "spool"), "FORESHOCK_LAUNCH": "one",
            "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "megatron_world.py"), json.dumps(setup), *scenarios]
        ranks = [
            subprocess.Popen(
                command, env=environment | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for r in range(size)
        ]
        try:
            ended = [rank.communicate(timeout=400) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            service.stop()
        for rank, (_, errors) in zip(ranks, ended, strict=True):
            assert rank.returncode == 0, errors[-3000:]
        self.said = [json.loads(out.strip().splitlines()[-1]) for out, _ in ended]
        self.service = service

    def frames(self, run: str) -> list[Frame]:
        clients = {envelope.client for envelope in self.service.envelopes if envelope.run == f"lab/{run}"}
        items = [self.service.items[key] for key in self.service.order if key[0] in clients]
        return [item for item in items if isinstance(item, Frame)]

    def merged(self, run: str, step: int = 1) -> dict[str, PairRecord]:
        """The step's pairs, merged over all ranks."""
        frames = [frame for frame in self.frames(run) if frame.step == step]
        return {pair: merge([f.pairs[pair] for f in frames if pair in f.pairs]) for pair in PAIRS}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One process that sees every token: what the others must add up to."""
    scenarios = ("unwatched", "train", "scored_by_model", "quiet", "broken", "context")
    return World(tmp_path_factory.mktemp("single"), 1, {}, *scenarios)


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("data"), 2, {}, "train", "commands", "stale")


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tensor"), 2, {"tensor": 2}, "train", "computed")


@pytest.fixture(scope="module")
def context_parallel(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("context"), 2, {"context": 2}, "context", "one_fails")


def assert_same(found: PairRecord, expected: PairRecord, relative: float = 1e-6) -> None:
    ours, theirs = statistics(found), statistics(expected)
    assert ours.missing == theirs.missing
    assert set(ours.values) == set(theirs.values)
    for name, value in theirs.values.items():
        assert ours.values[name] == pytest.approx(value, rel=relative, abs=1e-12), name


def test_two_data_parallel_ranks_add_up_to_the_single_process(single: World, data_parallel: World) -> None:
    found, expected = data_parallel.merged("train"), single.merged("train")
    for pair in PAIRS:
        assert_same(found[pair], expected[pair])
    assert sum(rank["train"]["tokens"] for rank in data_parallel.said) == found["policy"].tokens
    assert {frame.rank for frame in data_parallel.frames("train")} == {0, 1}


def test_two_tensor_parallel_ranks_count_each_token_once(single: World, tensor_parallel: World) -> None:
    found, expected = tensor_parallel.merged("train"), single.merged("train")
    for pair in PAIRS:
        assert_same(found[pair], expected[pair])
    frames = tensor_parallel.frames("train")
    assert {frame.rank for frame in frames} == {0, 1}, "both report"
    assert {frame.rank for frame in frames if frame.pairs} == {0}, "one observes"


def test_two_context_parallel_ranks_complete_their_sequences(single: World, context_parallel: World) -> None:
    found, expected = context_parallel.merged("context")["policy"], single.merged("context")["policy"]
    assert expected.sequences == 8
    assert_same(found, expected)


def test_a_failing_rank_does_not_keep_the_others_waiting_in_a_collective(context_parallel: World) -> None:
    assert [rank["one_fails"]["off"] for rank in context_parallel.said] == [False, True]
    record = context_parallel.merged("one_fails")["policy"]
    assert record.tokens > 0
    assert record.sequences == 0, "no sequence is taken for whole"


def test_a_step_holds_what_the_loop_knows(single: World) -> None:
    first, second = single.frames("train")
    assert (first.step, second.step) == (1, 2)
    for frame, iteration in ((first, 1.0), (second, 2.0)):
        assert frame.scalars["weights.version"] == iteration
        assert frame.scalars["update.skipped"] == 0.0
        assert frame.scalars["grad.norm"] > 0
        assert frame.scalars["lr"] == pytest.approx(1e-2)
        assert "loss" in frame.scalars
    assert {token.sequence for token in first.pairs["policy"].evidence()} <= set(range(8))


def test_training_is_bit_identical_with_and_without(single: World) -> None:
    said = single.said[0]
    assert said["train"]["digest"] == said["unwatched"]["digest"]


def test_a_collector_that_throws_at_every_call_changes_no_bit(single: World) -> None:
    said = single.said[0]
    assert set(said["broken"].values()) == {said["unwatched"]["digest"]}


@pytest.mark.parametrize("run", ["scored_by_model", "quiet"])
def test_log_probs_are_the_same_wherever_they_come_from(run: str, single: World) -> None:
    """Heard in the closure, given by the model, or computed from the logits."""
    assert_same(single.merged(run)["policy"], single.merged("train")["policy"])


def test_log_probs_over_a_split_vocabulary_equal_megatrons_own_to_the_bit(tensor_parallel: World) -> None:
    assert [rank["computed"] for rank in tensor_parallel.said] == 2 * [
        {"equal": True, "chosen": True, "untouched": True}
    ]


def test_a_forward_over_stale_shards_is_seen_and_resync_cures_it(data_parallel: World) -> None:
    for rank in data_parallel.said:
        assert not rank["stale"]["after_step"], "with overlap the gather waits for the next forward"
        assert rank["stale"]["after_resync"]
        assert rank["stale"]["detail"] == {"parameters_equal": True}
    frames = [frame for frame in data_parallel.frames("stale") if frame.rank == 0]
    shares = {frame.step: frame.scalars.get("param_sync.stale_forward") for frame in frames}
    assert shares[2] == 0.0
    assert shares[3] is not None
    assert shares[3] > 0.0


def test_all_ranks_skip_and_scale_together_and_a_skipped_update_changes_nothing(data_parallel: World) -> None:
    one, other = (rank["commands"] for rank in data_parallel.said)
    for rank in (one, other):
        assert rank["successes"] == [True, False, True, True]
        assert rank["states"][1] == rank["states"][0]
        assert len(set(rank["states"])) == 3
        assert rank["rates"] == pytest.approx([1e-2, 5e-3, 5e-3])
    assert one["states"] == other["states"]
    frames = data_parallel.frames("commands")
    assert [f.scalars["update.skipped"] for f in frames if f.rank == 0] == [0.0, 1.0, 0.0, 0.0]


def test_capabilities_follow_what_was_handed_over() -> None:
    always = {"pause", "resume"}
    optimizer = SimpleNamespace()
    plain = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=False))
    sharded = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=True))
    assert adapter.capabilities(None, []) == always
    assert adapter.capabilities(optimizer, [plain]) == always | {"scale_lr", "skip_update"}
    assert "resync_trainer" in adapter.capabilities(optimizer, [sharded])
    assert {"checkpoint_now", "stop"} <= adapter.capabilities(None, [], print, print)
    assert set(adapter.CAPABILITIES) == adapter.capabilities(optimizer, [sharded], print, print)


def test_a_digest_moves_with_every_bit_and_every_place() -> None:
    a, b = torch.randn(5), torch.randn(3).bfloat16()
    assert torch.equal(parallel.digest([a, b]), parallel.digest([a.clone(), b.clone()]))
    swapped = a.flip(0)
    nudged = a.clone()
    nudged[2] = torch.nextafter(nudged[2], torch.tensor(9.0))
    assert len({int(parallel.digest([each, b])) for each in (a, swapped, nudged)}) == 3
    assert int(parallel.digest([a[:2], a[2:]])) != int(parallel.digest([a[2:], a[:2]]))
