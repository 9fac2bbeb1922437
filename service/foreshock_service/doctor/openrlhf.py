"""OpenRLHF's PPO start scripts and argument files: what they imply.

Defaults are OpenRLHF's own (openrlhf/cli/train_ppo_ray.py at 3c3be623, 2026-08-13). Options have two spellings: dotted
(`--rollout.top_p`) from 2026-04-19 on, flat (`--top_p`) before; both are read. OpenRLHF always recomputes the old
log-prob and divides the trainer's logits by the rollout temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from foreshock_service.doctor import shared
from foreshock_service.doctor.document import Document, Value
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.shared import finding, number

FLAT: Final = {
    "rollout.batch_size": "rollout_batch_size", "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.micro_batch_size": "micro_rollout_batch_size", "train.micro_batch_size": "micro_train_batch_size",
    "train.batch_size": "train_batch_size", "train.max_epochs": "max_epochs",
    "train.dynamic_batch_enable": "use_dynamic_batch", "train.async_enable": "async_train",
    "train.partial_rollout_enable": "partial_rollout", "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu", "rollout.top_p": "top_p",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.advantage.is_correction_type": "vllm_is_correction_type",
    "algo.advantage.is_correction_threshold": "vllm_is_truncated_threshold",
    "vllm.enable_prefix_caching": "enable_prefix_caching", "vllm.num_engines": "vllm_num_engines",
    "ds.lora.rank": "lora_rank", "ds.lora.dropout": "lora_dropout", "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high", "actor.dual_clip": "dual_clip", "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.init_coef": "init_kl_coef", "algo.kl.estimator": "kl_estimator",
    "actor.policy_loss_type": "policy_loss_type",
}  # fmt: skip
"""Dotted → flat."""
_OWN: Final = ("vllm_num_engines", "micro_rollout_batch_size", "enable_vllm_is_correction")


def recognises(document: Document) -> bool:
    """Whether this looks like OpenRLHF's options, dotted or flat."""
    dotted = document.has("actor") and any(document.has(n) for n in ("rollout.batch_size", "vllm.num_engines", "algo"))
    return dotted or any(document.has(name) for name in _OWN)


def examine(document: Document, version: str | None) -> list[Finding]:
    """Everything that the options imply, worst first. `version` decides nothing here."""
    return shared.worst_first([f for check in CHECKS for f in check(document)])


def get(d: Document, name: str, default: Any = None) -> Value:
    """The option under either spelling."""
    return d.get(FLAT[name] if not d.has(name) and d.has(FLAT[name]) else name, default)


def numeric(d: Document, name: str, default: float | None = None) -> Value:
    """As `get`, for numbers."""
    return d.number(FLAT[name] if not d.has(name) and d.has(FLAT[name]) else name, default)


def steps(d: Document) -> float | None:
    """Optimizer steps per rollout; None where the options do not tell."""
    sizes = [number(numeric(d, name, default)) for name, default in _SIZES]
    if any(size is None or size <= 0 for size in sizes):
        return None
    prompts, group, batch, epochs = (size for size in sizes if size is not None)
    return prompts * group / batch * epochs


_SIZES: Final = (
    ("rollout.batch_size", 1024.0), ("rollout.n_samples_per_prompt", 1.0), ("train.batch_size", 128.0),
    ("train.max_epochs", 1.0),
)  # fmt: skip


def on_policy(d: Document) -> Iterator[Finding]:
    at, *more = (numeric(d, name, default) for name, default in _SIZES)
    late = get(d, "train.async_enable", False)
    if late.value is True:
        yield finding(
            "asynchronous", "info", "Rollouts are older than the weights that train on them", late,
            "Samples are made while the trainer updates: their ratios are not 1 by design.",
            "Read `mismatch` with its lag; correct for it (is_correction_enable).",
        )  # fmt: skip
    yield from shared.updates(steps(d), at, f"{at.value} prompts × {more[0].value} samples / {more[1].value}", *more)


