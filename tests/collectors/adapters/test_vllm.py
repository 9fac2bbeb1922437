"""vLLM's adapter against recorded answers of the real engine, and against engines that behave like it in process."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreshock.adapters import vllm
from foreshock.adapters.engine_plain import PlainClient
from foreshock.adapters.vllm_requests import loads, meaning_of
from tests.collectors.adapters.engine_fixtures import Replay, others, recorded
from tests.collectors.adapters.engine_watching import Told

GENERATE = "/inference/v1/generate"
CONTROL = {"/weight_info": (200, {"weight_version": "default"}), "/weight_checker": (404, {})}
EXCHANGES = (
    "generate", "generate_several", "generate_stream", "completions", "completions_stream", "chat", "chat_stream"
)  # fmt: skip


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.monitor.finish()


def send(client: Any, name: str | Path) -> Any:
    said = recorded(f"vllm_{name}" if isinstance(name, str) else name)
    if said["request"].get("stream"):
        with client.stream("POST", said["url"], json=said["request"]) as response:
            return b"".join(response.iter_bytes())
    return client.post(said["url"], json=said["request"]).content


def pairs(choice: dict[str, Any]) -> list[tuple[int, float]]:
    return [(one["token_id"], one["logprob"]) for one in choice["logprobs"]["content"]]


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_route_gives_ids_and_log_probs_and_the_host_its_own_bytes(told: Told, name: str) -> None:
    said = recorded(f"vllm_{name}")
    replay = Replay({said["url"]: f"vllm_{name}", **CONTROL})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    assert send(client, name) == said["body"].encode()
    watch.report()
    assert told.scalars["engine.samples"] == (2 if name == "generate_several" else 1)
    assert (told.scalars["engine.unread"], told.scalars["engine.finish_length"]) == (0, 1)
    for sample in watch.samples._samples.values():
        assert len(sample.token_ids) == 8
        assert (sample.log_probs < 0).all()
        # Only the token route tells versions.
        assert len(sample.spans) == said["url"].endswith("generate")


@pytest.mark.parametrize("path", others("vllm"), ids=lambda path: path.stem)
def test_other_recordings_are_read_as_well(told: Told, path: Path) -> None:
    replay = Replay({recorded(path)["url"]: path, **CONTROL})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    send(client, path)
    watch.report()
    assert told.scalars["engine.unread"] == 0


def test_what_is_kept_is_what_the_engine_said(told: Told) -> None:
    replay = Replay({GENERATE: "vllm_generate_several", **CONTROL})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    send(client, "generate_several")
    body = json.loads(recorded("vllm_generate_several")["body"])
    kept = list(watch.samples._samples.values())
    assert [[*zip(s.token_ids.tolist(), s.log_probs.tolist(), strict=True)] for s in kept] == [
        [(token, pytest.approx(value)) for token, value in pairs(choice)] for choice in body["choices"]
    ]
    assert [sample.id for sample in kept] == [f"{body['request_id']}-{n}" for n in (0, 1)]


def test_ids_and_log_probs_are_asked_for(told: Told) -> None:
    replay = Replay({GENERATE: "vllm_generate", "/v1/completions": "vllm_completions", **CONTROL})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    client.post(GENERATE, json={"token_ids": [1], "request_id": "mine", "sampling_params": {"temperature": 0.7}})
    client.post("/v1/completions", json={"prompt": "x", "logprobs": 3})
    assert replay.sent[0][1]["sampling_params"] == {"temperature": 0.7, "logprobs": 0}
    assert replay.sent[1][1] == {"prompt": "x", "logprobs": 3, "return_token_ids": True}
    assert next(iter(watch.samples._samples)) == "mine"


@pytest.mark.parametrize(
    ("mode", "settings", "complete", "meaning"),
    [
        ("raw_logprobs", {"temperature": 0.7, "top_k": 20}, False, (1.0, "none", "full_vocabulary", "none")),
        ("processed_logprobs", {"temperature": 0.7}, True, (0.7, "none", "kept_set", "none")),
        ("processed_logprobs", {"temperature": 0.0, "top_k": 5}, True, (1.0, "top_k=5", "kept_set", "none")),
        # What a request leaves out, a server may have defaults for.
        ("processed_logprobs", {"top_k": 5}, False, (None, "", "kept_set", "")),
        ("raw_logits", {}, True, (1.0, "none", "logits", "none")),
    ],
)
def test_what_log_probs_mean_follows_the_engines_mode(mode: str, settings: Any, complete: bool, meaning: Any) -> None:
    said = meaning_of(mode, settings, complete)
    assert (said.temperature, said.truncation, said.normaliser, said.penalties) == meaning


def test_a_mode_that_is_not_known_is_refused(told: Told) -> None:
    with pytest.raises(ValueError, match="logprobs_mode must be one of"):
        vllm.wrap(Replay({}).client(), told.monitor, logprobs_mode="cooked")


RELOAD = ("/collective_rpc", {"method": "reload_weights"})


@pytest.mark.parametrize(
    ("calls", "kinds"),
    [
        ([RELOAD], ["weights"]),
        ([RELOAD, ("/reset_prefix_cache", {})], ["weights", "flush"]),
        ([("/pause?mode=wait", {}), RELOAD, ("/resume", {})], ["pause", "flush", "resume", "weights"]),
        ([("/pause?mode=keep", {}), RELOAD, ("/resume", {})], ["pause", "resume", "weights"]),
        ([("/sleep?level=1", {}), ("/wake_up", {})], ["sleep", "flush", "wake"]),
        ([("/update_weights", {"update_info": {}}), ("/finish_weight_update", {"weight_version": "v2"})], ["weights"]),
        ([("/collective_rpc", {"method": "get_model_info"})], []),
    ],
)
def test_pushes_and_flushes_are_told_in_their_order(told: Told, calls: Any, kinds: list[str]) -> None:
    done = {path.partition("?")[0]: (200, {"success": True}) for path, _ in calls}
    replay = Replay({GENERATE: "vllm_generate", **CONTROL, **done})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    send(client, "generate")
    for path, body in calls:
        client.post(path, json=body)
    send(client, "generate")
    assert watch.http is not None
    assert watch.http.wait()
    assert told.kinds() == kinds


def test_a_reset_that_did_not_happen_is_no_flush(told: Told) -> None:
    replay = Replay({"/reset_prefix_cache": (200, {"success": False}), **CONTROL})
    vllm.wrap(client := replay.client(), told.monitor)
    client.post("/reset_prefix_cache")
    assert told.kinds() == []


def test_a_failed_push_is_told_with_its_status(told: Told) -> None:
    replay = Replay({GENERATE: "vllm_generate", "/finish_weight_update": (500, {"error": "broken"}), **CONTROL})
    watch = vllm.wrap(client := replay.client(), told.monitor)
    client.post("/finish_weight_update", json={"weight_version": "v3"})
    send(client, "generate")
    assert watch.http is not None
    assert watch.http.wait()
    said = told.last("weights")
    assert (said["ok"], "pushed" in said) == (False, False)
    assert "broken" in said["message"]


def test_packed_tensors_count_on_neither_side(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.loads(recorded("vllm_weight_checker")["body"])
    moved = copy.deepcopy(body)
    embedding = next(name for name in body["checksums"] if "embed_tokens" in name)
    moved["checksums"][embedding] = "0" * 64
    answers = iter([body, moved])
    monkeypatch.setattr(PlainClient, "get", lambda self, path: (200, {"weight_version": "v1"}))
    monkeypatch.setattr(PlainClient, "post", lambda self, path, body=None: (200, next(answers)))
    replay = Replay({GENERATE: "vllm_generate", "/collective_rpc": (200, {})})
    watch = vllm.wrap(client := replay.client(), told.monitor, checksum_share=1.0)
    for _ in range(2):
        client.post("/collective_rpc", json=RELOAD[1])
        send(client, "generate")
        assert watch.http is not None
        assert watch.http.wait()
    full = [name for name, digest in body["checksums"].items() if not digest.startswith("e3b0c44298fc1c14")]
    assert 0 < len(full) < len(body["checksums"])
    assert told.last("weights")["changed_share"] == pytest.approx(1 / len(full))


@pytest.mark.parametrize("name", ["reload_weights", "update_weights", "load_weights", "receive_weight_bucket"])
def test_worker_methods_that_change_weights_are_known_by_name(name: str) -> None:
    assert loads(name)


@pytest.mark.parametrize(
    "name", ["get_weights", "compute_weight_checksums", "init_weight_transfer_engine", "sleep", None]
)
def test_others_are_not(name: Any) -> None:
    assert not loads(name)


# --- engines in this process


class Kind(Enum):
    """As `vllm.sampling_params.RequestOutputKind`: no number."""

    CUMULATIVE = 0
    DELTA = 1


class Params:
    """As `vllm.SamplingParams`."""

    def __init__(self, **said: Any) -> None:
        self.temperature, self.top_k, self.top_p, self.min_p = 1.0, 0, 1.0, 0.0
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = 1.0, 0.0, 0.0
        self.logprobs, self.n, self.output_kind = None, 1, Kind.CUMULATIVE
        vars(self).update(said)

    def clone(self) -> Params:
        return copy.copy(self)


def output(index: int, tokens: list[int], finish: str | None = "stop", spans: Any = None) -> Any:
    entries = [{token: SimpleNamespace(logprob=-token / 8), 9999: SimpleNamespace(logprob=0.0)} for token in tokens]
    return SimpleNamespace(
        index=index, token_ids=tokens, logprobs=entries, finish_reason=finish, weight_versions=spans
    )  # fmt: skip


def answer(name: str, *outputs: Any) -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1, 2, 3], num_cached_tokens=2, outputs=list(outputs))


class Engine:
    """Answers as `vllm.LLM` does."""

    def __init__(self, mode: str = "processed_logprobs") -> None:
        self.seen: list[Any] = []
        self.digests = {"w": "0"}
        inner = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=mode)),
            get_weight_version=lambda: "v3", collective_rpc=lambda method: [dict(self.digests)],
        )  # fmt: skip
        self.llm_engine = inner

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> Any:
        self.seen.append(sampling_params)
        span = SimpleNamespace(version="v3", start=0, end=2)
        return [
            answer("0", output(0, [8, 16], spans=[span]), output(1, [24])),
            answer("1", output(0, [4]), output(1, [2])),
        ]

    def get_default_sampling_params(self) -> Params:
        return Params()

    def collective_rpc(self, method: Any, kwargs: Any = None) -> Any:
        if method == "load_weights_wrongly":
            raise RuntimeError("weight (128,384) into parameter ([0])")
        self.digests = {"w": "1"}
        return [None]

    def reset_prefix_cache(self) -> bool:
        return True


def test_an_engine_in_process_is_asked_for_log_probs_of_sampled_tokens(told: Told) -> None:
    engine = Engine()
    watch = vllm.wrap(engine, told.monitor)
    mine = Params(temperature=0.7, top_k=20, n=2)
    engine.generate(["a", "b"], mine)
    assert (mine.logprobs, engine.seen[0].logprobs) == (None, 0)
    assert {name: sample.log_probs.tolist() for name, sample in watch.samples._samples.items()} == {
        "0-0": [-1.0, -2.0], "0-1": [-3.0], "1-0": [-0.5], "1-1": [-0.25],
    }  # fmt: skip
    sample = watch.samples.get("0-0")
    assert sample is not None
    assert (sample.cached_tokens, sample.prompt_tokens, sample.spans) == (2, 3, (("v3", 0, 2),))
    assert (sample.semantics.temperature, sample.semantics.normaliser) == (0.7, "kept_set")
    assert sample.semantics.truncation == "top_k=20,top_p=1.0,min_p=0.0"
    engine.generate(["a", "b"], sampling_params=[mine, mine], sample_ids=["x", "y"])
    assert {"x-0", "x-1", "y-0", "y-1"} <= set(watch.samples._samples)


def test_a_host_may_keep_log_probs_for_itself(told: Told) -> None:
    engine = Engine()
    vllm.wrap(engine, told.monitor, ask=False)
    engine.generate(["a", "b"], Params())
    engine.generate(["a", "b"], Params(logprobs=1))
    assert [seen.logprobs for seen in engine.seen] == [None, 1]


def test_a_push_in_process_tells_checksum_and_label(told: Told) -> None:
    engine = Engine()
    watch = vllm.wrap(engine, told.monitor, checksum_share=1.0)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": "x"})
    engine.reset_prefix_cache()
    engine.generate(["a"])
    assert told.kinds() == ["weights", "flush"]
    assert (told.last("weights")["version"], told.last("weights")["changed_share"]) == ("v3", 1.0)
    with pytest.raises(RuntimeError, match="into parameter"):
        engine.collective_rpc("load_weights_wrongly")
    watch.report()
    assert told.last("weights")["ok"] is False


class AsyncEngine:
    """Answers as `vllm.v1.engine.async_llm.AsyncLLM` does."""

    def __init__(self, deltas: bool) -> None:
        self.deltas, self.output_processor = deltas, object()
        self.model_config = SimpleNamespace(logprobs_mode="raw_logprobs")

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        assert sampling_params.logprobs == 0
        yield answer(request_id, output(0, [5], None))
        yield answer(request_id, output(0, [5] if self.deltas else [5, 5]))

    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    async def get_weight_version(self) -> str:
        return "v8"

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return [{"w": "1"}]


@pytest.mark.anyio
@pytest.mark.parametrize("deltas", [False, True])
async def test_an_async_engine_is_watched_whether_its_answers_cumulate_or_not(told: Told, deltas: bool) -> None:
    engine: Any = AsyncEngine(deltas)
    watch = vllm.wrap(engine, told.monitor)
    params = Params(output_kind=Kind.DELTA if deltas else Kind.CUMULATIVE)
    assert len([one async for one in engine.generate("a", params, "mine")]) == 2
    sample = watch.samples.get("mine")
    assert sample is not None
    assert sample.token_ids.tolist() == [5, 5]
    await engine.finish_weight_update(weight_version="v8")
    watch.report()
    said = told.last("weights")
    assert (said["version"], said["pushed"], bool(said["checksum"])) == ("v8", "v8", True)


def test_a_collector_that_throws_leaves_the_engine_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path, raise_errors=False)
    engine = Engine()
    watch = vllm.wrap(engine, told.monitor)

    def throw(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    for owner, name in ((watch, "keep"), (watch.weights["engine"], "updated"), (watch.weights["engine"], "generating")):
        monkeypatch.setattr(owner, name, throw)
    for _ in range(60):
        assert len(engine.generate(["a", "b"])) == 2
        assert engine.collective_rpc("reload_weights") == [None]
    assert told.monitor.guard.off
