"""What engines answer → `Choice`: token ids and log-probs of one response, from whole bodies and from streams.

Here is what sglang and vLLM share: the OpenAI routes, and event streams. Nothing is re-tokenised: an answer whose
token ids are not in it yields a choice without ids, which nobody keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from foreshock.adapters.engine_samples import Span

Json = Mapping[str, Any]
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MAX_EVENT_BYTES: Final = 64 << 20
"""A stream whose single event is longer is given up."""


@dataclass(slots=True)
class Choice:
    """One response of an answer, in the making where it is streamed."""

    index: int = 0
    id: str = ""
    """What the answer calls itself."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish_reason: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int = 0


def spans_of(said: Any, label: Any, tokens: int) -> tuple[Span, ...]:
    """Version spans as both engines spell them; else one span of the label, else none."""
    if isinstance(said, Sequence) and not isinstance(said, str) and said:
        return tuple(Span(str(_of(s, "version")), int(_of(s, "start")), int(_of(s, "end"))) for s in said)
    return () if label is None or not tokens else (Span(str(label), 0, tokens),)


def openai_choices(route: str, body: Json) -> list[Choice]:
    """The choices of a whole answer of an OpenAI route."""
    found: dict[int, Choice] = {}
    openai_event(route, body, found)
    return list(found.values())


def openai_event(route: str, body: Json, found: dict[int, Choice]) -> None:
    """Adds one event of a stream (or a whole answer) to the choices by index."""
    usage, metadata = body.get("usage") or {}, body.get("metadata") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for said in body.get("choices") or ():
        index = int(said.get("index") or 0)
        choice = found.setdefault(index, Choice(index))
        choice.id = str(body.get("id") or choice.id)
        if said.get("finish_reason"):
            choice.finish_reason = str(said["finish_reason"])
        meta = said.get("meta_info")
        if isinstance(meta, Mapping) and meta.get("output_token_logprobs"):
            _meta(meta, choice)
            continue
        ids = said.get("token_ids") or said.get("response_token_ids") or ()
        choice.token_ids += ids
        choice.log_probs += _log_probs(route, said.get("logprobs") or {}, len(ids))
        choice.spans = spans_of(
            metadata.get("weight_versions"), metadata.get("weight_version"), len(choice.token_ids)
        )  # fmt: skip
    for choice in found.values():
        if len(found) == 1 and usage.get("prompt_tokens") is not None:
            choice.prompt_tokens = int(usage["prompt_tokens"])
        choice.cached_tokens = cached if cached is not None else choice.cached_tokens


def _log_probs(route: str, said: Json, tokens: int) -> list[float]:
    """Of the sampled tokens; a prompt that was echoed comes first in `token_logprobs` and is cut."""
    if route == CHAT or "content" in said:
        return [float(entry["logprob"]) for entry in said.get("content") or ()]
    values = [float("nan") if value is None else float(value) for value in said.get("token_logprobs") or ()]
    return values[len(values) - tokens :] if tokens and len(values) > tokens else values


def _meta(meta: Json, choice: Choice) -> None:
    """sglang's `meta_info` holds id and log-prob of each token side by side."""
    choice.log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    choice.token_ids = [int(entry[1]) for entry in meta["output_token_logprobs"]]
    describe(meta, choice)


def describe(meta: Json, choice: Choice) -> None:
    """Everything else that sglang's `meta_info` says of a response."""
    choice.id = str(meta.get("id") or choice.id)
    reason = meta.get("finish_reason")
    if reason:
        choice.finish_reason = str(reason.get("type") if isinstance(reason, Mapping) else reason)
    choice.prompt_tokens = meta.get("prompt_tokens", choice.prompt_tokens)
    choice.cached_tokens = meta.get("cached_tokens", choice.cached_tokens)
    choice.retractions = int(meta.get("num_retractions") or 0)
    choice.spans = spans_of(meta.get("weight_versions"), meta.get("weight_version"), len(choice.token_ids))


class EventStream:
    """Server-sent events, fed in pieces as they pass; `add(event)` takes each. Never holds more than one event."""

    def __init__(self, add: Callable[[Json], None]) -> None:
        self._add = add
        self._rest = b""
        self.finished = False

    def feed(self, piece: bytes) -> None:
        """Takes what has arrived. Raises ValueError for what is no event stream of JSON."""
        for line in self._lines(piece):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.finished = True
            elif data:
                event = json.loads(data)
                if isinstance(event, Mapping):
                    self._add(event)

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        yield from lines


def _of(said: Any, name: str) -> Any:
    return said[name] if isinstance(said, Mapping) else getattr(said, name)
