"""verl's PPO configurations and start scripts: what they imply.

Defaults are verl's own (verl/trainer/config at 1dda039b, 2026-08-22). Hydra composes them with the file: what it leaves
out is read with them. verl divides the trainer's logits by `rollout.temperature`, so a temperature is on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from foreshock_service.doctor import shared
from foreshock_service.doctor.document import Document, Value
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.shared import finding, number

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
ASYNCHRONOUS = ("separate_async", "colocate_async")


def recognises(document: Document) -> bool:
    """Whether this looks like a verl configuration."""
    return document.has("actor_rollout_ref")


def examine(document: Document, version: str | None) -> list[Finding]:
    """Everything that the file implies, worst first. Raises ValueError for a version that is none."""
    old = shared.below_version(version, (0, 9))
    found = [f for check in CHECKS for f in check(document)]
    found += [f for check in BEFORE_0_9 if old is not False for f in check(document)]
    return shared.worst_first(found)


def steps(d: Document) -> float | None:
    """Optimizer steps per rollout; None where the file does not tell."""
    sizes = [number(d.number(f"{path}", default)) for path, default in _SIZES]
    if any(size is None or size <= 0 for size in sizes):
        return None
    batch, mini, epochs = (size for size in sizes if size is not None)
    return math.ceil(batch / mini) * epochs


_SIZES = (
    ("data.train_batch_size", 1024.0), (f"{ACTOR}.ppo_mini_batch_size", 256.0), (f"{ACTOR}.ppo_epochs", 1.0),
)  # fmt: skip


def on_policy(d: Document) -> Iterator[Finding]:
    batch, mini, epochs = (d.number(path, default) for path, default in _SIZES)
    mode = d.get("trainer.v1.trainer_mode", "sync")
    if mode.value in ASYNCHRONOUS or d.has("async_training"):
        at = mode if mode.present else d.get("async_training")
        yield finding(
            "asynchronous", "info", "Rollouts are older than the weights that train on them", at,
            "Samples of several versions meet in one update: their ratios are not 1 by design.",
            "Read `mismatch` per version lag, and `staleness.mean`.",
        )  # fmt: skip
        return
    count = steps(d)
    yield from shared.updates(
        count, batch, f"{batch.value} prompts / {mini.value} per mini-batch × {epochs.value} epochs", mini, epochs
    )


def old_source(d: Document) -> Iterator[Finding]:
    bypass = d.get(f"{CORRECTION}.bypass_mode", False)
    if bypass.value is True:
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is the rollout engine's", bypass,
            "No scoring pass: the ratio holds the engine's mismatch and the policy's drift together, and clips both.",
            "bypass_mode: false keeps the two apart, for one more forward pass.",
        )  # fmt: skip
    elif bypass.known:
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is recomputed by a scoring pass", bypass,
            "A second forward pass over the same weights: its difference from the training pass is the invariant.",
            "Nothing to change.",
        )  # fmt: skip


def two_partitions(d: Document) -> Iterator[Finding]:
    if d.get(f"{CORRECTION}.bypass_mode", False).value is True:
        return
    dynamic = d.get(f"{ACTOR}.use_dynamic_bsz", False)
    scoring = d.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz", dynamic.value)
    pairs = [(dynamic, scoring)]
    if dynamic.value is True and scoring.value is True:
        budget = d.number(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
        pairs.append((budget, d.number(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", number(budget))))
    elif dynamic.value is False and scoring.value is False:
        size = d.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        pairs.append((size, d.number(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")))
    yield from shared.two_partitions([p for p in pairs if None not in (p[0].value, p[1].value)])


def sampling(d: Document) -> Iterator[Finding]:
    top_k, top_p = d.number(f"{ROLLOUT}.top_k", -1), d.number(f"{ROLLOUT}.top_p", 1)
    cut = [v for v, cuts in ((top_k, shared.positive(top_k)), (top_p, shared.below_one(top_p))) if cuts]
    yield from shared.truncated(cut, "top_k: -1 and top_p: 1 under rollout; keep truncation to rollout.val_kwargs.")
    mode, temperature = d.get(f"{ROLLOUT}.logprobs_mode", "processed_logprobs"), d.number(f"{ROLLOUT}.temperature", 1)
    if mode.value == "raw_logprobs" and number(temperature) not in (None, 1.0):
        yield finding(
            "temperature_one_sided", "warning", "The engine's log-probs are before temperature, the trainer's after",
            temperature,
            "The two score different distributions: a first-token ratio of 2.0 at temperature 0.6 is reported "
            "(huggingface/trl 4159).",
            "logprobs_mode: processed_logprobs.", mode,
        )  # fmt: skip


def correction(d: Document) -> Iterator[Finding]:
    weights, rejects = d.get(f"{CORRECTION}.rollout_is"), d.get(f"{CORRECTION}.rollout_rs")
    collected, bypass = d.get(f"{ROLLOUT}.calculate_log_probs", True), d.get(f"{CORRECTION}.bypass_mode", False)
    wanted = bool(weights.value or rejects.value or bypass.value)
    if collected.value is False:
        yield finding(
            "logprobs_not_collected", "critical" if wanted else "warning", "The engine's log-probs are not collected",
            collected,
            "Without them nobody sees whether engine and trainer agree on what was sampled, and the correction has "
            "nothing to work on.",
            "calculate_log_probs: true under rollout.",
        )  # fmt: skip
    if all(v.known for v in (weights, rejects, bypass)) and not wanted:
        engine = d.get(f"{ROLLOUT}.name")
        yield shared.no_correction(
            weights,
            "The rollout engine",
            "algorithm.rollout_correction.rollout_is: token (threshold 2.0).",
            *([engine] if engine.present else []),
        )
    threshold, length = d.number(f"{CORRECTION}.rollout_is_threshold", 2.0), d.number("data.max_response_length", 512)
    summed = [v for v in (rejects,) if isinstance(v.value, str) and "seq_sum" in v.value]
    if weights.value == "sequence" or summed:
        at = weights if weights.value == "sequence" else rejects
        yield from shared.sequence_weights(
            at, threshold if at is weights else d.number(f"{CORRECTION}.rollout_rs_threshold"), length,
            "rollout_is: token, or a geometric filter (rollout_rs: seq_mean_k1).",
        )  # fmt: skip


def stale_lora(d: Document) -> Iterator[Finding]:
    ranks = [d.number("actor_rollout_ref.model.lora_rank", 0), d.number("actor_rollout_ref.model.lora.rank", 0)]
    rank = next((r for r in ranks if shared.positive(r)), None)
    merge, backend = d.get("actor_rollout_ref.model.lora.merge", False), d.get(f"{ROLLOUT}.checkpoint_engine.backend")
    if rank and merge.value is False and backend.present and backend.known and backend.value not in (None, "naive"):
        yield finding(
            "adapter_never_synchronised", "critical", "The rollout engine never receives the LoRA adapter", backend,
            "With a checkpoint engine other than naive each sync pushes the frozen base model: the engine keeps "
            "sampling from the initial policy, and it looks like asynchronous staleness (verl-project/verl 7495).",
            "actor_rollout_ref.model.lora.merge: true, or a verl with pull request 7496.", rank, merge,
            versions="verl without pull request 7496 (open on 2026-08-22)",
        )  # fmt: skip


def quantised(d: Document) -> Iterator[Finding]:
    said, weights = d.get(f"{ROLLOUT}.quantization"), d.get(f"{CORRECTION}.rollout_is")
    if isinstance(said.value, str):
        covered = bool(weights.value) or not weights.known
        yield finding(
            "quantised_rollout", "info" if covered else "warning", "The engine samples from quantised weights", said,
            "Trainer and sampler are different policies, further apart as training moves the weights: with tensor-wise "
            "fp8 the KL tripled in 8 steps, with mxfp8 it stayed (verl-project/verl 7519).",
            "Token-level correction (rollout_is: token), and watch `mismatch.kl_k3` for a trend.", weights,
        )  # fmt: skip


def clipping(d: Document) -> Iterator[Finding]:
    if d.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla").value != "vanilla":
        return
    said = d.number(f"{ACTOR}.clip_ratio", 0.2)
    low, high = d.number(f"{ACTOR}.clip_ratio_low", 0.2), d.number(f"{ACTOR}.clip_ratio_high", 0.2)
    if said.present and said.known and not (low.present or high.present) and said.value != 0.2:
        yield finding(
            "clip_ratio_ignored", "warning", "clip_ratio is set and not used", said,
            "The loss takes clip_ratio_low and clip_ratio_high, which verl's own actor.yaml sets to 0.2; clip_ratio "
            "counts only where they are null.",
            f"clip_ratio_low and clip_ratio_high: {said.value}.", low, high,
        )  # fmt: skip
    yield from shared.clip_off(low, high)


def kl(d: Document) -> Iterator[Finding]:
    in_loss, in_reward = d.get(f"{ACTOR}.use_kl_loss", False), d.get("algorithm.use_kl_in_reward", False)
    if in_loss.value is True:
        estimator = d.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
        if estimator.value in ("kl", "k1"):
            coefficient = d.number(f"{ACTOR}.kl_loss_coef", 0.001)
            yield from shared.kl_k1_loss(estimator, coefficient, "kl_loss_type: k2, low_var_kl, or k1+.")
        if in_reward.value is True:
            yield finding(
                "kl_twice", "warning", "The KL penalty is in the loss and in the reward", in_loss,
                "Both pull towards the same reference; verl only prints a notice.", "Keep one of the two.", in_reward,
            )  # fmt: skip
    elif in_loss.known and in_reward.value is False:
        yield shared.no_reference(in_loss, in_reward)


def collected_by_default(d: Document) -> Iterator[Finding]:
    said = d.get(f"{ROLLOUT}.calculate_log_probs")
    if not said.present:
        yield finding(
            "logprobs_by_default", "info", "Whether log-probs are collected hangs on the version", said,
            "The default became true on 2026-06-05; before, nothing was collected unless asked for.",
            "Say calculate_log_probs: true under rollout.", versions="verl before 0.9",
        )  # fmt: skip


def context_parallel(d: Document) -> Iterator[Finding]:
    size: Value = d.number(f"{ACTOR}.megatron.context_parallel_size", 1)
    if (number(size) or 1) > 1:
        yield finding(
            "context_parallel_token_loss", "warning", "Gradients are scaled wrongly under context parallelism", size,
            "Megatron-Bridge turns on calculate_per_token_loss, and verl did not return the token count that it "
            "divides by: auxiliary and z-losses of a mixture of experts grow by the number of tokens, with gradient "
            "norms in the thousands (verl-project/verl 6609).",
            "verl ≥ 0.9 (pull request 6836), or context_parallel_size: 1.", versions="verl before 0.9",
        )  # fmt: skip


CHECKS = (
    on_policy, old_source, two_partitions, sampling, correction, stale_lora, quantised, clipping, kl,
)  # fmt: skip
BEFORE_0_9 = (collected_by_default, context_parallel)
