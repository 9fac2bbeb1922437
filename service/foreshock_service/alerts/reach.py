"""Where alerts may go: link-local addresses (a cloud's metadata) never, private ones unless a setting forbids them.

The address that is checked is the address that is connected to, so a name that resolves differently the second time
(DNS rebinding) gains nothing. Redirects are not followed (`base.new_client`).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, Final

import httpcore
import httpx

_METADATA: Final = frozenset({"fd00:ec2::254", "100.100.100.200", "192.0.0.192"})
"""Metadata services outside the link-local ranges: AWS by IPv6, Alibaba, Oracle."""


class Forbidden(httpcore.ConnectError):
    """The receiver's address is none that alerts go to."""


def refusal(address: str, private: bool) -> str | None:
    """Why nothing is sent to this address; None where it may be."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip.is_link_local or str(ip) in _METADATA:
        return "a link-local or metadata address"
    if ip.is_multicast or ip.is_unspecified or (ip.is_reserved and not ip.is_private):
        return "no address of a receiver"
    if not private and not ip.is_global:
        return "a private address (FORESHOCK_OUTGOING_PRIVATE is off)"
    return None


def reachable(host: str, port: int, private: bool) -> list[str]:
    """The addresses of `host`, all of which may be sent to. Raises Forbidden, and ConnectError for an unknown name."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError("the receiver's name is not known") from error
    for address in found:
        if why := refusal(address, private):
            raise Forbidden(why)
    return list(dict.fromkeys(found))


class _Guarded(httpcore.SyncBackend):
    def __init__(self, private: bool) -> None:
        super().__init__()
        self._private = private

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        last: Exception | None = None
        for address in reachable(host, port, self._private):
            try:
                return super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last or httpcore.ConnectError("the receiver's name has no address")


def transport(private: bool = True) -> httpx.HTTPTransport:
    """httpx's transport over connections that are checked when they are made."""
    made = httpx.HTTPTransport(trust_env=False)
    # httpx has no door for httpcore's network backend; a test shows that the guard is in force.
    made._pool = httpcore.ConnectionPool(
        ssl_context=httpx.create_ssl_context(trust_env=False), network_backend=_Guarded(private), keepalive_expiry=5.0
    )
    return made
