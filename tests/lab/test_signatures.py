"""Each illness shows on the edge where it sits, beside its healthy twin, and its cure restores the floor."""

from __future__ import annotations

import pytest

from lab.trainer import Trainer

from .conftest import ONSET, JobMaker, OrderFake

STEPS = 10
FLOOR = 5e-4
EDGES = ("policy.kl_k2", "mismatch.kl_k3", "mismatch_current.kl_k3")


def largest(history: list[dict[str, float]], signal: str, since: int = ONSET) -> float:
    return max(entry[signal] for entry in history if entry["step"] >= since)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    from lab.train import Job, RunConfig

    from .conftest import RecordingMonitorFake

    config = RunConfig(steps=STEPS, checkpoints=str(tmp_path_factory.mktemp("healthy")))
    return Job(config, RecordingMonitorFake()).run().history


def test_the_healthy_floor_of_every_edge_is_small_and_not_zero(healthy: list[dict[str, float]]) -> None:
    for edge in EDGES:
        for entry in healthy:
            assert 0 < entry[edge] < FLOOR, (edge, entry["step"])


@pytest.mark.parametrize(
    ("illness", "raised"),
    [
        ("stale_parameters", {"policy.kl_k2", "mismatch_current.kl_k3"}),
        ("stale_scoring", {"policy.kl_k2", "mismatch.kl_k3"}),
        ("frozen_update", set()),
        ("stale_engine", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("frozen_engine", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("quantised_engine", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("shifted_labels", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("temperature", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("top_k", {"mismatch.kl_k3", "mismatch_current.kl_k3"}),
        ("forced_eos", set()),
        ("dropout", {"policy.kl_k2", "mismatch_current.kl_k3"}),
        ("old_batch", {"policy.kl_k2", "mismatch.kl_k3"}),
    ],
)
def test_an_illness_raises_its_own_edges_and_leaves_the_others_at_their_floor(
    illness: str, raised: set[str], make_job: JobMaker, healthy: list[dict[str, float]]
) -> None:
    job, _ = make_job(illness, STEPS)
    history = job.run().history
    before = [entry for entry in history if entry["step"] < ONSET]
    assert before == healthy[: len(before)]
    assert {edge for edge in EDGES if largest(history, edge) > FLOOR} == raised


@pytest.mark.parametrize("illness", ["ramped_stale_parameters", "ramped_stale_engine", "ramped_quantised_engine"])
def test_a_ramped_illness_grows(illness: str, make_job: JobMaker) -> None:
    job, _ = make_job(illness, 22)
    history = job.run().history
    edge = "policy.kl_k2" if illness == "ramped_stale_parameters" else "mismatch.kl_k3"
    assert largest(history, edge, 19) > 3 * max(e[edge] for e in history if ONSET <= e["step"] < ONSET + 4)


def test_a_frozen_update_moves_no_tensor_though_gradients_flow(make_job: JobMaker) -> None:
    job, monitor = make_job("frozen_update", STEPS)
    job.run()
    assert set(monitor.scalars["weights.changed_share"][ONSET:]) == {0.0}
    assert min(monitor.scalars["weights.changed_share"][:ONSET]) > 0
    assert min(monitor.scalars["grad.norm"]) > 0.01


def test_shifted_labels_lose_the_correlation(make_job: JobMaker) -> None:
    job, _ = make_job("shifted_labels", STEPS)
    history = job.run().history
    assert all(e["mismatch.logp_pearson"] > 0.99 for e in history if e["step"] < ONSET)
    assert all(abs(e["mismatch.logp_pearson"]) < 0.3 for e in history if e["step"] >= ONSET)


@pytest.mark.parametrize(
    ("illness", "command"),
    [
        ("stale_parameters", "resync_trainer"),
        ("stale_scoring", "resync_trainer"),
        ("stale_engine", "resync_engine"),
        ("frozen_engine", "resync_engine"),
    ],
)
def test_a_resync_restores_the_floor_while_the_broken_mechanism_stays(
    illness: str, command: str, make_job: JobMaker
) -> None:
    cure_at = ONSET + 2
    job, monitor = make_job(illness, 12, {cure_at: [OrderFake(command)]})
    history = job.run().history
    assert monitor.acknowledged == [(command, "done")]
    assert max(largest(history, edge) for edge in EDGES) > FLOOR
    assert max(largest(history, edge, cure_at + 1) for edge in EDGES) < FLOOR
    assert still_broken(job.trainer, illness)


def still_broken(trainer: Trainer, illness: str) -> bool:
    """The switch that the fault threw is where the fault left it."""
    if illness == "stale_parameters":
        return trainer.parameters.training_views.lag > 0
    if illness == "stale_scoring":
        return trainer.parameters.scoring_views.lag > 0
    return trainer.channel.delay > 0 or not trainer.channel.delivering


def test_a_resync_lets_a_frozen_update_move_again(make_job: JobMaker) -> None:
    job, monitor = make_job("frozen_update", 12, {ONSET + 2: [OrderFake("resync_trainer")]})
    job.run()
    changed = monitor.scalars["weights.changed_share"]
    assert changed[ONSET + 1] == 0
    assert min(changed[ONSET + 3 :]) > 0.5


def test_a_push_to_an_engine_that_quantises_fails_and_says_so(make_job: JobMaker) -> None:
    job, monitor = make_job("quantised_engine", ONSET + 1, {ONSET + 1: [OrderFake("resync_engine")]})
    result = job.run()
    assert monitor.acknowledged == [("resync_engine", "failed")]
    assert "checksum" in result.commands[0]["error"]
