"""One rank of real Megatron-core runs: `python megatron_world.py '{"tensor": 2}' SCENARIO…`, with RANK, WORLD_SIZE and
MASTER_* set. Each scenario is a run of its own, `lab/<scenario>`; one JSON line tells what the rank saw of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import megatron_on_cpu as cpu

from foreshock.control.inbox import Pending
from foreshock.guard import guarded
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ppo_loss(batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """A host's loss closure: log-probs by Megatron's cross entropy, which overwrites the logits."""
    from megatron.core import tensor_parallel

    if output.shape == batch["labels"].shape:
        logps = -output
    else:
        laid = batch["labels"].t().contiguous()
        logps = -tensor_parallel.vocab_parallel_cross_entropy(output.transpose(0, 1).contiguous().float(), laid).t()
    kept.append(logps.detach().clone())
    ratio = (logps - batch["old_log_probs"]).exp()
    advantages = torch.linspace(-1, 1, len(ratio))[:, None]
    loss = -(torch.minimum(ratio, ratio.clamp(0.5, 2.0)) * advantages * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {"loss": loss.detach()}


def quiet_loss(batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """A host's closure whose log-probs nobody can hear: a cross entropy of its own."""
    logps = output.float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    kept.append(logps.detach().clone())
    loss = -(logps * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {"loss": loss.detach()}


kept: list[torch.Tensor] = []


class Loop:
    """A trainer of four micro-batches a step, spread over data-parallel ranks."""

    def __init__(
        self, run: str, watched: bool = True, distributed: bool = False, loss: Any = ppo_loss, **arguments: Any
    ) -> None:
        from megatron.core import parallel_state as state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from foreshock.adapters import megatron_core

        self.model = cpu.make_gpt(state.get_tensor_model_parallel_world_size())
        self.ddp, self.optimizer = cpu.make_optimizer(self.model, distributed, overlap=distributed)
        self.schedule = get_forward_backward_func()
        self.loss, self.scored_by_model = loss, False
        self.micro = cpu.batches()[state.get_data_parallel_rank() :: state.get_data_parallel_world_size()]
        self.watch = None
        if watched:
            self.watch = megatron_core.attach(f"lab/{run}", optimizer=self.optimizer, model=self.ddp, **arguments)
        self.losses: list[float] = []

    def forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        size = batch["tokens"].shape[1]
        blocked = torch.ones(size, size).triu(1).bool()[None, None].expand(len(batch["tokens"]), -1, -1, -1)
        labels = batch["labels"] if self.scored_by_model else None
        output = model(batch["tokens"], batch["position_ids"], blocked, labels=labels)
        loss = partial(self.loss, batch)
        if self.watch is not None:
            loss = self.watch.loss(
                loss, labels=batch["labels"], mask=batch["mask"], old_log_probs=batch["old_log_probs"],
                rollout_log_probs=batch["rollout_log_probs"], seq_ids=batch["row"], clip_range=(0.5, 2.0),
            )  # fmt: skip
        return output, loss

    def run(self, forward_only: bool = False) -> list[Any]:
        return self.schedule(
            forward_step_func=self.forward_step, data_iterator=iter(self.micro), model=self.ddp,
            num_microbatches=len(self.micro), seq_length=cpu.POSITIONS, micro_batch_size=2, forward_only=forward_only,
        )  # fmt: skip

    def step(self, number: int) -> Any:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses += [float(out["loss"]) for out in self.run()]
        result = self.optimizer.step()
        if self.watch is not None:
            self.watch.end_step(number)
        return result

    def digest(self) -> str:
        digest = hashlib.sha256(repr(self.losses).encode())
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()

    def end(self) -> None:
        if self.watch is not None:
            self.watch.monitor.finish()


def train(run: str = "train", **arguments: Any) -> dict[str, Any]:
    """Two steps, and what they leave behind."""
    scored_by_model = arguments.pop("scored_by_model", False)
    loop = Loop(run, **arguments)
    loop.scored_by_model = scored_by_model
    for number in (1, 2):
        loop.step(number)
    loop.end()
    return {"digest": loop.digest(), "tokens": float(sum(b["mask"].sum() for b in loop.micro))}


def unwatched() -> dict[str, Any]:
    return train(watched=False)


def scored_by_model() -> dict[str, Any]:
    """The model is given the labels: its output is the loss per token."""
    return train("scored_by_model", scored_by_model=True)


def quiet() -> dict[str, Any]:
    """Nobody can hear the closure's cross entropy."""
    return train("quiet", loss=quiet_loss)


def broken() -> dict[str, Any]:
    """A collector that throws at every call of one of its parts."""
    from foreshock.adapters.megatron_core import MegatronAdapter
    from foreshock.frames.builder import StepBuilder
    from foreshock.stats.pair import PairAccumulator

    def throw(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    digests = {}
    for owner, name in ((PairAccumulator, "observe"), (StepBuilder, "seal"), (MegatronAdapter, "_log_loss")):
        working = getattr(owner, name)
        setattr(owner, name, guarded()(throw) if name == "_log_loss" else throw)
        digests[name] = train("broken", raise_errors=False, guard_limit=2)["digest"]
        setattr(owner, name, working)
    return digests


def computed() -> dict[str, Any]:
    """Log-probs from split logits against Megatron's own, and whether the logits were left alone."""
    from megatron.core import tensor_parallel

    from foreshock.adapters import megatron_parallel as parallel
    from foreshock.guard import Guard

    torch.manual_seed(5)
    whole = torch.randn(3, 11, cpu.VOCABULARY) * 4
    labels = torch.randint(0, cpu.VOCABULARY, (3, 11))
    group, _ = parallel.groups()
    logits = whole.chunk(group.size, -1)[group.rank].contiguous()
    before = logits.clone()
    ours = parallel.log_probs(logits, labels, temperature=1.0, tensor=group, guard=Guard(1, True, lambda: None))
    same = torch.equal(logits, before)
    theirs = -tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), labels)
    mask = torch.arange(33).reshape(3, 11) % 3
    some = parallel.log_probs(
        logits, labels, temperature=1.0, tensor=group, guard=Guard(1, True, lambda: None), mask=mask
    )
    assert ours is not None
    assert some is not None
    chosen = torch.equal(some, torch.where(mask > 0, theirs, 0.0))
    return {"equal": torch.equal(ours, theirs), "chosen": chosen, "untouched": same and torch.equal(logits, before)}


