"""Text that others wrote, for a terminal or a log: no character of it moves a cursor, paints, reorders, breaks lines.

Names, reasons, paths and settings come from clients and files. What a terminal would act on becomes visible (`\\x1b`).
"""

from __future__ import annotations

import logging
import re
from typing import Final

from foreshock.frames.redaction import scrubbed

# C0 without tab and newline, DEL and C1, line and paragraph separators, and what reverses the order of what is read.
_ACTS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BREAKS: Final = re.compile(r"[\t\n]")


def safe(text: str) -> str:
    """`text` with control characters written out; tabs and line ends stay."""
    return _ACTS.sub(_written, text)


def one_line(text: str) -> str:
    """`safe`, and line ends and tabs are written out as well."""
    return _BREAKS.sub(_written, safe(text))


class OneLine(logging.Formatter):
    """A record is one line, whatever was put into it; only a traceback may follow on lines of its own, made safe."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = one_line(scrubbed(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Indented, so that no line of it looks like a record."""
        told = safe(scrubbed(super().formatException(ei)))  # type: ignore[arg-type]
        return "\n".join(f"    {line}" for line in told.splitlines())


def log_lines(level: str) -> None:
    """The root logger on standard error: a line a record, no control characters, no secrets that can be recognised."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _written(found: re.Match[str]) -> str:
    character = found[0]
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character) or (
        f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    )
