"""A real GRPO run of a tiny model on the CPU, with and without Foreshock."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import IntervalStrategy, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from foreshock.adapters import trl as adapter
from foreshock.monitor import Monitor
from foreshock.stats.merge import statistics
from foreshock.wire import Action, Command, Frame
from tests.fake_service import FakeService

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
MakeMonitor = Callable[..., Monitor]
WORDS = ["<pad>", "<eos>", "<unk>", "add", "=", *[str(i) for i in range(59)]]
CONFIG = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
TOKENS = 8


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [sum(w.isdigit() and int(w) % 3 == 0 for w in c.split()) / TOKENS for c in completions]


def make_trainer(folder: Path, **arguments: Any) -> GRPOTrainer:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": TOKENS,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "beta": 0.0,
        "lr_scheduler_type": "linear",
        "disable_tqdm": True,
    }
    rows = [{"prompt": f"add {i % 59} {(7 * i) % 59} ="} for i in range(32)]
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**(defaults | arguments)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


class Engine:
    """Stands where TRL's vLLM client stands: samples one token after the other from a copy of the weights."""

    def __init__(self, trainer: GRPOTrainer, stale: bool = False) -> None:
        self.trainer, self.stale = trainer, stale
        self.model = Qwen2ForCausalLM(Qwen2Config(**CONFIG)).eval()
        self.synced = 0

    def sync_weights(self) -> None:
        self.synced += 1
        if not self.stale or self.synced == 1:
            self.model.load_state_dict({k: v.detach().clone() for k, v in self.trainer.model.state_dict().items()})

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[Any, ...]:
        rows, logps = [], []
        for prompt in prompts:
            ids, row, logp = list(prompt), [], []
            for _ in range(TOKENS):
                distribution = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
                token = int(torch.multinomial(distribution.exp(), 1))
                ids.append(token)
                row.append(token)
                logp.append([float(distribution[token])])
                if token == 1:
                    break
            rows.append(row)
            logps.append(logp)
        return None, rows, logps, None


def with_engine(trainer: GRPOTrainer, **arguments: Any) -> GRPOTrainer:
    trainer.vllm_generation = Engine(trainer, **arguments)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    return trainer


class Between(TrainerCallback):
    """Calls `act(step)` before each step."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act = act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(state.global_step)


def issue(service: FakeService, monitor: Monitor, kind: str, **arguments: Any) -> None:
    """Has a command wait in the trainer's inbox."""
    service.wait_for(lambda: monitor._process.acceptance is not None and monitor._process.acceptance.attempt == 1)
    with service.changed:
        service.commands = [
            Command(id=f"c-{kind}", run="lab/x", attempt=1, actions=[Action(kind=kind, arguments=arguments)])
        ]
    service.wait_for(lambda: len(monitor._process.inbox) == 1)


def commanded(
    service: FakeService, make_monitor: MakeMonitor, trainer: GRPOTrainer, at: int, kind: str, **arguments: Any
) -> adapter.TRLAdapter:
    """Trains; the command arrives during the step after `at` updates and is carried out at its end."""
    monitor = make_monitor(capabilities=adapter.capabilities(trainer))
    watched = adapter.attach(trainer, monitor=monitor)
    monitor.notice("note", text="so that the attempt is known")
    trainer.add_callback(Between(lambda step: issue(service, monitor, kind, **arguments) if step == at else None))
    trainer.train()
    service.wait_for(lambda: bool(service.notices("finished")))
    return watched


