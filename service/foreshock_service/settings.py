"""Every setting of the service, declared once: default, unit, sentence. `docs/settings.md` is rendered from here.

Each is read from the environment as `FORESHOCK_<NAME>`; `foreshock serve` takes the most common ones as options too.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1024 * 1024
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def data_dir() -> Path:
    """Where an embedded service keeps its database: `$XDG_DATA_HOME/foreshock`, else `~/.local/share/foreshock`."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "foreshock"


def _default_database() -> str:
    return f"sqlite:///{data_dir() / 'foreshock.db'}"


def _setting(default: Any, unit: str, sentence: str, **limits: Any) -> Any:
    extra: dict[str, Any] = {"unit": unit}
    if callable(default):
        return Field(default_factory=default, description=sentence, json_schema_extra=extra, **limits)
    return Field(default, description=sentence, json_schema_extra=extra, **limits)


class Settings(BaseSettings):
    """Settings of one service process. Unknown values are refused at start, by name."""

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="ignore", frozen=True, hide_input_in_errors=True)

    # The door
    host: str = _setting("127.0.0.1", "", "Address to listen on; beyond loopback at least one token must exist.")
    port: int = _setting(8720, "", "TCP port to listen on; 0 takes a free one.", ge=0, le=65535)
    public_url: str = _setting("", "", "How people reach the page, for links in alerts; empty: http://host:port.")
    trust_loopback: bool = _setting(
        True, "", "Loopback clients need no token. Switch off behind a reverse proxy on the same machine."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "", "Least severe log line to write.")
    access_log: bool = _setting(True, "", "One log line per request: method, path, status and time; never a token.")
    shutdown_s: float = _setting(
        10.0, "seconds", "Longest wait for open requests when the service stops.", gt=0, le=600
    )

    replicas: int = _setting(
        1,
        "replicas",
        "With `foreshock serve --ray`: replicas on the cluster; two and more need PostgreSQL.",
        ge=1,
        le=100,
    )

    # The store
    database_url: SecretStr = _setting(
        lambda: SecretStr(_default_database()),
        "",
        "SQLAlchemy URL: `sqlite:///path` (one process) or `postgresql+psycopg://user:password@host/db`.",
    )
    database_pool: int = _setting(10, "connections", "PostgreSQL connections kept per process.", ge=2, le=200)
    migrate: bool = _setting(
        True, "", "Migrate the database at start; otherwise only check that it is at head or head − 1."
    )
    frames_retention_days: float = _setting(
        7.0, "days", "How long raw frames are kept; merged points stay until the run is deleted.", gt=0, le=3650
    )
    upkeep_s: float = _setting(3600.0, "seconds", "Time between looks for what is old enough to go.", gt=0, le=86_400)
    deliveries_retention_days: float = _setting(
        30.0, "days", "How long sent or dead deliveries stay listed.", gt=0, le=3650
    )
    writer_queue: int = _setting(
        2048, "envelopes", "Envelopes that may wait for the writer; beyond that ingest answers 503.", ge=1, le=100_000
    )
    writer_group: int = _setting(256, "envelopes", "Most envelopes stored in one transaction.", ge=1, le=10_000)

    # The evaluator
    watermark_min_s: float = _setting(
        5.0, "seconds", "Least wait for missing ranks after a step's first frame.", ge=0, le=3600
    )
    evaluator_processes: int = _setting(
        0,
        "processes",
        "Evaluate in so many processes beside the one that answers; 0, and SQLite: in a thread of it.",
        ge=0,
        le=64,
    )
    lease_s: float = _setting(10.0, "seconds", "Lease of a run on one replica; renewed while busy.", gt=0.5, le=600)
    tick_s: float = _setting(10.0, "seconds", "Time between looks at silent runs, expiry and watermarks.", gt=0, le=600)
    rules_path: Path | None = _setting(None, "", "YAML rule pack; empty: the shipped one. Re-read when it changes.")
    default_mode: Literal["observe", "approve", "auto"] = _setting(
        "observe", "", "Mode of a run that names none: never act, act when a person agrees, or act."
    )
    max_mode: Literal["observe", "approve", "auto"] = _setting(
        "auto", "", "The most that any run may ask for; a bolder wish is cut down to it."
    )
    command_expiry_s: float = _setting(
        600.0, "seconds", "A command that was not accepted by then expires.", ge=1, le=86_400
    )
    budget_per_run: int = _setting(6, "commands", "Commands that policy may issue per run.", ge=0, le=10_000)

    # Alerts
    slack_webhook_url: SecretStr | None = _setting(
        None, "", "Slack incoming webhook that alerts go to; the URL is a secret. Empty: none."
    )
    slack_bot_token: SecretStr | None = _setting(
        None, "", "Bot token (`xoxb-…`) of a Slack app: threads, edits, pictures, buttons. Empty: none."
    )
    slack_channel: str = _setting("", "", "Id of the Slack channel that the app posts to, as `C0123456789`.")
    slack_signing_secret: SecretStr | None = _setting(
        None, "", "Signing secret of the Slack app; with it, waiting commands get buttons. Empty: no buttons."
    )
    slack_users: str = _setting(
        "",
        "",
        "Who may press them: `U0AAA=commands:approve commands:reject; U0BBB@math=operate` (Slack ids; `@project`).",
    )
    slack_api_url: str = _setting("https://slack.com/api/", "", "Slack's Web API, for a gateway in front of it.")
    webhook_url: SecretStr | None = _setting(None, "", "URL that alerts are posted to as signed JSON. Empty: none.")
    webhook_secret: SecretStr | None = _setting(
        None, "", "Key of the HMAC-SHA256 that signs what is posted to the webhook; empty: unsigned."
    )
    alertmanager_url: SecretStr | None = _setting(
        None, "", "Base URL of a Prometheus Alertmanager that alerts go to, as `http://alertmanager:9093`. Empty: none."
    )
    smtp_url: SecretStr | None = _setting(
        None, "", "Mail server: `smtp://user:password@host:587` (STARTTLS) or `smtps://…`. Empty: no mail."
    )
    email_from: str = _setting("", "", "Sender of alert mails; needed with a mail server.")
    email_to: str = _setting("", "", "Receivers of alert mails, separated by commas; needed with a mail server.")
    digest_over: int = _setting(
        3, "1/min", "Messages a minute and channel; what is more leaves as one digest a minute.", ge=1, le=1000
    )
    quiet_hours: str = _setting(
        "",
        "",
        "When a channel holds back what is not critical: `slack_app=22:00-07:00 Europe/Berlin; email=…`.",
    )

    # Limits
    max_body_bytes: int = _setting(8 * MIB, "bytes", "Largest request body, as received.", ge=1024, le=1024 * MIB)
    max_decompressed_bytes: int = _setting(
        32 * MIB, "bytes", "Largest body after decompression.", ge=1024, le=4096 * MIB
    )
    request_timeout_s: float = _setting(
        30.0, "seconds", "Longest time that a request's head, and then its body, may take to come in.", gt=0, le=3600
    )
    outgoing_private: bool = _setting(
        True, "", "Alerts may go to private and loopback addresses; link-local ones (cloud metadata) never."
    )
    max_items: int = _setting(1024, "items", "Most frames and notices in one envelope.", ge=1, le=100_000)
    max_signals_per_frame: int = _setting(
        512, "signals", "Most scalars, and most pairs, in one frame.", ge=1, le=10_000
    )
    max_signals_per_run: int = _setting(
        4096, "signals", "Most different signals of one run; further ones are dropped with a warning.", ge=1, le=100_000
    )
    max_runs: int = _setting(10_000, "runs", "Most runs; ingest for a further one is refused.", ge=1, le=10_000_000)
    max_waiters: int = _setting(1000, "requests", "Most long-polls and event streams at once.", ge=1, le=100_000)
    max_wait_s: float = _setting(60.0, "seconds", "Longest long-poll that is honoured.", ge=0, le=600)
    max_stream_s: float = _setting(
        3600.0, "seconds", "Longest event stream; a page that was watching comes again by itself.", ge=1, le=86_400
    )
    max_page: int = _setting(500, "rows", "Most rows on one page of a list.", ge=1, le=10_000)
    max_series_points: int = _setting(5000, "points", "Most points per signal in one answer.", ge=10, le=100_000)
    max_series_signals: int = _setting(64, "signals", "Most signals in one series request.", ge=1, le=1000)
    max_series_steps: int = _setting(
        1_000_000, "steps", "Most stored steps that one series request may read.", ge=100, le=100_000_000
    )
    max_replay_steps: int = _setting(20_000, "steps", "Most steps that one replay may fold.", ge=1, le=1_000_000)
    replay_slots: int = _setting(2, "requests", "Replays that may run at once.", ge=1, le=64)
    ingest_rate_per_s: float = _setting(
        200.0, "1/s", "Envelopes per second per client address and token.", gt=0, le=1e6
    )
    request_rate_per_s: float = _setting(
        50.0, "1/s", "Other requests per second per client address and token.", gt=0, le=1e6
    )
    rate_burst_s: float = _setting(
        5.0, "seconds", "Burst that a silent client has saved up, in seconds of its rate.", gt=0, le=600
    )
    max_metric_runs: int = _setting(
        200, "runs", "Most runs shown in `/metrics`, the most recently heard first.", ge=0, le=10_000
    )

    # Tokens and the page
    token_cache_s: float = _setting(
        5.0, "seconds", "How long another replica may still honour a token after it was revoked.", ge=0, le=300
    )
    login_hours: float = _setting(12.0, "hours", "How long a login on the page lasts.", gt=0, le=720)

    @field_validator("public_url")
    @classmethod
    def _http_only(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return value.rstrip("/")

    @property
    def is_sqlite(self) -> bool:
        return self.database_url.get_secret_value().startswith("sqlite")

    @property
    def listens_on_loopback(self) -> bool:
        """False for any address that another machine could reach."""
        if self.host in LOOPBACK_NAMES:
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """Where people find the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.public_url or f"http://{host}:{self.port}"


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = "sqlite:///$XDG_DATA_HOME/foreshock/foreshock.db"
    if value in (None, ""):
        return "—"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def render() -> str:
    """`docs/settings.md`: one row per setting, in the order of declaration."""
    lines = [
        "# Settings",
        "",
        "Rendered from `service/foreshock_service/settings.py` (a test keeps it current) by",
        "`python -m foreshock_service.settings > docs/settings.md`.",
        "",
        "| environment variable | default | unit | what it does |",
        "|---|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        unit = extra.get("unit", "") if isinstance(extra, dict) else ""
        default = field.get_default(call_default_factory=True, validated_data={})
        lines.append(f"| `FORESHOCK_{name.upper()}` | {_shown(default)} | {unit or '—'} | {field.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201 - the output is the document
