"""Findings on ROLL's sampler: truncation, temperature, correction, and whether its log-probs are collected."""

from __future__ import annotations

from collections.abc import Iterator

from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.roll_case import Case

BEFORE_V020 = "ROLL before 2026-02-04 (v0.2.0)"


def truncated_sampling(case: Case) -> Iterator[Finding]:
    top_k = case.number("actor_infer.generating_args.top_k", 50)
    top_p = case.number("actor_infer.generating_args.top_p", 0.7)
    cut = []
    if isinstance(top_k.value, int | float) and top_k.value > 0:
        cut.append(top_k)
    if isinstance(top_p.value, int | float) and top_p.value < 1:
        cut.append(top_p)
    if cut:
        yield Finding(
            id="truncated_sampling", severity="warning",
            title="Sampling is truncated while the trainer scores the full vocabulary",
            path=cut[0].path, line=next((v.line for v in cut if v.present), None),
            evidence="; ".join(v.quote() for v in cut),
            why="Tokens come from the renormalised kept set; the trainer's probability of them is smaller by the mass "
            "cut off. The ratio against the sampler is one-sided, and training pushes against what sampling removed.",
            remedy="top_k: -1 (sglang, vLLM) and top_p: 1 for training rollouts; keep truncation to validation. "
            "Keys that are left out default to top_k 50 and top_p 0.7.",
        )  # fmt: skip


def temperature(case: Case) -> Iterator[Finding]:
    said = case.number("actor_infer.generating_args.temperature", 0.95)
    if isinstance(said.value, int | float) and said.value != 1:
        yield Finding(
            id="temperature_one_sided", severity="warning", title="A temperature is applied on the sampler's side only",
            path=said.path, line=said.line, evidence=said.quote(),
            why="ROLL's training and scoring passes take logits as they are: they score another distribution than the "
            "one sampled from, by a factor on every logit.",
            remedy="temperature: 1 for training rollouts (the default, when the key is left out, is 0.95).",
        )  # fmt: skip


def no_correction(case: Case) -> Iterator[Finding]:
    if not any(name in case.engine for name in ("sglang", "vllm")):
        return
    weight = case.get("train_infer_correction.is_weight.enabled", False)
    filters = case.get("train_infer_correction.filters", []).value
    filtered = isinstance(filters, list) and any(isinstance(f, dict) and f.get("enabled") is True for f in filters)
    has = case.version.correction
    if (weight.value is True or filtered) and has is not False:
        return
    engine = case.get("actor_infer.strategy_args.strategy_name")
    remedy = (
        "train_infer_correction: {is_weight: {enabled: true, weight_type: token, upper_bound: 2.0}} (ROLL ≥ v0.2.0)"
    )
    if has is False:
        remedy = "This version has none: move to ROLL ≥ v0.2.0, or let the adapter's enable_is_correction weight it."
    yield Finding(
        id="no_is_correction", severity="warning", title="No correction although another engine samples",
        path=weight.path if weight.present else engine.path, line=weight.line or engine.line,
        evidence=f"{engine.quote()}; {weight.quote()}",
        why=f"{case.engine} computes its own probabilities with other kernels (and with truncation, other "
        "normalisers). Uncorrected, the update is off-policy although the run calls itself on-policy.",
        remedy=remedy,
    )  # fmt: skip


def logprobs(case: Case) -> Iterator[Finding]:
    said = case.get("actor_infer.generating_args.logprobs", 0)
    if case.get("async_generation_ratio", 0).value:
        return
    if case.version.logprobs_setting is not True and said.value:
        yield Finding(
            id="logprobs_ignored", severity="warning" if case.version.logprobs_setting is False else "info",
            title="logprobs is no setting of this version and is ignored", path=said.path, line=said.line,
            evidence=said.quote(), versions="" if case.version.logprobs_setting is False else BEFORE_V020,
            why="GeneratingArguments has no such field before v0.2.0 and ROLL drops unknown keys: a synchronous run "
            "collects no engine log-probs, and `mismatch` cannot be measured.",
            remedy="ROLL ≥ v0.2.0; before, only asynchronous runs (async_generation_ratio > 0) ask for them.",
        )  # fmt: skip
    elif case.version.logprobs_setting is False or (said.present and said.value is None):
        yield Finding(
            id="logprobs_not_collected", severity="warning", title="The engine's log-probs are not collected",
            path=said.path, line=said.line, evidence=said.quote(),
            why="Without them nobody sees whether the engine and the trainer agree on what was sampled, and no "
            "correction is possible.",
            remedy="actor_infer.generating_args.logprobs: 1, on ROLL ≥ v0.2.0.",
        )  # fmt: skip
