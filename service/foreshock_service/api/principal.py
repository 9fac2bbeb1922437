"""Who is asking: bearer tokens, the page's cookie, or a loopback client, and what each may do.

Scopes: `ingest` (post frames; health and ack of its own project), `read`, `operate` (includes read), `admin` (all).
A route names the scopes of which any one suffices; `x-scopes` in the OpenAPI document says the same.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from foreshock_service.errors import Forbidden
from foreshock_service.settings import LOOPBACK_NAMES

SCOPES: Final = ("ingest", "read", "operate", "admin")
_IMPLIED: Final[dict[str, frozenset[str]]] = {
    "ingest": frozenset({"ingest"}),
    "read": frozenset({"read"}),
    "operate": frozenset({"operate", "read"}),
    "admin": frozenset(SCOPES),
}
COOKIE: Final = "foreshock_session"
CSRF_HEADER: Final = "x-foreshock-csrf"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FORWARDING: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `project` None: every project."""

    name: str
    scopes: frozenset[str]
    project: str | None = None
    csrf: str = ""
    """What the page's forms must send back; empty where no cookie is involved."""

    def may(self, *scopes: str) -> bool:
        return not self.scopes.isdisjoint(scopes)

    def covers(self, project: str) -> bool:
        return self.project is None or self.project == project

    def check_project(self, project: str) -> None:
        """Raises `Forbidden` outside the token's project, whether or not the run exists."""
        if not self.covers(project):
            raise Forbidden("This token is bound to another project.")


LOOPBACK: Final = Principal("loopback", frozenset(SCOPES))


def expand(scopes: list[str]) -> frozenset[str]:
    """Scopes with what they imply; unknown ones give nothing."""
    return frozenset().union(*(_IMPLIED.get(s, frozenset()) for s in scopes))


def digest(secret: str) -> str:
    """What the store keeps of a token."""
    return hashlib.sha256(secret.encode()).hexdigest()


def csrf_of(secret: str) -> str:
    """The CSRF value that belongs to a login: derived from the token, useless for anything else."""
    return hmac.new(secret.encode(), b"foreshock csrf", hashlib.sha256).hexdigest()


def bearer(connection: HTTPConnection) -> str | None:
    """The bearer token, or None where there is no Authorization header of that kind."""
    kind, _, value = connection.headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


@lru_cache(1024)
def _host_name(value: str) -> str:
    try:
        return (urlsplit(f"//{value}").hostname or "").lower()
    except ValueError:
        return ""


@lru_cache(1024)
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(connection: HTTPConnection) -> bool:
    """True for a loopback client that names a loopback host and was not forwarded by a proxy.

    The Host check defeats DNS rebinding: a foreign page that resolves to 127.0.0.1 still sends its own name.
    """
    client = connection.client
    if client is None or not _is_loopback(client.host) or any(name in connection.headers for name in _FORWARDING):
        return False
    return _host_name(connection.headers.get("host", "")) in LOOPBACK_NAMES


def same_origin(connection: HTTPConnection) -> bool:
    """False where a browser says that another site's page sent this. Programs send no Origin and pass."""
    if connection.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = connection.headers.get("origin")
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.netloc.lower() == connection.headers.get("host", "").lower() and parts.scheme in ("http", "https")