def two_partitions(d: Document) -> Iterator[Finding]:
    dynamic = get(d, "train.dynamic_batch_enable", False)
    if dynamic.value is True:
        budget = numeric(d, "train.max_tokens_per_gpu", 16192)
        yield from shared.two_partitions([(budget, numeric(d, "rollout.max_tokens_per_gpu", number(budget)))])
    elif dynamic.value is False:
        sizes = numeric(d, "train.micro_batch_size", 1), numeric(d, "rollout.micro_batch_size", 1)
        yield from shared.two_partitions([sizes])


def sampling(d: Document) -> Iterator[Finding]:
    top_p = numeric(d, "rollout.top_p", 1.0)
    yield from shared.truncated([top_p] if shared.below_one(top_p) else [], f"--{top_p.path} 1.0 for training.")


def correction(d: Document) -> Iterator[Finding]:
    used = get(d, "algo.advantage.is_correction_enable", False)
    if used.value is False:
        yield shared.no_correction(used, "vLLM", f"--{used.path} with type tis or icepop.")
        yield finding(
            "logprobs_not_collected", "warning", "The engine's log-probs are not collected", used,
            "OpenRLHF asks vLLM for them only where the correction is on: nobody sees whether engine and trainer agree "
            "on what was sampled, and vllm_kl is not logged.",
            f"--{used.path}.",
        )  # fmt: skip
        return
    kind, loss = get(d, "algo.advantage.is_correction_type", "tis"), get(d, "actor.policy_loss_type", "ppo")
    if used.value is True and loss.value == "ppo" and kind.value == "seq-mask-tis":
        yield finding(
            "is_weight_unbounded", "warning", "The correction's token weights are not bounded", kind,
            "seq-mask-tis drops sequences by their geometric mean, but multiplies the loss by each token's raw ratio: "
            "one token of 1e3 in a sequence that passes carries the update (openrlhf/models/loss.py, 3c3be623).",
            f"--{kind.path} tis or icepop.", used,
        )  # fmt: skip


def stale_cache(d: Document) -> Iterator[Finding]:
    caches, partial = get(d, "vllm.enable_prefix_caching", False), get(d, "train.partial_rollout_enable", False)
    if caches.value is True and partial.value is True:
        yield finding(
            "stale_cache", "warning", "The prefix cache may outlive the weights that filled it", caches,
            "The cache is asked to empty before the weights arrive, with paused requests still holding blocks of it: "
            "vLLM then keeps them, and later prompts reuse keys and values of old weights (the same fault: "
            "NVIDIA-NeMo/RL 4018, NovaSky-AI/SkyRL 2246).",
            f"Leave --{caches.path} out with partial rollouts.", partial,
        )  # fmt: skip


def dropout(d: Document) -> Iterator[Finding]:
    rank, rate = numeric(d, "ds.lora.rank", 0), numeric(d, "ds.lora.dropout", 0)
    if shared.positive(rank) and shared.positive(rate):
        yield shared.dropout(
            rate,
            "The scoring pass runs in eval mode and the engine has none: every ratio is noise around 1, and clipping "
            "starts at the first step.",
            f"--{rate.path} 0.", rank,
        )  # fmt: skip


def clipping(d: Document) -> Iterator[Finding]:
    both, one = get(d, "actor.eps_clip_low_high"), numeric(d, "actor.eps_clip", 0.2)
    if isinstance(both.value, list) and len(both.value) == 2:
        yield from shared.clip_off(*(Value(f"{both.path}[{i}]", both.value[i], both.line) for i in (0, 1)))
    elif both.value is None:
        yield from shared.clip_off(one, one)
    yield from shared.no_dual_clip(get(d, "actor.dual_clip"), steps(d), "--actor.dual_clip 3.0.")


def kl(d: Document) -> Iterator[Finding]:
    used, coefficient = get(d, "algo.kl.use_loss", False), numeric(d, "algo.kl.init_coef", 0.01)
    if number(coefficient) == 0:
        yield shared.no_reference(coefficient)
    elif used.value is True:
        estimator = get(d, "algo.kl.estimator", "k1")
        if estimator.value == "k1":
            yield from shared.kl_k1_loss(estimator, coefficient, f"--{estimator.path} k2 or k3 (left out: k1).")


CHECKS = (on_policy, two_partitions, sampling, correction, stale_cache, dropout, clipping, kl)
