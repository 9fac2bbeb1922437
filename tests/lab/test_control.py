"""Commands do what they say, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab import checkpoints
from lab.train import CAPABILITIES, Job
from lab.trainer import Trainer

from .conftest import JobMaker, OrderFake


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything that a checkpoint promises, copied."""
    optimizer = trainer.parameters.optimizer
    moments = [optimizer.state[p] for p in trainer.parameters.optimized]
    return {
        "weights": {name: w.clone() for name, w in trainer.parameters.master.items()},
        "first": [m["exp_avg"].clone() for m in moments],
        "second": [m["exp_avg_sq"].clone() for m in moments],
        "count": [m["step"].clone() for m in moments],
        "schedule": trainer.schedule.rate,
        "schedule_steps": trainer.schedule.steps,
        "generator": trainer.generator.get_state().clone(),
        "torch_rng": torch.get_rng_state().clone(),
        "data_position": trainer.data_position,
    }


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Paths at which two states differ by even one bit."""
    if isinstance(before, torch.Tensor):
        return [] if torch.equal(before, after) else [where]
    if isinstance(before, dict):
        return [d for key in before for d in differences(before[key], after[key], f"{where}/{key}")]
    if isinstance(before, list):
        return [d for i, pair in enumerate(zip(before, after, strict=True)) for d in differences(*pair, f"{where}/{i}")]
    return [] if before == after else [where]


def steps_of(job: Job, count: int) -> list[dict[str, float]]:
    for _ in range(count):
        job.one_step()
    return job.history[-count:]


def test_a_restored_checkpoint_is_the_saved_state_to_the_bit_and_trains_on_alike(make_job: JobMaker) -> None:
    job, _ = make_job()
    steps_of(job, 3)
    path, saved = job.save_checkpoint(), state_of(job.trainer)
    first = steps_of(job, 3)
    assert differences(saved, state_of(job.trainer))
    assert checkpoints.restore(job.trainer, path) == 3
    assert differences(saved, state_of(job.trainer)) == []
    job.step = 3
    again = steps_of(job, 3)
    ignored = {"weights.version"}  # goes on where it was: a version is never used twice
    assert [{k: v for k, v in e.items() if k not in ignored} for e in again] == [
        {k: v for k, v in e.items() if k not in ignored} for e in first
    ]


def test_a_rollback_restores_everything_but_the_offending_batches(make_job: JobMaker) -> None:
    job, monitor = make_job("stale_parameters", steps=14)
    job.control.bind(monitor)
    steps_of(job, 5)
    path, step = monitor.checkpoints[-1]
    saved = state_of(job.trainer)
    steps_of(job, 4)
    monitor.orders[10] = [OrderFake("rollback", {"checkpoint": path, "step": step, "skip_until_step": 10})]
    steps_of(job, 1)
    assert (step, job.step, job.attempt, monitor.attempts) == (5, 5, 2, ["rollback"])
    saved["data_position"] += 10 - 5
    assert differences(saved, state_of(job.trainer)) == []
    history = steps_of(job, 4)
    assert max(entry["policy.kl_k2"] for entry in history) < 5e-4


def test_a_rollback_without_a_bound_skips_every_batch_seen(make_job: JobMaker) -> None:
    job, monitor = make_job()
    job.control.bind(monitor)
    steps_of(job, 6)
    job.control.carry_out(OrderFake("rollback", {"checkpoint": monitor.checkpoints[-1][0], "step": 5}))
    assert job.trainer.data_position == 6


def test_a_rollback_to_a_missing_or_broken_file_fails_and_changes_nothing(make_job: JobMaker, tmp_path: Path) -> None:
    job, _ = make_job()
    steps_of(job, 1)
    saved = state_of(job.trainer)
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a checkpoint")
    for path in (tmp_path / "absent.pt", broken):
        with pytest.raises(checkpoints.CheckpointError, match="cannot restore"):
            job.control.carry_out(OrderFake("rollback", {"checkpoint": str(path), "step": 0}))
    assert differences(saved, state_of(job.trainer)) == []
    assert job.step == 1


def test_a_skipped_update_leaves_parameters_moments_and_schedule_to_the_bit(make_job: JobMaker) -> None:
    job, monitor = make_job()
    steps_of(job, 2)
    job.control.carry_out(OrderFake("skip_update", {"steps": 2}))
    before = state_of(job.trainer)
    steps_of(job, 2)
    after = state_of(job.trainer)
    for kept in ("weights", "first", "second", "count", "schedule", "schedule_steps"):
        assert differences(before[kept], after[kept], kept) == []
    assert monitor.scalars["update.skipped"] == [0, 0, 1, 1]
    steps_of(job, 1)
    assert differences(before["weights"], state_of(job.trainer)["weights"])


def test_the_learning_rate_is_scaled(make_job: JobMaker) -> None:
    job, monitor = make_job(orders={7: [OrderFake("scale_lr", {"factor": 0.3})]}, steps=9)
    job.run()
    assert monitor.scalars["lr"][7:] == pytest.approx([0.3 * 3e-4] * 2)
    assert monitor.scalars["lr"][6] == pytest.approx(3e-4)
    assert monitor.notices == [("settings", {"lr": pytest.approx(0.3 * 3e-4)})]


def test_correction_changes_the_updates_and_can_be_switched_off_again(make_job: JobMaker) -> None:
    plain, _ = make_job("quantised_engine", 10)
    orders = {8: [OrderFake("enable_is_correction")], 9: [OrderFake("disable_is_correction")]}
    corrected, monitor = make_job("quantised_engine", 10, orders)
    a, b = plain.run().history, corrected.run().history
    assert a[:8] == b[:8]
    assert a[8]["reward.mean"] == b[8]["reward.mean"]
    assert a[8]["loss"] != b[8]["loss"]
    assert corrected.trainer.is_cap is None
    assert [state for _, state in monitor.acknowledged] == ["done", "done"]


def test_pause_and_resume_are_kept_and_leave_the_waiting_to_the_monitor(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=3, orders={2: [OrderFake("pause"), OrderFake("resume")]})
    result = job.run()
    assert [(entry["kind"], entry["step"]) for entry in result.commands] == [("pause", 2), ("resume", 2)]
    assert (result.steps, monitor.status) == (3, "completed")


def test_a_stopped_job_ends_after_its_step_and_says_stopped(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=9, orders={2: [OrderFake("stop")]})
    result = job.run()
    assert (result.steps, result.status, monitor.status) == (2, "stopped", "stopped")


def test_checkpoint_now_saves_and_announces_a_restorable_file(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=3, orders={2: [OrderFake("checkpoint_now")]})
    job.run()
    assert [step for _, step in monitor.checkpoints] == [0, 2]
    assert checkpoints.restore(job.trainer, Path(monitor.checkpoints[-1][0])) == 2


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("scale_lr", {"factor": 0}),
        ("scale_lr", {"factor": float("nan")}),
        ("skip_update", {"steps": 0}),
        ("enable_is_correction", {"cap": -1}),
    ],
)
def test_a_senseless_argument_fails_the_command(kind: str, arguments: dict[str, Any], make_job: JobMaker) -> None:
    job, _ = make_job()
    with pytest.raises(ValueError, match="must be"):
        job.control.carry_out(OrderFake(kind, arguments))


def test_what_is_announced_is_what_has_a_handler(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=1)
    job.run()
    assert set(monitor.handlers) == set(CAPABILITIES) == set(job.control.kinds)
