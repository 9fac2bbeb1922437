"""OpenRLHF's actors watched: on a miniature (`openrlhf_fake`), on real Ray, and with OPENRLHF_HOME on its real loss."""

from __future__ import annotations

import ast
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
import torch

from foreshock.adapters import openrlhf as adapter
from foreshock.adapters.openrlhf_worker import WorkerWatch
from foreshock.control.inbox import Pending
from foreshock.monitor import Monitor
from foreshock.stats.merge import merge, statistics
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command, Frame
from tests.collectors.adapters import openrlhf_fake as fake
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(120)
HOME = os.environ.get("OPENRLHF_HOME")
real_source = pytest.mark.skipif(not HOME, reason="OPENRLHF_HOME is not set: OpenRLHF's source is not here")


class Worker(WorkerWatch, fake.PolicyModelActor):
    """As `watched` makes it, without Ray."""


class Driver(adapter.DriverWatch, fake.PPOTrainer):
    """The same."""


@pytest.fixture
def job(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Makes a driver of two watched workers, all in this process."""
    settings = {"URL": service.url, "RUN": "lab/x", "LAUNCH": "one", "SPOOL_DIR": str(tmp_path), "FINISH_S": "3"}
    for name, value in settings.items():
        monkeypatch.setenv(f"FORESHOCK_{name}", value)
    monkeypatch.setattr(ray, "get", lambda value: value)
    return lambda **changed: Driver(args := fake.make_args(**changed), fake.Group(Worker, args))


def frames(service: FakeService, role: str) -> list[Frame]:
    return [frame for frame in service.frames() if frame.role == role]


def test_pairs_of_every_worker_arrive_with_their_step_and_rank(
    service: FakeService, job: Callable[..., Driver]
) -> None:
    job().fit()
    seen = frames(service, "trainer")
    assert sorted((frame.step, frame.rank) for frame in seen) == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    pairs = {name: statistics(record).values for name, record in seen[0].pairs.items()}
    assert set(pairs) >= {"policy", "update", "mismatch", "mismatch_current", "reference"}
    assert pairs["policy"]["tokens"] == 16  # two micro-batches of 8 sampled tokens, before the first optimizer step
    assert pairs["policy"]["kl_k2"] == 0.0
    assert pairs["update"]["kl_k2"] > 0.0
    assert math.isclose(pairs["mismatch"]["delta_mean"], -0.01, rel_tol=1e-4)
    assert math.isclose(pairs["reference"]["delta_mean"], -0.1, rel_tol=0.1)


def test_the_drivers_figures_bear_our_names_and_pairs_are_measured_not_copied(
    service: FakeService, job: Callable[..., Driver]
) -> None:
    job().fit()
    first, second, _ = frames(service, "driver")
    assert {"reward.mean", "grad.norm", "lr", "loss"} <= set(first.scalars)
    assert not any(name.startswith(("mismatch", "update.kl")) for name in first.scalars)
    assert "reward.validation" not in first.scalars  # OpenRLHF evaluates past the boundary
    assert "reward.validation" in second.scalars


def test_a_checkpoint_that_was_written_is_announced(service: FakeService, job: Callable[..., Driver]) -> None:
    driver = job()
    driver.fit()
    [notice] = service.notices("checkpoint")
    assert notice.data["path"] == "ckpt/_actor/global_step2"
    assert notice.data["scope"] == ["weights", "optimizer", "scheduler", "data"]


def test_training_is_bit_identical_with_and_without(service: FakeService, job: Callable[..., Driver]) -> None:
    watched = job()
    watched.fit()
    args = fake.make_args()
    bare = fake.PPOTrainer(args, fake.Group(fake.PolicyModelActor, args))
    bare.fit()
    for ours, theirs in zip(
        watched.actor_model_group._actor_handlers, bare.actor_model_group._actor_handlers, strict=True
    ):
        assert ours.trainer.losses == theirs.trainer.losses


def throws(*_: Any, **__: Any) -> None:
    raise RuntimeError("of ours")


def test_a_collector_that_throws_at_every_call_leaves_training_bit_identical(
    service: FakeService, job: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESHOCK_RAISE", "0")
    for name in ("observe", "log", "checkpoint", "notice"):
        monkeypatch.setattr(Monitor, name, throws)
    watched = job()
    watched.fit()
    args = fake.make_args()
    bare = fake.PPOTrainer(args, fake.Group(fake.PolicyModelActor, args))
    bare.fit()
    assert [worker.trainer.losses for worker in watched.actor_model_group._actor_handlers] == [
        worker.trainer.losses for worker in bare.actor_model_group._actor_handlers
    ]


def test_without_the_correction_the_engine_told_nothing_and_the_pair_says_so(
    service: FakeService, job: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fake.experience

    def without(draws: torch.Generator) -> Any:
        made = plain(draws)
        made.rollout_log_probs = None
        return made

    monkeypatch.setattr(fake, "experience", without)
    driver = job(is_correction_enable=False)
    driver.fit()
    missing = frames(service, "trainer")[0].missing
    assert missing["mismatch"] == "no_rollout_logprobs"
    announced = {kind for notice in service.notices() for kind in notice.data.get("capabilities", ())}
    assert "stop" in announced
    assert "enable_is_correction" not in announced


def command(driver: Driver, kind: str, **arguments: Any) -> None:
    """A command that is due at the next boundary."""
    wire = Command(id="c1", run="lab/x", attempt=1, actions=[Action(kind=kind, arguments=arguments)])
    driver._foreshock.monitor._process.inbox.put(Pending(wire, boot_s() + 100.0))


@pytest.mark.parametrize("kind", ["stop", "checkpoint_now", "disable_is_correction"])
def test_a_command_is_carried_out_at_the_boundary(
    kind: str, service: FakeService, job: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = job()
    step = fake.PPOTrainer.train_step

    def first(self: Any, samples: Any, global_step: int) -> Any:
        if global_step == 0:
            command(driver, kind)
        return step(self, samples, global_step)

    monkeypatch.setattr(fake.PPOTrainer, "train_step", first)
    driver.fit()
    service.wait_for(lambda: any(ack.state == "done" for _, ack in service.acks))
    workers = driver.actor_model_group._actor_handlers
    if kind == "stop":
        assert {frame.step for frame in frames(service, "driver")} == {1}
    elif kind == "checkpoint_now":
        assert [worker.saved for worker in workers] == [["global_step1", "global_step2"]] * 2
    else:
        assert not any(worker.trainer.actor_loss_fn.enable_vllm_is_correction for worker in workers)


def test_secrets_do_not_leave_in_the_configuration() -> None:
    assert "secret" not in repr(adapter.configuration(fake.make_args()))


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_the_watched_class_runs_as_a_real_ray_actor() -> None:
    class Host:  # as OpenRLHF's: decorated, imported by name, made with options
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def rank(self) -> int:
            return self._rank

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        made = adapter.watched(ray.remote(num_gpus=1)(Host), WorkerWatch, num_gpus=1)
        actor = made.options(num_cpus=1, num_gpus=0).remote(3)
        assert ray.get(actor.rank.remote()) == 3
        assert ray.get(actor.foreshock_finish.remote("completed")) is None  # not watched: silence
    finally:
        ray.shutdown()


def test_install_replaces_both_actors_where_the_script_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"openrlhf.trainer.ray.ppo_actor": "PolicyModelActor", "openrlhf.trainer.ppo_trainer": "PPOTrainer"}
    for name, held in places.items():
        module = ModuleType(name)
        setattr(module, held, ray.remote(getattr(fake, held)))
        monkeypatch.setitem(sys.modules, name, module)
    adapter.install()
    made = sys.modules["openrlhf.trainer.ray.ppo_actor"].PolicyModelActor.__ray_metadata__.modified_class
    assert issubclass(made, WorkerWatch)
    assert issubclass(made, fake.PolicyModelActor)
    driver = sys.modules["openrlhf.trainer.ppo_trainer"].PPOTrainer.__ray_metadata__.modified_class
    assert driver.mro().index(adapter.DriverWatch) < driver.mro().index(fake.PPOTrainer)


# --- the real source -------------------------------------------------------------------------------------------------


def source(path: str) -> ast.Module:
    return ast.parse((Path(HOME or "") / path).read_text())


def methods(tree: ast.Module, name: str) -> dict[str, ast.FunctionDef]:
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def arguments(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


@real_source
def test_the_real_classes_have_what_the_adapter_stands_on() -> None:
    worker = source("openrlhf/trainer/ray/ppo_actor.py")
    trainer = methods(worker, "ActorPPOTrainer")
    assert arguments(trainer["training_step"])[:4] == ["self", "experience", "kl_ctl", "step"]
    text = ast.unparse(worker)
    for used in (
        "self.trainer = ActorPPOTrainer(", "self.actor_loss_fn = PolicyLoss(", "self.strategy.accumulated_gradient",
        "self.replay_buffer.dynamic_optimizer_step[step]", "rollout_log_probs=experience.rollout_log_probs",
    ):  # fmt: skip
        assert used in text, used
    assert arguments(methods(worker, "PolicyModelActor")["save_checkpoint"])[1:3] == ["tag", "client_states"]
    driver = source("openrlhf/trainer/ppo_trainer.py")
    base = methods(driver, "BasePPOTrainer")
    assert arguments(base["train_step"]) == ["self", "rollout_samples", "global_step"]
    assert arguments(base["save_logs_and_checkpoints"]) == ["self", "global_step", "logs_dict", "client_states"]
    assert {"fit", "evaluate"} <= set(methods(driver, "PPOTrainer"))
    group = methods(source("openrlhf/trainer/ray/launcher.py"), "RayActorGroup")
    assert "method_name" in arguments(group["async_run_method"])


@real_source
def test_the_real_script_takes_its_actors_from_where_they_are_replaced() -> None:
    tree = source("openrlhf/cli/train_ppo_ray.py")
    taken = {
        (node.module, name.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert ("openrlhf.trainer.ray.ppo_actor", "PolicyModelActor") in taken
    assert ("openrlhf.trainer.ppo_trainer", "PPOTrainer") in taken


def real_loss(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PolicyLoss of the real loss.py, with only its own helper module beside it."""
    folder = Path(HOME or "") / "openrlhf/models"
    package = ModuleType("openrlhf_models")
    package.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))  # its helpers import it, the loss does not
    monkeypatch.setitem(sys.modules, "openrlhf_models", package)
    spec = importlib.util.spec_from_file_location("openrlhf_models.loss", folder / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "openrlhf_models.loss", module)
    spec.loader.exec_module(module)
    return module.PolicyLoss


