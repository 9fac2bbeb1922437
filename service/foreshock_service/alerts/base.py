"""What every channel is: a name, a way to send one alert, a way to send many as one.

ChannelError
├── Later   try again: no answer, 408, 425, 429, 5xx; `after_s` where the receiver said when
└── Never   do not: any other answer, or a message that this channel cannot carry
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx
import msgspec

TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 3600.0


class ChannelError(Exception):
    """A delivery that did not arrive. The message is kept and shown: it names no URL and no secret."""


class Later(ChannelError):  # noqa: N818 - part of the sentence "raise Later"
    """Worth another try."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Never(ChannelError):  # noqa: N818
    """Not worth another try."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One alert on its way. `delivery_id` is the same at every try, so that a receiver can drop repeats."""

    delivery_id: str
    event: str
    payload: Mapping[str, Any]
    created_at: float


class Channel(abc.ABC):
    """One channel; its subclass is one file and one registry entry. Blocking; called from the delivery worker alone."""

    name: ClassVar[str]

    def __init__(self, client: httpx.Client, public_url: str = "") -> None:
        self.client = client
        self.public_url = public_url.rstrip("/")

    @abc.abstractmethod
    def send(self, message: Message, now: float) -> None:
        """Sends one alert; returns when the receiver has taken it. Raises Later or Never."""

    @abc.abstractmethod
    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Sends many as one. Raises Later or Never."""

    def link(self, payload: Mapping[str, Any]) -> str | None:
        """Where a person sees more, if it is known how people reach the service."""
        return f"{self.public_url}{payload['path']}" if self.public_url and payload.get("path") else None


def digest_id(messages: Sequence[Message]) -> str:
    """The delivery id of a digest: the same for the same alerts, in any order."""
    return hashlib.sha256("\n".join(sorted(m.delivery_id for m in messages)).encode()).hexdigest()[:32]


def new_client() -> httpx.Client:
    """No redirects (a hook goes only where configured), no proxies or credentials from the environment, ten seconds."""
    return httpx.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False, headers={"User-Agent": "foreshock"})


def post(client: httpx.Client, url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Posts once. 2xx is taken; raises Later or Never for everything else."""
    try:
        answer = client.post(url, content=body, headers={"Content-Type": "application/json", **headers})
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise Never("the configured URL is not valid") from error
    except httpx.HTTPError as error:
        raise Later(f"no answer ({type(error).__name__})") from error
    status = answer.status_code
    if 200 <= status < 300:
        return
    if status in (408, 425, 429) or status >= 500:
        raise Later(f"answered {status}", _retry_after(answer))
    raise Never(f"answered {status}")


def _retry_after(answer: httpx.Response) -> float | None:
    """Seconds, where the header holds a number; dates are left to the back-off."""
    try:
        seconds = float(answer.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
