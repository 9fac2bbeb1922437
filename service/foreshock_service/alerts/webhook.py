"""`webhook`: JSON to any URL, signed with HMAC-SHA256 over timestamp, delivery id and body."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from foreshock_service.alerts.base import Channel, Message, digest_id, post
from foreshock_service.store.types import dump_json

SIGNATURE_HEADER = "X-Foreshock-Signature"
TIMESTAMP_HEADER = "X-Foreshock-Timestamp"
DELIVERY_HEADER = "X-Foreshock-Delivery"


class Webhook(Channel):
    """Body: {delivery_id, event, timestamp, …payload}, or {delivery_id, event: "digest", timestamp, alerts: […]}."""

    name = "webhook"
    digest_every_s = 0.0
    batch = 200

    def __init__(self, client: httpx.Client, url: str, secret: str, public_url: str = "") -> None:
        super().__init__(client, public_url)
        self._url, self._secret = url, secret

    def send(self, message: Message, now: float) -> None:
        """One alert."""
        self._post(message.delivery_id, {"event": message.event, **self._linked(message.payload)}, now)

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Many alerts, whole, each with its own delivery id."""
        alerts = [{"delivery_id": m.delivery_id, "event": m.event, **self._linked(m.payload)} for m in messages]
        self._post(digest_id(messages), {"event": "digest", "alerts": alerts}, now)

    def _linked(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {**payload, "link": self.link(payload)}

    def _post(self, delivery_id: str, body: Mapping[str, Any], now: float) -> None:
        timestamp = str(int(now))
        raw = dump_json({"delivery_id": delivery_id, "timestamp": int(now), **body}).encode()
        headers = {DELIVERY_HEADER: delivery_id, TIMESTAMP_HEADER: timestamp}
        if self._secret:
            headers[SIGNATURE_HEADER] = signature(self._secret, timestamp, delivery_id, raw)
        post(self.client, self._url, raw, headers)


def signature(secret: str, timestamp: str, delivery_id: str, body: bytes) -> str:
    """`sha256=<hex>` over `timestamp.delivery_id.body`: what a receiver computes and compares in constant time."""
    signed = b".".join((timestamp.encode(), delivery_id.encode(), body))
    return f"sha256={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"
