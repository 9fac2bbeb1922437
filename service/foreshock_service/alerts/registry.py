"""The channels that ship, and how settings make them. A new channel: its file, its entry here, its test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import httpx

from foreshock_service.alerts.alertmanager import Alertmanager
from foreshock_service.alerts.base import Channel, new_client
from foreshock_service.alerts.email import Email
from foreshock_service.alerts.hours import QuietHours, parse
from foreshock_service.alerts.slack_api import SlackApi
from foreshock_service.alerts.slack_app import SlackApp
from foreshock_service.alerts.slack_clicks import Clicks, users
from foreshock_service.alerts.slack_webhook import SlackWebhook
from foreshock_service.alerts.webhook import Webhook
from foreshock_service.settings import LOOPBACK_NAMES, Settings
from foreshock_service.store.engine import Store

Make = Callable[[Settings, httpx.Client, Store], Channel | None]


class AlertConfigError(ValueError):
    """Settings of alerts that cannot work; the message names the setting and no secret."""


def _webhook(settings: Settings, client: httpx.Client, store: Store) -> Channel | None:
    if not settings.webhook_url:
        return None
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
    return Webhook(client, settings.webhook_url.get_secret_value(), secret, settings.url)


def _slack_webhook(settings: Settings, client: httpx.Client, store: Store) -> Channel | None:
    if not settings.slack_webhook_url:
        return None
    return SlackWebhook(client, settings.slack_webhook_url.get_secret_value(), settings.url)


def _slack_app(settings: Settings, client: httpx.Client, store: Store) -> Channel | None:
    if not settings.slack_bot_token:
        return None
    if not settings.slack_channel:
        raise AlertConfigError("FORESHOCK_SLACK_CHANNEL must name the channel that FORESHOCK_SLACK_BOT_TOKEN posts to")
    parts = urlsplit(settings.slack_api_url)
    if parts.scheme != "https" and parts.hostname not in LOOPBACK_NAMES:
        raise AlertConfigError("FORESHOCK_SLACK_API_URL must be https: the bot token is not sent in the clear")
    api = SlackApi(settings.slack_bot_token.get_secret_value(), settings.slack_api_url)
    buttons = bool(settings.slack_signing_secret)
    return SlackApp(client, api, store, settings.slack_channel, settings.url, buttons=buttons)


def _alertmanager(settings: Settings, client: httpx.Client, store: Store) -> Channel | None:
    if not settings.alertmanager_url:
        return None
    return Alertmanager(client, settings.alertmanager_url.get_secret_value(), settings.url)


def _email(settings: Settings, client: httpx.Client, store: Store) -> Channel | None:
    if not settings.smtp_url:
        return None
    url = settings.smtp_url.get_secret_value()
    return Email(client, url, settings.email_from, settings.email_to, settings.url)


CHANNELS: Final[dict[str, Make]] = {
    Webhook.name: _webhook,
    SlackWebhook.name: _slack_webhook,
    SlackApp.name: _slack_app,
    Alertmanager.name: _alertmanager,
    Email.name: _email,
}


def configured(settings: Settings, store: Store, client: httpx.Client | None = None) -> dict[str, Channel]:
    """Name → channel, for those that the settings configure; empty where none is. Raises AlertConfigError."""
    client = client or new_client()
    made = {name: make(settings, client, store) for name, make in CHANNELS.items()}
    return {name: channel for name, channel in made.items() if channel is not None}


def quiet_hours(settings: Settings) -> dict[str, QuietHours]:
    """Channel → its quiet hours. Raises AlertConfigError for what cannot be read, or names no channel."""
    try:
        found = parse(settings.quiet_hours)
    except ValueError as error:
        raise AlertConfigError(f"FORESHOCK_QUIET_HOURS: {error}") from error
    if unknown := set(found) - set(CHANNELS):
        raise AlertConfigError(f"FORESHOCK_QUIET_HOURS: no channel {', '.join(sorted(unknown))}")
    return found


def clicks(settings: Settings) -> Clicks | None:
    """Who may decide by button, where clicks come back at all. Raises AlertConfigError."""
    if not settings.slack_signing_secret or not settings.slack_bot_token:
        return None
    try:
        return Clicks(settings.slack_signing_secret.get_secret_value(), users(settings.slack_users))
    except ValueError as error:
        raise AlertConfigError(f"FORESHOCK_SLACK_USERS, FORESHOCK_SLACK_SIGNING_SECRET: {error}") from error
