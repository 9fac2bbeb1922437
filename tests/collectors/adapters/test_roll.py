"""The watched ROLL worker, on a named fake whose shape `test_roll_real.py` holds against ROLL's source."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreshock.adapters import registry
from foreshock.adapters.roll import options
from foreshock.adapters.roll.worker import StopAskedError, monitored
from foreshock.stats.merge import statistics
from foreshock.wire import Action, Command, Frame
from tests.collectors.adapters.roll_fake import FakeWorker, ReusingWorker, rollout
from tests.fake_service import FakeService

Make = Callable[..., Any]


@pytest.fixture
def make(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes initialised watched workers, with settings as `system_envs` would give them."""
    made: list[Any] = []

    def build(base: type = FakeWorker, url: bool = True, **settings: str) -> Any:
        for name in list(options.os.environ):
            if name.startswith("FORESHOCK_ROLL"):
                monkeypatch.delenv(name)
        said = {"FORESHOCK_RUN": "lab/roll", "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"), "FORESHOCK_POLL_S": "0.2"}
        said |= {"FORESHOCK_URL": service.url if url else ""} | settings
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        worker = monitored(base)(str(tmp_path))
        worker.initialize(None)
        made.append(worker)
        return worker

    yield build
    for worker in made:
        if worker._foreshock is not None:
            worker._foreshock.monitor.end("completed", None, 0.2)


def frame(service: FakeService, step: int) -> Frame:
    service.wait_for(lambda: any(f.step == step for f in service.frames()))
    return next(f for f in service.frames() if f.step == step)


def figures(service: FakeService, step: int, pair: str = "policy") -> dict[str, float]:
    return dict(statistics(frame(service, step).pairs[pair]).values)


def table(worker: Any) -> torch.Tensor:
    return worker.strategy.model.table.detach().clone()


def test_without_a_url_the_worker_is_rolls_own() -> None:
    worker = monitored(FakeWorker)("")
    worker.initialize(None)
    assert worker._foreshock is None
    worker.train_step(rollout(worker, 1))
    assert worker.strategy.scheduler.num_steps == 1


def test_the_three_edges_are_exact_where_nothing_is_wrong(make: Make, service: FakeService) -> None:
    worker = make()
    worker.train_step(rollout(worker, 1))
    tokens = float(rollout(worker, 1).batch["response_mask"][:, 1:].sum())
    for pair in ("policy", "mismatch", "mismatch_current"):
        seen = figures(service, 1, pair)
        assert seen["kl_k2"] == 0.0
        assert seen["tokens"] == tokens


def test_tokens_are_counted_before_the_trainers_filters(make: Make, service: FakeService) -> None:
    worker = make()
    data = rollout(worker, 1)
    kept, sampled = data.batch["final_response_mask"].sum(), data.batch["response_mask"][:, 1:].sum()
    worker.train_step(data)
    assert frame(service, 1).scalars["filter.share"] == pytest.approx(1 - float(kept / sampled))
    assert 0 < float(kept) < float(sampled) == figures(service, 1)["tokens"]


def test_a_training_pass_that_disagrees_shows_on_policy_and_not_on_mismatch(make: Make, service: FakeService) -> None:
    worker = make()
    worker.strategy.model.noise = 0.3
    worker.train_step(rollout(worker, 1))
    assert figures(service, 1)["kl_k2"] > 1e-3
    assert figures(service, 1, "mismatch")["kl_k2"] == 0.0
    assert figures(service, 1, "mismatch_current")["kl_k2"] > 1e-3


def test_an_engine_that_disagrees_shows_on_both_of_its_edges(make: Make, service: FakeService) -> None:
    worker = make()
    worker.train_step(rollout(worker, 1, engine=0.3))
    assert figures(service, 1)["kl_k2"] == 0.0
    for pair in ("mismatch", "mismatch_current"):
        assert figures(service, 1, pair)["kl_k2"] == pytest.approx(0.045, rel=0.5)


def test_an_engine_without_log_probs_is_missing_and_not_zero(make: Make, service: FakeService) -> None:
    worker = make()
    worker.train_step(rollout(worker, 1, engine=None))
    assert frame(service, 1).missing["mismatch"] == "no_rollout_logprobs"
    assert "enable_is_correction" not in worker._foreshock.actions._by_kind


