"""slime's batches, settings and ranks, read. Log-probs are lists, one tensor of response tokens per sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from foreshock import Semantics
from foreshock.adapters import megatron_parallel
from foreshock.adapters.rows import Rows


class Rollout(NamedTuple):
    """What a training rank was given for one rollout."""

    scalars: dict[str, float]
    updates: int
    engine: bool
    """Whether it holds the engine's log-probs."""


@dataclass(frozen=True, slots=True)
class Scored(Rows):
    """A micro-batch, packed: [K] response tokens of all samples."""

    old_source: str
    entropy: Any
    """Mean over the sampled tokens."""


class Place(NamedTuple):
    """This rank: where it reports, and whether it is the first of all."""

    rank: int
    world: int
    reports: bool
    first: bool
    agree: Callable[[bool], tuple[bool, Callable[[Any], Any] | None]] = megatron_parallel.agree


noted: tuple[int, Rollout] | None = None
"""Of the rollout that is about to be trained on, by rollout id."""


def place() -> Place:
    """From Megatron's state. Of the ranks with the same rows one reports: the last stage's first of a tensor group."""
    import torch.distributed as dist
    from megatron.core import mpu

    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    world = mpu.get_data_parallel_world_size(with_context_parallel=True)
    reports = bool(last and mpu.get_tensor_model_parallel_rank() == 0)
    return Place(int(rank), int(world), reports, dist.get_rank() == 0)


def loss_module() -> Any:
    """Where slime's loss functions are looked up."""
    return import_module("slime.backends.megatron_utils.loss")


def in_backward() -> bool:
    """Whether a backward pass is running: `--recompute-loss-function` computes the loss a second time there."""
    import torch

    return int(torch._C._current_graph_task_id()) != -1


def read(data: Mapping[str, Any]) -> Rollout:
    """Scalars of a rank's share: rewards, lengths, truncation. The engine's log-probs come in with the samples."""
    found: dict[str, float] = {}
    rewards = [float(value) for value in data.get("raw_reward") or ()]
    if rewards:
        mean = sum(rewards) / len(rewards)
        spread = sum((value - mean) ** 2 for value in rewards) / len(rewards)
        found |= {
            "reward.mean": mean,
            "reward.std": spread**0.5,
            "reward.min": min(rewards),
            "reward.max": max(rewards),
        }
    lengths = [int(value) for value in data.get("response_lengths") or ()]
    if lengths:
        found |= {"length.mean": sum(lengths) / len(lengths), "length.max": float(max(lengths))}
    cut = [float(value) for value in data.get("truncated") or ()]
    if cut:
        found["length.truncated"] = sum(cut) / len(cut)
    return Rollout(found, len(data.get("num_microbatches") or ()), bool(data.get("rollout_log_probs")))


def rows(scored: Any, batch: Mapping[str, Any], args: Any) -> Scored | None:
    """None where this rank has only pieces of its sequences. `scored` is what `get_log_probs_and_entropy` returned."""
    import torch

    current = scored[1]["log_probs"]
    masks = batch["loss_masks"]
    if any(len(row) != len(mask) for row, mask in zip(current, masks, strict=True)):
        return None

    def packed(name: str) -> Any:
        held = batch.get(name)
        return torch.cat(list(held)).detach() if held is not None and len(held) else None

    old, source = packed("log_probs"), "older_weights" if getattr(args, "keep_old_actor", False) else "same_weights"
    if getattr(args, "use_rollout_logprobs", False):
        old, source = packed("rollout_log_probs"), "rollout"
    elif old is None:
        source = "detached"
    ids = [tokens[len(tokens) - len(mask) :] for tokens, mask in zip(batch["unconcat_tokens"], masks, strict=True)]
    lengths = torch.tensor([0, *(len(row) for row in current)])
    mask_K = torch.cat(list(masks))
    entropy_K = torch.cat(list(scored[1]["entropy"])).detach()
    return Scored(
        torch.cat(list(current)).detach(), old, packed("rollout_log_probs"), packed("ref_log_probs"),
        packed("advantages"), mask_K, torch.cat(ids), lengths.cumsum(0).to(mask_K.device), source,
        (entropy_K * mask_K).sum() / mask_K.sum().clamp(min=1),
    )  # fmt: skip


def clip_range(args: Any) -> tuple[float, float] | None:
    """The ratio's bounds; None for estimators that clip something else."""
    if getattr(args, "advantage_estimator", "") in ("gspo", "cispo") or getattr(args, "eps_clip", None) is None:
        return None
    high = args.eps_clip if getattr(args, "eps_clip_high", None) is None else args.eps_clip_high
    return 1.0 - float(args.eps_clip), 1.0 + float(high)


def semantics(args: Any) -> dict[str, Semantics]:
    """slime divides its logits by the rollout's temperature; sglang tells log-probs before it cuts (top-k, top-p)."""
    temperature = float(getattr(args, "rollout_temperature", 1.0))
    same = {"temperature": temperature, "truncation": "none", "normaliser": "full_vocabulary"}
    return {
        "a": Semantics(engine="megatron", source="rescore", **same),  # type: ignore[arg-type]
        "b": Semantics(engine="sglang", source="decode", **same),  # type: ignore[arg-type]
    }


def configuration(args: Any) -> dict[str, Any]:
    """slime's arguments, plain ones, and what our figures rest on."""
    said = {key: value for key, value in vars(args).items() if isinstance(value, str | int | float | bool | list)}
    return said | {"host": "slime"}


def latest_checkpoint(args: Any) -> tuple[int, str] | None:
    """(iteration, folder) that Megatron's tracker file names; None without one."""
    root = getattr(args, "save", None)
    if not root:
        return None
    try:
        step = int(Path(root, "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return step, os.path.abspath(os.path.join(root, f"iter_{step:07d}"))
