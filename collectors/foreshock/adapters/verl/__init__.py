"""verl's PPO/GRPO trainers: the plugin attaches by itself where FORESHOCK_URL is set; or `attach(trainer)` by hand.

`plugin` is verl's entry point (group `verl.plugins`) and waits for a trainer to be built. `driver` stands on the
trainer's instance: boundaries, scalars, checkpoints, `actions` (commands). `worker` stands on each actor worker, where
the log-probs per token are (`pairs`), and is sent there by verl's own `execute_with_func_generator` (`workers`): no
class of verl is changed in a worker, and each one's answer is its heartbeat. A trainer under a name of its own in
verl's registry is not an option: verl compares that name with "sync" to decide how to sample, save and resume.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "with `rollout.calculate_log_probs`, not in bypass mode: sets "
    "`algorithm.rollout_correction.rollout_is` and its threshold from the next step on",
    "disable_is_correction": "as above",
    "rollback": "synchronous trainers: weights, optimizer, schedule and RNG (critic too) as verl loads them when it "
    "resumes, then the engine's weights; the next prompts follow, or with `data` in its scope those after the "
    "checkpoint (v1)",
    "scale_lr": "where every actor worker answered and has a torch or Megatron optimizer: every later update takes the "
    "schedule's rate times the factor",
    "skip_update": "the next updates are not asked of the workers: parameters, moments and schedule stay as they are",
    "checkpoint_now": "synchronous trainers: verl's own full checkpoint at the boundary",
    "pause": "always",
    "resume": "always",
    "stop": "always: the loop ends after this step",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "resync_engine": "verl pushes its weights after every step by itself; digests are not read back",
    "resync_trainer": "no seam that is the same over its engines",
    "probe": "no second scoring pass",
}


def attach(trainer: Any, run: str | None = None, **arguments: Any) -> Any:
    """Watches a built trainer (v1 `PPOTrainer` after `init()`, v0 `RayPPOTrainer` after `init_workers()`) until its
    `fit` ends. `run` is by default FORESHOCK_RUN, else `trainer.project_name/experiment_name`; `arguments` go to
    `foreshock.init`. Without a url the trainer is left untouched. Raises TypeError for another kind of trainer."""
    return import_module("foreshock.adapters.verl.driver").attach(trainer, run, **arguments)
