"""TRL's GRPOConfig, as YAML, JSON, a Python call or a start script: what it implies.

Defaults are TRL's own (trl/trainer/grpo_config.py at f2cd5771, 2026-07-24; the same in 1.16.0). TRL divides
the trainer's logits by `temperature`, and scores in the micro-batches that it trains on: no finding about these.
"""

from __future__ import annotations

from collections.abc import Iterator

from foreshock_service.doctor import shared
from foreshock_service.doctor.document import Document, Value
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.shared import finding, number

_OWN = (
    "num_generations", "max_completion_length", "use_vllm", "vllm_mode", "steps_per_generation", "num_iterations",
    "vllm_importance_sampling_correction", "scale_rewards",
)  # fmt: skip
RELOADED = "TRL 0.26 to 1.9; 1.16 is repaired (pull request 5313)"
RAW = "TRL before 0.24, and before 0.28 with a vLLM server"


def recognises(document: Document) -> bool:
    """Whether this looks like GRPOConfig's arguments."""
    return any(document.has(name) for name in _OWN)


def examine(document: Document, version: str | None) -> list[Finding]:
    """Everything that the arguments imply, worst first. Raises ValueError for a version that is none."""
    found = [f for check in CHECKS for f in check(document)]
    if shared.below_version(version, (1, 16)) is not False and shared.below_version(version, (0, 26)) is not True:
        found += list(sleep_mode(document, version))
    if shared.below_version(version, (0, 28)):
        found += list(raw_logprobs(document))
    return shared.worst_first(found)


def steps(d: Document) -> float | None:
    """Optimizer steps per generation; None where the arguments do not tell (`generation_batch_size`)."""
    accumulation = number(d.number("gradient_accumulation_steps", 1))
    per, iterations = d.number("steps_per_generation"), number(d.number("num_iterations", 1))
    if not per.present and d.get("generation_batch_size").value is not None:
        return None
    generation = accumulation if per.value is None else number(per)
    if not accumulation or not iterations or not generation:
        return None
    return generation * iterations / accumulation


def on_policy(d: Document) -> Iterator[Finding]:
    accumulation, per = d.number("gradient_accumulation_steps", 1), d.number("steps_per_generation")
    iterations = d.number("num_iterations", 1)
    yield from shared.updates(steps(d), per, "steps_per_generation × num_iterations / accumulation", accumulation,
                              iterations)  # fmt: skip


def old_source(d: Document) -> Iterator[Finding]:
    count, vllm, corrected = steps(d), d.get("use_vllm", False), d.get("vllm_importance_sampling_correction", True)
    if count is None or not vllm.known or not corrected.known:
        return
    aligned = count > 0 and (1 / count).is_integer()  # else TRL keeps the log-probs of before the update
    if aligned and not (vllm.value is True and corrected.value is True):
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is the detached current one", corrected,
            "The ratio is 1 and the clip fraction 0 by construction: they prove nothing.",
            "With vLLM, the correction makes TRL score the samples again.", vllm,
        )  # fmt: skip
    else:
        yield finding(
            "old_log_prob_source", "info", "The old log-prob is recomputed by a scoring pass", corrected,
            "A second forward pass over the same weights: its difference from the training pass is the invariant.",
            "Nothing to change.", vllm,
        )  # fmt: skip


def sampling(d: Document) -> Iterator[Finding]:
    cut: list[Value] = []
    for prefix in ("", "generation_kwargs."):
        top_k, top_p, min_p = (d.number(f"{prefix}{name}") for name in ("top_k", "top_p", "min_p"))
        cut += [v for v in (top_k, min_p) if shared.positive(v)] + [v for v in (top_p,) if shared.below_one(v)]
    yield from shared.truncated(cut, "top_k: 0, top_p: 1.0 and no min_p for training.")
    penalties = [d.number(f"{prefix}repetition_penalty", 1.0) for prefix in ("", "generation_kwargs.")]
    said = next((p for p in penalties if number(p) not in (None, 1.0)), None)
    if said is not None:
        yield finding(
            "penalised_sampling", "warning", "A repetition penalty changes what is sampled, not what is scored", said,
            "The sampler lowers logits of tokens that occurred; the trainer scores without it, so it trains on another "
            "distribution than its own.",
            "repetition_penalty: 1.0 for training.",
        )  # fmt: skip


