"""Each framework's names for our signals, with sign, unit and estimator. Of two names for one signal the first wins.

Sources: the frameworks' own code at verl 1dda039, slime 624b824, NeMo-RL 7ea279a, TRL f2cd577, OpenRLHF 3c3be62,
SkyRL a956457, AReaL 4aef98d, ms-swift 3602360, prime-rl 559b447, ROLL 8eb27cc. docs/aliases.md is made of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec


class Alias(msgspec.Struct, frozen=True):
    """`signal` = offset + scale · value; no signal: it cannot be translated, and `note` says why."""

    signal: str | None
    note: str = ""
    scale: float = 1.0
    offset: float = 0.0
    least: float | None = None
    """What is smaller is taken as this."""
    may_be_nan: bool = False
    """NaN is how the host says that there is no value."""

    def value(self, logged: float) -> float:
        """The signal's value for the logged one."""
        value = self.offset + self.scale * logged
        return self.least if self.least is not None and value < self.least else value


def to(signal: str, note: str = "", *, scale: float = 1.0, offset: float = 0.0) -> Alias:
    """A translation."""
    return Alias(signal, note, scale, offset)


def dropped(note: str = "") -> Alias:
    """Of a mean importance weight after its correction: the weights average 1 before it, so 1 − mean was dropped."""
    said = "1 minus it: weights average 1 before the correction, what is missing it dropped (or it lies in the tail)"
    return Alias("is_weight.masked", f"{said}{note}", -1.0, 1.0, 0.0)


def no(reason: str) -> Alias:
    """A name that is shown and not read."""
    return Alias(None, reason)


Table = Mapping[str, Alias]

BOTH_SIDES: Final = "share clipped on either side"
ALL_UPDATES: Final = "over all mini-batches, so of the update and not of its first step"
POST_CLIP: Final = "taken after the correction truncated or masked the ratios: cannot show how far they went"
LENGTHS: Final = "product over a sequence: grows with its length"
ENGINE_OR_UPDATE: Final = "current weights against the engine: holds the update as well"
KL_LOSS: Final = "against the reference; the estimator is the configured one, usually k3"

TRL: Final[Table] = {
    "reward": to("reward.mean"),
    "reward_std": to("reward.std"),
    "eval_reward": to("reward.validation"),
    "frac_reward_zero_std": to("group.zero_std"),
    "entropy": to("entropy.mean", "full vocabulary"),
    "entropy/mean": to("entropy.mean", "full vocabulary (ms-swift)"),
    "grad_norm": to("grad.norm", "before clipping"),
    "learning_rate": to("lr"),
    "loss": to("loss"),
    "Training Loss": to("loss", "as notebooks show it"),
    "kl": to("reference.kl_k3", "k3 of KL(policy‖reference)"),
    "completions/mean_length": to("length.mean"),
    "completion_length": to("length.mean", "older releases"),
    "completions/max_length": to("length.max"),
    "completions/clipped_ratio": to("length.truncated"),
    "clip_ratio/low_mean": to("update.clip_low", ALL_UPDATES),
    "clip_ratio/high_mean": to("update.clip_high", ALL_UPDATES),
    "clip_ratio": to("update.clip_high", BOTH_SIDES),
    "clip_ratio/region_mean": no("sum of low_mean and high_mean"),
    "sampling/sampling_logp_difference/mean": to("mismatch.abs_mean", "mean of per-rank means"),
    "sampling/sampling_logp_difference/max": to("mismatch.abs_max"),
    "sampling/importance_sampling_ratio/mean": dropped(),
    "sampling/importance_sampling_ratio/min": no(POST_CLIP),
    "sampling/importance_sampling_ratio/max": no(POST_CLIP),
    "step_time": to("time.step_s"),
    "objective/scores": to("reward.mean", "PPO: the score, without the KL penalty"),
    "objective/rlhf_reward": no("score minus the KL penalty; objective/scores is read"),
    "objective/non_score_reward": no("the KL penalty"),
    "objective/kl": no("PPO: k1 summed over a response, no token mean"),
    "objective/entropy": no("PPO: negative log-probs summed over a response"),
    "policy/approxkl_avg": to("update.kl_k2", ALL_UPDATES),
    "policy/clipfrac_avg": to("update.clip_high", BOTH_SIDES),
    "policy/entropy_avg": to("entropy.mean"),
    "val/ratio": to("update.ratio_mean", ALL_UPDATES),
    "loss/policy_avg": to("loss", "policy loss"),
    "eps": no("samples a second"),
    "lr": to("lr"),
    "ppo/mean_scores": to("reward.mean", "older PPO"),
    "env/reward_mean": to("reward.mean", "older PPO"),
    "ppo/policy/entropy": to("entropy.mean"),
    "ppo/policy/approxkl": to("update.kl_k2", ALL_UPDATES),
    "ppo/policy/policykl": to("update.kl_k1", "old − new, " + ALL_UPDATES),
    "ppo/policy/clipfrac": to("update.clip_high", BOTH_SIDES),
    "ppo/loss/total": to("loss"),
    "ppo/mean_non_score_reward": no("the KL penalty"),
    "tokens/responses_len_mean": to("length.mean"),
}

