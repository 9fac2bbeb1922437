"""The plugins inside the engines, against stand-ins with the engines' own names: what is told, and never an exception.

The real engines load them in tests/engines.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreshock.adapters import sglang_plugin, vllm_plugin
from foreshock.adapters.engine_probe import Probe, wanted
from foreshock.monitor import Monitor
from tests.collectors.adapters.engine_watching import Told
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Both plugins wanted; the monitor that they make is this one."""
    made = Told(tmp_path)
    for name, value in {"URL": "http://127.0.0.1:9", "RUN": "a/b", "LAUNCH": "one"}.items():
        monkeypatch.setenv(f"FORESHOCK_{name}", value)
    monkeypatch.setattr("foreshock.adapters.engine_probe.foreshock.init", lambda **_: made.monitor)
    start = Probe.start
    monkeypatch.setattr(Probe, "start", lambda self, rank, world, ask: start(self, rank, world, ask, 1.0))
    for module in (sglang_plugin, vllm_plugin):
        monkeypatch.setattr(module, "probe", Probe("e"))
    yield made
    made.monitor.finish()


@pytest.mark.parametrize("missing", ["FORESHOCK_URL", "FORESHOCK_RUN", "FORESHOCK_LAUNCH"])
def test_an_engine_is_not_watched_unless_it_is_told_run_and_launch(
    told: Told, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wanted()
    for name in (missing, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not wanted()


def test_a_probe_reports_as_rollout_under_the_trainers_launch(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"URL": service.url, "RUN": "lab/x", "LAUNCH": "one", "SPOOL_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"FORESHOCK_{name}", value)
    probe = Probe("e")
    probe.start(0, 1, lambda digests: ({"w": "1"} if digests else None, "v1"))
    assert probe.weights is not None
    probe.weights.updated(True, label="v1", flushed=True)
    probe.call(probe.weights.generating)
    service.wait_for(lambda: service.notices("flush"))
    envelope = service.envelopes[0]
    assert (envelope.run, envelope.launch, envelope.role, envelope.controller) == ("lab/x", "one", "rollout", False)
    assert envelope.expected_ranks is None
    assert service.notices("weights")[0].data["version"] == "v1"
    assert probe.monitor is not None
    assert not probe.monitor.guard.raise_errors
    probe.monitor.finish()


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


# --- vLLM


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine core with vLLM's names."""

    class EngineCore:
        def __init__(self) -> None:
            self.label, self.weight = "v0", torch.zeros(3)
            worker = SimpleNamespace(rank=0, model_runner=SimpleNamespace(get_model=lambda: self))
            self.model_executor = SimpleNamespace(collective_rpc=lambda method: [method(worker)])
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0))

        def named_parameters(self) -> Any:
            return [("w", self.weight)]

        def add_request(self, request: Any, request_wave: int = 0) -> str:
            return "added"

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
            if method == "load_nothing":
                raise RuntimeError("no such method")
            self.weight = self.weight + 1
            return [None]

        def set_weight_version(self, weight_version: str) -> None:
            self.label = weight_version

        def get_weight_version(self) -> str:
            return self.label

        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            return not reset_connector

        def sleep(self, level: int = 1, mode: str = "abort") -> None: ...

    class EngineCoreProc(EngineCore):
        pass

    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        module(name, monkeypatch)
    module("vllm.v1.engine.core", monkeypatch, EngineCore=EngineCore, EngineCoreProc=EngineCoreProc)
    sys.modules["vllm.v1.engine"].core = sys.modules["vllm.v1.engine.core"]  # type: ignore[attr-defined]
    return EngineCoreProc


def test_vllms_pushes_labels_and_resets_are_told(told: Told, core: Any) -> None:
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may load its plugins several times
    engine = core()
    assert engine.add_request("a") == "added"
    assert engine.collective_rpc("reload_weights") == [None]
    engine.set_weight_version("v1")
    assert engine.reset_prefix_cache()
    engine.sleep(level=1)
    engine.add_request("b")
    assert told.kinds() == ["sleep", "weights", "flush"]
    said = told.last("weights")
    assert (said["version"], said["pushed"], said["ok"], said["updates"]) == ("v1", "v1", True, 1)
    assert said["clean"]
    assert len(said["checksum"]) == 16
    assert not engine.reset_prefix_cache(reset_connector=True)
    assert told.kinds().count("flush") == 1


def test_vllms_own_exceptions_pass_and_are_told(told: Told, core: Any) -> None:
    vllm_plugin.register()
    engine = core()
    with pytest.raises(RuntimeError, match="no such method"):
        engine.collective_rpc("load_nothing")
    engine.add_request("a")
    assert (told.last("weights")["ok"], "no such method" in told.last("weights")["message"]) == (False, True)


# --- sglang


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the plugin registers with sglang's registry, by the end of its target's name."""
    found: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def register(target: str, hook: Any, kind: str) -> None:
            found[target.rpartition(".")[2]] = hook

    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        module(name, monkeypatch)
    kinds = SimpleNamespace(AFTER="after", BEFORE="before")
    module("sglang.srt.plugins.hook_registry", monkeypatch, HookRegistry=Registry, HookType=kinds)
    serving = SimpleNamespace(weight_version="v1")
    parallel = SimpleNamespace(tp_rank=0, tp_size=1)
    module(
        "sglang.srt.runtime_context", monkeypatch, get_serving=lambda: serving, get_parallel=lambda: parallel
    )  # fmt: skip
    return found


def test_sglangs_pushes_and_flushes_are_told(told: Told, hooks: dict[str, Any]) -> None:
    sglang_plugin.register()
    weight = torch.nn.Linear(2, 2)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=weight)))
    updater = SimpleNamespace(scheduler=scheduler)
    done = SimpleNamespace(success=True, message="")
    assert hooks["handle_generate_request"](scheduler, "request") is None
    request = SimpleNamespace(weight_version="v1", flush_cache=False)
    with torch.no_grad():
        weight.weight.add_(1)
    assert hooks["update_weights_from_tensor"](done, updater, request) is None
    hooks["pause_generation"](None, scheduler, SimpleNamespace(mode="in_place", tags=None))
    hooks["handle_generate_request"](scheduler, "request")
    assert told.kinds() == ["pause", "weights"]
    assert told.last("pause") == {"engine": told.last("weights")["engine"], "mode": "in_place"}
    said = told.last("weights")
    assert (said["version"], said["pushed"], said["clean"]) == ("v1", "v1", False)
    hooks["flush_cache"](False, scheduler)  # refused: requests were running
    assert told.kinds()[-1] == "weights"
    hooks["flush_cache"](True, scheduler)
    assert told.kinds()[-1] == "flush"


def test_a_hook_that_fails_is_swallowed(told: Told, hooks: dict[str, Any]) -> None:
    told.monitor.guard.raise_errors = False
    sglang_plugin.register()
    for hook in hooks.values():
        hook(object(), object(), object())
    told.monitor.guard.raise_errors = True