def test_scalars_of_rows_and_update_travel(make: Make, service: FakeService) -> None:
    worker = make()
    data = rollout(worker, 1)
    worker.train_step(data)
    seen = frame(service, 1).scalars
    assert seen["reward.mean"] == pytest.approx(float(data.batch["scores"].mean()))
    assert seen["grad.norm"] == 0.5
    assert seen["lr"] == pytest.approx(0.1)
    assert seen["loss"] == pytest.approx(sum(worker.losses), rel=1e-5)
    assert seen["length.mean"] == pytest.approx(float(data.batch["response_mask"].sum(-1).float().mean()))
    assert seen["update.skipped"] == 0.0


def test_rolls_own_metrics_are_what_they_were(make: Make) -> None:
    plain, watched = FakeWorker(""), make()
    plain.initialize(None)
    assert plain.train_step(rollout(plain, 1)).meta_info == watched.train_step(rollout(watched, 1)).meta_info


def test_mixed_groups_are_told_from_the_rows_alone(make: Make, service: FakeService) -> None:
    worker = make()
    worker.train_step(rollout(worker, 1))
    worker.train_step(rollout(worker, 2, mixed=True))
    assert frame(service, 1).scalars["group.mixed"] == 0.0
    assert frame(service, 2).scalars["group.mixed"] > 0.5
    assert 0.0 <= frame(service, 1).scalars["group.zero_std"] < 1.0


def test_groups_are_not_judged_where_they_cannot_be(make: Make, service: FakeService) -> None:
    worker = make()
    worker.pipeline_config.reward_clip = 0.5
    worker.train_step(rollout(worker, 1, mixed=True))
    worker.pipeline_config.adv_estimator = "gae"
    worker.train_step(rollout(worker, 2, mixed=True))
    assert "group.mixed" not in frame(service, 1).scalars
    assert "group.zero_std" not in frame(service, 2).scalars


def test_where_old_is_the_detached_current_policy_proves_nothing_until_scored_again(
    make: Make, service: FakeService
) -> None:
    worker = make(ReusingWorker, FORESHOCK_ROLL_RESAMPLE_EVERY="2")
    worker.pipeline_config.enable_old_logprobs_recompute = False
    for step in (1, 2):
        worker.train_step(rollout(worker, step))
    assert frame(service, 1).missing["policy"] == "detached"
    assert figures(service, 2)["kl_k2"] == 0.0
    assert figures(service, 2)["tokens"] == float(rollout(worker, 2).batch["response_mask"][:6, 1:].sum())


def test_scoring_again_finds_the_fault_that_reuse_hides(make: Make, service: FakeService) -> None:
    worker = make(ReusingWorker, FORESHOCK_ROLL_RESAMPLE_EVERY="1")
    worker.pipeline_config.enable_old_logprobs_recompute = False
    worker.strategy.model.noise = 0.3
    worker.train_step(rollout(worker, 1))
    assert figures(service, 1)["kl_k2"] > 1e-3


def test_groups_formed_across_prompts_are_refused_from_the_yaml_alone(make: Make, service: FakeService) -> None:
    worker = make(FORESHOCK_ROLL_REFUSE="1")
    before = table(worker)
    worker.train_step(rollout(worker, 1, mixed=True))
    assert torch.equal(before, table(worker))
    service.wait_for(lambda: service.notices("note"))
    assert "advantage groups were formed across prompts" in service.notices("note")[0].data["text"]
    worker.train_step(rollout(worker, 2))
    assert not torch.equal(before, table(worker))
    assert [frame(service, step).scalars["update.skipped"] for step in (1, 2)] == [1.0, 0.0]


@pytest.mark.parametrize("mode", ["exact", "detached"])
def test_exact_trains_with_ratio_one_whatever_rolls_partition_gave(mode: str, make: Make, service: FakeService) -> None:
    worker = make(FORESHOCK_ROLL_ON_POLICY=mode)
    data = rollout(worker, 1)
    data.batch["old_log_probs"] += 0.01 * data.batch["response_mask"][:, 1:]  # another partition's rounding
    output = worker.train_step(data)
    assert output.meta_info["metrics"]["actor/approxkl@sum"] == [0.0, 0.0]
    expected = 0.0 if mode == "exact" else 0.5 * 0.01**2
    assert figures(service, 1)["kl_k2"] == pytest.approx(expected, rel=1e-3)