@real_source
@pytest.mark.filterwarnings("ignore")  # importing transformers warns
def test_on_the_real_loss_our_numbers_are_its_own(
    service: FakeService, job: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = real_loss(monkeypatch)
    told: list[tuple[float, float]] = []

    class Loss(made):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(enable_vllm_is_correction=True, vllm_is_truncated_threshold=[0.5, 5.0])

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            loss, _, ppo_kl, vllm_kl = super().forward(*args, **kwargs)
            told.append((float(ppo_kl), float(vllm_kl)))
            return loss

    monkeypatch.setattr(fake, "PolicyLoss", Loss)
    driver = job()
    driver.steps = 1
    driver.fit()
    both = [frame.pairs for frame in frames(service, "trainer")]
    mismatch = statistics(merge([pairs["mismatch"] for pairs in both])).values
    first = [kl for number, (_, kl) in enumerate(told) if number % 4 < 2]  # micro-batches before an optimizer step
    assert math.isclose(mismatch["kl_k1"], sum(first) / len(first), rel_tol=1e-5)
    update = statistics(merge([pairs["update"] for pairs in both])).values
    later = [kl for number, (kl, _) in enumerate(told) if number % 4 >= 2]
    assert math.isclose(update["kl_k1"], sum(later) / len(later), rel_tol=1e-5)