VERL: Final[Table] = {
    "critic/score/mean": to("reward.mean", "before any KL penalty"),
    "critic/rewards/mean": to("reward.mean", "after the KL penalty"),
    "critic/score/max": to("reward.max"),
    "critic/score/min": to("reward.min"),
    "critic/advantages/mean": to("advantage.mean"),
    "critic/advantages/max": to("advantage.abs_max", "positive side only"),
    "actor/entropy": to("entropy.mean", "full vocabulary"),
    "actor/entropy_loss": to("entropy.mean", "the entropy itself, not its loss term"),
    "actor/grad_norm": to("grad.norm", "mean over mini-batches, before clipping"),
    "actor/lr": to("lr"),
    "actor/pg_loss": to("loss", "policy loss"),
    "actor/kl_loss": to("reference.kl_k3", KL_LOSS),
    "actor/ppo_kl": to("update.kl_k1", "−mean(clamp(cur − old, ±20)), " + ALL_UPDATES),
    "actor/pg_clipfrac": to("update.clip_high", BOTH_SIDES),
    "actor/pg_clipfrac_lower": no("dual clip (c = 3), a third bound"),
    "response_length/mean": to("length.mean"),
    "response_length/max": to("length.max"),
    "response_length/clip_ratio": to("length.truncated"),
    "rollout_corr/k3_kl": to("mismatch.kl_k3"),
    "rollout_corr/kl": to("mismatch.kl_k1"),
    "rollout_corr/chi2_token": to("mismatch.chi2_token"),
    "rollout_corr/chi2_seq": no(LENGTHS),
    "rollout_corr/rollout_is_eff_sample_size": to("mismatch.ess_token", "of truncated weights: an upper bound"),
    "rollout_corr/rollout_rs_masked_fraction": to("is_weight.masked"),
    "rollout_corr/rollout_is_mean": dropped(),
    "rollout_corr/rollout_is_max": no(POST_CLIP),
    "rollout_corr/ppl_ratio": no("ratio of per-sequence perplexities"),
    "rollout_corr/log_ppl_abs_diff": to("mismatch.abs_mean_seqmean", "|mean δ| of a sequence: a lower bound"),
    "training/rollout_probs_diff_mean": to("mismatch.prob_abs_mean", "probability space, not nats"),
    "training/rollout_probs_diff_max": to("mismatch.prob_abs_max", "probability space, not nats"),
    "training/rollout_probs_diff_std": no("probability space"),
    "training/rollout_actor_probs_pearson_corr": to("mismatch.prob_pearson"),
    "timing_s/step": to("time.step_s"),
    "perf/time_per_step": to("time.step_s"),
    "rollout/moe/max_vio": to("expert.max_violation"),
}

SLIME: Final[Table] = {
    "rollout/raw_reward": to("reward.mean"),
    "rollout/rewards": no("normalised within groups: always about 0"),
    "train/entropy_loss": to("entropy.mean", "the entropy itself, full vocabulary"),
    "train/grad_norm": to("grad.norm"),
    "train/lr-pg_0": to("lr"),
    "train/loss": to("loss"),
    "train/pg_loss": to("loss", "policy loss"),
    "train/kl_loss": to("reference.kl_k3", KL_LOSS),
    "train/ppo_kl": to("update.kl_k1", "mean(old − cur), mean of sequence means, " + ALL_UPDATES),
    "train/pg_clipfrac": to("update.clip_high", BOTH_SIDES),
    "train/train_rollout_logprob_abs_diff": to("mismatch.abs_mean", "mean of sequence means by default"),
    "train/ois": no("exp(−ppo_kl): says the same"),
    "train/tis": to("mismatch.ratio_mean", "before truncation"),
    "train/tis_clipfrac": to("is_weight.masked", "share of truncated weights"),
    "train/mis_k3_kl": to("mismatch.kl_k3"),
    "train/mis_kl": to("mismatch.kl_k1"),
    "train/mis_chi2_token": to("mismatch.chi2_token"),
    "train/mis_chi2_seq": no(LENGTHS),
    "rollout/response_len/mean": to("length.mean"),
    "rollout/response_lengths": to("length.mean"),
    "rollout/response_len/max": to("length.max"),
    "rollout/truncated_ratio": to("length.truncated"),
    "rollout/truncated": to("length.truncated"),
    "rollout/repetition_frac": to("length.repetition"),
    "rollout/log_probs": to("mismatch.a_mean"),
    "rollout/rollout_log_probs": to("mismatch.b_mean"),
}

NEMO_RL: Final[Table] = {
    "train/reward": to("reward.mean"),
    "avg_reward": to("reward.mean"),
    "train/gen_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer)"),
    "gen_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer)"),
    "generation_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer), as printed"),
    "train/policy_kl_error": no("KL(trainer‖engine), the other direction; gen_kl_error is read"),
    "train/js_divergence_error": no("Jensen–Shannon divergence"),
    "train/token_mult_prob_error": to("mismatch.abs_mean", "mean(e^|δ|) − 1: an upper bound of mean |δ|", offset=-1.0),
    "token_mult_prob_error": to("mismatch.abs_mean", "mean(e^|δ|) − 1: an upper bound of mean |δ|", offset=-1.0),
    "train/sampling_importance_ratio": to("mismatch.ratio_mean"),
    "train/approx_entropy": to("entropy.mean", "importance-weighted sample, not the full vocabulary"),
    "approx_entropy": to("entropy.mean", "importance-weighted sample, not the full vocabulary"),
    "train/probs_ratio": to("update.ratio_mean", ALL_UPDATES),
    "train/kl_penalty": to("reference.kl_k3", KL_LOSS),
    "train/loss": to("loss"),
    "train/grad_norm": to("grad.norm"),
    "train/lr": to("lr"),
    "train/mean_gen_tokens_per_sample": to("length.mean"),
    "mean_generation_length": to("length.mean"),
    "train/is_oob_ratio": to("is_weight.masked"),
    "validation/accuracy": to("reward.validation"),
}

OPENRLHF: Final[Table] = {
    "train/reward": to("reward.mean"),
    "reward": to("reward.mean"),
    "rollout/reward_mean": to("reward.mean"),
    "rollout/reward_std": to("reward.std"),
    "group_reward_std": to("reward.std", "within groups"),
    "train/return": no("return, of reward and KL penalty"),
    "return": no("return, of reward and KL penalty"),
    "policy_loss": to("loss", "policy loss"),
    "train/policy_loss": to("loss", "policy loss"),
    "entropy_loss": to("entropy.mean", "the entropy itself"),
    "train/entropy_loss": to("entropy.mean", "the entropy itself"),
    "actor_grad_norm": to("grad.norm"),
    "train/actor_grad_norm": to("grad.norm"),
    "actor_lr": to("lr"),
    "train/actor_lr": to("lr"),
    "ppo_kl": to("update.kl_k1", "−mean(cur − old), " + ALL_UPDATES),
    "train/ppo_kl": to("update.kl_k1", "−mean(cur − old), " + ALL_UPDATES),
    "ppo_clip_ratio": to("update.clip_high", BOTH_SIDES),
    "train/ppo_clip_ratio": to("update.clip_high", BOTH_SIDES),
    "vllm_kl": to("mismatch.kl_k1", "engine minus old"),
    "train/vllm_kl": to("mismatch.kl_k1", "engine minus old"),
    "kl": to("reference.kl_k3", KL_LOSS),
    "train/kl": to("reference.kl_k3", KL_LOSS),
    "logprobs_diff": no("difference to the initial model, sign and estimator configured"),
    "response_length": to("length.mean"),
    "train/response_length": to("length.mean"),
    "rollout/response_length_mean": to("length.mean"),
    "rollout/truncated_rate": to("length.truncated"),
    "truncated": to("length.truncated"),
    "train/truncated": to("length.truncated"),
}