def test_a_disagreement_is_refused_and_leaves_everything_bit_identical(make: Make, service: FakeService) -> None:
    worker = make(FORESHOCK_ROLL_ON_POLICY="exact", FORESHOCK_ROLL_REFUSE="1")
    worker.train_step(rollout(worker, 1))
    before, moments = table(worker), worker.strategy.optimizer.state_dict()
    moments = {k: v["momentum_buffer"].clone() for k, v in moments["state"].items()}
    worker.strategy.model.noise = 0.05
    worker.train_step(rollout(worker, 2))
    assert torch.equal(before, table(worker))
    after = worker.strategy.optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[k]["momentum_buffer"]) for k, v in moments.items())
    assert worker.strategy.scheduler.num_steps == 1
    assert frame(service, 2).scalars["update.skipped"] == 1.0
    service.wait_for(lambda: service.notices("note"))
    assert "log-prob and old log-prob disagree" in service.notices("note")[0].data["text"]
    worker.strategy.model.noise = 0.0
    worker.train_step(rollout(worker, 3))
    assert not torch.equal(before, table(worker))
    assert worker.strategy.scheduler.num_steps == 2


def test_parameters_that_change_between_scoring_and_training_are_refused_and_named(
    make: Make, service: FakeService
) -> None:
    worker = make(FORESHOCK_ROLL_ON_POLICY="exact", FORESHOCK_ROLL_REFUSE="1")
    worker.train_step(rollout(worker, 1))
    data = rollout(worker, 2)
    with torch.no_grad():
        worker.strategy.model.table[0, 0] += 1.0
    before = table(worker)
    worker.train_step(data)
    assert torch.equal(before, table(worker))
    service.wait_for(lambda: service.notices("note"))
    assert "not those of the scoring pass (ranks 0)" in service.notices("note")[0].data["text"]


def test_old_log_probs_of_other_rows_are_refused_and_named(make: Make, service: FakeService) -> None:
    worker = make(FORESHOCK_ROLL_ON_POLICY="exact", FORESHOCK_ROLL_REFUSE="1")
    worker.train_step(rollout(worker, 1))
    data = rollout(worker, 2)
    data.batch["old_log_probs"] = data.batch["old_log_probs"].roll(1, 0)
    worker.train_step(data)
    assert frame(service, 2).scalars["update.skipped"] == 1.0
    service.wait_for(lambda: service.notices("note"))
    assert "not those of these rows" in service.notices("note")[0].data["text"]
    assert frame(service, 2).scalars["roll.scored_kl_k2"] > 0.01


def test_the_limit_is_calibrated_from_this_runs_own_floor(make: Make, service: FakeService) -> None:
    worker = make(FORESHOCK_ROLL_REFUSE="1")
    data = rollout(worker, 1)
    data.batch["old_log_probs"] += 0.001 * data.batch["response_mask"][:, 1:]
    worker.train_step(data)
    exact = worker._foreshock.exact
    assert exact.floor["repeat"] == 0.0
    assert exact.floor["partition"] == pytest.approx(0.5e-6, rel=1e-2)
    assert exact.limit == pytest.approx(5e-6, rel=1e-2)
    service.wait_for(lambda: service.notices("calibration"))


def test_a_given_limit_stands(make: Make) -> None:
    worker = make(FORESHOCK_ROLL_REFUSE="1", FORESHOCK_ROLL_LIMIT="0.5")
    worker.strategy.model.noise = 0.3
    before = table(worker)
    worker.train_step(rollout(worker, 1))
    assert not torch.equal(before, table(worker))


def test_skip_update_leaves_one_update_out(make: Make) -> None:
    worker = make()
    assert worker.foreshock_apply("skip_update", {"steps": 1})[0] == "done"
    before = table(worker)
    worker.train_step(rollout(worker, 1))
    assert torch.equal(before, table(worker))
    worker.train_step(rollout(worker, 2))
    assert not torch.equal(before, table(worker))


