"""Real engines, the real service, our watch between them. `make test-engines` installs the engines and runs this.

FORESHOCK_ENGINES is the engines' virtual environment (install.sh), FORESHOCK_ENGINES_MODEL the tiny model (models.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import foreshock
from benchmarks.ingest.service import Service, service
from foreshock import Monitor, Semantics
from foreshock.adapters import sglang, vllm
from foreshock.adapters.engine_watch import EngineWatch
from tests.engines.servers import EngineServer

VENV, MODEL = os.environ.get("FORESHOCK_ENGINES", ""), os.environ.get("FORESHOCK_ENGINES_MODEL", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VENV and MODEL), reason="FORESHOCK_ENGINES and FORESHOCK_ENGINES_MODEL: make test-engines"),
]
PROMPTS = [[318, 286, 81, 81, 10, 282, 14, 749, 307, 201, 260], [318, 286, 81, 81], [296, 16, 525], [7, 85, 30, 19]]
PREFIX = list(range(100, 180))
"""Long enough that both engines find it in their cache again."""
TRAINER = Semantics(engine="test", source="rescore", temperature=1.0, truncation="none", normaliser="full_vocabulary")
LONG = 4000
"""Tokens of a response that no engine finishes in a second."""
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    with service("sqlite") as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, and the same with other weights (5 % noise)."""
    from safetensors.torch import load_file, save_file

    found = [Path(MODEL)]
    for seed in (1, 2, 3):
        folder = tmp_path_factory.mktemp("weights") / f"step{seed}"
        shutil.copytree(MODEL, folder)
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(str(folder / "model.safetensors"))
        noisy = {
            name: weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
            for name, weight in weights.items()
        }
        save_file(noisy, str(folder / "model.safetensors"), {"format": "pt"})
        found.append(folder)
    return found


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def engine(request: pytest.FixtureRequest, served: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    environment = {
        "FORESHOCK_URL": served.url, "FORESHOCK_RUN": f"inside/{request.param}",
        "FORESHOCK_LAUNCH": f"launch-{request.param}",
    }  # fmt: skip
    server = EngineServer(
        request.param, Path(VENV) / "bin" / "python", Path(MODEL), tmp_path_factory.mktemp("engine"), environment
    )
    yield server
    server.stop()


class Job:
    """A trainer's loop around one engine: generate, push, end the step."""

    def __init__(self, engine: EngineServer, served: Service, folder: Path) -> None:
        self.kind, self.served, self.step = engine.kind, served, 0
        self.run = f"outside/{engine.kind}-{next(NUMBERS)}"
        self.client = httpx.Client(base_url=engine.url, trust_env=False, timeout=120)
        self.monitor: Monitor = foreshock.init(self.run, url=served.url, spool_dir=str(folder), raise_errors=True)
        module = {"sglang": sglang, "vllm": vllm}[engine.kind]
        self.watch: EngineWatch = module.wrap(self.client, self.monitor, checksum_share=1.0)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.client.post(path, json=body or {})

    def generate(self, prompt: list[int], sample_id: str, length: int = 12, **params: Any) -> list[int]:
        """Token ids of the response."""
        params = {"temperature": 1.0} | params
        if self.kind == "sglang":
            params = {"max_new_tokens": length} | params
            said = self.post("/generate", {"input_ids": prompt, "rid": sample_id, "sampling_params": params})
            return [int(token) for token in said.json()["output_ids"]]
        params = {"max_tokens": length} | params
        asked = {"token_ids": prompt, "request_id": sample_id, "sampling_params": params}
        said = self.post("/inference/v1/generate", asked)
        return [int(token) for token in said.json()["choices"][0]["token_ids"]]

    @contextlib.contextmanager
    def generating(self, sample_id: str) -> Iterator[Future[list[int]]]:
        """A long response that is under way in another thread."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.generate, PROMPTS[0], sample_id, LONG, ignore_eos=True)
            time.sleep(0.7)
            assert not asked.done()
            yield asked

    def push(self, model: Path, label: str | None, flush: bool = True) -> None:
        """New weights from a folder."""
        if self.kind == "sglang":
            body = {"model_path": str(model), "flush_cache": flush} | ({"weight_version": label} if label else {})
            assert self.post("/update_weights_from_disk", body).json()["success"]
            return
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        assert self.post("/collective_rpc", rpc).status_code == 200
        if label:
            self.label(label)
        if flush:
            assert self.post("/reset_prefix_cache").json()["success"]

    def label(self, label: str) -> None:
        body = {"new_version": label} | ({"abort_all_requests": False} if self.kind == "sglang" else {})
        assert self.post("/update_weight_version", body).status_code == 200

    def end(self) -> None:
        """One step: a response, so that what was pushed has settled, then the boundary."""
        self.generate(PREFIX, f"{self.run}-{self.step}")
        self.watch.report()
        assert self.watch.http is not None
        assert self.watch.http.wait()
        self.monitor.end_step(self.step)
        self.step += 1

    def said(self, name: str) -> float:
        """A scalar of the last step that was judged."""
        judged(self.served, self.run, self.step - 1)
        step = httpx.get(f"{self.served.url}/v1/runs/{self.run}/steps/{self.step - 1}", trust_env=False).json()
        return float(step["values"][name])

    def incidents(self) -> dict[str, str]:
        """Rule → severity, once every step was judged."""
        judged(self.served, self.run, self.step - 1)
        return incidents(self.served, self.run)

    def close(self) -> None:
        self.watch.close()
        self.monitor.finish()
        self.client.close()


def judged(served: Service, run: str, step: int) -> None:
    """Waits until the service has evaluated a step of a run that it may not have heard of yet."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError):
            if served.last_step(run) >= step:
                return
        time.sleep(0.1)
    raise AssertionError(f"the service never judged step {step} of {run}")


def incidents(served: Service, run: str) -> dict[str, str]:
    found = httpx.get(served.url + "/v1/incidents", params={"run": run}, trust_env=False).json()["incidents"]
    return {incident["rule"]: incident["severity"] for incident in found}


@pytest.fixture
def job(engine: EngineServer, served: Service, models: list[Path], tmp_path: Path) -> Iterator[Job]:
    """A job whose engine was just given the first weights, labelled and flushed."""
    made = Job(engine, served, tmp_path)
    made.push(models[0], f"{made.run}/0")
    made.end()
    yield made
    made.close()


def test_the_trainers_samples_meet_the_engines_by_id(job: Job, served: Service) -> None:
    ids = [f"{job.run}-{row}" for row in range(len(PROMPTS))]
    rows = [job.generate(prompt, sample_id) for prompt, sample_id in zip(PROMPTS, ids, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    found = job.watch.samples.align(ids, tokens, mask)
    assert found.counts == {"matched": len(rows)}
    counts = job.watch.samples.observe(
        job.monitor, [*ids[:-1], "nobody"], found.log_probs_BT + 1e-3, tokens, mask, semantics=TRAINER
    )
    assert counts == {"matched": len(rows) - 1, "unknown": 1}
    job.end()
    assert job.incidents() == {}
    step = httpx.get(f"{served.url}/v1/runs/{job.run}/steps/1", trust_env=False).json()
    assert step["values"]["mismatch.abs_mean"] == pytest.approx(1e-3, rel=1e-3)
    assert step["values"]["mismatch.tokens"] == sum(map(len, rows[:-1]))


def test_token_ids_that_are_not_the_engines_are_a_finding(job: Job) -> None:
    row = job.generate(PROMPTS[0], f"{job.run}-x")
    tokens = torch.tensor([[*row[:-1], row[-1] + 1]])
    counts = job.watch.samples.observe(job.monitor, [f"{job.run}-x"], torch.zeros(tokens.shape), tokens, tokens * 0 + 1)
    assert counts == {"token_ids": 1}
    job.end()
    assert set(job.incidents()) == {"semantics_differ"}


def test_pushes_with_label_and_flush_are_left_alone(job: Job, models: list[Path]) -> None:
    for number in (1, 2, 3):
        job.push(models[number], f"{job.run}/{number}")
        job.end()
    assert job.incidents() == {}


def test_weights_that_move_under_the_old_label_open_stale_weights(job: Job, models: list[Path]) -> None:
    job.push(models[1], None)
    job.end()
    assert job.incidents() == {"stale_weights": "warning"}


def test_a_label_that_moves_without_the_weights_is_critical(job: Job) -> None:
    job.label(f"{job.run}/9")
    job.end()
    assert job.incidents()["stale_weights"] == "critical"


def test_a_push_without_a_flush_opens_stale_cache(job: Job, models: list[Path]) -> None:
    job.push(models[2], f"{job.run}/2", flush=False)
    job.end()
    assert job.incidents() == {"stale_cache": "warning"}


def test_a_push_that_fails_is_critical(job: Job) -> None:
    if job.kind == "sglang":
        body = {"model_path": "/nonexistent", "weight_version": "lost"}
        assert job.post("/update_weights_from_disk", body).status_code == 400
    else:
        rpc = {"method": "load_weights_that_nobody_has"}
        assert job.post("/collective_rpc", rpc).status_code >= 400
        time.sleep(0.5)  # the server closes that connection, and the client must notice
    job.end()
    assert job.incidents()["stale_weights"] == "critical"


def test_responses_that_are_aborted_are_counted_and_their_tokens_kept(job: Job) -> None:
    sample_id = f"{job.run}-aborted"
    with job.generating(sample_id) as asked:
        if job.kind == "sglang":
            assert job.post("/abort_request", {"rid": sample_id}).status_code == 200
        else:
            assert job.post("/pause?mode=abort").status_code == 200
            assert job.post("/resume").status_code == 200
        tokens = asked.result(60)
    assert 0 < len(tokens) < LONG
    kept = job.watch.samples.get(sample_id)
    assert kept is not None
    assert (kept.finish_reason, kept.token_ids.tolist()) == ("abort", tokens)
    job.end()
    assert job.said("engine.finish_abort") == 0.5
    assert job.said("engine.unread") == 0
    assert job.incidents() == {}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_routes_give_ids_and_log_probs(job: Job, route: str, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0.8, "stream": stream}
    if route == "/v1/completions":
        asked["prompt"] = PROMPTS[0]
    else:
        asked["messages"] = [{"role": "user", "content": "def f"}]
    before = len(job.watch.samples)
    if stream:
        with job.client.stream("POST", route, json=asked) as response:
            response.read()
    else:
        response = job.post(route, asked)
    assert response.status_code == 200, response.text
    kept = list(job.watch.samples._samples.values())[before:]
    if (job.kind, stream, route) == ("sglang", True, "/v1/chat/completions"):
        assert kept == []  # sglang refuses token ids there: the host's request goes as it is
        return
    assert [(len(one.token_ids), one.finish_reason) for one in kept] == [(8, "length")]
    assert (kept[0].log_probs < 0).all()


def test_the_plugin_alone_tells_of_stale_weights_and_cache(
    engine: EngineServer, served: Service, models: list[Path], tmp_path: Path
) -> None:
    """No watch on the client: what is told comes from inside the engine."""
    run = f"inside/{engine.kind}"
    quiet = Job(engine, served, tmp_path / "quiet")
    quiet.watch.close()
    trainer = foreshock.init(run, url=served.url, launch=f"launch-{engine.kind}", spool_dir=str(tmp_path / "trainer"))
    step = itertools.count()

    def end() -> set[str]:
        quiet.generate(PREFIX, f"plugin-{time.monotonic_ns()}")
        time.sleep(1.5)  # the plugin posts from the engine's own process
        number = next(step)
        trainer.end_step(number)
        judged(served, run, number)
        found = httpx.get(served.url + "/v1/incidents", params={"run": run, "status": "unresolved"}, trust_env=False)
        return {incident["rule"] for incident in found.json()["incidents"]}

    quiet.push(models[0], "inside/0")
    end()
    for number in range(1, 13):  # what the other tests left behind resolves
        quiet.push(models[number % 2], f"inside/{number}")
        left = end()
        if not left:
            break
    assert left == set()
    quiet.push(models[2], "inside/20", flush=False)
    assert end() == {"stale_cache"}
    for number in range(10):  # digests are due of two pushes in a row, after a while that a busy machine makes longer
        quiet.push(models[3 - number % 2], None)
        left = end()
        if "stale_weights" in left:
            break
    assert "stale_weights" in left
    trainer.finish()
    quiet.close()


def test_an_engine_that_dies_and_comes_back_with_its_first_weights_is_critical(
    engine: EngineServer, job: Job, models: list[Path]
) -> None:
    """The last one of an engine: it is killed in the middle of a response and started again."""
    job.push(models[1], f"{job.run}/1")
    job.end()
    assert job.incidents() == {}
    with job.generating(f"{job.run}-cut") as asked:
        engine.stop(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            asked.result(60)
    with pytest.raises(httpx.ConnectError):
        job.generate(PROMPTS[0], f"{job.run}-refused")
    job.watch.report()
    job.monitor.end_step(job.step)  # the trainer goes on
    job.step += 1
    assert job.said("engine.unread") == 1
    assert job.incidents() == {}
    engine.start()
    job.end()
    assert job.incidents() == {"stale_weights": "critical"}
    assert job.said("engine.unread") == 0
    job.push(models[1], f"{job.run}/2")
    job.end()
    assert job.watch.guard.errors == 0
