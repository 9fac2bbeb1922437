"""The half of a monitor that a loop tells its figures to: pairs, scalars, checkpoints, notices → one sealed step.

host's tensors → Measuring → StepBuilder → Process → Sender (thread) → service
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from foreshock.control.supervised import Launcher
from foreshock.frames.builder import StepBuilder
from foreshock.frames.plain import plain
from foreshock.guard import Guard, guarded
from foreshock.process import Process
from foreshock.transport.stream import Extras
from foreshock.wire.envelope import Semantics


class Measuring:
    """What `Monitor` builds upon; every method returns at once and raises nothing of ours."""

    guard: Guard
    enabled: bool
    _builder: StepBuilder
    _extras: Extras
    _launcher: Launcher | None
    _process: Process

    def _begin_measuring(self, builder: StepBuilder, process: Process) -> None:
        """At `init`, and again in a forked child."""
        self._builder, self._process, self._keeper = builder, process, process.keeper
        self._rejections = 0

    @guarded()
    def observe(
        self,
        pair: str,
        a: Any = None,
        b: Any = None,
        mask: Any = None,
        *,
        optimizer_step: int = 0,
        clip_range: tuple[float, float] | None = None,
        seq_ids: Any = None,
        cu_seqlens: Any = None,
        token_ids: Any = None,
        versions: Any = None,
        advantages: Any = None,
        group_ids: Any = None,
        prompt_ids: Any = None,
        semantics: Semantics | Mapping[str, Semantics] | None = None,
        old_source: str = "same_weights",
        **where: Any,
    ) -> None:
        """Adds a micro-batch of log-probs [sequences, positions] (or packed, with `cu_seqlens`) to a pair of this step.

        δ = a − b over tokens where `mask` is not 0; b is the side nearest to what was sampled. Reduced where the
        tensors live, without waiting for the device. `policy` on later optimizer steps (`optimizer_step` > 0) lands on
        `update`; it is missing where `old_source` is not `same_weights`. `b=None`: the engine told no log-probs.

        `clip_range` is the ratio's bounds, as (0.8, 1.28), or the two ε, as (0.2, 0.28). `versions` says how many
        versions behind the trainer the sampling engine was (int, one per row, or one per token); the pair is then also
        kept per lag. `advantages` (per token or row) give `advantage.mean/std/abs_max`. `semantics` are side b's, or
        {"a": …, "b": …}: streams that do not mean the same are not compared, the pair is missing as `semantics_differ`.
        `group_ids` and `prompt_ids` (one integer a row) are kept in token dumps alone (docs/dumps.md).
        Further keywords go to `foreshock.stats.pair.PairAccumulator.observe`.
        """
        if not self.enabled:
            return
        for name, value in (("seq_ids", seq_ids), ("cu_seqlens", cu_seqlens), ("token_ids", token_ids)):
            if value is not None:
                where[name] = value
        if clip_range is not None:
            low, high = clip_range
            where["clip_range"] = (1.0 - low, 1.0 + high) if high < 1.0 else (low, high)
        self._builder.observe(
            pair, a, b, mask, optimizer_step=optimizer_step, semantics=semantics, old_source=old_source,
            versions=versions, advantages=advantages, **where,
        )  # fmt: skip
        if self._keeper is not None and a is not None and b is not None:
            self._keeper.observe(
                pair,
                {"a": a, "b": b, "mask": mask, "cu_seqlens": cu_seqlens, "seq_ids": seq_ids, "token_ids": token_ids,
                 "positions": where.get("positions"), "versions": versions, "advantages": advantages,
                 "group_ids": group_ids, "prompt_ids": prompt_ids},
                semantics, optimizer_step=optimizer_step, old_source=old_source, clip_range=where.get("clip_range"),
                piece=bool(where.get("split") or where.get("sequence_sums")),
            )  # fmt: skip

    @guarded()
    def log(self, scalars: Mapping[str, Any]) -> None:
        """Adds scalars to this step; repeated names fold by the catalogue's merge rule (else by mean).

        Values are numbers, numpy scalars or one-element tensors; those on a device are read later, without waiting.
        """
        if self.enabled:
            self._builder.scalars.add(scalars)

    @guarded()
    def checkpoint(
        self, path: str | os.PathLike[str], step: int, scope: Collection[str] = (), reward: float | None = None
    ) -> None:
        """Announces a checkpoint that was written.

        `scope` names what it holds, of weights, optimizer, scheduler, rng, data. `reward` is by default the last
        `reward.validation` of a step.
        """
        if not self.enabled:
            return
        data: dict[str, Any] = {"path": os.fspath(path), "step": operator.index(step)}
        if scope:
            data["scope"] = list(scope)
        if reward is None:
            reward = self._builder.scalars.last_validation
        if reward is not None:
            data["reward"] = float(reward)
        self._process.put_notice("checkpoint", data, operator.index(step))
        if self._launcher is not None and self._extras.controller:
            self._launcher.tell(checkpoint=data["path"], step=data["step"])

    @guarded()
    def notice(self, kind: str, step: int | None = None, **data: Any) -> None:
        """Tells of something that happened.

        `settings` (lr, batch …: baselines begin a new segment), `weights` (version, checksum, changed_share, side, ok),
        `flush` (engine), `note` (text), or a kind of the host's own.
        """
        if self.enabled:
            self._process.put_notice(kind, plain(data), step)

    def dump_tokens(self, reason: str = "asked") -> None:
        """Keeps the tokens of the ring's steps and of the next ones (docs/dumps.md); nothing without `dump_dir`."""
        if self._keeper is not None:
            self._keeper.ask(reason)

    # --- inside --------------------------------------------------------------------------------------------------

    @guarded()
    def _seal(self, step: int) -> None:
        if not self.enabled:
            return
        number = operator.index(step)
        sealed = self._builder.seal(number, time.monotonic())
        if self._keeper is not None:
            self._keeper.end_step(number, self._process.place())
        if self._builder.notes or self._builder.scalars.rejections > self._rejections:
            self._tell_what_was_odd(number)
        self._process.put_step(sealed)
        if self._builder.errors:
            errors, self._builder.errors = self._builder.errors, []
            raise errors[0]

    def _tell_what_was_odd(self, step: int) -> None:
        """Counts rejected scalars; the first of each kind are told in a notice."""
        scalars = self._builder.scalars
        self._process.losses.add("invalid_signal", scalars.rejections - self._rejections)
        texts = [f"{name!r}: {why}" for name, why in scalars.newly_rejected()]
        self._rejections = scalars.rejections
        texts += self._builder.notes
        self._builder.notes = []
        if texts:
            self._process.put_notice("note", {"text": plain("; ".join(texts))}, step)
