"""slime, from its own command line:

    --custom-megatron-before-train-step-hook-path foreshock.adapters.slime.before_train_step
    --rollout-data-postprocess-path foreshock.adapters.slime.rollout_data

The first is called on every training rank ahead of each optimizer step: there the adapter begins, and wraps slime's
`policy_loss_function` (which sees current, old and rollout log-probs of a micro-batch at once) and the `step` methods
of optimizer and scheduler. The second gives a rollout's rewards and lengths. A Foreshock step is one rollout, with all
its optimizer steps, under slime's rollout id. Commands are agreed over all ranks: slime's settings are per process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from logging import getLogger
from typing import Any, Final

import foreshock
from foreshock import Command, Monitor
from foreshock.adapters import slime_batch as batches
from foreshock.adapters.optimizer import asked_skips, scale_lr, scaled
from foreshock.guard import guarded

_log = getLogger("foreshock")
CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "once a batch has held rollout log-probs, not with `--use-rollout-logprobs`: `use_tis` and "
    "`tis_clip` on every rank, from the next rollout on",
    "disable_is_correction": "as above",
    "scale_lr": "every later update takes the scheduler's rate times the factor",
    "skip_update": "the next updates leave parameters, moments and schedule as they are",
    "pause": "always",
    "resume": "always",
    "stop": "always: training raises after the rollout's last update on every rank, which ends the job",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "rollback": "slime loads a full checkpoint at its start only: stop, and `--load … --ckpt-step`",
    "resync_trainer": "no seam of slime's for it",
    "resync_engine": "slime pushes its weights after every rollout by itself",
    "checkpoint_now": "the driver decides when to save",
    "probe": "no second scoring pass",
}
_adapter: SlimeAdapter | None = None


class StopAskedError(RuntimeError):
    """A `stop` command: leaves the actor's `train` on every rank, and so ends the driver's loop."""


def before_train_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """`--custom-megatron-before-train-step-hook-path`. Critics are left alone."""
    if getattr(model[0], "role", "actor") != "actor":
        return
    if _adapter is None:
        _begin(args, optimizer, scheduler)
    assert _adapter is not None
    _adapter.before_step(int(rollout_id), int(step_id))


def rollout_data(args: Any, rollout_id: int, data: Any) -> None:
    """`--rollout-data-postprocess-path`: looked at, never changed."""
    batches.noted = (int(rollout_id), batches.read(data))


def _begin(args: Any, optimizer: Any, scheduler: Any) -> None:
    """On every rank together, at the first optimizer step."""
    global _adapter
    place = batches.place()
    active, broadcast = place.agree(bool(os.environ.get("FORESHOCK_URL")))
    settings: dict[str, Any] = {} if active and (place.reports or place.first) else {"url": ""}
    monitor = foreshock.init(
        config=batches.configuration(args),
        role="trainer" if place.reports else "driver",
        rank=place.rank if place.reports else 0,
        world=place.world if place.reports else 1,
        controller=place.first,
        broadcast=broadcast if active else None,
        mode=os.environ.get("FORESHOCK_MODE", "observe"),
        **settings,
    )
    _adapter = SlimeAdapter(args, monitor, active, place, optimizer, scheduler)
    if active:
        _adapter.install(batches.loss_module())


class SlimeAdapter:
    """One rank's. What fails of ours is caught by the monitor's guard; collectives are met whatever failed."""

    def __init__(
        self, args: Any, monitor: Monitor, active: bool, place: batches.Place, optimizer: Any, scheduler: Any
    ) -> None:
        self.args = args
        self.monitor = monitor
        self.guard = monitor.guard
        self.active = active
        self.place = place
        self.optimizer, self.scheduler = optimizer, scheduler
        self.updates = 0
        self.lr_factor = 1.0
        self.skips = 0
        """Updates still to be left out."""
        self._skipping = False
        self._stop = False
        self._rollout: int | None = None
        self._updates_due = 0
        self._scored: Any = None
        self._can_correct = False
        self._announced: int | None = None

    def install(self, loss: Any) -> None:
        """Wraps the loss module's two functions and the `step` methods of optimizer and scheduler."""
        for owner, name, ours in (
            (loss, "policy_loss_function", self._loss),
            (loss, "get_log_probs_and_entropy", self._scoring),
            (self.optimizer, "step", self._updating),
            (self.scheduler, "step", self._scheduling),
        ):
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(functools.partial(ours, original)))
        handlers: dict[str, Callable[[Command], Any]] = {
            "scale_lr": functools.partial(scale_lr, self),
            "skip_update": self._skip_update,
            "stop": self._stop_asked,
            "pause": lambda command: None,
            "resume": lambda command: None,
        }
        for kind, handler in handlers.items():
            self.monitor.on(kind, handler)

    # --- boundaries --------------------------------------------------------------------------------------------------

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """Ahead of an optimizer step; seals a rollout whose last update never came (gradients that were not finite)."""
        if not self.active:
            return
        if step_id == 0:
            self._seal()
            self._rollout, self.updates = rollout_id, 0
            self._updates_due = self._note_rollout(rollout_id) or 0
        self._skipping = self.skips > 0
        self.skips -= self._skipping

    def _seal(self) -> None:
        """Seals the rollout in progress and carries out what is due; on every rank."""
        if self._rollout is None:
            return
        rollout, self._rollout = self._rollout, None
        self._settle()
        self.monitor.end_step(rollout)
        if self._stop:
            raise StopAskedError("foreshock: stop was asked for")

    @guarded(default=0)
    def _note_rollout(self, rollout_id: int) -> int:
        """A rollout's scalars; how many updates it will have, 0 where that is not known."""
        noted, batches.noted = batches.noted, None
        if noted is None or noted[0] != rollout_id:
            return 0
        self.monitor.log(noted[1].scalars)
        if noted[1].engine and not self._can_correct and not getattr(self.args, "use_rollout_logprobs", False):
            self._can_correct = True
            for kind in ("enable_is_correction", "disable_is_correction"):
                self.monitor.on(kind, self._correct)
        return noted[1].updates

    @guarded()
    def _settle(self) -> None:
        """Announces the newest checkpoint that slime says is complete."""
        found = batches.latest_checkpoint(self.args) if self.place.first else None
        if found is not None and found[0] != self._announced:
            if self._announced is not None or found[0] >= getattr(self.args, "start_rollout_id", 0):
                self.monitor.checkpoint(found[1], found[0], ("weights", "optimizer", "scheduler", "rng"))
            self._announced = found[0]

    # --- around slime's own: whatever they return or raise is passed on as it is -------------------------------------

    def _scoring(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        scored = original(*args, **kwargs)
        self._scored = scored
        return scored

    def _loss(self, original: Any, args: Any, batch: Any, *more: Any, **kwargs: Any) -> Any:
        self._scored = None
        result = original(args, batch, *more, **kwargs)
        self._trained(batch)
        self._scored = None
        return result

    def _updating(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._skipping:
            return True, 0.0, 0
        with scaled(self.optimizer, self.lr_factor):
            result = original(*args, **kwargs)
        self._updated(result)
        return result

    def _scheduling(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = None if self._skipping else original(*args, **kwargs)
        self.updates += not self._skipping
        self.monitor.log({"update.skipped": float(self._skipping)})
        self._updates_due -= 1
        if self._updates_due == 0:
            self._seal()
        return result

    # --- measuring ---------------------------------------------------------------------------------------------------

    @guarded()
    def _trained(self, batch: Any) -> None:
        """A micro-batch's loss was computed; not again where slime computes it anew in the backward pass."""
        if not self.place.reports or self._scored is None or batches.in_backward():
            return
        found = batches.rows(self._scored, batch, self.args)
        if found is None:
            for pair in ("policy", "mismatch"):  # a rank of a context-parallel group has a piece of each sequence
                self.monitor.observe(pair)
            return
        where = {"cu_seqlens": found.cu_seqlens, "token_ids": found.token_ids}
        self.monitor.observe(
            "policy", found.current, found.old, found.mask, optimizer_step=self.updates, old_source=found.old_source,
            clip_range=batches.clip_range(self.args), advantages=found.advantages, **where,
        )  # fmt: skip
        engine = where | {"semantics": batches.semantics(self.args)}
        trainer = found.current if found.old_source in ("detached", "rollout") else found.old
        if trainer is not found.current or self.updates == 0:
            self.monitor.observe("mismatch", trainer, found.rollout, found.mask, **engine)
        if self.updates == 0:
            self.monitor.observe("mismatch_current", found.current, found.rollout, found.mask, **engine)
        if found.reference is not None:
            self.monitor.observe("reference", found.reference, found.current, found.mask, **where)
        self.monitor.log({"entropy.mean": found.entropy})

    @guarded()
    def _updated(self, result: Any) -> None:
        scalars: dict[str, Any] = {"lr": float(self.optimizer.param_groups[0]["lr"]) * self.lr_factor}
        if isinstance(result, tuple) and result[1] is not None:
            scalars["grad.norm"] = result[1]
        self.monitor.log(scalars)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _skip_update(self, command: Command) -> Any:
        self.skips += asked_skips(command.arguments)
        return {"updates": self.skips}

    def _stop_asked(self, command: Command) -> Any:
        self._stop = True
        return {"how": "train raises at this boundary on every rank"}

    def _correct(self, command: Command) -> Any:
        """slime reads these at every micro-batch, on every rank."""
        on = command.kind == "enable_is_correction"
        cap = command.arguments.get("cap") if on else None
        if cap is not None and float(cap) <= 0:
            command.refused(f"cap must be above 0, not {cap}")
            return None
        self.args.use_tis = on
        if cap is not None:
            self.args.tis_clip = float(cap)
        self.monitor.notice("settings", use_tis=on, tis_clip=float(self.args.tis_clip))
        return {"use_tis": on, "tis_clip": float(self.args.tis_clip)}
