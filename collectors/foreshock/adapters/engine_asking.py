"""Which requests are asked for log-probs where the host does not ask by itself: all, none, or a share of them.

An engine pays for log-probs once a step if any request of its batch asks, and far less for each token of those that
do. So a share comes in bursts of requests in a row, which an engine has in its batch together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from foreshock.adapters.engine_answers import CHAT

T = TypeVar("T")
SHARE: Final = 0.05
"""Of the responses, where `wrap` is told nothing else: what asking for all of them costs is on the engines' pages."""
BURST: Final = 16
"""Responses that a share saves up before it asks for any; the first ones of a run are asked for at once."""


class Asking:
    """Chooses among requests that want no log-probs. Safe to use from several threads."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` of the responses: True is all, False none. Raises ValueError outside [0, 1]."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"ask must be True, False or a share between 0 and 1, not {share!r}")
        self.share = float(share)
        self._credit = float(BURST)
        self._open = True
        self._lock = threading.Lock()

    def choose(self, responses: Sequence[int]) -> list[bool]:
        """Whether each request is to be asked; `responses[i]` is how many request i will have.

        Over a run the share is kept to within one burst, or one request where that has more responses.
        """
        if self.share in (0.0, 1.0):
            return [self.share == 1.0] * len(responses)
        total = sum(responses)
        with self._lock:
            self._credit += self.share * total
            self._open = self._open or self._credit >= BURST
            if not self._open or not total:
                return [False] * len(responses)
            count = min(len(responses), max(1, int(self._credit * len(responses) / total)))
            self._credit -= sum(responses[:count])
            self._open = self._credit >= 1.0
        return [place < count for place in range(len(responses))]

    def among(self, wanting: Sequence[bool], responses: Sequence[int]) -> list[bool]:
        """As `choose`, where `wanting` requests ask by themselves: those are true and cost the share nothing."""
        quiet = [place for place, wants in enumerate(wanting) if not wants]
        found = list(wanting)
        for place, chosen in zip(quiet, self.choose([responses[place] for place in quiet]), strict=True):
            found[place] = chosen
        return found


def openai_asking(route: str, body: Mapping[str, Any], asking: Asking) -> tuple[dict[str, Any], bool]:
    """What to add to a request of an OpenAI route, and whether it then asks for log-probs."""
    wants = bool(body.get("logprobs")) if route == CHAT else body.get("logprobs") is not None
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    (wanted,) = asking.among([wants], [prompts * int(body.get("n") or 1)])
    added: dict[str, Any] = {"logprobs": True if route == CHAT else 0} if wanted and not wants else {}
    return added, wanted


def per_choice(per_prompt: Sequence[T], choices: int) -> list[T]:
    """What holds for each choice of an answer, whose prompts' choices lie side by side; or one for all of them."""
    each = max(1, choices // len(per_prompt))
    return [per_prompt[min(n // each, len(per_prompt) - 1)] for n in range(choices)]
