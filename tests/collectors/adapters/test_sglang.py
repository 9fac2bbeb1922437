"""sglang's adapter against recorded answers of the real engine, and against engines that behave like it in process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests

from foreshock import Semantics
from foreshock.adapters import sglang
from foreshock.adapters.engine_plain import PlainClient
from tests.collectors.adapters.engine_fixtures import Replay, others, recorded
from tests.collectors.adapters.engine_watching import Told, rows_of

CONTROL = {"/model_info": (200, {"weight_version": "v0"}), "/weights_checker": (404, {})}
EXCHANGES = ("generate", "generate_batch", "generate_stream", "completions", "completions_stream", "chat")


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.monitor.finish()


def truth(name: str) -> list[list[tuple[int, float]]]:
    """(token id, log-prob) of each response of a recorded `/generate`, from its last event where it was a stream."""
    body = recorded(f"sglang_{name}")["body"]
    if name.endswith("stream"):
        body = [line[6:] for line in body.splitlines() if line.startswith("data: {")][-1]
    answers = json.loads(body)
    metas = [answer["meta_info"] for answer in (answers if isinstance(answers, list) else [answers])]
    return [[(one[1], one[0]) for one in meta["output_token_logprobs"]] for meta in metas]


def send(client: Any, name: str | Path) -> Any:
    said = recorded(f"sglang_{name}" if isinstance(name, str) else name)
    if said["request"].get("stream"):
        with client.stream("POST", said["url"], json=said["request"]) as response:
            return b"".join(response.iter_bytes())
    return client.post(said["url"], json=said["request"]).content


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_route_gives_ids_and_log_probs_and_the_host_its_own_bytes(told: Told, name: str) -> None:
    said = recorded(f"sglang_{name}")
    replay = Replay({said["url"]: f"sglang_{name}", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    assert send(client, name) == said["body"].encode()
    watch.report()
    expected = 4 if name == "generate_batch" else 1
    assert told.scalars["engine.samples"] == expected
    assert told.scalars["engine.unread"] == 0
    assert told.scalars["engine.finish_length"] == 1
    for sample in watch.samples._samples.values():
        assert len(sample.token_ids) == said["request"].get("max_tokens", 8)
        assert sample.semantics == Semantics(
            engine="sglang", temperature=0.7, truncation="none", normaliser="full_vocabulary", penalties="none",
            source="decode", dtype="float32",
        )  # fmt: skip
        assert [span[1:] for span in sample.spans] in ([(0, 8)], [])


@pytest.mark.parametrize("name", ["generate", "generate_batch", "generate_stream"])
def test_what_is_kept_is_what_the_engine_said(told: Told, name: str) -> None:
    replay = Replay({"/generate": f"sglang_{name}", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    send(client, name)
    kept = list(watch.samples._samples.values())
    assert [[*zip(s.token_ids.tolist(), s.log_probs.tolist(), strict=True)] for s in kept] == [
        [(token, pytest.approx(value)) for token, value in row] for row in truth(name)
    ]
    assert {sample.prompt_tokens for sample in kept} <= {11, 4}


@pytest.mark.parametrize("path", others("sglang"), ids=lambda path: path.stem)
def test_other_recordings_are_read_as_well(told: Told, path: Path) -> None:
    replay = Replay({recorded(path)["url"]: path, **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    send(client, path)
    watch.report()
    # A chat stream that was recorded without asking for ids has none.
    assert told.scalars["engine.unread"] == float(path.stem == "sglang_chat_stream")


def test_the_callers_id_is_kept_and_one_is_given_where_there_is_none(told: Told) -> None:
    replay = Replay({"/generate": "sglang_generate", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    client.post("/generate", json={"input_ids": [1], "rid": "mine", "sampling_params": {"temperature": 0.7}})
    client.post("/generate", json={"input_ids": [1], "sampling_params": {"temperature": 0.7}})
    (_, first), (_, second) = replay.sent
    assert (first["rid"], first["return_logprob"]) == ("mine", True)
    assert len(second["rid"]) == 32
    assert list(watch.samples._samples) == ["mine", second["rid"]]
    client.post("/generate", json={"text": ["a", "b"], "sampling_params": {}})
    assert len(replay.sent[2][1]["rid"]) == 2
    client.post("/generate", json={"text": "a", "sampling_params": {"n": 4}})
    assert "rid" not in replay.sent[3][1]  # the engine makes up four of its own


def test_several_responses_of_a_given_id_are_numbered(told: Told) -> None:
    request = recorded("sglang_generate_batch")["request"] | {"rid": ["x", "y"]}
    replay = Replay({"/generate": "sglang_generate_batch", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    client.post("/generate", json=request)
    assert list(watch.samples._samples) == ["x-0", "x-1", "y-0", "y-1"]


def test_what_is_not_the_engines_passes_untouched(told: Told) -> None:
    replay = Replay({"/other": (200, {"a": 1}), "/v1/models": (200, {})})
    sglang.wrap(client := replay.client(), told.monitor)
    assert client.post("/other", json={"prompt": "x"}).json() == {"a": 1}
    assert client.get("/v1/models").status_code == 200
    assert replay.sent == [("/other", {"prompt": "x"}), ("/v1/models", None)]


def test_a_chat_stream_passes_as_it_is_since_sglang_tells_no_ids_there(told: Told) -> None:
    body = {"messages": [], "stream": True}
    replay = Replay({"/v1/chat/completions": (200, {"choices": []}), **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    client.post("/v1/chat/completions", json=body)
    assert replay.sent[-1] == ("/v1/chat/completions", body)
    watch.report()
    assert told.scalars["engine.unread"] == 1.0


def test_an_answer_without_token_ids_is_counted_and_never_retokenised(told: Told) -> None:
    body = {"id": "z", "choices": [{"index": 0, "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]}
    replay = Replay({"/v1/completions": (200, body), **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    client.post("/v1/completions", json={"prompt": "x"})
    watch.report()
    assert (len(watch.samples), told.scalars["engine.unread"]) == (0, 1.0)


def test_an_error_answer_reaches_the_host_and_is_counted(told: Told) -> None:
    replay = Replay({"/generate": (400, {"error": "no"}), **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    assert client.post("/generate", json={"text": "a"}).status_code == 400
    watch.report()
    assert told.scalars["engine.unread"] == 1.0


def test_an_engine_that_refuses_what_was_added_gets_the_hosts_own_request(told: Told) -> None:
    def strict(body: Any) -> Any:
        return (400, {"error": "unknown field"}) if "return_logprob" in body else (200, {"text": "a"})

    replay = Replay({"/generate": strict, **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    for _ in range(3):
        assert client.post("/generate", json={"text": "a"}).json() == {"text": "a"}
    # Amended once, and never again.
    assert ["return_logprob" in body for _, body in replay.sent] == [True, False, False, False]
    watch.report()
    assert told.scalars["engine.unread"] == 1.0


def test_the_original_log_probs_of_a_server_are_of_temperature_one(told: Told) -> None:
    replay = Replay({"/generate": "sglang_generate", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor, original_log_probs=True)
    send(client, "generate")
    assert watch.samples.get("fs-1").semantics.temperature == 1.0  # type: ignore[union-attr]


def pushed(told: Told, client: httpx.Client, watch: Any, answers: list[tuple[str, dict[str, Any]]]) -> None:
    send(client, "generate")
    for path, body in answers:
        client.post(path, json=body)
    send(client, "generate")
    assert watch.http.wait()


DISK = "/update_weights_from_disk"


@pytest.mark.parametrize(
    ("calls", "kinds"),
    [
        ([(DISK, {"weight_version": "v1"})], ["weights", "flush"]),
        ([(DISK, {"weight_version": "v1", "flush_cache": False})], ["weights"]),
        ([(DISK, {"flush_cache": False}), ("/flush_cache", {})], ["weights", "flush"]),
        ([("/flush_cache", {}), (DISK, {"flush_cache": False})], ["flush", "weights"]),
        ([("/release_memory_occupation", {"tags": ["weights"]}), (DISK, {"flush_cache": False})], ["sleep", "weights"]),
        ([("/release_memory_occupation", {}), (DISK, {"flush_cache": False})], ["sleep", "flush", "weights"]),
        ([("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})], ["pause", "resume"]),
    ],
)
def test_pushes_and_flushes_are_told_in_their_order(told: Told, calls: Any, kinds: list[str]) -> None:
    done = {path: (200, {"success": True}) for path, _ in calls}
    replay = Replay({"/generate": "sglang_generate", **CONTROL, **done})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    pushed(told, client, watch, calls)
    assert told.kinds() == kinds
    assert told.notices[-1][1]["engine"] == "http://engine:1"


def test_a_push_tells_checksum_and_label_of_the_engine_itself(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = json.loads(recorded("sglang_weights_checker")["body"])
    asked: list[str] = []

    def answer(self: PlainClient, path: str, body: Any = None) -> tuple[int, Any]:
        asked.append(path)
        return (200, checksums) if path == "/weights_checker" else (200, {"weight_version": "v0"})

    monkeypatch.setattr(PlainClient, "post", answer)
    monkeypatch.setattr(PlainClient, "get", answer)
    replay = Replay({"/generate": "sglang_generate", DISK: (200, {"success": True})})
    watch = sglang.wrap(client := replay.client(), told.monitor, checksum_share=1.0)
    for _ in range(2):
        pushed(told, client, watch, [(DISK, {"weight_version": "v1"})])
    said = told.last("weights")
    assert (said["version"], said["pushed"], said["changed_share"], len(said["checksum"])) == ("v0", "v1", 0.0, 16)
    assert "/weights_checker" in asked


def test_a_push_that_failed_is_told_as_such(told: Told) -> None:
    replay = Replay({"/generate": "sglang_generate", DISK: "sglang_update_disk_failed", **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    pushed(told, client, watch, [(DISK, recorded("sglang_update_disk_failed")["request"])])
    said = told.last("weights")
    assert said["ok"] is False
    assert "Failed to get weights iterator" in said["message"]
    assert "pushed" not in said


def test_a_push_without_an_answer_is_no_push(told: Told) -> None:
    def cut(_: Any) -> Any:
        raise httpx.ReadTimeout("cut")

    replay = Replay({"/generate": "sglang_generate", DISK: cut, **CONTROL})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    with pytest.raises(httpx.ReadTimeout):
        client.post(DISK, json={"model_path": "x"})
    pushed(told, client, watch, [])
    assert (told.last("weights")["ok"], "ReadTimeout" in told.last("weights")["message"]) == (False, True)


# --- the other clients


def test_requests_and_plain_clients_are_watched(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay({"/generate": "sglang_generate", **CONTROL})

    class Adapter(requests.adapters.BaseAdapter):
        def send(self, request: Any, **_: Any) -> requests.Response:
            inner = replay.client().post("/generate", content=request.body)
            made = requests.Response()
            made.status_code, made._content, made.url = inner.status_code, inner.content, request.url
            made.headers.update(inner.headers)
            return made

        def close(self) -> None: ...

    session = requests.Session()
    session.mount("http://engine:1", Adapter())
    watch = sglang.wrap(session, told.monitor)
    answer = session.post("http://engine:1/generate", json=recorded("sglang_generate")["request"])
    assert answer.json()["meta_info"]["id"] == "fs-1"
    assert list(watch.samples._samples) == ["fs-1"]


@pytest.mark.anyio
async def test_async_httpx_streams_are_read_as_they_pass(told: Told) -> None:
    replay = Replay({"/generate": "sglang_generate_stream", **CONTROL})
    async with replay.async_client() as client:
        watch = sglang.wrap(client, told.monitor)
        request = recorded("sglang_generate_stream")["request"]
        async with client.stream("POST", "/generate", json=request) as response:
            async for _ in response.aiter_lines():
                pass
    tokens, _ = rows_of(watch.samples, list(watch.samples._samples))
    assert tokens.tolist() == [[token for token, _ in truth("generate_stream")[0]]]


@pytest.mark.anyio
async def test_aiohttp_is_watched(told: Told) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    web = pytest.importorskip("aiohttp.web")
    seen = []

    async def generate(request: Any) -> Any:
        seen.append(await request.json())
        return web.json_response(text=recorded("sglang_generate")["body"])

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        watch = sglang.wrap(session, told.monitor)
        async with session.post("/generate", json={"input_ids": [1], "rid": "fs-1"}) as answer:
            assert (await answer.json())["meta_info"]["id"] == "fs-1"
    await runner.cleanup()
    assert seen[0]["return_logprob"] is True
    assert list(watch.samples._samples) == ["fs-1"]


def test_an_object_that_is_no_client_is_refused(told: Told) -> None:
    with pytest.raises(TypeError, match="neither an engine nor an HTTP client"):
        sglang.wrap(object(), told.monitor)


# --- an engine in this process


class Engine:
    """Answers as `sglang.Engine` does: signatures of 0.5.23, tuples for updates."""

    def __init__(self, label: str = "v0") -> None:
        self.loop = SimpleNamespace(is_running=lambda: False)
        self.seen: list[dict[str, Any]] = []
        self.answer: Callable[[], Any] = lambda: (True, "Success")

        class Manager:
            server_args = None

            def config_value(self, name: str) -> str:
                return label

        self.tokenizer_manager = Manager()

    def generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, return_logprob: Any = False,
        rid: Any = None, stream: bool = False,
    ) -> Any:  # fmt: skip
        self.seen.append({"sampling_params": sampling_params, "return_logprob": return_logprob, "rid": rid})
        whole = json.loads(recorded("sglang_generate")["body"])
        if not stream:
            return whole
        lines = recorded("sglang_generate_stream")["body"].splitlines()
        return iter([json.loads(line[6:]) for line in lines if line.startswith("data: {")])

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None, flush_cache: bool = True) -> Any:
        return self.answer()

    def begin_weight_update(self) -> Any:
        return self.answer()

    def end_weight_update(self) -> Any:
        return self.answer()

    def flush_cache(self) -> Any:
        return None


def test_an_engine_in_process_is_asked_for_log_probs_and_its_answer_passed_on(told: Told) -> None:
    engine = Engine()
    watch = sglang.wrap(engine, told.monitor)
    answer = engine.generate(input_ids=[1, 2], sampling_params={"temperature": 0.7}, rid="fs-1")
    assert answer == json.loads(recorded("sglang_generate")["body"])
    assert engine.seen == [{"sampling_params": {"temperature": 0.7}, "return_logprob": True, "rid": "fs-1"}]
    assert watch.samples.get("fs-1") is not None
    events = list(engine.generate(input_ids=[1, 2], sampling_params={"temperature": 0.7}, stream=True))
    assert len(events) == len(truth("generate_stream")[0])
    assert len(watch.samples) == 2
    watch.close()
    engine.generate(input_ids=[1], rid="later")
    assert engine.seen[-1]["return_logprob"] is False


def test_a_host_may_keep_log_probs_for_itself(told: Told) -> None:
    engine = Engine()
    sglang.wrap(engine, told.monitor, ask=False)
    engine.generate(input_ids=[1], rid="x")
    engine.generate(input_ids=[1], rid="x", return_logprob=True)
    assert [seen["return_logprob"] for seen in engine.seen] == [False, True]


def test_an_update_outside_a_session_is_not_taken_and_told(told: Told) -> None:
    engine = Engine()
    watch = sglang.wrap(engine, told.monitor)
    engine.answer = lambda: (False, "update_weights_from_tensor must run between begin and end")
    assert engine.update_weights_from_tensor([], flush_cache=True)[0] is False
    watch.report()
    said = told.last("weights")
    assert (said["ok"], said["version"]) == (False, "v0")
    assert "must run between" in said["message"]


def test_a_collector_that_throws_leaves_the_engine_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path, raise_errors=False)
    engine = Engine()
    watch = sglang.wrap(engine, told.monitor)

    def throw(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    for owner, name in ((watch, "keep"), (watch.weights["engine"], "updated"), (watch.weights["engine"], "generating")):
        monkeypatch.setattr(owner, name, throw)
    for _ in range(60):
        assert engine.generate(input_ids=[1])["meta_info"]["id"] == "fs-1"
        assert engine.update_weights_from_tensor([]) == (True, "Success")
    assert told.monitor.guard.off


def test_without_a_service_the_client_is_left_alone() -> None:
    engine = Engine()
    watch = sglang.wrap(engine, run="a/b")
    assert "generate" not in vars(engine)
    watch.report()
    watch.close()


def test_the_engines_host_can_be_asked_to_resync(told: Told) -> None:
    calls = []
    watch = sglang.wrap(Engine(), told.monitor, resync=lambda: calls.append(1))
    handler = told.monitor._handlers["resync_engine"]
    assert handler(None) == {"pushed": True}  # type: ignore[arg-type]
    assert calls == [1]
    assert set(watch.monitor._handlers) == {"resync_engine"}