def test_scale_lr_scales_the_update_and_not_the_schedule(make: Make, service: FakeService) -> None:
    plain, scaled = make(), make()
    scaled.foreshock_apply("scale_lr", {"factor": 0.5})
    before = table(plain)
    for worker in (plain, scaled):
        worker.train_step(rollout(worker, 1))
    torch.testing.assert_close((table(scaled) - before) * 2, table(plain) - before)
    assert scaled.strategy.optimizer.param_groups[0]["lr"] == 0.1
    assert scaled.foreshock_apply("scale_lr", {"factor": 2})[0] == "refused"


@pytest.mark.parametrize("native", [False, True])
def test_correction_weights_the_loss_and_disabling_restores_it(native: bool, make: Make) -> None:
    plain, worker = make(), make()
    if native:
        for one in (plain, worker):
            weight = SimpleNamespace(enabled=False, upper_bound=1.2)
            one.pipeline_config.train_infer_correction = SimpleNamespace(is_weight=weight)
    for one in (plain, worker):
        one.train_step(rollout(one, 1, engine=0.5))
    assert worker.foreshock_apply("enable_is_correction", {"cap": 1.5})[0] == "done"
    data = rollout(worker, 2, engine=0.5)
    kept = data.batch["advantages"].clone()
    weights = (data.batch["old_log_probs"] - data.batch["infer_logprobs"]).exp().clamp(max=1.5)
    expected = -(data.batch["advantages"] * weights * data.batch["final_response_mask"]).sum()
    worker.losses.clear()
    worker.train_step(data)
    assert sum(worker.losses) == pytest.approx(float(expected), rel=1e-4)
    assert torch.equal(kept, data.batch["advantages"])
    assert worker.foreshock_apply("disable_is_correction", {})[0] == "done"
    if native:
        assert worker.pipeline_config.train_infer_correction.is_weight == SimpleNamespace(
            enabled=False, upper_bound=1.2
        )


def test_rollback_brings_weights_moments_and_schedule_back(make: Make, service: FakeService, tmp_path: Path) -> None:
    worker = make()
    worker.train_step(rollout(worker, 1))
    worker.do_checkpoint(1)
    service.wait_for(lambda: service.notices("checkpoint"))
    told = service.notices("checkpoint")[0].data
    before, steps = table(worker), worker.strategy.scheduler.num_steps
    worker.train_step(rollout(worker, 2))
    state, detail = worker.foreshock_apply("rollback", {"checkpoint": told["path"]})
    assert state == "done"
    assert detail["scope"] == told["scope"]
    assert torch.equal(before, table(worker))
    assert worker.strategy.scheduler.num_steps == steps
    assert worker.strategy.loads == 0
    assert worker.foreshock_apply("rollback", {"checkpoint": str(tmp_path / "none")})[0] == "refused"


def test_a_command_of_the_service_is_carried_out_at_the_boundary(make: Make, service: FakeService) -> None:
    worker = make()
    action = Action(kind="skip_update", arguments={"steps": 1})
    service.commands = [Command(id="c1", run="lab/roll", attempt=1, actions=[action])]
    for step in range(1, 400):
        before = table(worker)
        worker.train_step(rollout(worker, step))
        if frame(service, step).scalars["update.skipped"]:
            break
    assert torch.equal(before, table(worker))
    worker.train_step(rollout(worker, step + 1))
    assert not torch.equal(before, table(worker))
    service.wait_for(lambda: any(ack.state == "done" for _, ack in service.acks))


def test_stop_leaves_train_step_on_purpose(make: Make) -> None:
    worker = make()
    worker.foreshock_apply("stop", {"reason": "the run is lost"})
    with pytest.raises(StopAskedError, match="the run is lost"):
        worker.train_step(rollout(worker, 1))


def test_probe_scores_one_micro_batch_again(make: Make) -> None:
    worker = make(FORESHOCK_ROLL_PROBE="1")
    assert worker.foreshock_apply("probe", {})[0] == "refused"
    worker.strategy.model.noise = 0.2
    worker.train_step(rollout(worker, 1))
    state, detail = worker.foreshock_apply("probe", {"name": "all"})
    assert state == "done"
    assert detail["probe"]["repeat"]["kl_k2"] == 0.0
    assert detail["probe"]["other_mode"]["kl_k2"] > 1e-4
    assert worker.foreshock_apply("probe", {"name": "fp32"})[0] == "refused"


