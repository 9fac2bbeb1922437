"""What several hosts' files are asked alike: each finding once, with the host's own keys as evidence.

Public reports that stand behind a number are named by repository and thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from foreshock_service.doctor.document import Value
from foreshock_service.doctor.finding import Finding

LONG_RESPONSE: Final = 1000
"""Tokens from which a product of token ratios is called length-confounded."""
ORDER: Final = {"critical": 0, "warning": 1, "info": 2}


def finding(
    name: str, severity: str, title: str, at: Value, why: str, remedy: str, *more: Value,
    evidence: str = "", versions: str = "",
) -> Finding:  # fmt: skip
    """A finding at the first value that the file holds, else at the default `at`; the evidence quotes all of them."""
    decides = next((value for value in (at, *more) if value.present), at)
    quoted = "; ".join(value.quote() for value in (at, *more))
    return Finding(
        id=name, severity=severity, title=title, path=decides.path, line=decides.line,
        evidence=f"{evidence} ({quoted})" if evidence else quoted, why=why, remedy=remedy, versions=versions,
    )  # fmt: skip


def worst_first(found: list[Finding]) -> list[Finding]:
    """Worst first, then by line."""
    return sorted(found, key=lambda f: (ORDER[f.severity], f.line or 0, f.id))


def number(value: Value) -> float | None:
    """The value as a number; None where it is none or not known."""
    said = value.value
    return float(said) if isinstance(said, int | float) and not isinstance(said, bool) else None


def updates(steps: float | None, at: Value, said: str, *more: Value) -> Iterator[Finding]:
    """On-policy by construction or not, from the updates of one rollout."""
    if steps is None:
        return
    if steps <= 1:
        yield finding(
            "on_policy_by_construction", "info", "One optimizer step per rollout: on-policy", at,
            "Every policy ratio should be exactly 1 and the policy KL numeric noise. What is more is a defect of a "
            "forward pass (parameters, rows, masks, precision), never learning.",
            "Nothing to change. Watch `policy.kl_k2` as an invariant.", *more, evidence=said,
        )  # fmt: skip
    else:
        yield finding(
            "several_optimizer_steps", "info", f"{steps:g} optimizer steps per rollout", at,
            "Only the first step of each rollout must have ratio 1.",
            "Read the first step apart from the others (`policy` against `update`).", *more, evidence=said,
        )  # fmt: skip


def two_partitions(pairs: Sequence[tuple[Value, Value]]) -> Iterator[Finding]:
    """Settings of the (training, scoring) passes that differ although both are known."""
    differing = [pair for pair in pairs if all(v.known for v in pair) and pair[0].value != pair[1].value]
    if differing:
        values = [value for pair in differing for value in pair]
        yield finding(
            "two_partitions", "warning", "Training and scoring cut the same rows into different micro-batches",
            values[0],
            "Kernels sum in another order over other shapes, so log-prob and old log-prob differ although the weights "
            "are the same: clipping starts on-policy (verl-project/verl 6280), and small faults hide under it.",
            f"Set {values[1].path} to {values[0].path}'s value.", *values[1:],
        )  # fmt: skip


def truncated(cut: Sequence[Value], remedy: str) -> Iterator[Finding]:
    """Sampler settings that drop tokens which the trainer's softmax counts."""
    if cut:
        yield finding(
            "truncated_sampling", "warning", "Sampling is truncated while the trainer scores the full vocabulary",
            cut[0],
            "Tokens come from the renormalised kept set; the trainer's probability of them is smaller by the mass cut "
            "off. The ratio against the sampler is one-sided: 0.95 at top_p 0.95, 0.17 at top_k 50 in a public "
            "simulation (huggingface/trl 6789).",
            remedy, *cut[1:],
        )  # fmt: skip


def below_one(value: Value) -> bool:
    """top_p-like: cuts where it is under 1."""
    said = number(value)
    return said is not None and said < 1


def positive(value: Value) -> bool:
    """top_k-like: cuts where it is over 0."""
    said = number(value)
    return said is not None and said > 0


