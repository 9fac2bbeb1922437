"""The only clock that the collector trusts: seconds since boot, which no one can set."""

from __future__ import annotations

import time
from pathlib import Path

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def boot_s() -> float:
    """Seconds since this machine's boot, suspension included (Linux); elsewhere the monotonic clock."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def boot_id() -> str:
    """Names this boot of this machine; empty where the system does not tell, and then no two boots are the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
