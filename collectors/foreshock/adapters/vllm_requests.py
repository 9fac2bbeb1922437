"""vLLM's requests and answers: what is asked for, what a response's log-probs mean, what comes back."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foreshock import Semantics
from foreshock.adapters.engine_answers import Choice, Json, spans_of
from foreshock.adapters.engine_asking import Asking, per_choice
from foreshock.adapters.engine_sampling import PENALTIES, TRUNCATION, settings_of, spelled, temperature_of
from foreshock.adapters.engine_watch import EngineWatch, sample_ids
from foreshock.adapters.engine_weights import Digests

ENGINE: Final = "vllm"
MODES: Final = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
GENERATE: Final = "/inference/v1/generate"
_LOADS: Final = re.compile(
    r"^(?!get|compute|save|init|start|check|destroy|shutdown).*(weight|load|param)", re.IGNORECASE
)
"""Names of worker methods (`collective_rpc`) that change weights."""


def meaning_of(mode: str, settings: Mapping[str, Any], complete: bool) -> Semantics:
    """What the log-probs of one request mean; `complete` where settings that are not there are switched off."""
    if mode.startswith("raw"):
        temperature, truncation, penalties, kept = 1.0, "none", "none", "full_vocabulary"
    else:
        temperature = temperature_of(settings)  # type: ignore[assignment]
        truncation, kept = spelled(settings, TRUNCATION, complete), "kept_set"
        penalties = spelled(settings, PENALTIES, complete)
    return Semantics(
        engine=ENGINE, temperature=temperature, truncation=truncation, penalties=penalties,
        normaliser="logits" if mode.endswith("logits") else kept, source="decode", dtype="float32",
    )  # fmt: skip


class Asked:
    """One request: the ids that the caller gave, how it is sampled, and of which prompts log-probs were asked for."""

    def __init__(
        self,
        watch: EngineWatch,
        mode: str,
        engine: str,
        given: Sequence[str],
        params: Any,
        wanted: Sequence[bool] = (True,),
    ) -> None:
        self.watch, self.engine, self.given, self.wanted = watch, engine, list(given), list(wanted)
        several = params if isinstance(params, Sequence) and not isinstance(params, str | Mapping) else [params]
        self.settings = [settings_of(one or {}) for one in several]
        complete = not isinstance(several[0], Mapping)
        self.meanings = [meaning_of(mode, settings, complete) for settings in self.settings]
        kind = getattr(several[0], "output_kind", 0)
        self.deltas = getattr(kind, "value", kind) == 1
        """Whether answers hold only what is new (`RequestOutputKind.DELTA`)."""
        self.streamed: dict[int, Choice] = {}

    def keep(self, choices: Sequence[Choice]) -> None:
        """The choices of the answer, those of one prompt side by side."""
        count = len(choices)
        self.watch.keep(
            choices, sample_ids(choices, self.given), per_choice(self.meanings, count),
            per_choice(self.settings, count), self.engine, per_choice(self.wanted, count),
        )  # fmt: skip

    def event(self, said: Json) -> None:
        """One event (or the whole answer) of `/inference/v1/generate`."""
        usage = said.get("usage") or {}
        for one in said.get("choices") or ():
            choice = self.streamed.setdefault(int(one.get("index") or 0), Choice(int(one.get("index") or 0)))
            choice.id = str(said.get("request_id") or choice.id)
            choice.token_ids += one.get("token_ids") or ()
            entries = (one.get("logprobs") or {}).get("content") or ()
            choice.log_probs += [float(entry["logprob"]) for entry in entries]
            choice.finish_reason = str(one.get("finish_reason") or choice.finish_reason)
            choice.spans = spans_of(one.get("weight_versions"), None, len(choice.token_ids)) or choice.spans
            choice.prompt_tokens = usage.get("prompt_tokens", choice.prompt_tokens)
            choice.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", choice.cached_tokens)

    def outputs(self, answers: Sequence[Any]) -> None:
        """What `LLM.generate` returns."""
        choices = []
        for answer in answers:
            for output in answer.outputs:
                choice = Choice(output.index, str(answer.request_id))
                add(output, choice)
                describe(answer, output, choice)
                choices.append(choice)
        self.keep(choices)

    def end(self) -> None:
        """A stream has ended."""
        self.keep([self.streamed[index] for index in sorted(self.streamed)])


def asking(params: Any, prompts: int, asking: Asking) -> tuple[Any, list[bool]]:
    """Sampling parameters (one, or one a prompt) with log-probs of the sampled tokens where those are asked for.

    And for which prompts they are. Copies where that must be added; one for all stays one where all are alike.
    """
    several = isinstance(params, Sequence)
    each = list(params) if several else [params] * prompts
    wanting = [getattr(one, "logprobs", 0) is not None for one in each]
    wanted = asking.among(wanting, [int(getattr(one, "n", 1) or 1) for one in each])
    if wanted == wanting:
        return params, wanted
    if several:
        return [
            one if wants or not asks else _with_log_probs(one)
            for one, wants, asks in zip(each, wanting, wanted, strict=True)
        ], wanted
    copied = _with_log_probs(params)
    return copied if all(wanted) else [copied if asks else params for asks in wanted], wanted


def _with_log_probs(params: Any) -> Any:
    params = params.clone() if hasattr(params, "clone") else copy.copy(params)
    params.logprobs = 0
    return params


def prompts_of(prompts: Any) -> int:
    """How many prompts (or conversations) `LLM.generate` and `chat` take this for; 1 where it has no length."""
    one = isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__len__")
    if one or not len(prompts):
        return 1
    first = prompts[0]
    conversation = isinstance(first, Mapping) and "role" in first
    return 1 if conversation or isinstance(first, int) else len(prompts)


def add(output: Any, choice: Choice) -> None:
    """Token ids and the sampled tokens' log-probs of a `CompletionOutput`."""
    entries = output.logprobs or ()
    ids = list(output.token_ids)
    choice.token_ids += ids
    choice.log_probs += [float(entry[token].logprob) for token, entry in zip(ids, entries, strict=False)]


def describe(answer: Any, output: Any, choice: Choice) -> None:
    choice.finish_reason = str(output.finish_reason or choice.finish_reason)
    choice.spans = spans_of(getattr(output, "weight_versions", None), None, len(choice.token_ids)) or choice.spans
    choice.prompt_tokens = len(answer.prompt_token_ids) if answer.prompt_token_ids else None
    choice.cached_tokens = getattr(answer, "num_cached_tokens", None)


def loads(method: Any) -> bool:
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    return bool(_LOADS.search(name))


def merged(workers: Sequence[Mapping[str, str]]) -> Digests | None:
    found = {name: str(digest) for worker in workers for name, digest in worker.items()}
    return found or None
