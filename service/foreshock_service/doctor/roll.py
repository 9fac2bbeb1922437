"""ROLL's RLVR configurations: what they imply for log-prob, old log-prob, approxkl and the update.

Defaults are ROLL's own (roll/configs/base_config.py, generating_args.py; the same from 2025-10-29 to 2026-08): keys
that a file leaves out are read with them, and ROLL drops keys that it does not know without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from foreshock_service.doctor.document import UNKNOWN, Document, Value
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.roll_case import Case
from foreshock_service.doctor.roll_sampling import BEFORE_V020, logprobs, no_correction, temperature, truncated_sampling
from foreshock_service.doctor.roll_version import RollVersion

MIXING = "ROLL 2025-10-29 (cec5234a) until before 2026-02-04 (v0.2.0)"
BEFORE_REUSE = "ROLL before 2025-12-08"


def recognises(document: Document) -> bool:
    """Whether this looks like a ROLL configuration."""
    return document.has("actor_train") and document.has("actor_infer")


def examine(document: Document, version: RollVersion) -> list[Finding]:
    """Everything that the file implies, worst first, then by line."""
    case = Case(document, version)
    found = [finding for check in CHECKS for finding in check(case)]
    order = {"critical": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda f: (order[f.severity], f.line or 0, f.id))


def on_policy(case: Case) -> Iterator[Finding]:
    steps, prompts = case.optimizer_steps, case.number("rollout_batch_size")
    if steps is None or case.ranks is None or case.per_update is None:
        return
    accumulation = case.number("actor_train.training_args.gradient_accumulation_steps", 1)
    epochs = case.number("ppo_epochs", 1)
    total = float(prompts.value) * float(case.group.value)
    sum_said = (
        f"{prompts.value} prompts × {case.group.value} responses = {total:g} sequences = {case.ranks:g} ranks × "
        f"{case.per_update / float(accumulation.value):g} × {accumulation.value} accumulation; "
        f"ppo_epochs {epochs.value}"
    )
    evidence = f"{sum_said} ({prompts.quote()}; {accumulation.quote()}; {epochs.quote()})"
    if steps <= 1:
        yield Finding(
            id="on_policy_by_construction", severity="info", title="One optimizer step per rollout: on-policy",
            path=prompts.path, line=prompts.line, evidence=evidence,
            why="Every policy ratio should be exactly 1 and approxkl numeric noise. What is more is a defect of a "
            "forward pass (parameters, rows, masks, precision), never learning.",
            remedy="Nothing to change. Watch approxkl as an invariant: above its floor at step 1, something is wrong.",
        )  # fmt: skip
    else:
        yield Finding(
            id="several_optimizer_steps", severity="info", title=f"{steps:g} optimizer steps per rollout",
            path=prompts.path, line=prompts.line, evidence=evidence,
            why="Only the first step of each rollout must have ratio 1; ROLL averages approxkl over all of them.",
            remedy="Read approxkl of the first step apart from the others (`policy` against `update`).",
        )  # fmt: skip


def old_source(case: Case) -> Iterator[Finding]:
    recomputes = case.recomputes_old
    coefficient = case.number("init_kl_coef", 0.2)
    if recomputes is True:
        title, why = (
            "The old log-prob is recomputed by a scoring pass",
            ("A second forward pass over the same weights: its difference from the training pass is the invariant."),
        )
        remedy = "Nothing to change."
        if case.version.reuses_old is not False and not coefficient.present and (coefficient.value or 0) > 0:
            why += " Only because init_kl_coef is left at 0.2: with 0 and one update ROLL ≥ 2025-12-08 reuses instead."
            remedy = "To keep it, say enable_old_logprobs_recompute: true, so that it does not hang on a default."
        versions = ""
    elif recomputes is False:
        title = "The old log-prob is the detached current one"
        why = (
            "approxkl is identically 0 and proves nothing: a faulty training pass looks like a mismatch of the engine."
        )
        remedy = "enable_old_logprobs_recompute: true, or the adapter's sampled re-scoring, shows the third edge."
        versions = ""
    else:
        title, why = (
            "The old log-prob is recomputed or reused, by version",
            (
                "Until 2025-12-08 it was always recomputed; since then one update per rollout reuses the current one, "
                "and approxkl is then identically 0."
            ),
        )
        remedy, versions = (
            "Say enable_old_logprobs_recompute: true, and give the version.",
            BEFORE_REUSE + ", and since",
        )
    yield Finding(
        id="old_log_prob_source", severity="info", title=title, path=coefficient.path, line=coefficient.line,
        evidence=coefficient.quote(), why=why, remedy=remedy, versions=versions,
    )  # fmt: skip


def two_partitions(case: Case) -> Iterator[Finding]:
    if case.recomputes_old is False:
        return
    train = case.get("actor_train.use_dynamic_batching_in_train", False)
    infer = case.get("actor_train.use_dynamic_batching_in_infer", False)
    why = (
        "Scoring and training cut the same rows into different micro-batches, with other padded shapes: kernels sum in "
        "another order, so log-prob and old log-prob differ although the weights are the same. In bf16 this is the "
        "floor under approxkl, and it hides small faults."
    )
    differ: list[Value] = []
    if bool(train.value) != bool(infer.value):
        differ = [train, infer]
    elif train.value:
        for name in ("max_tokens_per_microbatch", "sequence_length_round"):
            pair = [case.number(f"actor_train.{name}_in_{phase}") for phase in ("train", "infer")]
            if all(v.known for v in pair) and pair[0].value != pair[1].value:
                differ += pair
    else:
        batch = case.number("actor_train.training_args.per_device_train_batch_size", 8)
        scored = case.number("actor_train.infer_batch_size", 16)
        differ = [batch, scored] if batch.known and scored.known and batch.value != scored.value else []
    if differ:
        yield Finding(
            id="two_partitions", severity="warning", title="Scoring and training batch the same rows differently",
            path=differ[0].path, line=next((v.line for v in differ if v.present), None),
            evidence="; ".join(v.quote() for v in differ), why=why,
            remedy="Give both phases the same budget, rounding and batch size (costs memory or a little speed), or "
            "run MonitoredActorPGWorker with on_policy: exact.",
        )  # fmt: skip


def mixed_groups(case: Case) -> Iterator[Finding]:
    if case.version.mixes_groups is False:
        return
    estimator = case.get("adv_estimator", "gae")
    grouped = estimator.value == "grpo" or "group" in (
        case.get("norm_mean_type").value, case.get("norm_std_type").value
    )  # fmt: skip
    group = case.group
    if not grouped or not isinstance(group.value, int | float) or group.value <= 1:
        return
    passes = [case.get(f"{role}.use_dynamic_batching_in_infer", False) for role in ("actor_train", "reference")]
    dynamic = [v for v in passes if v.value is True]
    if not dynamic:
        return
    yield Finding(
        id="mixed_groups", severity="critical", title="Advantage groups are mixed across prompts",
        path=dynamic[0].path, line=dynamic[0].line,
        evidence="; ".join(v.quote() for v in [*dynamic, estimator, group]),
        why="The scoring pass sorts rows by length and prompt_id is numbered after the sort, so a group of "
        f"{group.value} holds neighbours in length from other prompts. A quarter of the advantage falls on prompts "
        "without signal; a small run collapses on every seed. Nothing in the log shows it.",
        remedy="ROLL ≥ v0.2.0; before, use_dynamic_batching_in_infer: false on actor_train and reference.",
        versions="" if case.version.mixes_groups else MIXING,
    )  # fmt: skip


def micro_batch_mean(case: Case) -> Iterator[Finding]:
    dynamic = case.get("actor_train.use_dynamic_batching_in_train", False)
    if case.version.micro_batch_mean is False or dynamic.value is not True:
        return
    yield Finding(
        id="micro_batch_normalisation", severity="warning", title="Each micro-batch's loss is normalised by itself",
        path=dynamic.path, line=dynamic.line, evidence=dynamic.quote(),
        why="A micro-batch of two long sequences weighs as much as one of thirty short ones: a long sequence pulled 6 "
        "to 17 times as hard at this kind of geometry.",
        remedy="ROLL ≥ v0.2.0, which divides by the whole batch; before, use_dynamic_batching_in_train: false.",
        versions="" if case.version.micro_batch_mean else BEFORE_V020,
    )  # fmt: skip


def stale_shards(case: Case) -> Iterator[Finding]:
    name = str(case.get("actor_train.strategy_args.strategy_name", "").value or "")
    distributed = case.get("actor_train.strategy_args.strategy_config.use_distributed_optimizer", False)
    if case.version.clears_shards is True or "megatron" not in name or distributed.value is not True:
        return
    yield Finding(
        id="offload_cached_shards", severity="warning", title="Off-load leaves Megatron's cached shards behind",
        path=distributed.path, line=distributed.line, evidence=distributed.quote(),
        why="Until 2026-02-04 ROLL did not clear the cached buffer shards after off-load and reload. Harmless with "
        "Megatron-core 0.13, which it pins; with 0.14 parameters freeze after the second update (measured).",
        remedy="ROLL ≥ v0.2.0, or Megatron-core < 0.14.",
        versions="" if case.version.clears_shards is False else BEFORE_V020,
    )  # fmt: skip


def no_dual_clip(case: Case) -> Iterator[Finding]:
    dual, clip = case.get("dual_clip_loss", False), case.get("advantage_clip")
    variant = case.get("actor_train.pg_variant", "ppo")
    if dual.value is True or clip.value is not None or variant.value not in ("ppo", UNKNOWN):
        return
    yield Finding(
        id="no_dual_clip", severity="warning", title="Neither dual clip nor an advantage clip",
        path=dual.path, line=dual.line, evidence=f"{dual.quote()}; {clip.quote()}",
        why="For a negative advantage PPO's loss is unbounded in the ratio: one token whose log-probs disagree can "
        "carry the update. It causes nothing by itself and turns a disagreement into a collapse.",
        remedy="dual_clip_loss: true, and advantage_clip (ROLL's examples use 2.0).",
    )  # fmt: skip


def whitening(case: Case) -> Iterator[Finding]:
    whiten = case.get("whiten_advantages", False)
    if whiten.value is not True or case.get("adv_estimator", "gae").value != "grpo":
        return
    yield Finding(
        id="whitened_after_groups", severity="info", title="Advantages are whitened after the group's normalisation",
        path=whiten.path, line=whiten.line, evidence=whiten.quote(),
        why="Prompts without signal (all right, all wrong) get a small common advantage instead of none.",
        remedy="whiten_advantages: false if such prompts are frequent.",
    )  # fmt: skip


def masked_but_measured(case: Case) -> Iterator[Finding]:
    mask = case.get("max_len_mask", False)
    if mask.value is not True:
        return
    yield Finding(
        id="approxkl_counts_masked", severity="info", title="approxkl counts sequences that the loss drops",
        path=mask.path, line=mask.line, evidence=mask.quote(),
        why="It is averaged per sequence over response_mask; truncated sequences, dropped from the loss, still count, "
        "and few of them can carry most of it.",
        remedy="Read token-weighted figures (policy.kl_k2) beside it.",
    )  # fmt: skip


FORGOTTEN = re.compile(
    r"^(infer_correction|infer_is_|enable_token_reject|enable_seq_reject|infer_token_mask|enable_cata)"
)


def dropped_keys(case: Case) -> Iterator[Finding]:
    for key in case.document.root:
        if FORGOTTEN.match(key):
            value = case.get(key)
            yield Finding(
                id="unknown_key", severity="warning", title=f"{key} is no key of ROLL and is dropped without a word",
                path=key, line=value.line, evidence=value.quote(),
                why="ROLL builds its settings without checking for unknown keys; what it should switch on is off.",
                remedy="ROLL ≥ v0.2.0: train_infer_correction.",
            )  # fmt: skip
    if case.document.has("defaults"):
        value = case.get("defaults")
        others = [str(d) for d in value.value if d != "_self_"] if isinstance(value.value, list) else []
        if others:
            yield Finding(
                id="defaults_not_read", severity="info", title="Keys may come from other files",
                path="defaults", line=value.line, evidence=f"line {value.line}: {', '.join(others)[:100]}",
                why="Hydra composes them; what is absent here was read with ROLL's own defaults.",
                remedy="Run doctor on the composed file (the start script prints it) to be exact.",
            )  # fmt: skip


CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    on_policy, old_source, two_partitions, truncated_sampling, temperature, no_correction, logprobs, mixed_groups,
    micro_batch_mean, stale_shards, no_dual_clip, whitening, masked_but_measured, dropped_keys,
)  # fmt: skip
