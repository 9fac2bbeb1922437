"""The contract that both sides import: envelope, commands, codec, version."""

from foreshock.wire.commands import (
    ACK_STATES,
    COMMAND_KINDS,
    MODES,
    STATES,
    TERMINAL_STATES,
    Ack,
    Action,
    Command,
)
from foreshock.wire.envelope import Envelope, Frame, Notice, Reply, Semantics
from foreshock.wire.version import PROTOCOL, SUPPORTED

__all__ = [
    "ACK_STATES",
    "COMMAND_KINDS",
    "MODES",
    "PROTOCOL",
    "STATES",
    "SUPPORTED",
    "TERMINAL_STATES",
    "Ack",
    "Action",
    "Command",
    "Envelope",
    "Frame",
    "Notice",
    "Reply",
    "Semantics",
]
