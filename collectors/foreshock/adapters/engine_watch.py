"""One watched engine client: what sglang's and vLLM's adapters share behind their own routes and methods.

    host's call → prepare (ids, log-probs asked for) → engine → answered → Samples, counts
    push, label, flush → WeightWatch → notices

Whatever of ours fails is caught by the monitor's guard, and the call goes to the engine as the host made it.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import foreshock
from foreshock import Monitor, Semantics
from foreshock.adapters.engine_answers import Choice
from foreshock.adapters.engine_asking import Asking
from foreshock.adapters.engine_samples import Sample, Samples
from foreshock.adapters.engine_weights import Ask, WeightWatch
from foreshock.guard import Guard, guarded

if TYPE_CHECKING:
    from foreshock.adapters.engine_http import HttpWatch

ONE = "engine"
CLOSE_S: Final = 2.0


class EngineWatch:
    """What `wrap` returns: `samples` for the join, `report()` before `end_step`, `close()` to let the client go."""

    def __init__(self, monitor: Monitor, name: str, samples: Samples, checksum_share: float) -> None:
        self.monitor = monitor
        self.guard: Guard = monitor.guard
        self.name = name
        self.samples = samples
        self.checksum_share = checksum_share
        self.weights: dict[str, WeightWatch] = {}
        """By engine: one in process, or one per origin of a client that speaks to several."""
        self.asking = Asking()
        """Of which requests log-probs are asked for where the host does not."""
        self.client: Any = None
        """What speaks to the server, where a URL was given."""
        self.http: HttpWatch | None = None
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []

    # --- the host's side -----------------------------------------------------------------------------------------

    @guarded()
    def report(self) -> None:
        """Tells what is pending and logs what the responses since the last time had in common; call before `end_step`.

        Scalars: `engine.samples`, `engine.tokens`; shares of responses: `engine.finish_<reason>`,
        `engine.mixed_versions` (several version labels in one), `engine.unasked` (no log-probs were asked for),
        `engine.unread` (asked for and not to be read, or no answer); `engine.cached_share` (of prompt tokens),
        `engine.retractions` (per response).
        """
        self.settle()
        with self._lock:
            counts, self._counts = self._counts, Counter()
        answers = counts["samples"] + counts["unread"]
        if not answers:
            return
        scalars = {"engine.samples": float(counts["samples"]), "engine.tokens": float(counts["tokens"])}
        scalars["engine.unread"] = counts["unread"] / answers
        if counts["samples"]:
            shares = ("unasked", "mixed_versions", "retractions", *(n for n in counts if n.startswith("finish_")))
            scalars |= {f"engine.{name}": counts[name] / counts["samples"] for name in shares}
        if counts["prompt_tokens"]:
            scalars["engine.cached_share"] = counts["cached_tokens"] / counts["prompt_tokens"]
        self.monitor.log(scalars)

    @guarded()
    def trainer_weights(self, version: Any, checksum: str = "", changed_share: float | None = None) -> None:
        """Tells what the trainer is about to push: what the engine's weights are held against."""
        data: dict[str, Any] = {"side": "trainer", "version": str(version)}
        data |= {"checksum": checksum} if checksum else {}
        data |= {} if changed_share is None else {"changed_share": float(changed_share)}
        self.monitor.notice("weights", **data)

    @guarded()
    def settle(self) -> None:
        """Tells of pushes that wait to be told; over HTTP on a thread that asks the engines (`http.wait` waits)."""
        for weights in list(self.weights.values()):
            weights.settle()

    @guarded()
    def close(self) -> None:
        """Gives the client its own methods back; waits up to 2 s until what is pending has been told."""
        while self._undo:
            self._undo.pop()()
        self.settle()
        if self.http is not None:
            self.http.wait(CLOSE_S)

    # --- the adapters' side --------------------------------------------------------------------------------------

    def replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """From now on `owner.name(…)` is `around(original, …)`, on this instance alone. Absent methods are left out."""
        original = getattr(owner, name, None)
        if not callable(original):
            return
        setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))
        self._undo.append(functools.partial(_drop, owner, name))

    def engine(
        self, name: str = ONE, ask: Ask | None = None, run: Callable[[Callable[[], Any]], None] | None = None
    ) -> WeightWatch:
        """The weights of the engine of that name, watched from the first time it is named."""
        with self._lock:
            found = self.weights.get(name)
            if found is None:
                label = self.name if name == ONE else name
                found = self.weights[name] = WeightWatch(self.monitor, label, ask, self.checksum_share, run)
        return found

    def keep(
        self,
        choices: Sequence[Choice],
        ids: Sequence[str],
        semantics: Sequence[Semantics],
        sampling: Sequence[Mapping[str, Any]],
        engine: str,
        asked: Sequence[bool],
    ) -> None:
        """Keeps the responses of one answer under `ids`; those without ids, or not as many log-probs, are counted.

        Of those that were not `asked` for log-probs only the ids are remembered, and the rest is counted as of others.
        """
        counts: Counter[str] = Counter()
        self._engine_of(engine).answered()
        for choice, sample_id, meaning, how, wanted in zip(choices, ids, semantics, sampling, asked, strict=True):
            if not wanted and not choice.log_probs:
                self.samples.pass_over(sample_id)
                counts["unasked"] += 1
            elif len(choice.token_ids) != len(choice.log_probs) or not (choice.token_ids or _aborted(choice)):
                counts["unread"] += 1
                continue
            else:
                self.samples.put(
                    Sample(
                        sample_id, np.asarray(choice.token_ids, np.int32), np.asarray(choice.log_probs, np.float32),
                        meaning, engine, how, choice.spans, choice.finish_reason, choice.prompt_tokens,
                        choice.cached_tokens, choice.retractions,
                    )
                )  # fmt: skip
            counts["samples"] += 1
            counts["tokens"] += len(choice.token_ids)
            counts[f"finish_{choice.finish_reason or 'unknown'}"] += 1
            counts["retractions"] += choice.retractions
            counts["mixed_versions"] += len({span.version for span in choice.spans}) > 1
            if choice.cached_tokens is not None and choice.prompt_tokens is not None:
                counts["cached_tokens"] += choice.cached_tokens
                if choice.cached_tokens:
                    self._engine_of(engine).cached()
                counts["prompt_tokens"] += choice.prompt_tokens
        with self._lock:
            self._counts.update(counts)

    def _engine_of(self, engine: str) -> WeightWatch:
        return self.weights[engine if engine in self.weights else ONE]

    def unread(self, answers: int = 1) -> None:
        """Responses that could not be read."""
        with self._lock:
            self._counts["unread"] += answers


