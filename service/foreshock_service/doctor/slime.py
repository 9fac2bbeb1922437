"""slime's start scripts: what they imply.

Defaults are slime's own (slime/utils/arguments.py at 624b824a, 2026-08-21). slime scores and trains on the same
schedule of micro-batches, divides the trainer's logits by the rollout temperature, replays the tokens that top-p kept,
and always asks sglang for log-probs: no finding about these.
"""

from __future__ import annotations

from collections.abc import Iterator

from foreshock_service.doctor import shared
from foreshock_service.doctor.document import Document
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.shared import finding, number

_OWN = ("num_rollout", "rollout_num_gpus_per_engine", "rollout_max_response_len", "sglang_mem_fraction_static")
_LOW_BITS = ("fp8", "int4", "int8", "awq", "gptq", "nvfp4", "mxfp4", "mxfp8")


def recognises(document: Document) -> bool:
    """Whether this looks like slime's options."""
    return document.has("rollout_batch_size") and any(document.has(name) for name in _OWN)


def examine(document: Document, version: str | None) -> list[Finding]:
    """Everything that the options imply, worst first. `version` decides nothing here."""
    return shared.worst_first([f for check in CHECKS for f in check(document)])


def steps(d: Document) -> float | None:
    """Optimizer steps per rollout; None where the options do not tell."""
    said = number(d.number("num_steps_per_rollout"))
    if said is not None:
        return said
    prompts, group = number(d.number("rollout_batch_size")), number(d.number("n_samples_per_prompt", 1))
    batch = number(d.number("global_batch_size"))
    return None if not prompts or not group or not batch else prompts * group / batch


def on_policy(d: Document) -> Iterator[Finding]:
    prompts, group = d.number("rollout_batch_size"), d.number("n_samples_per_prompt", 1)
    said, batch = d.number("num_steps_per_rollout"), d.number("global_batch_size")
    at = said if said.present else batch
    yield from shared.updates(steps(d), at, f"{prompts.value} prompts × {group.value} samples", prompts, group)
    interval = d.number("update_weights_interval", 1)
    if (number(interval) or 1) > 1:
        yield finding(
            "asynchronous", "info", "Rollouts are older than the weights that train on them", interval,
            "The engines keep their weights for several rollouts: ratios against them are not 1 by design.",
            "Read `mismatch` per version lag.",
        )  # fmt: skip


def old_source(d: Document) -> Iterator[Finding]:
    rollout, metrics = d.get("use_rollout_logprobs", False), d.get("get_mismatch_metrics", False)
    if rollout.value is True:
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is the rollout engine's", rollout,
            "The ratio holds the engine's mismatch and the policy's drift together, and clips both.",
            "Leave --use-rollout-logprobs out to keep the two apart.",
        )  # fmt: skip
    elif _reuses(d):
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is the detached current one", metrics,
            "With one step per rollout slime skips the scoring pass: ppo_kl is identically 0 and proves nothing; a "
            "faulty training pass looks like a mismatch of the engine.",
            "--get-mismatch-metrics (with --custom-tis-function-path) forces the scoring pass.",
        )  # fmt: skip


def _reuses(d: Document) -> bool:
    """slime's can_reuse_log_probs_in_loss, as far as the options tell."""
    several = ("use_rollout_logprobs", "get_mismatch_metrics", "keep_old_actor", "use_opd", "use_critic")
    if any(d.get(name, False).value is not False for name in several) or steps(d) != 1:
        return False
    replay = d.get("use_routing_replay", False).value is True
    return (
        d.get("loss_type", "policy_loss").value == "policy_loss"
        and number(d.number("kl_coef", 0.0)) == 0
        and (not replay or d.get("use_rollout_routing_replay", False).value is True)
        and d.get("advantage_estimator", "grpo").value not in ("gspo", "ppo")
    )


def sampling(d: Document) -> Iterator[Finding]:
    top_k = d.number("rollout_top_k", -1)
    yield from shared.truncated(
        [top_k] if shared.positive(top_k) else [], "--rollout-top-k -1; top-p is replayed in the trainer, top-k is not."
    )