SKYRL: Final[Table] = {
    "reward/avg_raw_reward": to("reward.mean"),
    "reward/mean_positive_reward": no("of positive rewards only"),
    "policy/policy_entropy": to("entropy.mean"),
    "policy/raw_grad_norm": to("grad.norm"),
    "policy/grad_norm": to("grad.norm"),
    "policy/policy_lr": to("lr"),
    "policy/policy_loss": to("loss", "policy loss"),
    "policy/final_loss": to("loss"),
    "policy/policy_kl": to("reference.kl_k3", KL_LOSS),
    "policy/rollout_train_logprobs_abs_diff_mean": to("mismatch.abs_mean"),
    "policy/rollout_train_logprobs_abs_diff_max": to("mismatch.abs_max"),
    "policy/minibatch_rollout_logprobs_abs_diff_mean": to("mismatch_current.abs_mean", ENGINE_OR_UPDATE),
    "loss_metrics/clip_ratio": to("update.clip_high", BOTH_SIDES),
    "policy/loss_metrics/clip_ratio": to("update.clip_high", BOTH_SIDES),
    "loss_metrics/is_ratio_min": no("includes padding as zeros"),
    "loss_metrics/is_ratio_std": no("includes padding as zeros"),
    "loss_metrics/is_ratio_mean": no(POST_CLIP),
    "generate/avg_num_tokens": to("length.mean"),
    "generate/max_num_tokens": to("length.max"),
}

AREAL: Final[Table] = {
    "task_reward/avg": to("reward.mean"),
    "final_reward/avg": no("after scaling and KL penalty"),
    "entropy/avg": to("entropy.mean"),
    "grad_norm": to("grad.norm"),
    "actor_loss/avg": to("loss"),
    "approx_kl/avg": to("update.kl_k1", "cur − prox: the other sign; where prox is the engine's it holds the mismatch",
                        scale=-1.0),
    "importance_weight/avg": to("update.ratio_mean"),
    "behave_approx_kl/avg": to("mismatch.kl_k1", "prox − behave: the other sign", scale=-1.0),
    "behave_imp_weight/avg": no(POST_CLIP),
    "clip_ratio/avg": to("update.clip_high", BOTH_SIDES),
    "seq_len/avg": no("prompt and response together"),
    "no_eos_ratios/avg": to("length.truncated", "responses without an end token"),
    "rs_filtered_fraction/avg": to("is_weight.masked"),
    "version_stats/sample_staleness_avg": to("staleness.mean"),
    "version_stats/sample_staleness_max": to("staleness.max"),
    "update_successful": to("update.skipped", "1 minus it", scale=-1.0, offset=1.0),
}  # fmt: skip

MS_SWIFT: Final[Table] = {
    "rollout_correction/k3_kl": to("mismatch.kl_k3"),
    "rollout_correction/kl": to("mismatch.kl_k1"),
    "rollout_correction/chi2_token": to("mismatch.chi2_token"),
    "rollout_correction/chi2_seq": no("of the geometric mean, unlike verl's"),
    "rollout_correction/ess": to("mismatch.ess_token", "of weights clamped to [1/t, t]: an upper bound"),
    "rollout_correction/is_weight_mean": dropped(),
    "rollout_correction/clipped_frac": to("is_weight.masked", "share of clipped weights"),
    **TRL,
}

PRIME_RL: Final[Table] = {
    "reward/all/mean": to("reward.mean"),
    "reward/mean": to("reward.mean"),
    "mismatch_kl/all/mean": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "mismatch_kl/mean": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "mismatch_kl": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "entropy/all/mean": to("entropy.mean"),
    "entropy/mean": to("entropy.mean"),
    "is_masked/all/mean": to("is_weight.masked"),
    "is_masked/mean": to("is_weight.masked"),
    "kl_ent_ratio/mean": no("mismatch_kl over entropy"),
    "loss/mean": to("loss"),
    "optim/grad_norm": to("grad.norm"),
    "optim/lr": to("lr"),
    "seq_len/all/mean": no("prompt and response together"),
    "max_vio/mean": to("expert.max_violation"),
}

