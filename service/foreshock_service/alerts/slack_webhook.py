"""`slack_webhook`: a Block Kit message through an incoming webhook, which can neither edit nor thread nor upload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from foreshock_service.alerts import slack_blocks
from foreshock_service.alerts.base import Channel, Message, digest_id, post
from foreshock_service.store.types import dump_json


class SlackWebhook(Channel):
    """The URL is the secret: it is in no message, error or log."""

    name = "slack_webhook"

    def __init__(self, client: httpx.Client, url: str, public_url: str = "") -> None:
        super().__init__(client, public_url)
        self._url = url

    def send(self, message: Message, now: float) -> None:
        """One alert."""
        self._post(slack_blocks.headline(message), slack_blocks.alert(message, self.link(message.payload)))

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Many alerts as one list, a line a run."""
        self._post(*slack_blocks.digest(messages, digest_id(messages), self.public_url or None))

    def _post(self, text: str, blocks: list[dict[str, Any]]) -> None:
        body = {"text": text, "blocks": blocks, "unfurl_links": False, "unfurl_media": False}
        post(self.client, self._url, dump_json(body).encode(), {})
