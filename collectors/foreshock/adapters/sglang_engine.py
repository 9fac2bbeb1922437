"""A `sglang.Engine` in this process: its methods, watched on the instance."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from foreshock.adapters.engine_watch import ONE, EngineWatch
from foreshock.adapters.engine_weights import Digests
from foreshock.adapters.sglang_requests import ENGINE, SESSION, UPDATES, Asked, Meaning, asking, digests_of
from foreshock.guard import Guard, guarded


class InProcess:
    """An `sglang.Engine` in this process."""

    def __init__(self, watch: EngineWatch, engine: Any, meaning: Meaning) -> None:
        self.watch, self.engine, self.meaning = watch, engine, meaning
        self.guard: Guard = watch.guard

    def install(self) -> None:
        """Puts the watch on this engine's instance, and takes its digests."""
        self.weights = self.watch.engine(ONE, self._ask)
        taken = inspect.signature(self.engine.generate).parameters.values()
        self._accepts_all = any(one.kind is one.VAR_KEYWORD for one in taken)
        self._accepted = {one.name for one in taken}
        replace = self.watch.replace
        replace(self.engine, "generate", self._around_generate)
        replace(self.engine, "async_generate", self._around_async_generate)
        for name in (*UPDATES, *SESSION):
            replace(self.engine, name, self._updating(name))
        replace(self.engine, "flush_cache", self._around_flush)
        replace(self.engine, "release_memory_occupation", self._around_release)
        replace(self.engine, "resume_memory_occupation", self._around_resume)
        self._baseline()

    @guarded()
    def _baseline(self) -> None:
        self.weights.baseline()

    def _around_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked, kwargs = self._prepare(args, kwargs) or (None, kwargs)
        answer = original(*args, **kwargs)
        if asked is None:
            return answer
        if not isinstance(answer, Iterator):
            self._answered(asked, answer)
            return answer
        return self._stream(asked, answer)

    async def _around_async_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked, kwargs = self._prepare(args, kwargs) or (None, kwargs)
        answer = await original(*args, **kwargs)
        if asked is None:
            return answer
        if not isinstance(answer, AsyncIterator):
            self._answered(asked, answer)
            return answer
        return self._async_stream(asked, answer)

    @guarded()
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Asked, dict[str, Any]]:
        self.weights.generating()
        names = ("prompt", "sampling_params", "input_ids")
        request = dict(zip(names, args, strict=False)) | kwargs
        changed, named, wanted = asking(request, "prompt", self.watch.asking)
        given = named if "rid" in changed else []
        changed = {name: value for name, value in changed.items() if self._accepts_all or name in self._accepted}
        asked = Asked(self.watch, self.meaning, ENGINE, given, request.get("sampling_params"), wanted)
        return asked, kwargs | changed

    @guarded()
    def _answered(self, asked: Asked, answer: Any) -> None:
        asked.answered(answer)

    @guarded()
    def _event(self, asked: Asked, event: Any) -> None:
        asked.event(event)

    def _stream(self, asked: Asked, answer: Iterator[Any]) -> Iterator[Any]:
        for event in answer:
            self._event(asked, event)
            yield event
        self._answered(asked, None)

    async def _async_stream(self, asked: Asked, answer: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for event in answer:
            self._event(asked, event)
            yield event
        self._answered(asked, None)

    def _updating(self, name: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                answer = original(*args, **kwargs)
            except Exception as error:
                self._updated(name, (False, repr(error)), kwargs)
                raise
            self._updated(name, answer, kwargs)
            return answer

        return around

    @guarded()
    def _updated(self, name: str, answer: Any, kwargs: Mapping[str, Any]) -> None:
        """Answers are (success, message, …), and before that came up None."""
        ok = bool(answer[0]) if isinstance(answer, tuple) and answer else answer is not False
        message = str(answer[1]) if isinstance(answer, tuple) and len(answer) > 1 else ""
        if name in UPDATES:
            self.weights.updated(ok, flushed=bool(kwargs.get("flush_cache", True)), message=message)
        elif not ok:
            self.weights.updated(False, message=f"{name}: {message}")

    def _around_flush(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        self._flushed(getattr(answer, "success", True))
        return answer

    @guarded()
    def _flushed(self, ok: bool) -> None:
        if ok:
            self.weights.flushed()

    def _around_release(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        tags = kwargs.get("tags", args[0] if args else None)
        self._slept(tags)
        return answer

    def _around_resume(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        self._event_of_engine("wake", kwargs.get("tags", args[0] if args else None))
        return answer

    @guarded()
    def _slept(self, tags: Any) -> None:
        self.weights.event("sleep", tags=list(tags or ()))
        if not tags or "kv_cache" in tags:
            self.weights.flushed()

    @guarded()
    def _event_of_engine(self, kind: str, tags: Any) -> None:
        self.weights.event(kind, tags=list(tags or ()))

    def _ask(self, digests: bool) -> tuple[Digests | None, str | None]:
        manager, loop = self.engine.tokenizer_manager, self.engine.loop
        label = manager.config_value("weight_version") if hasattr(manager, "config_value") else None
        label = getattr(manager.server_args, "weight_version", None) if label is None else label
        if not digests or loop.is_running() or not hasattr(manager, "check_weights"):
            return None, None if label is None else str(label)
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        checked = loop.run_until_complete(manager.check_weights(CheckWeightsReqInput(action="checksum")))
        ranks = checked[2] if len(checked) > 2 else None
        return digests_of(ranks), None if label is None else str(label)