ROLL: Final[Table] = {
    "critic/score/mean": to("reward.mean"),
    "actor/approxkl": to("policy.kl_k2", "k2 over all mini-batches, mean of sequence means: the invariant holds only "
                         "where there is one update a rollout"),
    "actor/policykl": to("policy.kl_k1", "cur − old: the other sign, mean of sequence means", scale=-1.0),
    "actor/ppo_ratio_low_clipfrac": to("update.clip_low"),
    "actor/ppo_ratio_high_clipfrac": to("update.clip_high"),
    "actor/ppo_ratio_clipfrac": no("sum of low and high"),
    "actor/clipfrac": to("update.clip_high", BOTH_SIDES),
    "actor/ratio_mean": to("policy.ratio_mean"),
    "actor/ratio_max": to("policy.ratio_max"),
    "actor/ratio_min": to("policy.ratio_min"),
    "actor/kl_loss": to("reference.kl_k3"),
    "actor/entropy": to("entropy.mean"),
    "actor/entropy_loss": to("entropy.mean", "the entropy itself"),
    "actor/pg_loss": to("loss", "policy loss"),
    "actor/total_loss": to("loss"),
    "actor/lr": to("lr"),
    "actor_train/grad_norm": to("grad.norm"),
    "actor/train_infer_ratio_token_mean": to("mismatch.ratio_mean"),
    "actor/train_infer_ratio_sequence_mean": no(LENGTHS),
    "actor/train_infer_diff_token_mean": no("exp(old) − exp(engine), signed, in probability space"),
    "actor/train_infer_final_mask_mean": to("is_weight.masked", "1 minus what is kept", scale=-1.0, offset=1.0),
    "tokens/response_length/mean": to("length.mean"),
    "tokens/response_length/max": to("length.max"),
    "critic/response_length/mean": to("length.mean"),
    "time/step_total": to("time.step_s"),
}  # fmt: skip


GENERIC: Final[Table] = {
    "reward": to("reward.mean"),
    "rewards": to("reward.mean"),
    "reward/overall": to("reward.mean"),
    "reward/total": to("reward.mean"),
    "total_reward": to("reward.mean"),
    "train_reward": to("reward.mean"),
    "raw_reward": to("reward.mean"),
    "rollout_reward": to("reward.mean"),
    "episode_reward": to("reward.mean"),
    "episode/reward": to("reward.mean"),
    "score": to("reward.mean"),
    "scores": to("reward.mean"),
    "return": to("reward.mean"),
    "success_rate": to("reward.mean", "share of successes"),
    "episode/success_rate": to("reward.mean", "share of successes"),
    "solve_rate": to("reward.mean", "share of right answers"),
    "pass_rate": to("reward.mean", "share of right answers"),
    "accuracy": to("reward.mean", "share of right answers"),
    "acc": to("reward.mean", "share of right answers"),
    "train_accuracy": to("reward.mean", "share of right answers"),
    "reward_std": to("reward.std"),
    "reward/std": to("reward.std"),
    "std_reward": to("reward.std"),
    "reward_max": to("reward.max"),
    "reward_min": to("reward.min"),
    "eval_reward": to("reward.validation"),
    "val_reward": to("reward.validation"),
    "eval_accuracy": to("reward.validation"),
    "eval_acc": to("reward.validation"),
    "val_accuracy": to("reward.validation"),
    "val_acc": to("reward.validation"),
    "test_accuracy": to("reward.validation"),
    "frac_reward_zero_std": to("group.zero_std"),
    "zero_std_frac": to("group.zero_std"),
    "frac_zero_std": to("group.zero_std"),
    "entropy": to("entropy.mean"),
    "policy_entropy": to("entropy.mean"),
    "token_entropy": to("entropy.mean"),
    "entropy_loss": to("entropy.mean", "taken for the entropy itself"),
    "grad_norm": to("grad.norm"),
    "gradient_norm": to("grad.norm"),
    "total_grad_norm": to("grad.norm"),
    "learning_rate": to("lr"),
    "lr": to("lr"),
    "loss": to("loss"),
    "total_loss": to("loss"),
    "train_loss": to("loss"),
    "policy_loss": to("loss"),
    "actor_loss": to("loss"),
    "pg_loss": to("loss"),
    "kl": to("reference.kl_k3", "taken for KL to the reference"),
    "kl_div": to("reference.kl_k3", "taken for KL to the reference"),
    "kl_divergence": to("reference.kl_k3", "taken for KL to the reference"),
    "kl_loss": to("reference.kl_k3", "taken for KL to the reference"),
    "kl_to_ref": to("reference.kl_k3"),
    "kl_ref": to("reference.kl_k3"),
    "ref_kl": to("reference.kl_k3"),
    "approx_kl": no("sign, estimator and pair differ between frameworks"),
    "ppo_kl": no("sign and estimator differ between frameworks"),
    "clip_frac": to("update.clip_high", BOTH_SIDES),
    "clipfrac": to("update.clip_high", BOTH_SIDES),
    "clip_fraction": to("update.clip_high", BOTH_SIDES),
    "frac_clipped": to("update.clip_high", BOTH_SIDES),
    "clip_ratio": to("update.clip_high", BOTH_SIDES),
    "pg_clipfrac": to("update.clip_high", BOTH_SIDES),
    "policy_ratio": to("update.ratio_mean"),
    "ratio": to("update.ratio_mean"),
    "log_ratio_abs": no("which two log-probs it compares is not said"),
    "response_length": to("length.mean"),
    "response_len": to("length.mean"),
    "completion_length": to("length.mean"),
    "completion_len": to("length.mean"),
    "completion_tokens": to("length.mean"),
    "response_tokens": to("length.mean"),
    "gen_len": to("length.mean"),
    "gen_length": to("length.mean"),
    "output_length": to("length.mean"),
    "length": to("length.mean"),
    "seq_len": to("length.mean", "may hold the prompt"),
    "truncated_ratio": to("length.truncated"),
    "truncated_frac": to("length.truncated"),
    "truncated": to("length.truncated"),
    "truncation_rate": to("length.truncated"),
    "clipped_ratio": to("length.truncated", "of completions"),
    "adv": to("advantage.mean"),
    "advantage": to("advantage.mean"),
    "adv_std": to("advantage.std"),
    "step_time": to("time.step_s"),
}