def begin(
    run: str | None,
    monitor: Monitor | None,
    name: str,
    max_bytes: int,
    checksum_share: float,
    arguments: Mapping[str, Any],
) -> EngineWatch:
    """A watch over `monitor`, or over one made by `foreshock.init(run, role="rollout", …)`."""
    if monitor is None:
        chosen: dict[str, Any] = {"role": "rollout", "controller": False} | dict(arguments)
        monitor = foreshock.init(run, **chosen)
    elif arguments or run is not None:
        raise ValueError("give either a monitor or what makes one (run, url, mode …), not both")
    return EngineWatch(monitor, name, Samples(max_bytes), checksum_share)


def sample_ids(choices: Sequence[Choice], given: Sequence[str]) -> list[str]:
    """Sample ids of an answer: the caller's, or else what the answer calls itself; `-<n>` where there are several.

    `given` are the ids of its prompts, in order; the responses of one prompt lie side by side.
    """
    if not choices:
        return []
    if not given:
        several = len({choice.id for choice in choices}) < len(choices)
        return [f"{choice.id}-{choice.index}" if several else choice.id for choice in choices]
    each = max(1, len(choices) // len(given))
    if each == 1:
        return [given[min(number, len(given) - 1)] for number in range(len(choices))]
    return [f"{given[min(n // each, len(given) - 1)]}-{n % each}" for n in range(len(choices))]


def _aborted(choice: Choice) -> bool:
    """An abort may come before the first token."""
    return choice.finish_reason == "abort"


def _drop(owner: Any, name: str) -> None:
    owner.__dict__.pop(name, None)
