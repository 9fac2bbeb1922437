"""Every setting of the collector, declared once: name, default, unit, sentence. From arguments, else the environment.

`FORESHOCK_<NAME>` sets `<name>`. An argument of the wrong type raises ValueError at `init`; a malformed environment
variable is logged and its default stays, because a typo in a job script must not end a training run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from logging import getLogger
from typing import Any

_log = getLogger("foreshock")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _setting(default: Any, unit: str, sentence: str, *, shown: bool = True) -> Any:
    return field(default=default, metadata={"unit": unit, "sentence": sentence}, repr=shown)


def _default_spool() -> str:
    return os.path.join(tempfile.gettempdir(), f"foreshock-{os.getuid() if hasattr(os, 'getuid') else 0}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `foreshock.init(**settings)` and the environment may set."""

    url: str = _setting("", "", "Address of the service, as http://host:8720; empty: the monitor does nothing.")
    token: str = _setting("", "", "Bearer token with scope `ingest`; not needed on loopback.", shown=False)
    project: str = _setting("default", "", "Project of a run that is named without one.")
    ca_file: str = _setting("", "path", "PEM file of the authorities that may sign the service's certificate.")
    verify_tls: bool = _setting(True, "", "Verify the service's certificate. Off only for experiments.")
    connect_timeout_s: float = _setting(3.0, "s", "Longest wait for a connection.")
    timeout_s: float = _setting(10.0, "s", "Longest wait for a whole answer, however slowly it drips.")
    backoff_s: float = _setting(0.5, "s", "First pause after an attempt without an answer; doubles, jittered.")
    backoff_max_s: float = _setting(15.0, "s", "Longest pause between attempts.")
    retry_after_max_s: float = _setting(60.0, "s", "Longest Retry-After that is honoured.")
    heartbeat_s: float = _setting(30.0, "s", "An idle client posts an empty envelope this often.")
    exit_flush_s: float = _setting(2.0, "s", "Longest wait for the service at interpreter exit; the rest is spooled.")
    finish_s: float = _setting(5.0, "s", "Longest time that `finish()` waits for the service.")
    settle_s: float = _setting(60.0, "s", "A step's device figures that are not there by then are sent as missing.")
    queue_items: int = _setting(1000, "items", "Sealed items kept in memory; the oldest are dropped beyond it.")
    queue_bytes: int = _setting(16 << 20, "bytes", "Encoded items kept in memory where there is no spool.")
    batch_items: int = _setting(64, "items", "Most items in one envelope.")
    batch_bytes: int = _setting(256 << 10, "bytes", "Most bytes of items in one envelope (one larger item goes alone).")
    spool_dir: str = _setting("", "path", "Folder of unsent items; empty: foreshock-<uid> in the temporary folder.")
    spool_bytes: int = _setting(64 << 20, "bytes", "Most bytes of a client's spool; the oldest are dropped beyond it.")
    spool_keep_s: float = _setting(7 * 86400.0, "s", "A dead client's spool that nobody adopts is deleted after this.")
    guard_limit: int = _setting(50, "errors", "Errors of its own after which the collector switches itself off.")
    raise_errors: bool = _setting(False, "", "Raise the collector's own errors (tests). Environment: FORESHOCK_RAISE.")
    max_signals: int = _setting(512, "signals", "Most scalars of one frame.")
    max_lag: int = _setting(4, "versions", "Version lags kept apart in `<pair>@lag<n>`; the last holds all above.")
    evidence: bool = _setting(True, "", "Send ids, positions and log-probs of the worst tokens (never text).")
    dump_dir: str = _setting("", "path", "Folder of token dumps; empty: none are kept (docs/dumps.md).")
    dump_share: float = _setting(0.0, "share", "Share of the steps whose tokens are kept, in [0, 1].")
    dump_ring: int = _setting(3, "steps", "Steps held in memory, to be kept where the service then finds an incident.")
    dump_after: int = _setting(3, "steps", "Steps kept from an incident's word on.")
    dump_memory_bytes: int = _setting(256 << 20, "bytes", "Most memory of captured tokens; beyond it they are lost.")
    dump_disk_bytes: int = _setting(2 << 30, "bytes", "Most disk of a process's dumps; old sampled ones go first.")
    poll_s: float = _setting(25.0, "s", "How long one question for commands stays open.")
    pause_limit_s: float = _setting(6 * 3600.0, "s", "A paused trainer goes on by itself after this.")

    @property
    def spool_root(self) -> str:
        return self.spool_dir or _default_spool()

    def public(self) -> dict[str, Any]:
        """All but the token: what may be shown."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token"}


def load(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from `arguments` (None counts as not given), else the environment, else the defaults.

    Raises ValueError for an unknown argument or one of the wrong type.
    """
    environment = os.environ if environment is None else environment
    known = {f.name: f for f in fields(Settings)}
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    chosen: dict[str, Any] = {}
    for name, declared in known.items():
        if arguments.get(name) is not None:
            chosen[name] = _typed(name, arguments[name], type(declared.default))
            continue
        variable = "FORESHOCK_RAISE" if name == "raise_errors" else f"FORESHOCK_{name.upper()}"
        if variable in environment:
            try:
                chosen[name] = _typed(name, environment[variable], type(declared.default))
            except ValueError as error:
                _log.warning("foreshock: %s ignored: %s", variable, error)
    return Settings(**chosen)


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ValueError(f"{name} must be true or false, not {value!r}")
    if kind is str:
        return str(value).strip()
    try:
        number = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r}") from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, not {value!r}")
    return number
