"""What every channel is: a name, a way to send one alert, a way to send many as one.

ChannelError
├── Later   try again: no answer, 408, 425, 429, 5xx; `after_s` where the receiver said when
└── Never   do not: any other answer, or a message that this channel cannot carry
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import httpx
import msgspec
from sqlalchemy.orm import Session

from foreshock_service.alerts.reach import Forbidden, transport

TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 3600.0
AWAY = frozenset({429, 502, 503, 504})
"""Answers that are about the receiver, not about what was sent."""
TOO_MUCH = frozenset({400, 413, 422})
"""Answers that may be about the one alert in a digest that is not taken, or about its size."""


class ChannelError(Exception):
    """A delivery that did not arrive. The message is kept and shown: it names no URL and no secret."""


class Later(ChannelError):  # noqa: N818 - part of the sentence "raise Later"
    """Worth another try. `whole_channel`: nothing else would get through now either."""

    def __init__(self, message: str, after_s: float | None = None, *, whole_channel: bool = False) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.whole_channel = whole_channel


class Never(ChannelError):  # noqa: N818
    """Not worth another try. `content`: it is about what was sent, so half of a digest may pass."""

    def __init__(self, message: str, *, content: bool = False) -> None:
        super().__init__(message)
        self.content = content


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One alert on its way. `delivery_id` is the same at every try, so that a receiver can drop repeats."""

    delivery_id: str
    event: str
    payload: Mapping[str, Any]
    created_at: float
    line: str = ""
    """What it is one of a series about: an incident's id, or a command's that belongs to no incident."""
    attempt: int = 1
    late: bool = False
    """A later alert of the same line has left already: this one was dead and was revived."""


class Channel(abc.ABC):
    """One channel; its subclass is one file and one registry entry. Blocking; called from its delivery worker alone."""

    name: ClassVar[str]
    digest_every_s: ClassVar[float] = 60.0
    """Least time between two digests: people are not to be flooded, machines (0) do not mind."""
    batch: ClassVar[int] = 1000
    """Most alerts in one digest."""
    follows: ClassVar[bool] = False
    """Shows the present state of what it told, so it is also told who approved, rejected or acknowledged."""

    def __init__(self, client: httpx.Client, public_url: str = "") -> None:
        self.client = client
        self.public_url = public_url.rstrip("/")

    @abc.abstractmethod
    def send(self, message: Message, now: float) -> None:
        """Sends one alert; returns when the receiver has taken it. Raises Later or Never."""

    @abc.abstractmethod
    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Sends many as one. Raises Later or Never."""

    def in_thread(self, session: Session, lines: Collection[str]) -> set[str]:
        """Those lines whose alerts go where one already stands, and so are no new noise. Most channels have none."""
        return set()

    def link(self, payload: Mapping[str, Any]) -> str | None:
        """Where a person sees more, if it is known how people reach the service."""
        return f"{self.public_url}{payload['path']}" if self.public_url and payload.get("path") else None


def digest_id(messages: Sequence[Message]) -> str:
    """The delivery id of a digest: the same for the same alerts, in any order."""
    return hashlib.sha256("\n".join(sorted(m.delivery_id for m in messages)).encode()).hexdigest()[:32]


def new_client(timeout_s: float = TIMEOUT_S, *, private: bool = True) -> httpx.Client:
    """No redirects (a hook goes only where configured), no proxies or credentials from the environment, ten seconds.

    `private`: whether private and loopback addresses are receivers too; `reach` says what never is.
    """
    return httpx.Client(
        timeout=timeout_s,
        follow_redirects=False,
        trust_env=False,
        headers={"User-Agent": "foreshock"},
        transport=transport(private),
    )


def post(client: httpx.Client, url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Posts once. 2xx is taken; raises Later or Never for everything else."""
    try:
        answer = client.post(url, content=body, headers={"Content-Type": "application/json", **headers})
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise Never("the configured URL is not valid") from error
    except httpx.HTTPError as error:
        if why := _forbidden(error):
            raise Never(f"the configured receiver is {why}") from error
        raise Later(f"no answer ({type(error).__name__})", whole_channel=True) from error
    status = answer.status_code
    if 200 <= status < 300:
        return
    if status in (408, 425, 429) or status >= 500:
        after_s = retry_after(answer.headers.get("Retry-After"))
        raise Later(f"answered {status}", after_s, whole_channel=status in AWAY)
    raise Never(f"answered {status}", content=status in TOO_MUCH)


def _forbidden(error: BaseException) -> str:
    """The reason of `reach.Forbidden`, where one lies beneath httpx's error."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, Forbidden):
        found = found.__cause__ or found.__context__
    return str(found) if found is not None else ""


def retry_after(header: str | None) -> float | None:
    """Seconds, where the header holds a number, an hour at most; dates are left to the back-off."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
