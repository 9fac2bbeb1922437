"""For each illness: what it means and what to do, in a sentence each. docs/rules has the page behind them."""

from __future__ import annotations

from typing import Final, NamedTuple


class Advice(NamedTuple):
    """For people who see the finding for the first time."""

    meaning: str
    action: str


ADVICE: Final[dict[str, Advice]] = {
    "non_finite": Advice(
        "A number became NaN or infinite; whatever is updated with it is lost.",
        "Stop, resume from a checkpoint before that step, and look at the batch and the loss scale there.",
    ),
    "mixed_groups": Advice(
        "Advantages are normalised over answers to different prompts: they mean nothing.",
        "Check how the sampler orders and shards groups before anything else.",
    ),
    "frozen_update": Advice(
        "The optimizer runs and the weights stay: all rollouts come from the first policy.",
        "Check which tensors require gradients and which the optimizer holds (LoRA, wrapped modules, sharded views).",
    ),
    "semantics_differ": Advice(
        "The two log-probs do not mean the same (temperature, truncation, normaliser).",
        "Score with the sampler's temperature and compare over the same vocabulary.",
    ),
    "onpolicy_disagreement": Advice(
        "Two passes of the trainer over the same weights disagree by more than rounding; collapses begin so.",
        "Score one batch again: same partition, then the other; check dropout, padding, and the gather of weights.",
    ),
    "rollout_mismatch": Advice(
        "The engine samples from another policy than the one that is trained.",
        "Push the weights, flush the engine's KV cache, compare digests; correct importance weights only after that.",
    ),
    "stale_weights": Advice(
        "The engine samples with weights that the trainer has left behind.",
        "Verify that each push arrives (digests of both sides), then push again.",
    ),
    "stale_cache": Advice(
        "The engine reuses keys and values of older weights.",
        "Flush the prefix cache after every push of weights.",
    ),
    "is_degeneracy": Advice(
        "A few tokens or sequences stand for the whole batch: most of it teaches nothing.",
        "Look for the mismatch behind it; a correction hides it and does not cure it.",
    ),
    "outlier_sequences": Advice(
        "A few sequences disagree grossly while the rest are fine.",
        "Score those prompts again: routing, special tokens, tool output in the mask.",
    ),
    "kl_blowup": Advice(
        "The policy leaves its reference many times faster than it ever did.",
        "Roll back before it, lower the learning rate or raise the KL coefficient.",
    ),
    "entropy_collapse": Advice(
        "The policy turns deterministic without earning more: exploration is over.",
        "Roll back before it; raise the entropy bonus or the upper clip, lower the learning rate.",
    ),
    "entropy_blowup": Advice(
        "The policy dissolves into noise; the reward follows.",
        "Roll back before it and look at mismatch and gradients of that step; lower the learning rate.",
    ),
    "gradient_spike": Advice(
        "Gradients many times larger than ever before; a moment of Adam carries them on.",
        "Clip gradients, look at the batch; skip the update if it was one batch.",
    ),
    "clip_saturation": Advice(
        "Most tokens hit the clip range: updates per rollout go further than the data supports.",
        "Fewer mini-batch updates a rollout or a smaller learning rate; check the old log-probs.",
    ),
    "length_runaway": Advice(
        "Responses grow and earn nothing by it.",
        "Look at samples; check length normalisation of the loss, the end token, and how cut answers are rewarded.",
    ),
    "length_collapse": Advice(
        "Responses shrink and the reward falls with them.",
        "Look at samples; check the end token, stop words and the engine's limits, and any penalty on length.",
    ),
    "truncation_surge": Advice(
        "Responses are cut by the limit: right answers cannot be finished any more.",
        "Look at samples; raise the limit only if they are sound, else roll back to before it.",
    ),
    "reward_collapse": Advice(
        "Most of the reward that the run had is gone.",
        "Roll back to before the first precursor; resuming from after it repeats the break.",
    ),
    "reward_hacking": Advice(
        "The reward climbs while what it stands for falls.",
        "Read samples of both steps; repair the reward before training on.",
    ),
    "dead_groups": Advice(
        "All answers to a prompt earn the same: no advantage, no gradient.",
        "At the top: harder prompts. At the bottom: only a rollback helps, no gradient will lift it.",
    ),
    "silent_run": Advice("Nothing was heard of the run.", "Look whether the job is alive."),
    "missing_ranks": Advice("Some ranks no longer report.", "Look at the nodes that they ran on."),
}