def correction(d: Document) -> Iterator[Finding]:
    used = [d.get(name, False) for name in ("use_tis", "use_rollout_logprobs", "use_opsm", "custom_tis_function_path")]
    if all(v.known for v in used) and not any(v.value for v in used):
        yield shared.no_correction(used[0], "sglang", "--use-tis (clip 2.0).")
    elif used[3].value and used[0].value is False and d.get("get_mismatch_metrics", False).value is False:
        yield finding(
            "correction_not_called", "warning", "A correction function is given and never called", used[3],
            "slime calls it only with --use-tis or --get-mismatch-metrics.", "--use-tis.", used[0],
        )  # fmt: skip


def dropout(d: Document) -> Iterator[Finding]:
    rates = [d.number("attention_dropout", 0.1), d.number("hidden_dropout", 0.1)]
    on = [rate for rate in rates if shared.positive(rate)]
    if on:
        yield shared.dropout(
            on[0],
            "Megatron's default is 0.1. The scoring pass runs in eval mode and the engine has none: every ratio is "
            "noise around 1, and clipping starts at the first step.",
            "--attention-dropout 0.0 --hidden-dropout 0.0.", *on[1:],
        )  # fmt: skip


def quantised(d: Document) -> Iterator[Finding]:
    said, checkpoint = d.get("sglang_quantization"), d.get("hf_checkpoint")
    trains_low = d.get("fp8_format").value is not None
    name = str(checkpoint.value).lower().rstrip("/").rsplit("/", 1)[-1] if checkpoint.known else ""
    low = said if isinstance(said.value, str) else checkpoint if any(bits in name for bits in _LOW_BITS) else None
    if low is not None and not trains_low:
        tis = d.get("use_tis", False)
        yield finding(
            "quantised_rollout", "info" if tis.value is not False else "warning",
            "The engine samples from quantised weights", low,
            "Trainer and sampler are different policies, further apart as training moves the weights: with tensor-wise "
            "fp8 the KL tripled in 8 steps (verl-project/verl 7519).",
            "--use-tis, and watch `mismatch.kl_k3` for a trend.", tis,
        )  # fmt: skip


def clipping(d: Document) -> Iterator[Finding]:
    low, estimator = d.number("eps_clip", 0.2), d.get("advantage_estimator", "grpo")
    if estimator.value == "cispo":
        if (number(low) or 1.0) < 1:
            yield finding(
                "cispo_lower_clip", "warning", "CISPO with a lower clip", low,
                "CISPO is one-sided; with eps-clip under 1 the lower bound is active (slime warns of it in its log).",
                "--eps-clip 1.0 and --eps-clip-high 4.0 or so.", estimator,
            )  # fmt: skip
        return
    yield from shared.clip_off(low, d.number("eps_clip_high", number(low)))
    yield from shared.no_dual_clip(d.get("eps_clip_c"), steps(d), "--eps-clip-c 3.0.")


def kl(d: Document) -> Iterator[Finding]:
    used, coefficient = d.get("use_kl_loss", False), d.number("kl_loss_coef", 0.0)
    shaped = d.number("kl_coef", 0.0)
    if used.value is True and number(coefficient) == 0:
        yield finding(
            "kl_measured_only", "info", "The KL to the reference is measured and weighs nothing", coefficient,
            "--use-kl-loss with a coefficient of 0 computes it for the log.", "Nothing to change.", used,
        )  # fmt: skip
    elif used.value is True:
        estimator = d.get("kl_loss_type", "k1")
        if estimator.value == "k1" and d.get("use_unbiased_kl", False).value is False:
            yield from shared.kl_k1_loss(estimator, coefficient, "--kl-loss-type low_var_kl (left out: k1).")
    elif used.known and number(shaped) == 0:
        yield shared.no_reference(used, shaped)


CHECKS = (on_policy, old_source, sampling, correction, dropout, quantised, clipping, kl)