def correction(d: Document) -> Iterator[Finding]:
    vllm, used = d.get("use_vllm", False), d.get("vllm_importance_sampling_correction", True)
    if vllm.value is not True:
        return
    if used.value is False and not d.get("off_policy_mask_threshold").value:
        yield shared.no_correction(
            used, "vLLM",
            "vllm_importance_sampling_correction: true (its default); without it TRL does not log "
            "sampling_logp_difference either.", vllm,
        )  # fmt: skip
    mode = d.get("vllm_importance_sampling_mode", "sequence_mask")
    if used.value is True and mode.value in ("sequence_mask", "sequence_truncate"):
        cap = d.number("vllm_importance_sampling_clip_max", 3.0)
        yield from shared.sequence_weights(
            mode, cap, d.number("max_completion_length", 512),
            "vllm_importance_sampling_mode: token_truncate (left out: sequence_mask).",
        )  # fmt: skip


def sleep_mode(d: Document, version: str | None) -> Iterator[Finding]:
    sleeps, vllm = d.get("vllm_enable_sleep_mode", False), d.get("use_vllm", False)
    if sleeps.value is True and vllm.value is True and d.get("vllm_mode", "colocate").value == "colocate":
        yield finding(
            "weights_reloaded_from_disk", "critical", "vLLM generates with the initial weights", sleeps,
            "Waking from sleep reloads the checkpoint over the weights just synchronised: the log-prob difference went "
            "from 0.010 to 0.201 by step 3 while the clip fraction stayed 0 (huggingface/trl 5312).",
            "TRL ≥ 1.16, or vllm_enable_sleep_mode: false.", vllm, versions="" if version else RELOADED,
        )  # fmt: skip


def raw_logprobs(d: Document) -> Iterator[Finding]:
    temperature, vllm = d.number("temperature", 1.0), d.get("use_vllm", False)
    if vllm.value is True and number(temperature) not in (None, 1.0):
        yield finding(
            "temperature_one_sided", "warning", "vLLM's log-probs are before temperature, the trainer's after",
            temperature,
            "A first-token ratio of 2.0 at temperature 0.6 is reported (huggingface/trl 4159).",
            "TRL ≥ 0.28, or temperature: 1.0.", vllm, versions=RAW,
        )  # fmt: skip


def dropout(d: Document) -> Iterator[Finding]:
    lora, off, peft = d.number("lora_dropout", 0.05), d.get("disable_dropout", False), d.get("use_peft", False)
    if peft.value is True and off.value is False and shared.positive(lora):
        yield shared.dropout(
            lora,
            "Each training forward drops other adapter inputs, and vLLM drops none: ratios are noise around 1. The "
            "default of lora_dropout, where it is left out, is 0.05.",
            "lora_dropout: 0.0, or disable_dropout: true.", peft, off,
        )  # fmt: skip


def clipping(d: Document) -> Iterator[Finding]:
    if d.get("loss_type", "dapo").value in ("cispo", "vespo", "sapo"):
        return
    low = d.number("epsilon", 0.2)
    yield from shared.clip_off(low, d.number("epsilon_high", number(low)))
    yield from shared.no_dual_clip(d.get("delta"), steps(d), "delta: 3.0 or so (two-sided clipping).")


def kl(d: Document) -> Iterator[Finding]:
    beta = d.number("beta", 0.0)
    if number(beta) == 0:
        yield shared.no_reference(beta)


CHECKS = (on_policy, old_source, sampling, correction, dropout, clipping, kl)
