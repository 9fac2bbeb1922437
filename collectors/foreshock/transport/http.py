"""One client of the service over HTTP: bounded in time and size, keeps its connection, follows no redirects.

urllib3's read timeout starts anew with every byte, so an answer that drips could hold a thread for ever; here the
timeout covers the whole answer.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  getaddrinfo looks it up by name: in a thread, around a fork or at exit, that fails
import http.client
import io
import os
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from foreshock.settings import Settings

MAX_ANSWER = 1 << 20


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. `status` 0: no answer (refused, reset, late, garbage, oversized)."""

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def keep(self) -> bool:
        """Later may help: no answer, or none that counts (1xx to 3xx), not authorised yet, too many, server's fault."""
        return (self.status < 400 and not self.ok) or self.status in (401, 403, 408, 429) or self.status >= 500


class Http:
    """Not thread-safe: each thread has its own."""

    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host:port or https://…, not {settings.url!r}")
        self._base = settings.url.rstrip("/")
        self._settings = settings
        self._headers = {"User-Agent": "foreshock-sdk", "Accept": "application/msgpack, application/json"}
        if settings.token:
            self._headers["Authorization"] = f"Bearer {settings.token}"
        self._pool = _pool(settings, parts.scheme, parts.hostname)

    def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float | None = None) -> Answer:
        """Posts `body`; never raises for what the network does."""
        return self._ask("POST", path, body, headers, timeout_s or self._settings.timeout_s)

    def get(self, path: str, timeout_s: float | None = None) -> Answer:
        """Gets `path`; never raises for what the network does."""
        return self._ask("GET", path, None, {}, timeout_s or self._settings.timeout_s)

    def close(self) -> None:
        """Closes the kept connection."""
        self._pool.clear()

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> Answer:
        connect_s = min(self._settings.connect_timeout_s, timeout_s)
        try:
            response = self._pool.request(
                method,
                self._base + path,
                body=body,
                headers=self._headers | headers,
                timeout=urllib3.Timeout(connect=connect_s, read=timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            return Answer(status=0, error=f"{type(error).__name__}: {error}"[:300])
        return self._read(response)

    def _read(self, response: Any) -> Answer:
        try:
            body = response.read(MAX_ANSWER + 1)
            whole = len(body) <= MAX_ANSWER and not response.read(1)
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            response.close()
            return Answer(status=0, error=f"{type(error).__name__}: {error}"[:300])
        if not whole:
            response.close()
            return Answer(status=0, error=f"answer of more than {MAX_ANSWER} bytes")
        response.release_conn()
        return Answer(status=response.status, body=body, retry_after_s=_seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds. A date is not used: no wall clock is trusted."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


class _DeadlineReader(io.RawIOBase):
    """Reads a socket's stream until one deadline for everything."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        limit = sock.gettimeout()
        self._deadline = None if limit is None else time.monotonic() + limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out before the whole answer had come")
            self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_DeadlineReader(sock))


class _Plain(HTTPConnection):
    response_class = _Response


class _Tls(HTTPSConnection):
    response_class = _Response


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _Tls


def _pool(settings: Settings, scheme: str, host: str) -> urllib3.PoolManager:
    options: dict[str, Any] = {"num_pools": 2, "maxsize": 1}
    if scheme == "https":
        options["cert_reqs"] = "CERT_REQUIRED" if settings.verify_tls else "CERT_NONE"
        if settings.ca_file:
            if not os.path.isfile(settings.ca_file):
                raise ValueError(f"ca_file {settings.ca_file!r} does not exist")
            options["ca_certs"] = settings.ca_file
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        manager: urllib3.PoolManager = urllib3.ProxyManager(proxy, **options)
    else:
        manager = urllib3.PoolManager(**options)
    manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _TlsPool}
    return manager
