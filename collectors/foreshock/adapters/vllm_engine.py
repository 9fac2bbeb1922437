"""A `vllm.LLM` or `AsyncLLM` in this process: its methods, watched on the instance."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from foreshock.adapters.engine_answers import Choice
from foreshock.adapters.engine_watch import ONE, EngineWatch
from foreshock.adapters.engine_weights import Digests, WeightWatch
from foreshock.adapters.vllm_requests import ENGINE, Asked, add, asking, describe, loads, merged, prompts_of
from foreshock.guard import Guard, guarded


class _Engine:
    """What `LLM` and `AsyncLLM` have in common."""

    def __init__(self, watch: EngineWatch, engine: Any, mode: str) -> None:
        self.watch, self.engine, self.mode = watch, engine, mode
        self.guard: Guard = watch.guard

    @guarded()
    def _updated(self, ok: bool, label: Any, message: str) -> None:
        label = None if label is None or not ok else str(label)
        self.weights.updated(ok, label=label, message=message)

    @guarded()
    def _labelled(self, label: Any) -> None:
        self.weights.labelled(str(label))

    @guarded()
    def _flushed(self) -> None:
        self.weights.flushed()

    @guarded()
    def _event(self, kind: str, **data: Any) -> None:
        self.weights.event(kind, **data)

    def _after(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], answer: Any) -> None:
        """What a call that succeeded has done to weights and cache."""
        first = args[0] if args else None
        if name == "finish_weight_update":
            self._updated(True, kwargs.get("weight_version", first), "")
        elif name in ("update_weights", "reload_weights"):
            self._updated(True, None, "")
        elif name == "collective_rpc":
            if loads(kwargs.get("method", first)):
                self._updated(True, None, "")
        elif name == "update_weight_version":
            self._labelled(kwargs.get("new_version", first))
        elif name == "reset_prefix_cache":
            if answer is not False:
                self._flushed()
        elif name == "sleep":
            level = int(kwargs.get("level", 1 if first is None else first))
            self._event("sleep", level=level)
            if level >= 1:
                self._flushed()
        elif name == "wake_up":
            self._event("wake", tags=list(kwargs.get("tags", first) or ()))
        elif name == "pause_generation":
            mode = str(kwargs.get("mode", first or "abort"))
            self._event("pause", mode=mode)
            if mode != "keep" and kwargs.get("clear_cache", True):
                self._flushed()
        elif name == "resume_generation":
            self._event("resume")

    def _failed(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException) -> None:
        if name == "collective_rpc" and not loads(kwargs.get("method", args[0] if args else None)):
            return
        if name in ("finish_weight_update", "update_weights", "reload_weights", "collective_rpc"):
            self._updated(False, None, f"{name}: {error!r}")

    @property
    def weights(self) -> WeightWatch:
        return self.watch.engine(ONE, self._ask)

    def _ask(self, digests: bool) -> tuple[Digests | None, str | None]:
        raise NotImplementedError

    @guarded()
    def _baseline(self) -> None:
        self.weights.baseline()

    METHODS: Final = (
        "update_weights", "finish_weight_update", "reload_weights", "collective_rpc", "update_weight_version",
        "reset_prefix_cache", "sleep", "wake_up", "pause_generation", "resume_generation",
    )  # fmt: skip


class InProcess(_Engine):
    """A `vllm.LLM` in this process."""

    def install(self) -> None:
        """Puts the watch on this engine's instance, and takes its digests."""
        for name in ("generate", "chat"):
            self.watch.replace(self.engine, name, self._around_generate)
        for name in self.METHODS:
            self.watch.replace(self.engine, name, self._around(name))
        self._baseline()

    def _around_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked, args, kwargs = self._prepare(args, kwargs) or (None, args, kwargs)
        answers = original(*args, **kwargs)
        if asked is not None:
            self._answered(asked, answers)
        return answers

    @guarded()
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Asked, tuple[Any, ...], dict[str, Any]]:
        self.weights.generating()
        kwargs = dict(kwargs)
        given = kwargs.pop("sample_ids", ())
        params = args[1] if len(args) > 1 else kwargs.get("sampling_params")
        params = self.engine.get_default_sampling_params() if params is None else params
        prompts = args[0] if args else kwargs.get("prompts", kwargs.get("messages"))
        asked, wanted = asking(params, prompts_of(prompts), self.watch.asking)
        if len(args) > 1:
            args = (args[0], asked, *args[2:])
        else:
            kwargs["sampling_params"] = asked
        return Asked(self.watch, self.mode, ENGINE, given, params, wanted), args, kwargs

    @guarded()
    def _answered(self, asked: Asked, answers: Any) -> None:
        asked.outputs(answers)

    def _around(self, name: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                answer = original(*args, **kwargs)
            except Exception as error:
                self._failed(name, args, kwargs, error)
                raise
            self._after(name, args, kwargs, answer)
            return answer

        return around

    def _ask(self, digests: bool) -> tuple[Digests | None, str | None]:
        inner = self.engine.llm_engine
        label = inner.get_weight_version() if hasattr(inner, "get_weight_version") else None
        if not digests or label is None:
            return None, label
        # The worker's method came with the labels; what is asked for goes past this watch.
        return merged(inner.collective_rpc("compute_weight_checksums")), str(label)


class AsyncInProcess(_Engine):
    """An `AsyncLLM` in this process."""

    def install(self) -> None:
        """Puts the watch on this engine's instance."""
        self._known: tuple[Digests | None, str | None] = (None, None)
        self._next_look_s = 0.0
        self.watch.replace(self.engine, "generate", self._around_generate)
        for name in self.METHODS:
            self.watch.replace(self.engine, name, self._around(name))

    def _around_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked, args, kwargs = self._prepare(args, kwargs) or (None, args, kwargs)
        answers = original(*args, **kwargs)
        return answers if asked is None else self._stream(asked, answers)

    @guarded()
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Asked, tuple[Any, ...], dict[str, Any]]:
        self.weights.generating()
        kwargs = dict(kwargs)
        params = args[1] if len(args) > 1 else kwargs["sampling_params"]
        asked, wanted = asking(params, 1, self.watch.asking)
        given = args[2] if len(args) > 2 else kwargs["request_id"]
        if len(args) > 1:
            args = (args[0], asked, *args[2:])
        else:
            kwargs["sampling_params"] = asked
        return Asked(self.watch, self.mode, ENGINE, [str(given)], params, wanted), args, kwargs

    async def _stream(self, asked: Asked, answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for answer in answers:
            self._answered(asked, answer)
            yield answer
        self._ended(asked)

    @guarded()
    def _answered(self, asked: Asked, answer: Any) -> None:
        """Answers hold everything so far, or what is new."""
        for output in answer.outputs:
            choice = asked.streamed.setdefault(output.index, Choice(output.index, str(answer.request_id)))
            if (
                len(output.token_ids) > len(choice.token_ids)
                and list(output.token_ids[: len(choice.token_ids)]) == choice.token_ids
            ):
                choice.token_ids, choice.log_probs = [], []
            add(output, choice)
            describe(answer, output, choice)

    @guarded()
    def _ended(self, asked: Asked) -> None:
        asked.end()

    def _around(self, name: str) -> Callable[..., Any]:
        async def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                answer = await original(*args, **kwargs)
            except Exception as error:
                self._failed(name, args, kwargs, error)
                raise
            self._after(name, args, kwargs, answer)
            await self._look(name, args, kwargs)
            return answer

        return around

    async def _look(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """After a push: the engine's label, and its digests where they are due; both can only be awaited here."""
        first = args[0] if args else None
        if name == "collective_rpc" and not loads(kwargs.get("method", first)):
            return
        if name not in ("finish_weight_update", "reload_weights", "collective_rpc", "update_weight_version"):
            return
        began_s, share = time.monotonic(), self.watch.checksum_share
        due = share > 0 and began_s >= self._next_look_s
        try:
            label = str(await self.engine.get_weight_version())
            self._known = (merged(await self.engine.compute_weight_checksums()) if due else None, label)
        except Exception as error:
            self._known = (None, None)
            self.guard.caught("checksums", error)
        now_s = time.monotonic()
        if due and share < 1:
            self._next_look_s = now_s + (now_s - began_s) / share

    def _ask(self, digests: bool) -> tuple[Digests | None, str | None]:
        return self._known


def mode_of(engine: Any) -> str | None:
    """The mode of an engine in this process."""
    config = getattr(getattr(engine, "llm_engine", engine), "vllm_config", None) or getattr(
        engine, "model_config", None
    )
    config = getattr(config, "model_config", config)
    mode = getattr(config, "logprobs_mode", None)
    return None if mode is None else str(getattr(mode, "value", mode))
