"""OpenRLHF's policy worker, watched: log-probs per token of every micro-batch, where its loss sees them.

Legend: B rows of a micro-batch, A action positions.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import foreshock
from foreshock import Monitor, Semantics
from foreshock.guard import guarded


class WorkerWatch:
    """Before PolicyModelActor. Ranks of one ring-attention or tensor group hold the same rows: its first reports."""

    _foreshock: WorkerPart | None = None

    def foreshock_watch(self, note: dict[str, Any]) -> dict[str, Any]:
        """Begins to watch; the answer is the heartbeat."""
        try:
            self._foreshock = WorkerPart(self, note)
        except Exception as error:
            if os.environ.get("FORESHOCK_RAISE") == "1":
                raise
            return {"error": repr(error)}
        return {"rank": self._foreshock.rank, "reporting": self._foreshock.reporting}

    def foreshock_seal(self, step: int) -> None:
        """At the driver's boundary."""
        if self._foreshock is not None:
            self._foreshock.seal(step)

    def foreshock_correction(self, on: bool, threshold: list[float] | None) -> None:
        """The loss's importance weights, from the next micro-batch on."""
        loss = self.trainer.actor_loss_fn  # type: ignore[attr-defined]
        loss.enable_vllm_is_correction = on
        if threshold:
            loss.vllm_is_truncated_threshold = threshold

    def foreshock_finish(self, status: str) -> None:
        """When the driver's `fit` has ended."""
        if self._foreshock is not None:
            self._foreshock.monitor.finish(status)


class WorkerPart:
    """What one worker keeps, and the wrappers around its trainer."""

    def __init__(self, worker: Any, note: dict[str, Any]) -> None:
        trainer = worker.trainer
        self.args, self.trainer = trainer.args, trainer
        copies = int(self.args.ds.ring_attn_size) * int(self.args.ds.tensor_parallel_size)
        self.rank, self.reporting = int(worker._rank) // copies, int(worker._rank) % copies == 0
        self.monitor: Monitor = foreshock.init(
            note["run"], {"host": "openrlhf"}, role="trainer", rank=self.rank, world=int(worker._world_size) // copies,
            launch=note["launch"], controller=False, **(note["settings"] if self.reporting else {"url": ""}),
        )  # fmt: skip
        self.guard = self.monitor.guard
        self.updates = self._micro_batches = 0
        self._experience: Any = None
        loss = trainer.actor_loss_fn
        loss.forward = functools.wraps(loss.forward)(functools.partial(self._loss, loss.forward))
        step = trainer.training_step
        trainer.training_step = functools.wraps(step)(functools.partial(self._step, step))

    def _step(self, original: Any, experience: Any, kl_ctl: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        self._experience = experience
        try:
            return original(experience, kl_ctl, step, *args, **kwargs)
        finally:
            self._experience = None
            self._count(step)

    @guarded()
    def _count(self, step: int) -> None:
        """Optimizer steps: at the ends of accumulation, or where dynamic batching says."""
        self._micro_batches += 1
        if self.args.train.dynamic_batch_enable:
            self.updates += bool(self.trainer.replay_buffer.dynamic_optimizer_step[step])
        else:
            self.updates += self._micro_batches % max(1, int(self.trainer.strategy.accumulated_gradient)) == 0

    def _loss(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._look(*args, **kwargs)
        return original(*args, **kwargs)

    @guarded()
    def _look(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any = None,
        rollout_log_probs: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """One micro-batch, all [B, A]; looked at before the loss, nothing is changed."""
        current_BA, mask_BA, step = log_probs.detach(), action_mask, self.updates
        seen: dict[str, Any] = {}
        reference_BA = None
        if self._experience is not None:
            seen["token_ids"] = self._experience.sequences[:, -current_BA.shape[1] :]
            reference_BA = self._experience.base_action_log_probs
        loss = self.trainer.actor_loss_fn
        bounds = (1.0 - float(loss.clip_eps_low), 1.0 + float(loss.clip_eps_high))
        self.monitor.observe(
            "policy", current_BA, old_log_probs, mask_BA, optimizer_step=step, advantages=advantages,
            clip_range=bounds if loss.policy_loss_type == "ppo" else None, **seen,
        )  # fmt: skip
        if step == 0:
            meaning = semantics(self.args)
            self.monitor.observe("mismatch", old_log_probs, rollout_log_probs, mask_BA, semantics=meaning, **seen)
            self.monitor.observe("mismatch_current", current_BA, rollout_log_probs, mask_BA, semantics=meaning, **seen)
        if reference_BA is not None:
            self.monitor.observe("reference", reference_BA, current_BA, mask_BA, **seen)

    def seal(self, step: int) -> None:
        """Ends the step."""
        self.updates = self._micro_batches = 0
        self.monitor.end_step(step)


def semantics(args: Any) -> dict[str, Semantics]:
    """The trainer scores the full vocabulary at the rollout's temperature; vLLM is asked for `processed_logprobs`."""
    temperature, top_p = float(args.rollout.temperature), float(args.rollout.top_p)
    trainer = Semantics(
        engine="transformers", temperature=temperature, truncation="none", normaliser="full_vocabulary",
        penalties="none", source="rescore", dtype=str(args.ds.param_dtype),
    )  # fmt: skip
    engine = Semantics(
        engine="vllm", temperature=temperature, truncation=f"top_p={top_p}" if top_p < 1 else "none",
        normaliser="kept_set" if top_p < 1 else "full_vocabulary", penalties="none", source="decode",
    )  # fmt: skip
    return {"a": trainer, "b": engine}
