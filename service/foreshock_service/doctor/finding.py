"""What the doctor says: one finding, with its line in the file and what to change."""

from __future__ import annotations

from typing import Any, Final

import msgspec

SEVERITIES: Final = ("info", "warning", "critical")
"""`info` describes; `warning` and `critical` are wrong or dangerous, and make the exit code 1."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the configuration implies.

    `path` is the dotted key that decides it and `line` its line (1-based), or None where the key is absent and the
    framework's default decides. `evidence` quotes the file, `why` says what it does to training.
    """

    id: str
    severity: str
    title: str
    path: str
    line: int | None
    evidence: str
    why: str
    remedy: str
    versions: str = ""
    """For which versions of the framework it holds; empty: for all, or for the one given."""


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"findings": [msgspec.to_builtins(f) for f in findings]}


def wrong(findings: list[Finding]) -> bool:
    """Whether anything more than a description was found."""
    return any(f.severity != "info" for f in findings)
