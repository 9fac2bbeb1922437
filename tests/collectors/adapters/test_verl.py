"""verl's real trainer loop on the CPU (`verl_fake` says what is real), with and without Foreshock."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from foreshock.adapters import verl as adapter
from foreshock.adapters.verl.driver import STANDS_ON, Driver
from foreshock.adapters.verl.pairs import rows
from foreshock.control.inbox import Pending
from foreshock.stats.merge import statistics
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command, Frame
from tests.fake_service import FakeService

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing verl warns
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils.tracking import Tracking
    from verl.workers.utils.padding import no_padding_2_padding

    from tests.collectors.adapters import verl_fake

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """verl's update gathers over ranks."""
    path = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A trainer as verl's `init()` leaves it."""

    def trainer(steps: int = 3, *overrides: str) -> Any:
        return verl_fake.make_trainer(tmp_path / "run", monkeypatch.setattr, steps, *overrides)

    return trainer


@pytest.fixture
def attach(service: FakeService, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Attaches with short pauses; ends what the test left open."""
    made: list[Driver] = []

    def begin(trainer: Any, **arguments: Any) -> Driver:
        defaults = {
            "url": service.url, "spool_dir": str(tmp_path / "spool"), "launch": "one", "finish_s": 3.0,
        }  # fmt: skip
        os.environ["FORESHOCK_SPOOL_DIR"] = defaults["spool_dir"]
        made.append(adapter.attach(trainer, **(defaults | arguments)))
        return made[-1]

    yield begin
    os.environ.pop("FORESHOCK_SPOOL_DIR", None)
    for driver in made:
        driver.monitor.end("completed", None, 0.2)
        worker = driver.trainer.actor_rollout_wg.worker
        if "_foreshock" in worker.__dict__:
            worker._foreshock.monitor.end("completed", None, 0.2)


def fit(trainer: Any) -> list[dict[str, Any]]:
    """Trains; returns verl's own metrics of each step."""
    logged: list[dict[str, Any]] = []
    original = Tracking.log

    def record(self: Tracking, data: dict[str, Any], step: int, backend: Any = None) -> None:
        logged.append(dict(data))

    Tracking.log = record
    try:
        trainer.fit(trainer.rollouts)
    finally:
        Tracking.log = original
    return logged


def command(driver: Driver, at: int, kind: str, **arguments: Any) -> None:
    """The command arrives before the end of step `at` of the loop as it runs, and is carried out there."""
    step, done = driver.trainer.step, []

    def arrive(*args: Any, **kwargs: Any) -> Any:
        if driver.trainer.global_steps == at and not done:
            done.append(at)
            wire = Command(id=f"c-{kind}", run="lab/x", attempt=1, actions=[Action(kind=kind, arguments=arguments)])
            driver.monitor._process.inbox.put(Pending(wire, boot_s() + 100.0))
        return step(*args, **kwargs)

    driver.trainer.step = arrive


def of(service: FakeService, role: str) -> list[Frame]:
    return [frame for frame in service.frames() if frame.role == role]


def remains(trainer: Any, logged: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What a run leaves behind, to the bit."""
    timed = ("timing", "perf/", "actor/perf")
    kept = [{k: repr(v) for k, v in row.items() if not k.startswith(timed)} for row in logged]
    return kept, trainer.actor_rollout_wg.worker.actor.engine.state(), torch.get_rng_state().numpy().tobytes()


def disagree(trainer: Any) -> None:
    """The engine samples from other weights than those that were pushed."""
    manager = trainer.checkpoint_manager
    push, draw = manager.update_weights, torch.Generator().manual_seed(1)

    def off(step: int) -> None:
        push(step)
        manager.table = manager.table + 0.3 * torch.randn(manager.table.shape, generator=draw)

    manager.update_weights = off
    manager.asleep = True
    off(0)


# --- figures --------------------------------------------------------------------------------------------------------


def test_pairs_equal_verls_own_figures(make: Make, attach: Callable[..., Driver], service: FakeService) -> None:
    trainer = make(2)
    disagree(trainer)
    attach(trainer)
    logged = fit(trainer)
    for metrics, frame in zip(logged, of(service, "trainer"), strict=True):
        mismatch = statistics(frame.pairs["mismatch"]).values
        assert mismatch["kl_k1"] == pytest.approx(metrics["rollout_corr/kl"], rel=1e-5, abs=1e-7)
        assert mismatch["kl_k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-5)
        assert mismatch["chi2_token"] == pytest.approx(metrics["rollout_corr/chi2_token"], rel=1e-5)
        assert mismatch["prob_abs_mean"] == pytest.approx(metrics["training/rollout_probs_diff_mean"], rel=1e-5)
        assert mismatch["prob_abs_max"] == pytest.approx(metrics["training/rollout_probs_diff_max"], rel=1e-5)
        pearson = metrics["training/rollout_actor_probs_pearson_corr"]
        assert mismatch["prob_pearson"] == pytest.approx(pearson, rel=1e-5)
        assert mismatch["kl_k3"] > 1e-3, "two that agree would prove nothing"
        tokens = metrics["response_length/mean"] * verl_fake.PROMPTS * verl_fake.GROUP
        assert mismatch["tokens"] == pytest.approx(tokens)


def test_first_update_is_policy_and_later_ones_are_update(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make(1)
    attach(trainer)
    metrics = fit(trainer)[0]
    pairs = of(service, "trainer")[0].pairs
    first, later = statistics(pairs["policy"]).values, statistics(pairs["update"]).values
    assert first["abs_max"] < 1e-5
    assert later["abs_mean"] > 1e-3
    half = (first["kl_k1"] * 2 + later["kl_k1"] * 2) / 4  # verl: mean over four micro-batches, each its own mean
    assert half == pytest.approx(metrics["actor/ppo_kl"], rel=0.5, abs=1e-4)
    assert first["tokens"] + later["tokens"] == statistics(pairs["mismatch"]).values["tokens"]


def test_verls_metrics_come_under_our_names(make: Make, attach: Callable[..., Driver], service: FakeService) -> None:
    trainer = make(2)
    attach(trainer)
    logged = fit(trainer)
    for metrics, driver, worker in zip(logged, of(service, "driver"), of(service, "trainer"), strict=True):
        assert driver.scalars["reward.mean"] == pytest.approx(metrics["critic/score/mean"])
        assert driver.scalars["length.mean"] == pytest.approx(metrics["response_length/mean"])
        assert driver.scalars["loss"] == pytest.approx(metrics["actor/pg_loss"])
        assert driver.scalars["staleness.mean"] == 0
        assert worker.scalars["grad.norm"] >= metrics["actor/grad_norm"] > 0
        assert "grad.norm" not in driver.scalars
        assert {"advantage.std", "lr"} <= set(worker.scalars)
        assert 0 <= driver.scalars["group.zero_std"] <= 1
        assert driver.scalars["reward.std"] > 0
    assert [frame.step for frame in of(service, "trainer")] == [1, 2]


def test_rejected_tokens_stay_in_the_figures(make: Make, attach: Callable[..., Driver], service: FakeService) -> None:
    rejection = "algorithm.rollout_correction"
    trainer = make(1, f"{rejection}.rollout_rs=token_k1", f"{rejection}.rollout_rs_threshold='0.9_1.1'")
    disagree(trainer)
    attach(trainer)
    metrics = fit(trainer)[0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0.1
    tokens = statistics(of(service, "trainer")[0].pairs["mismatch"]).values["tokens"]
    assert tokens == pytest.approx(metrics["response_length/mean"] * verl_fake.PROMPTS * verl_fake.GROUP)


def test_truncated_sampling_is_told_as_differing_semantics(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make(1, "actor_rollout_ref.rollout.top_p=0.9")
    attach(trainer)
    fit(trainer)
    assert of(service, "trainer")[0].missing["mismatch"] == "semantics_differ"


def test_in_bypass_mode_policy_is_missing_and_not_a_mismatch_in_disguise(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make(1, "algorithm.rollout_correction.bypass_mode=true")
    driver = attach(trainer)
    fit(trainer)
    assert of(service, "trainer")[0].missing["policy"] == "rollout"
    assert "enable_is_correction" not in driver.monitor.kinds()


@pytest.mark.parametrize("padded", [False, True])
def test_response_log_probs_are_cut_out_as_verl_cuts_them(padded: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    prompts, responses = [3, 5, 2], [4, 1, 6]
    values = torch.randn(sum(prompts) + sum(responses), generator=draw)
    lengths = torch.tensor([a + b for a, b in zip(prompts, responses, strict=True)])
    whole = torch.nested.nested_tensor_from_jagged(values, lengths=None, offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]))  # fmt: skip # noqa: E501
    if padded:
        mask = torch.zeros(3, 5 + 6, dtype=torch.long)
        for row, (before, after) in enumerate(zip(prompts, responses, strict=True)):
            mask[row, 5 - before : 5 + after] = 1
        data = TensorDict({
            "prompts": torch.ones(3, 5, dtype=torch.long), "responses": torch.ones(3, 6, dtype=torch.long),
            "attention_mask": mask, "response_mask": mask[:, 5:],
        }, batch_size=3)  # fmt: skip
    else:
        jagged = {
            name: torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.long) for n in each], layout=torch.jagged)
            for name, each in (("prompts", prompts), ("responses", responses), ("response_mask", responses))
        }
        data = TensorDict(jagged, batch_size=3)
    expected = no_padding_2_padding(whole, data)
    found = rows(whole, data)
    shown = torch.cat([expected[i, :n] for i, n in enumerate(responses)])
    got = found.current[found.mask.bool()] if padded else found.current
    assert torch.equal(got, shown)


# --- harm -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(make: Make) -> tuple[Any, ...]:
    """What a run without Foreshock leaves behind."""
    trainer = make()
    return remains(trainer, fit(trainer))


def test_losses_and_weights_are_bit_identical_with_and_without(
    bare: tuple[Any, ...], make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make()
    attach(trainer)
    assert remains(trainer, fit(trainer)) == bare
    assert len(of(service, "trainer")) == len(of(service, "driver")) == 3


@pytest.mark.parametrize(
    "place",
    [
        "foreshock.frames.builder.StepBuilder.observe",
        "foreshock.frames.builder.StepBuilder.seal",
        "foreshock.frames.scalars.Scalars.add",
        "foreshock.transport.sender.Sender.put",
        "foreshock.adapters.verl.worker.rows",
        "foreshock.adapters.verl.driver.groups.values",
    ],
)
def test_a_collector_that_throws_at_every_call_changes_no_bit(
    place: str, bare: tuple[Any, ...], make: Make, attach: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setenv("FORESHOCK_RAISE", "0")
    trainer = make()
    driver = attach(trainer, guard_limit=3)
    monkeypatch.setattr(place, broken)
    assert remains(trainer, fit(trainer)) == bare
    assert driver.guard.errors + trainer.actor_rollout_wg.worker._foreshock.guard.errors > 0


def test_a_service_that_never_answers_changes_no_bit(
    bare: tuple[Any, ...], make: Make, attach: Callable[..., Driver]
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        trainer = make()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        attach(trainer, url=url, timeout_s=0.3, finish_s=0.3)
        assert remains(trainer, fit(trainer)) == bare


def test_without_a_url_the_trainer_is_left_untouched(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_URL", raising=False)
    trainer = make()
    before = dict(vars(trainer))
    adapter.attach(trainer)
    assert dict(vars(trainer)) == before


def test_another_trainer_is_an_error() -> None:
    with pytest.raises(TypeError, match="not a verl trainer"):
        adapter.attach(SimpleNamespace())


def test_verls_own_exception_passes_and_the_run_is_told_as_failed(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make()
    attach(trainer)
    trainer.on_step_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(trainer)
    service.wait_for(lambda: len(service.notices("finished")) == 2)
    assert {notice.data["status"] for notice in service.notices("finished")} == {"failed"}
    assert Tracking.log.__module__ == "verl.utils.tracking"


# --- the heartbeat --------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_be_watched_is_told_and_stays_expected(
    make: Make, attach: Callable[..., Driver], service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(1)
    trainer.actor_rollout_wg.broken = ModuleNotFoundError("No module named 'foreshock'")
    driver = attach(trainer)
    fit(trainer)
    assert "are not watched" in caplog.text
    service.wait_for(lambda: any("No module named" in str(n.data) for n in service.notices("note")))
    assert service.envelopes[0].expected_ranks == {"driver": 1, "trainer": 1}
    assert "scale_lr" not in driver.monitor.kinds()
    assert of(service, "driver")[0].scalars["grad.norm"] > 0, "verl's own figure stands in"


def test_the_plugin_watches_both_of_verls_trainers() -> None:
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared["verl.plugins"] == {"foreshock": "foreshock.adapters.verl.plugin"}
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "foreshock.adapters.verl.plugin",
        "PYTHONWARNINGS": "ignore",
    }
    environment["FORESHOCK_URL"] = "http://127.0.0.1:9"
    found = subprocess.run(
        [sys.executable, "-m", "foreshock.adapters.verl.plugin"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    assert "2 of 2 verl trainers are watched" in found.stderr


def test_the_plugin_does_nothing_without_a_url() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "FORESHOCK_URL"}
    script = (
        "import sys, foreshock.adapters.verl.plugin as p; "
        "assert not any(isinstance(f, p.Finder) for f in sys.meta_path); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_what_the_adapter_stands_on_is_in_verls_classes() -> None:
    from verl.single_controller.base import Worker
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    for trainer in (PPOTrainerSync, RayPPOTrainer):
        source = inspect.getsource(trainer) + "".join(inspect.getsource(base) for base in trainer.__mro__[1:-1])
        assert all(f"def {name}(" in source or f"self.{name}" in source for name in STANDS_ON)
        assert "logger.log(data=metrics, step=self.global_steps)" in source
        assert "self.global_steps += 1" in source
    assert list(inspect.signature(TrainingWorker.train_mini_batch).parameters) == ["self", "data"]
    assert "self.actor.train_mini_batch(data=data)" in inspect.getsource(ActorRolloutRefWorker.update_actor)
    assert list(inspect.signature(Worker.execute_with_func_generator).parameters)[:2] == ["self", "func"]
    for method in ("optimizer_step", "get_data_parallel_rank", "get_data_parallel_size", "is_mp_src_rank_with_outputs"):
        assert callable(getattr(BaseEngine, method))
    source = inspect.getsource(transformer_impl.FSDPEngine.train_batch)
    assert "self.optimizer_step()" in source
    load = inspect.signature(ActorRolloutRefWorker.load_checkpoint).parameters
    assert {"local_path", "del_local_after_load"} <= set(load)


# --- commands -------------------------------------------------------------------------------------------------------


def answered(service: FakeService) -> Any:
    service.wait_for(lambda: bool(service.acks))
    return service.acks[-1][1]


def test_scale_lr_scales_every_later_update_and_not_the_schedule(
    bare: tuple[Any, ...], make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make()
    command(attach(trainer), 1, "scale_lr", factor=0.25)
    logged = fit(trainer)
    assert answered(service).state == "done"
    rates = [frame.scalars["lr"] for frame in of(service, "trainer")]
    assert rates == pytest.approx([0.05, 0.25 * 0.045, 0.25 * 0.0405])
    assert [row["actor/lr"] for row in logged] == pytest.approx([0.045, 0.0405, 0.03645])
    assert remains(trainer, logged)[1] != bare[1]


def test_a_factor_out_of_bounds_is_refused(make: Make, attach: Callable[..., Driver], service: FakeService) -> None:
    trainer = make(2)
    command(attach(trainer), 1, "scale_lr", factor=3.0)
    fit(trainer)
    assert answered(service).state == "refused"


def test_skip_update_leaves_parameters_moments_and_schedule_as_they_are(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make()
    states: list[bytes] = []
    end = trainer.on_step_end

    def look() -> None:
        states.append(trainer.actor_rollout_wg.worker.actor.engine.state())
        end()

    trainer.on_step_end = look
    command(attach(trainer), 1, "skip_update", steps=1)
    fit(trainer)
    assert states[1] == states[0] != states[2]
    assert [frame.scalars["update.skipped"] for frame in of(service, "driver")] == [0, 1, 0]


def test_correction_is_toggled_in_verls_own_configuration(
    make: Make, attach: Callable[..., Driver], service: FakeService
) -> None:
    trainer = make(4)
    disagree(trainer)
    driver = attach(trainer)
    command(driver, 1, "enable_is_correction", cap=1.5)
    command(driver, 3, "disable_is_correction")
    logged = fit(trainer)
    assert ["rollout_corr/rollout_is_mean" in row for row in logged] == [False, True, True, False]
    assert logged[1]["rollout_corr/rollout_is_max"] > 1.0
    assert trainer.config.algorithm.rollout_correction.rollout_is_threshold == 1.5
    assert {ack.state for _, ack in service.acks} == {"done"}


def test_rollback_restores_the_state_and_the_loop_goes_on_after_the_checkpoint(
    make: Make, attach: Callable[..., Driver], service: FakeService, tmp_path: Path
) -> None:
    trainer = make(4, "trainer.save_freq=2")
    path = tmp_path / "run" / "global_step_2"
    states: dict[int, bytes] = {}
    begin = trainer.on_step_begin

    def look() -> None:
        states.setdefault(len(states), trainer.actor_rollout_wg.worker.actor.engine.state())
        begin()

    trainer.on_step_begin = look
    command(attach(trainer), 3, "rollback", checkpoint=str(path))
    logged = fit(trainer)
    assert answered(service).state == "done"
    assert [row["training/global_step"] for row in logged] == [1, 2, 3, 3, 4]
    assert states[3] == states[2], "the fourth step begins from the state after the second"
    assert [(f.generation, f.step) for f in of(service, "driver")] == [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4)]
    assert [(f.generation, f.step) for f in of(service, "trainer")] == [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4)]
    firsts = trainer.rollouts.seen
    assert firsts[8:12] != firsts[12:16], "the batches go on"
    service.wait_for(lambda: len(service.notices("checkpoint")) >= 2)
    assert service.notices("checkpoint")[0].data["path"] == str(path)


def test_rollback_with_data_in_its_scope_repeats_the_batches(
    make: Make, attach: Callable[..., Driver], service: FakeService, tmp_path: Path
) -> None:
    trainer = make(4, "trainer.save_freq=2")
    path = str(tmp_path / "run" / "global_step_2")
    command(attach(trainer), 3, "rollback", checkpoint=path, scope=["weights", "data"])
    fit(trainer)
    assert trainer.rollouts.seen[12:16] == trainer.rollouts.seen[8:12]


def test_rollback_to_what_is_not_there_is_refused_and_changes_nothing(
    bare: tuple[Any, ...], make: Make, attach: Callable[..., Driver], service: FakeService, tmp_path: Path
) -> None:
    trainer = make()
    command(attach(trainer), 2, "rollback", checkpoint=str(tmp_path / "global_step_1"))
    assert remains(trainer, fit(trainer)) == bare
    assert answered(service).state == "refused"


def test_checkpoint_now_writes_verls_own_and_announces_it(
    make: Make, attach: Callable[..., Driver], service: FakeService, tmp_path: Path
) -> None:
    trainer = make(2)
    command(attach(trainer), 1, "checkpoint_now")
    fit(trainer)
    service.wait_for(lambda: bool(service.notices("checkpoint")))
    data = service.notices("checkpoint")[0].data
    assert data["step"] == 1
    assert (Path(data["path"]) / "actor" / "all.pt").exists()
    assert (Path(data["path"]) / "data.pt").exists()


def test_stop_ends_the_loop_after_its_step(make: Make, attach: Callable[..., Driver], service: FakeService) -> None:
    trainer = make(4)
    command(attach(trainer), 2, "stop")
    assert len(fit(trainer)) == 2
    service.wait_for(lambda: len(service.notices("finished")) == 2)
    assert {notice.data["status"] for notice in service.notices("finished")} == {"stopped"}


def test_asynchronous_trainers_announce_no_rollback(make: Make, attach: Callable[..., Driver]) -> None:
    trainer = make(1)
    trainer.trainer_mode = "separate_async"
    kinds = attach(trainer).monitor.kinds()
    assert not {"rollback", "checkpoint_now"} & kinds
    assert {"scale_lr", "skip_update", "stop", "enable_is_correction"} <= kinds
