"""Servers that die, come back with other weights, or never answer; requests that their own host gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock.adapters import sglang
from foreshock.adapters.engine_plain import PlainClient
from foreshock.adapters.engine_watch import EngineWatch
from tests.collectors.adapters.engine_fixtures import Replay
from tests.collectors.adapters.engine_watching import Told

DISK = "/update_weights_from_disk"
STEP = {"input_ids": [1], "rid": "x", "sampling_params": {"temperature": 1.0}}


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.monitor.finish()


class Server:
    """What an engine says of its label and digests, and whether it is there at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: Told, **how: Any) -> None:
        self.dead, self.label, self.digest = False, "v0", "0"
        monkeypatch.setattr(PlainClient, "get", lambda _, path: (200, {"weight_version": self.label}))
        monkeypatch.setattr(
            PlainClient, "post", lambda _, path, body=None: (200, {"ranks": [{"checksums": {"w": self.digest}}]})
        )
        self.replay = Replay({"/generate": self._generate, DISK: self._update})
        self.client = self.replay.client()
        self.watch: EngineWatch = sglang.wrap(self.client, told.monitor, **{"checksum_share": 1.0} | how)

    def _generate(self, _: Any) -> Any:
        if self.dead:
            raise httpx.ConnectError("Connection refused")
        meta = {"id": "x", "finish_reason": {"type": "stop"}, "completion_tokens": 1}
        return 200, {"output_ids": [5], "meta_info": meta | {"output_token_logprobs": [[-1.0, 5, None]]}}

    def _update(self, body: Any) -> Any:
        self.label, self.digest = str(body["weight_version"]), str(body["weight_version"])
        return 200, {"success": True}

    def generate(self) -> None:
        self.client.post("/generate", json=STEP)
        assert self.watch.http is not None
        assert self.watch.http.wait()

    def dies(self) -> None:
        self.dead = True
        with pytest.raises(httpx.ConnectError):
            self.client.post("/generate", json=STEP)
        self.dead = False


@pytest.fixture
def server(told: Told, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that took a push, which was told."""
    made = Server(monkeypatch, told)
    made.client.post(DISK, json={"weight_version": "v1"})
    made.generate()
    assert told.last("weights")["ok"] is True
    told.notices.clear()
    return made


@pytest.mark.parametrize(("label", "digest"), [("v0", "v1"), ("v1", "0"), ("v0", "0")])
def test_an_engine_that_comes_back_without_what_was_pushed_is_told(
    told: Told, server: Server, label: str, digest: str
) -> None:
    server.dies()
    server.label, server.digest = label, digest
    server.generate()
    said = told.last("weights")
    assert (said["ok"], said["pushed"], said["version"], said["updates"]) == (False, "v1", label, 0)
    assert "restarted" in said["message"]
    server.generate()
    assert told.kinds() == ["weights"]


def test_an_outage_that_changed_nothing_is_told_of_as_lost_answers_alone(told: Told, server: Server) -> None:
    server.dies()
    server.generate()
    server.watch.report()
    assert told.kinds() == []
    assert told.scalars["engine.unread"] == pytest.approx(1 / 3)


def test_without_an_outage_a_label_that_others_move_is_theirs(told: Told, server: Server) -> None:
    server.label, server.digest = "v2", "v2"
    server.generate()
    assert told.kinds() == []


def test_where_nothing_was_ever_pushed_through_this_client_nothing_is_judged(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch, told)
    server.generate()
    server.dies()
    server.label, server.digest = "v7", "v7"
    server.generate()
    assert told.kinds() == []


def test_a_push_after_an_outage_is_judged_by_itself(told: Told, server: Server) -> None:
    server.dies()
    server.label, server.digest = "v0", "0"
    server.client.post(DISK, json={"weight_version": "v2"})
    server.generate()
    assert [data["ok"] for _, data in told.notices if "ok" in data] == [True]


def test_the_engine_is_asked_for_digests_after_an_outage_within_the_same_share_of_time(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch, told, checksum_share=0.5)
    server.client.post(DISK, json={"weight_version": "v1"})
    server.generate()
    weights = next(iter(server.watch.weights.values()))
    weights._next_ask_s = float("inf")
    server.dies()
    server.label = "v0"
    server.generate()
    assert [data["ok"] for kind, data in told.notices if kind == "weights"] == [True]
    weights._next_ask_s = 0.0
    server.generate()
    assert told.last("weights")["ok"] is False


def test_a_push_that_still_waits_is_told_when_the_client_is_let_go(told: Told, server: Server) -> None:
    server.client.post(DISK, json={"weight_version": "v2"})
    server.watch.close()
    assert told.last("weights")["pushed"] == "v2"
    server.client.post(DISK, json={"weight_version": "v3"})
    assert told.last("weights")["pushed"] == "v2"


@pytest.mark.anyio
async def test_a_request_that_its_host_cancels_is_counted(told: Told) -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with httpx.AsyncClient(transport=httpx.MockTransport(never), base_url="http://engine:1") as client:
        watch = sglang.wrap(client, told.monitor)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.post("/generate", json=STEP), 0.05)
    watch.report()
    assert told.scalars["engine.unread"] == 1.0


def test_a_response_that_was_aborted_before_its_first_token_is_counted_as_aborted(told: Told) -> None:
    meta = {"id": "x", "finish_reason": {"type": "abort", "message": "Abort"}, "completion_tokens": 0}
    answer = (200, {"output_ids": [], "meta_info": meta | {"output_token_logprobs": []}})
    replay = Replay({"/generate": answer, "/model_info": (200, {}), "/weights_checker": (404, {})})
    watch = sglang.wrap(client := replay.client(), told.monitor)
    client.post("/generate", json=STEP)
    watch.report()
    said = [told.scalars[f"engine.{name}"] for name in ("finish_abort", "unread", "tokens")]
    assert said == [1.0, 0.0, 0.0]
