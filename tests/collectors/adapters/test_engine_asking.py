"""The share of responses that engines are asked to give log-probs of, where the host does not ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreshock.adapters import sglang, vllm
from foreshock.adapters.engine_asking import BURST, Asking, openai_asking
from foreshock.adapters.vllm_requests import prompts_of
from tests.collectors.adapters.engine_fixtures import Replay
from tests.collectors.adapters.engine_watching import Told


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.monitor.finish()


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 7, 16, 512])
def test_over_a_run_the_share_is_kept_to_within_one_burst(share: float, batch: int) -> None:
    asking, asked, total = Asking(share), 0, 0
    while total < 20_000:
        chosen = asking.choose([1] * batch)
        asked, total = asked + sum(chosen), total + batch
        assert asked <= share * total + BURST
    assert asked == pytest.approx(share * total, abs=BURST)


def test_single_requests_are_asked_in_bursts_and_the_first_of_a_run_at_once() -> None:
    asking = Asking(0.05)
    chosen = [asking.choose([1])[0] for _ in range(2000)]
    begins = [n for n, one in enumerate(chosen) if one and (n == 0 or not chosen[n - 1])]
    assert all(chosen[:BURST])
    assert len(begins) <= sum(chosen) / BURST + 1


def test_those_chosen_of_one_call_are_its_first() -> None:
    assert Asking(0.1).choose([1] * 1000) == [n < 100 + BURST for n in range(1000)]


def test_a_request_of_many_responses_is_paid_back() -> None:
    asking, asked = Asking(0.05), 0
    for number in range(1, 501):
        asked += 64 * asking.choose([64])[0]
        assert asked <= 0.05 * 64 * number + 64 + BURST
    assert asked == pytest.approx(0.05 * 64 * 500, abs=64)


def test_all_and_none_are_what_they_say() -> None:
    assert Asking(True).choose([1, 5]) == [True, True]
    assert Asking(False).choose([1, 5]) == [False, False]
    assert Asking(False).among([True, False], [1, 1]) == [True, False]


def test_what_the_host_asks_for_costs_the_share_nothing() -> None:
    asking = Asking(0.05)
    assert all(asking.among([True], [1])[0] for _ in range(1000))
    assert [asking.choose([1])[0] for _ in range(BURST)] == [True] * BURST


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(told: Told, share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        sglang.wrap(Replay({}).client(), told.monitor, ask=share)


@pytest.mark.parametrize(
    ("route", "body", "added", "wanted"),
    [
        ("/v1/completions", {"prompt": "a"}, {"logprobs": 0}, True),
        ("/v1/completions", {"prompt": "a", "logprobs": 0}, {}, True),
        ("/v1/chat/completions", {"logprobs": False}, {"logprobs": True}, True),
        ("/v1/chat/completions", {"logprobs": True}, {}, True),
    ],
)
def test_openai_routes_are_asked_in_their_own_words(route: str, body: Any, added: Any, wanted: bool) -> None:
    assert openai_asking(route, body, Asking(True)) == (added, wanted)
    assert openai_asking(route, body, Asking(False)) == ({}, not added)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ({"prompt_token_ids": [1]}, 1),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}], 2), ([{"role": "user", "content": "a"}], 1),
        ([[{"role": "user", "content": "a"}]] * 3, 3), (iter("ab"), 1), ([], 1),
    ],
)  # fmt: skip
def test_prompts_are_counted_as_vllm_counts_them(prompts: Any, count: int) -> None:
    assert prompts_of(prompts) == count


class VLLM:
    """Answers one response a prompt; log-probs where they are asked for."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace()
        self.seen: list[Any] = []

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[Any]:
        several = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        self.seen = several
        return [self._answer(str(row), one.logprobs is not None) for row, one in enumerate(several)]

    def _answer(self, name: str, told: bool) -> Any:
        entries = [{5: SimpleNamespace(logprob=-1.0)}, {6: SimpleNamespace(logprob=-2.0)}] if told else None
        output = SimpleNamespace(index=0, token_ids=[5, 6], logprobs=entries, finish_reason="length")
        return SimpleNamespace(request_id=name, prompt_token_ids=[1, 2], num_cached_tokens=1, outputs=[output])


def test_responses_without_log_probs_are_counted_and_the_join_says_that_they_were_not_asked_for(told: Told) -> None:
    engine = VLLM()
    watch = vllm.wrap(engine, told.monitor, ask=0.25)
    params = SimpleNamespace(logprobs=None, temperature=1.0)
    engine.generate(["p"] * 100, params)
    asked = [n for n, one in enumerate(engine.seen) if one.logprobs == 0]
    assert len(asked) == 25 + BURST
    assert params.logprobs is None
    watch.report()
    assert told.scalars["engine.samples"] == 100
    assert told.scalars["engine.tokens"] == 200
    assert (told.scalars["engine.unread"], told.scalars["engine.finish_length"]) == (0, 1)
    assert told.scalars["engine.unasked"] == pytest.approx(1 - len(asked) / 100)
    assert told.scalars["engine.cached_share"] == 0.5
    tokens = torch.tensor([[5, 6]] * 100)
    counts = watch.samples.observe(told.monitor, [str(n) for n in range(100)], tokens * -0.5, tokens, tokens > 0)
    assert counts == {"matched": len(asked), "unasked": 100 - len(asked)}
    assert told.scalars["join.unmatched_share"] == 0
    assert told.scalars["join.unasked_share"] == pytest.approx(1 - len(asked) / 100)


def test_each_prompt_of_a_batch_may_be_asked_by_itself_over_http_too(told: Told) -> None:
    def answer(body: Any) -> Any:
        said = body.get("return_logprob", False)
        asked = said if isinstance(said, list) else [said] * len(body["input_ids"])
        answers = []
        for name, one in zip(body["rid"], asked, strict=True):
            meta = {"id": name, "finish_reason": {"type": "stop"}, "completion_tokens": 2}
            pairs = {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]} if one else {}
            answers.append({"output_ids": [5, 6], "meta_info": meta | pairs})
        return 200, answers

    replay = Replay({"/generate": answer, "/model_info": (200, {})})
    watch = sglang.wrap(client := replay.client(), told.monitor, ask=0.2)
    client.post("/generate", json={"input_ids": [[1]] * 100})
    client.post("/generate", json={"input_ids": [[1]] * 2, "return_logprob": True})
    client.post("/generate", json={"input_ids": [[1]] * 2, "sampling_params": {"n": 2}, "rid": ["x", "y"]})
    sent = [body.get("return_logprob") for path, body in replay.sent if path == "/generate"]
    assert (sum(sent[0]), sent[1], sent[2]) == (20 + BURST, True, None)
    watch.report()
    assert (told.scalars["engine.samples"], told.scalars["engine.unread"]) == (104, 0)
    assert told.scalars["engine.tokens"] == 208
    assert len(watch.samples) == 20 + BURST + 2