def remains(trainer: GRPOTrainer) -> tuple[Any, ...]:
    """What a run leaves behind, to the bit."""
    kept = ("loss", "grad_norm", "reward", "learning_rate", "entropy")
    logs = [tuple(row.get(name) for name in kept) for row in trainer.state.log_history[:-1]]
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    return logs, weights, torch.get_rng_state().numpy().tobytes()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a run without Foreshock leaves behind."""
    trainer = make_trainer(tmp_path_factory.mktemp("bare"))
    trainer.train()
    return remains(trainer)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a service that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_losses_and_weights_are_bit_identical_with_and_without(
    bare: tuple[Any, ...], service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    assert remains(trainer) == bare
    assert service.steps() == [1, 2, 3, 4]
    assert all(row[1] > 0.1 for row in bare[0]), "a run that learns nothing would prove nothing"


@pytest.mark.parametrize(
    "place",
    [
        "foreshock.frames.builder.StepBuilder.observe",
        "foreshock.frames.scalars.Scalars.add",
        "foreshock.frames.builder.StepBuilder.seal",
        "foreshock.transport.sender.Sender.put",
        "foreshock.adapters.trl_measures._mask",
    ],
)
def test_a_collector_that_throws_at_every_call_changes_no_bit(
    place: str, bare: tuple[Any, ...], make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    trainer = make_trainer(tmp_path)
    monitor = make_monitor(raise_errors=False, guard_limit=3)
    adapter.attach(trainer, monitor=monitor)
    monkeypatch.setattr(place, broken)
    trainer.train()
    assert remains(trainer) == bare
    assert monitor.guard.off


def test_a_service_that_never_answers_changes_no_bit(bare: tuple[Any, ...], silent: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    adapter.attach(trainer, run="lab/x", url=silent, spool_dir=str(tmp_path / "spool"), timeout_s=0.3, finish_s=0.3)
    trainer.train()
    assert remains(trainer) == bare


def test_without_a_url_the_trainer_is_left_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_URL", raising=False)
    trainer = make_trainer(tmp_path)
    before = dict(vars(trainer))
    adapter.attach(trainer, run="lab/x")
    assert dict(vars(trainer)) == before


def test_another_trainer_is_an_error() -> None:
    with pytest.raises(TypeError, match="not a GRPOTrainer"):
        adapter.attach(SimpleNamespace())


def frame_of(service: FakeService, step: int) -> Frame:
    return next(frame for frame in service.frames() if frame.step == step)


def test_the_trainers_figures_arrive_under_our_names_at_every_step_however_rarely_it_logs(
    bare: tuple[Any, ...], service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, logging_steps=3)
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    for step, (loss, grad_norm, mean_reward, lr, entropy) in enumerate(bare[0], start=1):
        scalars = frame_of(service, step).scalars
        assert scalars["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert scalars["grad.norm"] == pytest.approx(grad_norm, rel=1e-6)
        assert scalars["reward.mean"] == pytest.approx(mean_reward, rel=1e-6)
        assert scalars["entropy.mean"] == pytest.approx(entropy, rel=1e-6)
        assert scalars["lr"] == pytest.approx(lr, rel=1e-9)
        assert 1 <= scalars["length.mean"] <= scalars["length.max"] <= TOKENS
        assert {"reward.std", "group.zero_std", "length.truncated", "advantage.std"} <= set(scalars)


def test_where_trl_takes_the_detached_current_log_probs_policy_is_missing_and_not_zero(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    frame = frame_of(service, 1)
    assert frame.pairs == {}
    assert frame.missing == {"policy": "detached", "mismatch": "no_rollout_logprobs"}


def test_policy_holds_the_first_update_of_a_generation_and_update_the_later_ones(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1)
    scored = []
    original, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def record(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        scored.append(result[0].detach().double())
        return result

    def kept(model: Any, inputs: Any) -> Any:
        value = loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        deltas.append((scored[-1] - inputs["old_per_token_logps"].double())[mask])
        return value

    deltas: list[torch.Tensor] = []
    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = record, kept
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    assert service.steps() == [4], "four updates, one generation: one step"
    pairs = frame_of(service, 4).pairs
    first, later = statistics(pairs["policy"]).values, statistics(pairs["update"]).values
    moved = torch.cat(deltas[1:])
    assert first["tokens"] == len(deltas[0])
    assert first["kl_k2"] == pytest.approx(float((deltas[0] ** 2).mean() / 2), rel=1e-6, abs=1e-15)
    assert later["tokens"] == len(moved)
    assert later["kl_k2"] == pytest.approx(float((moved**2).mean() / 2), rel=1e-6)
    assert later["kl_k2"] > 1e6 * first["kl_k2"]
    assert "clip_high" in later


def test_the_engines_log_probs_are_compared_and_a_stale_engine_shows(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    found = {}
    for stale in (False, True):
        trainer = with_engine(make_trainer(tmp_path, max_steps=2), stale=stale)
        adapter.attach(trainer, monitor=make_monitor(run=f"lab/{stale}"))
        trainer.train()
        found[stale] = service.frames()[-1].pairs
    for name in ("mismatch", "mismatch_current"):
        healthy, ill = (statistics(found[stale][name]).values for stale in (False, True))
        assert healthy["abs_max"] < 1e-5
        assert ill["abs_mean"] > 1e-3
    assert statistics(found[True]["policy"]).values["abs_max"] < 1e-5, "the trainer itself is well"


def test_a_truncated_sampler_is_told_as_differing_semantics(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = with_engine(make_trainer(tmp_path, max_steps=1, top_p=0.9))
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    frame = frame_of(service, 1)
    assert frame.missing["mismatch"] == "semantics_differ"
    assert frame.semantics["mismatch"]["b"].normaliser == "kept_set"


def test_correction_is_toggled_between_generations(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = with_engine(make_trainer(tmp_path, max_steps=3))
    trainer.vllm_importance_sampling_mode = "token_truncate"
    commanded(service, make_monitor, trainer, 1, "disable_is_correction")
    corrected = ["sampling/importance_sampling_ratio/mean" in row for row in trainer.state.log_history[:-1]]
    assert corrected == [True, True, False]
    assert service.acks[-1][1].state == "done"
    assert frame_of(service, 3).missing["policy"] == "detached", "without correction TRL scores no old log-probs"

    trainer = with_engine(make_trainer(tmp_path, max_steps=3, vllm_importance_sampling_correction=False))
    commanded(service, make_monitor, trainer, 1, "enable_is_correction", cap=1.5)
    corrected = ["sampling/importance_sampling_ratio/mean" in row for row in trainer.state.log_history[:-1]]
    assert corrected == [False, False, True]
    assert trainer.vllm_importance_sampling_clip_max == 1.5


def test_scale_lr_multiplies_every_later_update_and_leaves_the_schedule(
    bare: tuple[Any, ...], service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    rates = []
    commanded(service, make_monitor, trainer, 1, "scale_lr", factor=0.25)
    rates = [frame_of(service, step).scalars["lr"] for step in (1, 2, 3, 4)]
    unscaled = [row[3] for row in bare[0]]
    assert rates == pytest.approx([unscaled[0], unscaled[1], 0.25 * unscaled[2], 0.25 * unscaled[3]])
    assert [row["learning_rate"] for row in trainer.state.log_history[:-1]] == pytest.approx(unscaled)
    assert remains(trainer)[1] != bare[1]


def test_skip_update_leaves_parameters_moments_and_schedule_as_they_are(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    states: list[bytes] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            moments = trainer.optimizer.state_dict()["state"]
            parts = [p.detach() for p in trainer.model.parameters()]
            parts += [value for each in moments.values() for value in each.values()]
            seen = b"".join(part.numpy().tobytes() for part in parts)
            states.append(seen + repr(trainer.lr_scheduler.get_last_lr()).encode())

    trainer.add_callback(Look())
    commanded(service, make_monitor, trainer, 1, "skip_update", steps=1)
    assert states[2] == states[1], "the third update was left out"
    assert len(set(states)) == 3, "the others were not"
    assert [frame_of(service, step).scalars["update.skipped"] for step in (1, 2, 3, 4)] == [0, 0, 1, 0]


def test_checkpoint_now_writes_a_full_checkpoint_that_training_resumes_from(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    commanded(service, make_monitor, trainer, 1, "checkpoint_now")
    notice = service.notices("checkpoint")[0]
    assert notice.data["step"] == 2
    assert set(notice.data["scope"]) == {"weights", "optimizer", "scheduler", "rng", "data"}
    again = make_trainer(tmp_path)
    again.train(resume_from_checkpoint=notice.data["path"])
    assert again.state.global_step == 4


def test_checkpoints_of_the_trainer_itself_are_announced(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True, max_steps=2)
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    service.wait_for(lambda: bool(service.notices("checkpoint")))
    data = service.notices("checkpoint")[0].data
    assert data["scope"] == ["weights"]
    assert (Path(data["path"]) / "config.json").exists()


def test_stop_ends_training_at_the_boundary(service: FakeService, make_monitor: MakeMonitor, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    commanded(service, make_monitor, trainer, 1, "stop")
    assert trainer.state.global_step == 2
    assert service.notices("finished")[0].data["status"] == "stopped"


def test_two_processes_train_together_and_stop_together(service: FakeService, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        "FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"), "FORESHOCK_LAUNCH": "one",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    script = textwrap.dedent(f"""
        import runpy, sys, types
        # Packages that ship a `tests` of their own would be found first.
        sys.modules["tests"] = types.ModuleType("tests")
        sys.modules["tests"].__path__ = [{str(Path(__file__).parents[2])!r}]
        from pathlib import Path
        from foreshock.control.inbox import Pending
        from foreshock.transport.clock import boot_s
        here = runpy.run_path({__file__!r})
        trainer = here["make_trainer"](Path({str(tmp_path)!r}))
        watched = here["adapter"].attach(trainer, run="lab/x")
        def ask(step):
            if step == 1 and trainer.accelerator.process_index == 0:
                action = here["Action"](kind="stop")
                command = here["Command"](id="c1", run="lab/x", attempt=1, actions=[action])
                watched.monitor._process.inbox.put(Pending(command, boot_s() + 100.0))
        trainer.add_callback(here["Between"](ask))
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        print("stopped after", trainer.state.global_step)
    """)
    each = [environment | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for env in each
    ]
    try:
        ended = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
        assert out.strip().splitlines()[-1] == "stopped after 2"
    assert sorted((frame.rank, frame.step) for frame in service.frames()) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_capabilities_follow_the_configuration(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    always = {"scale_lr", "skip_update", "checkpoint_now", "pause", "resume", "stop"}
    assert adapter.capabilities(trainer) == always
    trainer.use_vllm = True
    assert adapter.capabilities(trainer) == always | {"enable_is_correction", "disable_is_correction"}
    trainer.args.optim = "lomo"
    assert not {"scale_lr", "skip_update"} & adapter.capabilities(trainer)
    trainer.args.optim = "adamw_torch"
    trainer.accelerator.scaler = object()
    assert "skip_update" not in adapter.capabilities(trainer)
    trainer.accelerator.scaler = None


def test_evaluation_gives_the_validation_reward_of_its_own_step(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, per_device_eval_batch_size=4)
    trainer.eval_dataset = trainer.train_dataset.select(range(4))
    trainer.args.eval_strategy, trainer.args.eval_steps, trainer.state.eval_steps = IntervalStrategy.STEPS, 1, 1
    adapter.attach(trainer, monitor=make_monitor())
    trainer.train()
    rewards = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert [frame_of(service, step).scalars["reward.validation"] for step in (1, 2)] == pytest.approx(rewards)
