"""sglang's requests and answers: what is asked for, what a response's log-probs mean, what comes back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foreshock import Semantics
from foreshock.adapters.engine_answers import Choice, Json, describe
from foreshock.adapters.engine_asking import Asking, per_choice
from foreshock.adapters.engine_sampling import PENALTIES, settings_of, spelled, temperature_of
from foreshock.adapters.engine_watch import EngineWatch, sample_ids
from foreshock.adapters.engine_weights import Digests

ENGINE: Final = "sglang"
UPDATES: Final = (
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
    "update_weights_from_ipc",
)  # fmt: skip
SESSION: Final = ("begin_weight_update", "end_weight_update")


class Meaning:
    """What this engine's log-probs mean, by the request."""

    def __init__(self, original: bool) -> None:
        self.original = original

    def of(self, settings: Mapping[str, Any]) -> Semantics:
        """Semantics of one request's log-probs."""
        return Semantics(
            engine=ENGINE, temperature=1.0 if self.original else temperature_of(settings), truncation="none",
            normaliser="full_vocabulary", penalties=spelled(settings, PENALTIES, complete=True), source="decode",
            dtype="float32",
        )  # fmt: skip


class Asked:
    """One request: its ids, how each of its prompts is sampled, and of which of them log-probs were asked for."""

    def __init__(
        self,
        watch: EngineWatch,
        meaning: Meaning,
        engine: str,
        given: Sequence[str],
        params: Any,
        wanted: Sequence[bool] = (True,),
    ) -> None:
        self.watch, self.meaning, self.engine, self.given = watch, meaning, engine, list(given)
        self.wanted = list(wanted)
        self.settings = [settings_of(p) for p in params] if isinstance(params, list) else [settings_of(params or {})]
        self.streamed: dict[int, Choice] = {}

    def keep(self, choices: Sequence[Choice]) -> None:
        """The choices of the answer, those of one prompt side by side."""
        asked = per_choice(self.settings, len(choices))
        meant = [self.meaning.of(settings) for settings in asked]
        ids = sample_ids(choices, self.given)
        self.watch.keep(choices, ids, meant, asked, self.engine, per_choice(self.wanted, len(choices)))

    def event(self, said: Json) -> None:
        """One event of `/generate`: cumulative by default, incremental where the server says so."""
        meta = said.get("meta_info")
        if not isinstance(meta, Mapping):
            return
        index = int(said.get("index") or 0)
        choice = self.streamed.setdefault(index, Choice(index))
        pairs = meta.get("output_token_logprobs") or ()
        if len(pairs) == meta.get("completion_tokens"):
            choice.token_ids, choice.log_probs = [], []
        choice.log_probs += [float(pair[0]) for pair in pairs]
        choice.token_ids += [int(pair[1]) for pair in pairs]
        if not choice.log_probs:
            choice.token_ids = [0] * int(meta.get("completion_tokens") or 0)  # unasked: no more than counted
        describe(meta, choice)

    def answered(self, answer: Any) -> None:
        """A whole answer of `/generate` or `Engine.generate`; None ends a stream."""
        if answer is None:
            self.keep([self.streamed[index] for index in sorted(self.streamed)])
            return
        choices = []
        for number, said in enumerate(answer if isinstance(answer, list) else [answer]):
            meta = said["meta_info"]
            choice = Choice(number)
            pairs = meta.get("output_token_logprobs") or ()
            choice.log_probs = [float(pair[0]) for pair in pairs]
            choice.token_ids = [int(pair[1]) for pair in pairs]
            ids = list(said.get("output_ids") or choice.token_ids)
            if choice.log_probs and ids != choice.token_ids:
                choice.token_ids = []  # the answer contradicts itself: unread
            elif not choice.log_probs:
                choice.token_ids = ids
            describe(meta, choice)
            choices.append(choice)
        self.keep(choices)


def asking(request: Mapping[str, Any], prompts: str, asking: Asking) -> tuple[dict[str, Any], list[str], list[bool]]:
    """What must change in a request for log-probs and ids to come back, the ids, and which prompts ask for log-probs.

    `prompts` names the text field.
    """
    text, ids = request.get(prompts), request.get("input_ids")
    batch = (
        text if isinstance(text, list) else ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else None
    )
    given = request.get("rid")
    if given is None:
        given = uuid.uuid4().hex if batch is None else [uuid.uuid4().hex for _ in batch]
    params = request.get("sampling_params")
    first = params[0] if isinstance(params, list) and params else params
    # With n > 1 the engine makes up ids of its own: those of the answer are then the samples'.
    each = int((first or {}).get("n") or 1)
    made_up = request.get("rid") is None and each > 1
    changed: dict[str, Any] = {} if made_up else {"rid": given}
    count, said = 1 if batch is None else len(batch), request.get("return_logprob")
    if isinstance(said, list):
        wanted = asking.among([bool(one) for one in said], [each] * len(said))
    elif each > 1:  # sglang takes no list there
        wanted = asking.among([bool(said)], [each * count])
    else:
        wanted = asking.among([bool(said)] * count, [1] * count)
    if isinstance(said, list) or len(set(wanted)) > 1:
        changed["return_logprob"] = wanted
    elif wanted and wanted[0]:
        changed["return_logprob"] = True
    if isinstance(given, str):
        named = [given] if batch is None or len(batch) == 1 else [f"{given}_{n}" for n in range(len(batch))]
    else:
        named = [str(one) for one in given]
    return changed, named, wanted


def digests_of(ranks: Any) -> Digests | None:
    """Digests by rank and tensor, from what `check_weights` answers."""
    found = {
        f"{rank}:{name}": str(digest)
        for rank, said in enumerate(ranks or ())
        for name, digest in (said.get("checksums") or {}).items()
    }
    return found or None