def test_only_what_the_live_worker_can_do_is_announced(make: Make) -> None:
    class Engine(FakeWorker):
        def initialize(self, pipeline_config: Any = None) -> None:
            super().initialize(pipeline_config)
            self.strategy.model.backward = lambda loss: None  # as DeepSpeed's engine, which steps by itself
            self.strategy.load_checkpoint = None

    kinds = make(Engine)._foreshock.monitor.kinds()
    assert kinds == {"pause", "resume", "stop"}
    full = make()
    assert full._foreshock.monitor.kinds() == {"pause", "resume", "stop", "scale_lr", "skip_update", "rollback"}
    full.train_step(rollout(full, 1))
    assert full._foreshock.monitor.kinds() >= {"enable_is_correction", "disable_is_correction"}


def test_a_failure_of_ours_never_reaches_roll(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(FORESHOCK_RAISE="0")
    plain = FakeWorker("")
    plain.initialize(None)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("foreshock.adapters.roll.groups.Rows.add", broken)
    monkeypatch.setattr("foreshock.adapters.roll.exact.Exact.old", broken)
    monkeypatch.setattr("foreshock.adapters.roll.correction.Correction.before_loss", broken)
    said = worker.train_step(rollout(worker, 1)).meta_info
    assert said == plain.train_step(rollout(plain, 1)).meta_info
    assert worker._foreshock.guard.errors >= 3


def test_rolls_notes_on_its_methods_are_kept() -> None:
    watched: Any = monitored(FakeWorker)
    assert watched.do_checkpoint.noted == watched.foreshock_apply.noted == "as ROLL's register notes"
    assert watched.train_step.__wrapped__ is FakeWorker.train_step


def test_another_kind_of_class_is_named() -> None:
    with pytest.raises(TypeError, match="has no initialize"):
        monitored(object)


def test_settings_are_read_from_the_environment_and_typos_do_not_end_a_run() -> None:
    read = options.load({"FORESHOCK_ROLL_ON_POLICY": "exact", "FORESHOCK_ROLL_LIMIT": "x", "FORESHOCK_MODE": "AUTO"})
    assert (read.on_policy, read.limit, read.mode) == ("exact", None, "auto")
    assert options.load({"FORESHOCK_ROLL_ON_POLICY": "perhaps"}).on_policy == "observe"


def test_the_registry_names_roll_and_an_absent_host_is_an_error_when_asked_for() -> None:
    assert registry.find("roll").lowest.startswith("2025-10-29")
    assert "rollback" in registry.capabilities("roll")
    with pytest.raises(ImportError, match="not installed"):
        registry.load("roll")
    with pytest.raises(LookupError, match="there are roll"):
        registry.find("nobody")


def test_the_yaml_name_gives_one_class_that_ray_can_ship_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "roll" / "pipeline" / "rlvr"
    package.mkdir(parents=True)
    (package / "actor_pg_worker.py").write_text(
        "from tests.collectors.adapters.roll_fake import FakeWorker\nclass ActorPGWorker(FakeWorker):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "roll"]:
        monkeypatch.delitem(sys.modules, name)
    module_path, class_name = ["foreshock.adapters.roll", "MonitoredActorPGWorker"]
    try:
        cls = getattr(importlib.import_module(module_path), class_name)  # as ROLL's safe_import_class does
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert cls.__mro__[1].__module__ == "roll.pipeline.rlvr.actor_pg_worker"
        assert registry.load("roll").MonitoredActorPGWorker is cls
    finally:
        vars(importlib.import_module(module_path)).pop(class_name, None)
        for name in [n for n in sys.modules if n.split(".")[0] == "roll"]:
            sys.modules.pop(name)


def test_an_absent_roll_is_an_error_when_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError, match="roll"):
        importlib.import_module("foreshock.adapters.roll").MonitoredActorPGWorker  # noqa: B018 - the look-up imports
