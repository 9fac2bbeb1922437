"""What a watched worker keeps: one monitor, the sums of this step, and the hooks that `worker` calls.

Reads what ROLL has computed; computes nothing of the model again unless asked to (`exact`). Every hook is guarded: a
failure of ours is counted and training goes on.

Legend: B rows of a micro-batch, T = sequence positions − 1 (log-probs of tokens 1 …).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from logging import getLogger
from typing import Any

import foreshock
from foreshock import Monitor
from foreshock.adapters.roll import groups, options, ranks, scalars
from foreshock.adapters.roll.actions import Actions
from foreshock.adapters.roll.exact import Exact
from foreshock.adapters.roll.updates import Updates
from foreshock.guard import guarded

_log = getLogger("foreshock")


def attach(worker: Any) -> Watch | None:
    """Begins to watch an initialised worker; None, with a line in the log, where there is no url or it fails."""
    if not os.environ.get("FORESHOCK_URL"):
        return None
    try:
        chosen = options.load()
        exchange = ranks.Exchange()
        monitor = foreshock.init(
            config=scalars.configuration(worker),
            role="trainer",
            rank=int(worker.rank_info.rank),
            world=int(worker.rank_info.world_size),
            mode=chosen.mode,
            controller=chosen.controller,
            broadcast=exchange.broadcast if exchange.world > 1 else None,
        )
        return Watch(worker, monitor, chosen, exchange)
    except Exception as error:
        if os.environ.get("FORESHOCK_RAISE") == "1":
            raise
        _log.error("foreshock: this worker is not watched: %r", error, exc_info=error)
        return None


class Watch:
    """One worker's. Installs itself on the strategy's instance; the classes of ROLL stay as they are."""

    def __init__(self, worker: Any, monitor: Monitor, chosen: options.Options, exchange: ranks.Exchange) -> None:
        self.worker = worker
        self.monitor = monitor
        self.guard = monitor.guard
        self.options = chosen
        self.exchange = exchange
        self.stop_reason: str | None = None
        self.step = 0
        self.engine_seen = False
        self.reporting = _reporting(worker)
        self._listening = False
        self._current_BT: Any = None
        self._sums = scalars.Sums()
        self.updates = Updates(self)
        self.exact = Exact(self)
        self.actions = Actions(self)
        self.rows = groups.Rows()
        strategy = worker.strategy
        self._score = strategy.op_compute_log_probs
        strategy.op_compute_log_probs = self._listened
        self._semantics = scalars.semantics(worker)

    def _listened(self, *args: Any, **kwargs: Any) -> Any:
        """ROLL's own log-probs; the first of a loss are kept until it is done."""
        log_probs = self._score(*args, **kwargs)
        if self._listening:
            self._current_BT, self._listening = log_probs.detach(), False
            self.exact.fill(self._current_BT)
        return log_probs

    # --- around ROLL's own methods -----------------------------------------------------------------------------------

    # Where ranks meet (scoring again, refusal, rows, commands) every rank must come, also one whose collector has
    # switched itself off: those calls stand outside the guard.

    def begin(self, data: Any) -> None:
        """At the head of `train_step`."""
        step = data.meta_info.get("global_step")
        self.step = self.step + 1 if step is None else int(step)
        self._sums = scalars.Sums()
        self.rows = groups.Rows()
        self.updates.begin()

    @contextlib.contextmanager
    def around_updates(self) -> Iterator[None]:
        """`strategy.train_step` is one optimizer step: counted, scored before if asked, left out if need be."""
        strategy = self.worker.strategy
        had, original = strategy.__dict__.get("train_step"), strategy.train_step

        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_update(batch)
            with self.updates.on_optimizer(strategy):
                result = original(batch, *args, **kwargs)
            self.updates.done()
            return result

        strategy.train_step = counted
        try:
            yield
        finally:
            if had is None:
                strategy.__dict__.pop("train_step", None)
            else:
                strategy.train_step = had

    def before_update(self, batch: Any) -> None:
        """At the head of one update: the mini-batch is on the device, the states are loaded."""
        self._note_rows(batch)
        self.exact.before_update(batch, self.updates.index)
        if self.options.refuse and not self.updates.index and not self.exact.cause:
            self.exact.cause = self._mixed_groups()

    def _mixed_groups(self) -> str:
        """The cause, where groups were formed across prompts; the same on all ranks. Collective."""
        try:
            share = groups.values(self.exchange.gather(self._own_rows()), self.worker.pipeline_config)
        except Exception as error:
            self.guard.caught("group.mixed", error)
            return ""
        found = share.get("group.mixed", 0.0)
        return f"{found:.0%} of the advantage groups were formed across prompts" if found > 0 else ""

    @guarded()
    def _note_rows(self, batch: Any) -> None:
        if self.reporting:
            self.rows.add(batch)
        if self.options.probe:
            self.actions.probe.keep(batch)

    @guarded()
    def before_loss(self, data: Any) -> Callable[[], None] | None:
        """At the head of a micro-batch's loss; what it returns is called after it."""
        self._listening, self._current_BT = True, None
        self.exact.before_loss(data)
        return self.actions.correction.before_loss(data)

    @guarded()
    def after_loss(self, data: Any) -> None:
        """After a micro-batch's loss: the three edges, and the sums of this step."""
        current_BT, self._current_BT, self._listening = self._current_BT, None, False
        if current_BT is None or not self.reporting:
            return
        batch = data.batch
        mask_BT = _get(batch, "origin_response_mask", batch["response_mask"])[:, 1:]
        old_BT, source = self.exact.old(data, current_BT)
        self.updates.add(current_BT, old_BT, mask_BT, source)
        self.monitor.observe(
            "policy", current_BT, old_BT, mask_BT, optimizer_step=self.updates.index, clip_range=self._clip(),
            old_source=source, advantages=_get(batch, "advantages", None),
        )  # fmt: skip
        if self.updates.index == 0:
            self._observe_engine(data, current_BT, old_BT, mask_BT, source)
            self._sums.add(current_BT, mask_BT, _get(batch, "final_response_mask", None))

    def _observe_engine(self, data: Any, current_BT: Any, old_BT: Any, mask_BT: Any, source: str) -> None:
        engine_BT = _get(data.batch, "infer_logprobs", None)
        if engine_BT is None or len(engine_BT) == 0:
            self.monitor.observe("mismatch", None, None, mask_BT)
            self.monitor.observe("mismatch_current", None, None, mask_BT)
            return
        if not self.engine_seen:
            self.engine_seen = True
            self.actions.engine_log_probs_seen()
        # Where old is the detached current log-prob, `mismatch` is the same edge as `mismatch_current`.
        if source != "detached":
            self.monitor.observe("mismatch", old_BT, engine_BT, mask_BT, semantics=self._semantics)
        else:
            self.monitor.observe("mismatch", current_BT, engine_BT, mask_BT, semantics=self._semantics)
        self.monitor.observe("mismatch_current", current_BT, engine_BT, mask_BT, semantics=self._semantics)

    def _clip(self) -> tuple[float, float]:
        config = self.worker.pipeline_config
        if getattr(config, "use_pg_clip_range", False):
            return float(config.pg_clip_low), float(config.pg_clip_high)
        return float(config.pg_clip or 0.2), float(config.pg_clip or 0.2)

    def end(self, output: Any) -> None:
        """After `train_step`: scalars, the sealed step, and the commands that are due, on all ranks together."""
        every = self.exchange.gather(self._own_rows())
        self._log_scalars(output, every)
        self.monitor.end_step(self.step)

    @guarded()
    def _own_rows(self) -> Any:
        return self.rows.read()

    @guarded()
    def _log_scalars(self, output: Any, every: list[Any]) -> None:
        said: dict[str, Any] = {}
        said |= scalars.from_metrics(getattr(output, "meta_info", {}).get("metrics", {}), self.updates.factor)
        said |= self._sums.values() | self.updates.values()
        said |= groups.values(every, self.worker.pipeline_config)
        if self.exact.gap is not None:
            said["roll.scored_kl_k2"] = self.exact.gap
        if self.updates.skipped:
            said.pop("grad.norm", None)  # an optimizer that did not step has told none
        self.monitor.log(said)

    @guarded()
    def checkpoint(self, global_step: int) -> None:
        """Registers what ROLL has saved, once over all ranks."""
        if self.worker.rank_info.rank == 0:
            path = scalars.checkpoint_path(self.worker, global_step)
            self.monitor.checkpoint(path, global_step, scope=("weights", "optimizer", "scheduler", "rng"))


def _reporting(worker: Any) -> bool:
    """One rank of those that hold the same tokens: the first of its tensor- and context-parallel group."""
    info = worker.rank_info
    return int(getattr(info, "tp_rank", 0)) == 0 and int(getattr(info, "cp_rank", 0)) == 0


def _get(batch: Any, key: str, default: Any) -> Any:
    return batch[key] if key in batch.keys() else default  # noqa: SIM118 - a TensorDict iterates over rows
