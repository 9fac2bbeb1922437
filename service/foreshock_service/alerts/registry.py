"""The channels that ship, and how settings make them. A new channel: its file, its entry here, its test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import httpx

from foreshock_service.alerts.alertmanager import Alertmanager
from foreshock_service.alerts.base import Channel, new_client
from foreshock_service.alerts.email import Email
from foreshock_service.alerts.slack_webhook import SlackWebhook
from foreshock_service.alerts.webhook import Webhook
from foreshock_service.settings import Settings

Make = Callable[[Settings, httpx.Client], Channel | None]


def _webhook(settings: Settings, client: httpx.Client) -> Channel | None:
    if settings.webhook_url is None:
        return None
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
    return Webhook(client, settings.webhook_url.get_secret_value(), secret, settings.url)


def _slack_webhook(settings: Settings, client: httpx.Client) -> Channel | None:
    if settings.slack_webhook_url is None:
        return None
    return SlackWebhook(client, settings.slack_webhook_url.get_secret_value(), settings.url)


def _alertmanager(settings: Settings, client: httpx.Client) -> Channel | None:
    if settings.alertmanager_url is None:
        return None
    return Alertmanager(client, settings.alertmanager_url.get_secret_value(), settings.url)


def _email(settings: Settings, client: httpx.Client) -> Channel | None:
    if settings.smtp_url is None:
        return None
    url = settings.smtp_url.get_secret_value()
    return Email(client, url, settings.email_from, settings.email_to, settings.url)


CHANNELS: Final[dict[str, Make]] = {
    Webhook.name: _webhook,
    SlackWebhook.name: _slack_webhook,
    Alertmanager.name: _alertmanager,
    Email.name: _email,
}


def configured(settings: Settings, client: httpx.Client | None = None) -> dict[str, Channel]:
    """Name → channel, for those that the settings configure; empty where none is."""
    client = client or new_client()
    made = {name: make(settings, client) for name, make in CHANNELS.items()}
    return {name: channel for name, channel in made.items() if channel is not None}
