"""sglang: `watch = wrap(engine_or_client, monitor)`, then go on with the engine or client as before.

Watched on this instance alone: `Engine.generate`/`async_generate`, its weight updates and flushes; or what an HTTP
client posts to `/generate`, the OpenAI routes, `/update_weights_from_*`, `/flush_cache` and their like. Log-probs are
asked for on a share of the requests where the host does not ask; nothing is re-tokenised.

sglang's log-probs are of softmax(logits / T): after penalties and temperature, before top-k, top-p and min-p.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from foreshock import Monitor
from foreshock.adapters.engine_answers import CHAT, COMPLETIONS, Json, openai_choices, openai_event
from foreshock.adapters.engine_asking import SHARE, openai_asking
from foreshock.adapters.engine_attach import attach
from foreshock.adapters.engine_commands import CAPABILITIES, IMPOSSIBLE
from foreshock.adapters.engine_http import Call
from foreshock.adapters.engine_watch import EngineWatch, begin
from foreshock.adapters.sglang_engine import InProcess
from foreshock.adapters.sglang_requests import ENGINE, SESSION, UPDATES, Asked, Meaning, asking, digests_of

__all__ = ["CAPABILITIES", "IMPOSSIBLE", "wrap"]
EVENTS: Final = {
    "pause_generation": "pause", "continue_generation": "resume", "release_memory_occupation": "sleep",
    "resume_memory_occupation": "wake",
}  # fmt: skip


def wrap(
    engine: Any,
    monitor: Monitor | None = None,
    *,
    run: str | None = None,
    resync: Callable[[], Any] | None = None,
    max_bytes: int = 256 << 20,
    checksum_share: float = 0.01,
    ask: float = SHARE,
    original_log_probs: bool | None = None,
    **arguments: Any,
) -> EngineWatch:
    """Watches an `Engine`, an HTTP client, or the server at a URL (then `watch.client` speaks to it).

    Give the trainer's `monitor`, or what makes one of role `rollout` (run, url …). Without a service's url the engine
    is left untouched. `max_bytes` bounds what is kept for the join; `checksum_share` is the share of time that the
    engine's checksums may take (0: never asked). `ask` is the share of the responses whose log-probs are asked for
    where the host does not: True all, False none; those that the host asks for are read in any case. `resync` pushes
    the trainer's weights: with it the run can be asked to `resync_engine`. `original_log_probs`: whether the server
    was started with SGLANG_RETURN_ORIGINAL_LOGPROB (by default this process's own environment says so).
    Raises TypeError for an object of no known kind, ValueError for an `ask` outside [0, 1].
    """
    watch = begin(run, monitor, ENGINE, max_bytes, checksum_share, arguments)
    if original_log_probs is None:
        original_log_probs = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
    meaning = Meaning(original_log_probs)

    def inside(it: Any) -> InProcess | None:
        return InProcess(watch, it, meaning) if callable(getattr(it, "generate", None)) else None

    return attach(watch, engine, inside, Routes(watch, meaning), ask, resync)


class Routes:
    """sglang's HTTP routes."""

    def __init__(self, watch: EngineWatch, meaning: Meaning) -> None:
        self.watch, self.meaning = watch, meaning

    def call(self, engine: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Call | None:
        """See `engine_http.Routes`."""
        name = path.rpartition("/")[2]
        weights = self.watch.weights[engine]
        if path.endswith((COMPLETIONS, CHAT)):
            return self._openai(engine, CHAT if path.endswith(CHAT) else COMPLETIONS, body)
        if name == "generate":
            weights.generating()
            changed, named, wanted = asking(body, "text", self.watch.asking)
            asked = Asked(
                self.watch, self.meaning, engine, named if "rid" in changed else [], body.get("sampling_params"), wanted
            )
            return Call(body | changed, self._kept(asked), asked.event)
        if name in (*UPDATES, *SESSION):
            weights.changing()
            return Call(None, lambda status, answer: self._updated(engine, name, body, status, answer))
        if name == "flush_cache":
            return Call(None, lambda status, _: weights.flushed() if status == 200 else None)
        if name == "update_weight_version":
            weights.changing()
            label = str(body.get("new_version"))
            return Call(None, lambda status, _: weights.labelled(label) if status == 200 else None)
        if name in EVENTS:
            return Call(None, lambda status, _: self._event(engine, name, body, status))
        return None

    def ask(self, get: Callable[[str], Any], post: Callable[[str, Json], Any], digests: bool) -> Any:
        """See `engine_http.Routes`."""
        said = get("/model_info")
        label = said.get("weight_version") if isinstance(said, Mapping) else None
        checked = post("/weights_checker", {"action": "checksum"}) if digests else None
        ranks = checked.get("ranks") if isinstance(checked, Mapping) else None
        return digests_of(ranks), None if label is None else str(label)

    def _kept(self, asked: Asked) -> Callable[[int, Any], None]:
        def answered(status: int, answer: Any) -> None:
            if status == 200:
                asked.answered(answer)
            else:
                self.watch.unread(len(asked.given) or 1)

        return answered

    def _openai(self, engine: str, route: str, body: dict[str, Any]) -> Call | None:
        self.watch.weights[engine].generating()
        if route == CHAT and body.get("stream"):
            self.watch.unread()  # sglang refuses to tell token ids in a chat stream
            return None
        given = body.get("rid")
        added, wanted = openai_asking(route, body, self.watch.asking)
        changed = {"return_token_ids": True, "return_meta_info": True} | added
        named = [given] if isinstance(given, str) else list(given or ())
        asked = Asked(self.watch, self.meaning, engine, named, body, [wanted])

        def answered(status: int, answer: Any) -> None:
            if status != 200:
                self.watch.unread()
            elif isinstance(answer, Mapping):
                asked.keep(openai_choices(route, answer))
            else:
                asked.keep([asked.streamed[index] for index in sorted(asked.streamed)])

        return Call(body | changed, answered, lambda event: openai_event(route, event, asked.streamed))

    def _updated(self, engine: str, name: str, body: Json, status: int, answer: Any) -> None:
        said = answer if isinstance(answer, Mapping) else {}
        ok = status == 200 and said.get("success") is not False
        message = str(said.get("message", f"status {status}"))
        label = body.get("weight_version")
        if name in UPDATES:
            self.watch.weights[engine].updated(
                ok, label=None if label is None or not ok else str(label), flushed=bool(body.get("flush_cache", True)),
                message=message,
            )  # fmt: skip
        elif not ok:
            self.watch.weights[engine].updated(False, message=f"{name}: {message}")

    def _event(self, engine: str, name: str, body: Json, status: int) -> None:
        if status != 200:
            return
        tags = body.get("tags") or ()
        self.watch.weights[engine].event(EVENTS[name], tags=list(tags), mode=body.get("mode", ""))
        if name == "release_memory_occupation" and (not tags or "kv_cache" in tags):
            self.watch.weights[engine].flushed()
