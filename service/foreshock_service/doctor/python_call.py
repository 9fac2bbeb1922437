"""The keyword arguments of a `GRPOConfig(…)` call in a Python file, as a document. Parsed, never executed."""

from __future__ import annotations

import ast
from typing import Any, Final

from foreshock_service.doctor.document import UNKNOWN, Document, UnreadableError

CALL: Final = "GRPOConfig"


def parse(text: str, name: str = "the file") -> Document:
    """The only GRPOConfig call's keywords. Raises UnreadableError without one, with several, or with `**` arguments."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UnreadableError(f"{name} is no valid Python, line {error.lineno}: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _named(node.func) == CALL]
    if len(calls) != 1:
        raise UnreadableError(f"{name} holds {len(calls)} calls of {CALL}: one is read")
    root: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for keyword in calls[0].keywords:
        if keyword.arg is None:
            raise UnreadableError(f"{name}, line {keyword.value.lineno}: what ** holds is not known")
        root[keyword.arg] = _literal(keyword.value)
        lines[keyword.arg] = keyword.value.lineno
    return Document(root, lines)


def _named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """The value where it is written out; else UNKNOWN."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN
