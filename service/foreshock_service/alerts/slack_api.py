"""The few calls of Slack's Web API that alerts need, by Slack's own client; its failures as Later and Never.

https://docs.slack.dev/apis/web-api: an answer of 200 may still say `ok: false`, with a word for what is wrong; 429 says
in `Retry-After` how long to wait. No error text holds the token, a URL, or anything that Slack answered but that word.
"""

from __future__ import annotations

import http.client
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError

from foreshock_service.alerts.base import AWAY, TIMEOUT_S, Later, Never, retry_after

URL: Final = "https://slack.com/api/"
PASSING: Final = frozenset(
    {"ratelimited", "rate_limited", "fatal_error", "internal_error", "service_unavailable", "request_timeout",
     "message_limit_exceeded", "team_added_to_org", "accesslimited"}
)  # fmt: skip
"""Slack's own trouble: goes by itself."""
SETUP: Final = frozenset(
    {"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "no_permission",
     "missing_scope", "not_allowed_token_type", "ekm_access_denied", "org_login_required", "team_access_not_granted",
     "channel_not_found", "not_in_channel", "is_archived", "restricted_action"}
)  # fmt: skip
"""The app or the channel is set up wrong: goes when somebody has put it right, and until then nothing gets through."""
GONE: Final = frozenset({"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found"})
_WORD: Final = re.compile(r"[a-z0-9_]{1,64}")

# Its loggers print what is posted and answered wherever the level is left open.
_quiet = logging.getLogger("foreshock.slack_sdk")
_quiet.setLevel(logging.CRITICAL + 1)


class SlackGone(Never):
    """The message that was to be edited or answered is not there any longer."""


class SlackApi:
    """One bot token. Every call raises Later or Never, and blocks for `timeout_s` at most per request."""

    def __init__(self, token: str, url: str = URL, timeout_s: float = TIMEOUT_S) -> None:
        # Its own retries are off: the outbox retries, in order.
        self._client = WebClient(
            token=token, base_url=url, timeout=timeout_s, logger=_quiet, retry_handlers=[]  # type: ignore[arg-type]
        )  # fmt: skip

    def post(
        self, conversation: str, text: str, blocks: Sequence[dict[str, Any]], *, thread_ts: str | None = None
    ) -> tuple[str, str]:
        """(conversation id, ts) of a new message; below another one where `thread_ts` names it."""
        answer = self._asked(
            lambda: self._client.chat_postMessage(
                channel=conversation,
                text=text,
                blocks=blocks,
                thread_ts=thread_ts,
                unfurl_links=False,
                unfurl_media=False,
            )
        )
        return str(answer.get("channel") or conversation), str(answer["ts"])

    def edit(self, conversation: str, ts: str, text: str, blocks: Sequence[dict[str, Any]]) -> None:
        """Replaces a message. Raises SlackGone where it is not there any longer."""
        self._asked(lambda: self._client.chat_update(channel=conversation, ts=ts, text=text, blocks=blocks))

    def whisper(self, conversation: str, user: str, text: str, thread_ts: str | None = None) -> None:
        """Tells one person something that only they see."""
        self._asked(
            lambda: self._client.chat_postEphemeral(channel=conversation, user=user, text=text, thread_ts=thread_ts)
        )

    def upload(self, conversation: str, picture: bytes, name: str, title: str, thread_ts: str) -> None:
        """A PNG into a thread: files.getUploadURLExternal, the bytes, files.completeUploadExternal."""
        self._asked(
            lambda: self._client.files_upload_v2(
                channel=conversation, file=picture, filename=name, title=title, alt_txt=title, thread_ts=thread_ts
            )
        )

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SlackApiError as error:
            raise _failure(error) from None
        except (SlackClientError, OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: an answer that cannot be decoded. None of these words is kept: they may hold a URL.
            raise Later(f"no answer ({type(error).__name__})", whole_channel=True) from None


def _failure(error: SlackApiError) -> Later | Never:
    status = getattr(error.response, "status_code", 200)
    headers = {k.lower(): v for k, v in (getattr(error.response, "headers", None) or {}).items()}
    said = str(error.response.get("error", "")) if hasattr(error.response, "get") else ""
    word = said if _WORD.fullmatch(said) else "an error without a name"
    text = f"answered {status}" if status != 200 else f"answered {word}"
    if status == 429 or word in ("ratelimited", "rate_limited"):
        return Later(text, retry_after(headers.get("retry-after")), whole_channel=True)
    if word in SETUP:
        return Later(f"answered {word}", whole_channel=True)
    if status in (408, 425) or status >= 500 or word in PASSING or word not in (said,):
        return Later(text, retry_after(headers.get("retry-after")), whole_channel=status in AWAY)
    return SlackGone(text) if word in GONE else Never(text, content=True)