def sequence_weights(at: Value, threshold: Value, length: Value, remedy: str) -> Iterator[Finding]:
    """A product of token ratios over a long response against a threshold."""
    tokens, bound = number(length), number(threshold)
    if tokens is None or tokens < LONG_RESPONSE:
        return
    said = f"{math.log(bound) / tokens:.1e} nats a token, one-sided, cross it" if bound and bound > 1 else ""
    yield finding(
        "sequence_weights_long", "warning", "Sequence-level weights on long responses", at,
        "The weight is a product over all tokens: it measures length as much as mismatch. Public runs report 0.005 to "
        "0.012 nats a token between healthy engines, which masks or truncates most long responses (huggingface/trl "
        "4772, 7120).",
        remedy, threshold, length, evidence=said,
    )  # fmt: skip


def no_correction(at: Value, engine: str, remedy: str, *more: Value) -> Finding:
    """Another engine samples and nothing weights or filters by its log-probs."""
    return finding(
        "no_is_correction", "warning", "No correction although another engine samples", at,
        f"{engine} computes its own probabilities with other kernels. Uncorrected, the update is off-policy although "
        "the run calls itself on-policy.",
        remedy, *more,
    )  # fmt: skip


def no_dual_clip(at: Value, steps: float | None, remedy: str) -> Iterator[Finding]:
    """Said where ratios move: with one step per rollout they are 1."""
    if at.known and not at.value and steps is not None and steps > 1:
        yield finding(
            "no_dual_clip", "info", "Nothing bounds the loss of a negative advantage", at,
            "With several steps per rollout the ratio of a token with negative advantage may grow without bound; one "
            "such token can carry a whole update.",
            remedy,
        )  # fmt: skip


def clip_off(low: Value, high: Value) -> Iterator[Finding]:
    """A clip range that clips nothing, or everything."""
    below, above = number(low), number(high)
    odd = [v for v, n in ((low, below), (high, above)) if n is not None and n <= 0]
    if below is not None and below >= 1:
        odd.append(low)
    if odd:
        yield finding(
            "clip_off", "warning", "The clip range is off", odd[0],
            "At 0 every ratio that learning moves is clipped; a lower range of 1 or more clips nothing below, for a "
            "ratio is never negative.",
            "0.2 below and 0.2 to 0.28 above are what published runs use.", *odd[1:],
        )  # fmt: skip


def kl_k1_loss(estimator: Value, coefficient: Value, remedy: str) -> Iterator[Finding]:
    """The k1 estimator put into the loss."""
    if positive(coefficient):
        yield finding(
            "kl_k1_loss", "warning", "The KL loss has no gradient in expectation", estimator,
            "k1 is log-prob minus reference: its gradient is the score function, zero on average over on-policy "
            "samples. The penalty is shown and adds noise, and does not hold the policy near the reference.",
            remedy, coefficient,
        )  # fmt: skip


def no_reference(at: Value, *more: Value) -> Finding:
    """No penalty towards a reference: common, and worth knowing."""
    return finding(
        "no_reference", "info", "Nothing holds the policy near where it began", at,
        "Without a KL penalty drift is unbounded and no reference log-probs are computed: `reference` cannot be "
        "measured. Common for reasoning runs.",
        "Nothing to change, unless the run drifts.", *more,
    )  # fmt: skip


def dropout(at: Value, why: str, remedy: str, *more: Value) -> Finding:
    """Dropout that one pass has and another has not."""
    return finding("dropout_in_training", "warning", "Dropout is on in the training pass", at, why, remedy, *more)


def below_version(version: str | None, fixed: tuple[int, ...]) -> bool | None:
    """Whether a version is older than `fixed`; None without one. Raises ValueError for what is no version."""
    if version is None:
        return None
    parts = version.removeprefix("v").split(".")
    try:
        return tuple(int(part) for part in parts[: len(fixed)]) < fixed
    except ValueError:
        raise ValueError(f"--host-version must be as 1.16.0, not {version!r}") from None