OPEN_INSTRUCT: Final[Table] = {
    "scores": to("reward.mean"),
    "objective/verifiable_reward": to("reward.mean"),
    "objective/scores": to("reward.mean"),
    "policy/entropy_avg": to("entropy.mean"),
    "policy/approxkl_avg": to("update.kl_k2", ALL_UPDATES),
    "policy/clipfrac_avg": to("update.clip_high", BOTH_SIDES),
    "objective/kl3_avg": to("reference.kl_k3"),
    "objective/kl2_avg": to("reference.kl_k2"),
    "objective/kl_avg": to("reference.kl_k1", "current minus reference"),
    "debug/vllm_vs_local_logprob_diff_mean": to("mismatch.abs_mean"),
    "debug/vllm_vs_local_logprob_diff_max": to("mismatch.abs_max"),
    "val/ratio": to("update.ratio_mean", ALL_UPDATES),
    "val/sequence_lengths": to("length.mean"),
    "val/stop_rate": to("length.truncated", "1 minus it", scale=-1.0, offset=1.0),
    "loss/policy_avg": to("loss", "policy loss"),
    "optim/grad_norm": to("grad.norm"),
    "lr": to("lr"),
}

TINKER: Final[Table] = {
    "env/all/reward/total": to("reward.mean"),
    "optim/entropy": to("entropy.mean", "of sampled tokens"),
    "optim/kl_sample_train_v1": to("mismatch_current.kl_k1", "sampler minus trainer"),
    "optim/kl_sample_train_v2": to("mismatch_current.kl_k2"),
    "optim/lr": to("lr"),
    "env/all/ac_tokens_per_turn": to("length.mean", "of a turn"),
    "env/all/by_group/frac_mixed": to("group.zero_std", "1 minus it", scale=-1.0, offset=1.0),
    "kl_policy_base": to("reference.kl_k1"),
}

FRAMEWORKS: Final[Mapping[str, Table]] = {
    "trl": TRL, "verl": VERL, "roll": ROLL, "slime": SLIME, "nemo-rl": NEMO_RL, "openrlhf": OPENRLHF, "skyrl": SKYRL,
    "areal": AREAL, "ms-swift": MS_SWIFT, "prime-rl": PRIME_RL, "open-instruct": OPEN_INSTRUCT, "tinker": TINKER,
}  # fmt: skip
"""In order of preference where the names fit several alike."""

PATTERNS: Final[tuple[tuple[str, Alias], ...]] = (
    (r"val-core/.+/(acc|reward)/mean@\d+", to("reward.validation", "verl's validation")),
    (r"val/test_score/.+", to("reward.validation", "verl's validation, older releases")),
    (r"eval/.+/(reward|score|accuracy|acc|pass@1|avg_score)", to("reward.validation")),
    (r"eval/(reward|score|accuracy|mean_reward|all/avg_score)", to("reward.validation")),
    (r"eval_rewards?/.+", Alias(None, "one of several evaluation rewards", may_be_nan=True)),
    (r"rewards/.+", Alias(None, "one of several reward functions; NaN where it does not apply", may_be_nan=True)),
    (r"critic/.+", no("of the critic")),
)
"""For every framework, after its table; the whole name must match."""