def stale() -> dict[str, Any]:
    """Distributed optimizer with overlapped gather: a forward whose hooks are off reads stale shards."""
    from foreshock.adapters import megatron_sync as sync

    loop = Loop("stale", distributed=True)
    assert loop.watch is not None
    loop.step(1)
    equal_after_step = sync.parameters_equal(loop.ddp)
    loop.run(forward_only=True)
    loop.step(2)
    loop.ddp.disable_forward_pre_hook(param_sync=False)
    loop.run(forward_only=True)
    loop.ddp.enable_forward_pre_hook()
    loop.step(3)
    detail = loop.watch._resync_trainer(None)  # type: ignore[arg-type]
    equal_after_resync = sync.parameters_equal(loop.ddp)
    loop.end()
    return {"after_step": equal_after_step, "after_resync": equal_after_resync, "detail": detail}


def commands() -> dict[str, Any]:
    """Skips the update of step 2 and halves the rate from step 3 on; on all ranks, though rank 0 alone is asked."""
    loop = Loop("commands")
    assert loop.watch is not None
    inner = loop.optimizer.chained_optimizers[0].optimizer
    original, rates = inner.step, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        rates.append(inner.param_groups[0]["lr"])
        return original(*args, **kwargs)

    inner.step = noted
    asked = {
        1: Action(kind="skip_update", arguments={"steps": 1}),
        2: Action(kind="scale_lr", arguments={"factor": 0.5}),
    }
    successes, states = [], []
    for number in (1, 2, 3, 4):
        if RANK == 0 and number in asked:
            command = Command(id=f"c{number}", run="lab/commands", attempt=1, actions=[asked[number]])
            loop.watch.monitor._process.inbox.put(Pending(command, boot_s() + 100.0))
        successes.append(bool(loop.step(number)[0]))
        parts = [p.detach() for p in loop.model.parameters()]
        parts += [moment for each in inner.state.values() for moment in each.values() if torch.is_tensor(moment)]
        states.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
    loop.end()
    return {"successes": successes, "rates": rates, "states": states}


def context() -> dict[str, Any]:
    """Rows cut in Megatron's way over a context-parallel group; log-probs at hand, as after a host's own scoring."""
    return cut_rows("context")


def one_fails() -> dict[str, Any]:
    """The same where one rank's collector throws at every call: the other must not wait for ever."""
    from foreshock.stats.pair import PairAccumulator

    def throw(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    if RANK == 1:
        PairAccumulator.observe = throw  # type: ignore[method-assign]
    return cut_rows("one_fails", raise_errors=False, guard_limit=2)


def cut_rows(run: str, **arguments: Any) -> dict[str, Any]:
    from megatron.core.utils import get_batch_on_this_cp_rank

    from foreshock.adapters import megatron_core

    watch = megatron_core.attach(f"lab/{run}", **arguments)
    for batch in cpu.batches():
        row = batch.pop("row")
        batch["current"] = batch["old_log_probs"] * 0.98 + 0.03
        cut = get_batch_on_this_cp_rank(batch)
        watch.observe("policy", cut["current"], cut["old_log_probs"], cut["mask"], seq_ids=row)
    watch.end_step(1)
    watch.monitor.finish()
    return {"off": watch.guard.off}


if __name__ == "__main__":
    cpu.begin(**json.loads(sys.argv[1]))
    said = {name: globals()[name]() for name in sys.argv[2:]}
    print(json.dumps(said), flush=True)
    dist.barrier()
    os._exit(0)
