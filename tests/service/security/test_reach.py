"""Where alerts may go, whatever a name resolves to and wherever a receiver points."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.alerts.sink import Sink
from foreshock_service.alerts.base import Later, Never, new_client, post
from foreshock_service.alerts.reach import refusal


@pytest.fixture
def sink() -> Iterator[Sink]:
    opened = Sink()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "fd00:ec2::254", "0.0.0.0",
     "100.100.100.200", "224.0.0.1", "ff02::1", "::"],
)  # fmt: skip
def test_metadata_link_local_multicast_and_nowhere_are_refused_always(address: str) -> None:
    assert refusal(address, private=True)


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.1.1", "127.0.0.1", "::1", "fd12::1", "172.16.0.1"])
def test_private_addresses_are_refused_only_where_a_setting_says_so(address: str) -> None:
    assert refusal(address, private=True) is None
    assert refusal(address, private=False)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1"])
def test_public_addresses_are_receivers(address: str) -> None:
    assert refusal(address, private=False) is None


def test_the_guard_is_in_force_in_the_client_that_alerts_use(sink: Sink) -> None:
    with new_client() as client:
        post(client, sink.url, b"{}", {})
        with pytest.raises(Never, match="link-local or metadata"):
            post(client, "http://169.254.169.254/latest", b"{}", {})
    with new_client(private=False) as client, pytest.raises(Never, match="private address"):
        post(client, sink.url, b"{}", {})
    assert len(sink.got) == 1


def test_a_name_that_resolves_elsewhere_the_second_time_gains_nothing(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one connected to: the name is asked once."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host == "hook.example":
            asked.append(host)
            return real("127.0.0.1" if len(asked) == 1 else "169.254.169.254", port, *rest, **more)
        return real(host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = sink.server.server_port
    with new_client() as client:
        post(client, f"http://hook.example:{port}/", b"{}", {})
        assert asked == ["hook.example"]
        assert sink.got[0][1]["Host"] == f"hook.example:{port}"
    with new_client() as client, pytest.raises(Never, match="link-local"):
        post(client, f"http://hook.example:{port}/", b"{}", {})


def test_one_bad_address_among_good_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("127.0.0.1", "169.254.169.254")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: both)
    with new_client() as client, pytest.raises(Never):
        post(client, "http://two.example/", b"{}", {})


def test_redirects_and_the_environments_proxies_are_not_followed(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    sink.answers, sink.headers = [302], {"Location": "http://169.254.169.254/"}
    with new_client() as client:
        with pytest.raises(Never, match="answered 302"):
            post(client, sink.url, b"{}", {})
        assert client.follow_redirects is False


def test_an_unknown_name_is_tried_again_later() -> None:
    with new_client() as client, pytest.raises(Later):
        post(client, "http://nowhere.invalid/", b"{}", {})


def test_other_schemes_are_no_receivers() -> None:
    with httpx.Client() as plain, pytest.raises(Never):
        post(plain, "file:///etc/passwd", b"{}", {})
