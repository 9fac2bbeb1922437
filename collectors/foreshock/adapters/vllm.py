"""vLLM: `watch = wrap(llm_or_client, monitor)`, then go on with it as before.

Watched on this instance alone: `LLM.generate`/`chat`, `AsyncLLM.generate`, their weight updates, sleeps and cache
resets; or what an HTTP client posts to `/inference/v1/generate`, the OpenAI routes and the server's RL routes.
Log-probs of the sampled tokens are asked for, on a share of the requests where the host does not ask; nothing is
re-tokenised.

vLLM's log-probs are by default (`raw_logprobs`) of the model's logits before penalties, temperature and truncation;
`processed_logprobs` are after all of them, renormalised over the kept set. Answers do not say which: the engine in
this process is asked, of a server `logprobs_mode=` must say.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from foreshock import Monitor
from foreshock.adapters.engine_answers import CHAT, COMPLETIONS, Json, openai_choices, openai_event
from foreshock.adapters.engine_asking import SHARE, openai_asking
from foreshock.adapters.engine_attach import attach
from foreshock.adapters.engine_commands import CAPABILITIES, IMPOSSIBLE
from foreshock.adapters.engine_http import Call
from foreshock.adapters.engine_watch import EngineWatch, begin
from foreshock.adapters.vllm_engine import AsyncInProcess, InProcess, mode_of
from foreshock.adapters.vllm_requests import ENGINE, GENERATE, MODES, Asked, loads

__all__ = ["CAPABILITIES", "IMPOSSIBLE", "wrap"]


def wrap(
    engine: Any,
    monitor: Monitor | None = None,
    *,
    run: str | None = None,
    resync: Callable[[], Any] | None = None,
    max_bytes: int = 256 << 20,
    checksum_share: float = 0.01,
    ask: float = SHARE,
    logprobs_mode: str | None = None,
    **arguments: Any,
) -> EngineWatch:
    """Watches an `LLM`, an `AsyncLLM`, an HTTP client, or the server at a URL (then `watch.client` speaks to it).

    As `foreshock.adapters.sglang.wrap`. `logprobs_mode` is the server's `--logprobs-mode` (an engine in this process
    tells it by itself; else the default `raw_logprobs` is assumed). Raises TypeError for an object of no known kind,
    ValueError for a mode that is not known.
    """
    watch = begin(run, monitor, ENGINE, max_bytes, checksum_share, arguments)
    mode = logprobs_mode or mode_of(engine) or MODES[0]
    if mode not in MODES:
        raise ValueError(f"logprobs_mode must be one of {', '.join(MODES)}, not {mode!r}")

    def inside(it: Any) -> InProcess | AsyncInProcess | None:
        if not callable(getattr(it, "generate", None)):
            return None
        return (AsyncInProcess if hasattr(it, "output_processor") else InProcess)(watch, it, mode)

    return attach(watch, engine, inside, Routes(watch, mode), ask, resync)


class Routes:
    """vLLM's HTTP routes."""

    def __init__(self, watch: EngineWatch, mode: str) -> None:
        self.watch, self.mode = watch, mode

    def call(self, engine: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Call | None:
        """See `engine_http.Routes`."""
        weights = self.watch.weights[engine]
        if path.endswith((COMPLETIONS, CHAT)):
            return self._openai(engine, CHAT if path.endswith(CHAT) else COMPLETIONS, body)
        if path.endswith(GENERATE):
            return self._generate(engine, body)
        name = path.rpartition("/")[2]
        if name in ("update_weights", "finish_weight_update") or (
            name == "collective_rpc" and loads(body.get("method"))
        ):
            weights.changing()
            label = body.get("weight_version")
            return Call(
                None,
                lambda status, answer: weights.updated(
                    status == 200, label=None if label is None or status != 200 else str(label), message=str(answer)
                ),
            )
        if name == "reset_prefix_cache":

            def reset(status: int, answer: Any) -> None:
                if status == 200 and not (isinstance(answer, Mapping) and answer.get("success") is False):
                    weights.flushed()

            return Call(None, reset)
        if name == "update_weight_version":
            weights.changing()
        act = self._acts(engine, name, query, body)
        return None if act is None else Call(None, lambda status, _: act() if status == 200 else None)

    def _acts(self, engine: str, name: str, query: Mapping[str, str], body: Json) -> Callable[[], Any] | None:
        """What a request does to the engine once it is answered 200."""
        weights = self.watch.weights[engine]

        def pause() -> None:
            mode = query.get("mode", "abort")
            weights.event("pause", mode=mode)
            if mode != "keep" and query.get("clear_cache", "true").lower() not in ("false", "0"):
                weights.flushed()

        def sleep() -> None:
            level = int(query.get("level", 1))
            weights.event("sleep", level=level)
            if level >= 1:
                weights.flushed()

        acts: dict[str, Callable[[], Any]] = {
            "update_weight_version": lambda: weights.labelled(str(body.get("new_version"))),
            "pause": pause,
            "sleep": sleep,
            "resume": lambda: weights.event("resume"),
            "wake_up": lambda: weights.event("wake", tags=query.get("tags", "")),
        }
        return acts.get(name)

    def ask(self, get: Callable[[str], Any], post: Callable[[str, Json], Any], digests: bool) -> Any:
        """See `engine_http.Routes`."""
        said = get("/weight_info")
        label = said.get("weight_version") if isinstance(said, Mapping) else None
        checked = post("/weight_checker", {"action": "checksum"}) if digests else None
        found = checked.get("checksums") if isinstance(checked, Mapping) else None
        return found or None, None if label is None else str(label)

    def _generate(self, engine: str, body: dict[str, Any]) -> Call:
        self.watch.weights[engine].generating()
        params = dict(body.get("sampling_params") or {})
        wanted = self.watch.asking.among([params.get("logprobs") is not None], [int(params.get("n") or 1)])
        if wanted[0] and params.get("logprobs") is None:
            params["logprobs"] = 0
        given = body.get("request_id") or uuid.uuid4().hex
        asked = Asked(self.watch, self.mode, engine, [given] if body.get("request_id") else [], params, wanted)

        def answered(status: int, answer: Any) -> None:
            if status != 200:
                self.watch.unread()
                return
            if isinstance(answer, Mapping):
                asked.event(answer)
            asked.end()

        return Call(body | {"request_id": given, "sampling_params": params}, answered, asked.event)

    def _openai(self, engine: str, route: str, body: dict[str, Any]) -> Call:
        self.watch.weights[engine].generating()
        added, wanted = openai_asking(route, body, self.watch.asking)
        changed = {"return_token_ids": True} | added
        given = body.get("request_id")
        asked = Asked(self.watch, self.mode, engine, [str(given)] if given else [], body, [wanted])

        def answered(status: int, answer: Any) -> None:
            if status != 200:
                self.watch.unread()
            elif isinstance(answer, Mapping):
                asked.keep(openai_choices(route, answer))
            else:
                asked.end()

        return Call(body | changed, answered, lambda event: openai_event(route, event, asked.streamed))
