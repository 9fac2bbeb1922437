"""What can be wrong with a body, each with the HTTP status that answers it.

WireError                    400
├── Malformed                400   not msgpack or JSON, wrong types, a bad name, an absurd structure
├── TooLarge                 413   too many bytes, items or signals
├── UnsupportedMediaType     415   a content type or encoding that is not spoken here
└── UnsupportedVersion       426   a protocol version that is not accepted any more, or not yet
"""

from __future__ import annotations


class WireError(Exception):
    """A body that cannot be taken. The message may be shown to its sender."""

    status = 400


class Malformed(WireError):  # noqa: N818
    """Not what the schema says."""


class TooLarge(WireError):  # noqa: N818
    """More than the limits allow."""

    status = 413


class UnsupportedMediaType(WireError):  # noqa: N818
    """A content type or encoding that is not spoken here."""

    status = 415


class UnsupportedVersion(WireError):  # noqa: N818
    """A protocol version outside `SUPPORTED`."""

    status = 426
