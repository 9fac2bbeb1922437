"""A start script as a document: `--name value` and `a.b=value` of every command in it, each with its line.

Nothing is executed. Shell variables that the script itself sets to a constant, outside any branch, are followed; what
the environment, a branch, a loop or a substitution decides is `UNKNOWN` and not judged. Dashes in names become
underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import yaml

from foreshock_service import bounded_yaml
from foreshock_service.doctor.document import UNKNOWN, Document, UnreadableError

_SCAN: Final = re.compile(
    r"""(?P<skip>[ \t\r]+|\\\r?\n|\#[^\n]*)|(?P<end>\n|[;&|()]+)|"""
    r"""(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\(\([^\n]*?\)\)|\$\([^()]*\)|\$\{[^}]*\}|[^\s'"\\;&|()])+)""",
    re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:\[@\])?\}|\$(\w+)")
_OPENS, _CLOSES = frozenset(("if", "case", "for", "while", "until")), frozenset(("fi", "esac", "done"))
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_FLAG: Final = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


class _Word(NamedTuple):
    """One word as the shell would pass it; `text` None where the script does not tell. `ends`: a command ends here."""

    text: str | None
    line: int
    ends: bool = False


def parse(text: str, name: str = "the script") -> Document:
    """The options that a script passes. Raises UnreadableError where there are none."""
    root: dict[str, Any] = {}
    lines: dict[str, int] = {}
    flag: tuple[str, int, bool] | None = None
    values: list[str | None] = []
    for word, inside_branch in _words(text):
        flag_found = None if word.ends or word.text is None else _FLAG.fullmatch(word.text)
        override = None if word.ends or word.text is None else _OVERRIDE.fullmatch(word.text)
        if flag is not None and (word.ends or flag_found or override):
            _put(root, lines, flag[0], _option(values), flag[1], flag[2])
            flag, values = None, []
        if flag_found:
            flag, values = (flag_found[1].replace("-", "_"), word.line, inside_branch), []
            if flag_found[2] is not None:
                values.append(flag_found[2])
        elif override:
            _put(root, lines, override[1], _scalar(override[2]), word.line, inside_branch)
        elif flag is not None:
            values.append(word.text)
    if not lines:
        raise UnreadableError(f"{name} passes no options: neither --name value nor a.b=value")
    return Document(root, lines)


def _words(text: str) -> Iterator[tuple[_Word, bool]]:
    """Every word with whether a branch decides about it; variables replaced; a last end closes the text."""
    variables: dict[str, str | None] = {}
    depth, line, fresh = 0, 1, True
    for match in _SCAN.finditer(text):
        raw, at = match.group(), line
        line += raw.count("\n")
        if match["skip"]:
            continue
        if match["end"]:
            yield _Word(None, at, ends=True), depth > 0
            fresh = True
            continue
        if fresh and raw in _OPENS:
            depth += 1
        elif fresh and raw in _CLOSES:
            depth = max(0, depth - 1)
        assigned = re.fullmatch(r"(\w+)=(.*)", raw, re.DOTALL)
        if fresh and assigned:
            variables[assigned[1]] = None if depth else _expanded(assigned[2], variables)
            continue  # VAR=x VAR=y command: still at the front
        fresh = raw in ("export", "then", "do", "else", "local")
        said = _expanded(raw, variables)
        if said != "" or raw[0] != "$":  # an empty variable is no word: ${ARGS[@]} of an array read above
            yield _Word(said, at), depth > 0
    yield _Word(None, line, ends=True), False


def _expanded(raw: str, variables: dict[str, str | None]) -> str | None:
    """The word without quotes, its variables replaced; None where one is not known or a command would decide."""
    told = True

    def variable(match: re.Match[str]) -> str:
        nonlocal told
        value = variables.get(match[1] or match[2])
        told = told and value is not None
        return value or ""

    out = []
    for piece in re.findall(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\]+""", raw, re.DOTALL):
        if piece[0] == "'":
            out.append(piece[1:-1])
            continue
        bare = piece[1:-1] if piece[0] == '"' else piece[1:] if piece[0] == "\\" else piece
        filled = _VARIABLE.sub(variable, bare)
        told = told and "$" not in filled and "`" not in filled
        out.append(filled)
    name = re.match(r"--[\w.-]+=|\+{0,2}[A-Za-z_][\w.]*=", raw)
    if not told and name:  # the name is known although its value is not
        return f"{name.group()}${{unknown:}}"
    return "".join(out) if told else None


def _option(values: list[str | None]) -> Any:
    """A flag's value: true alone, one value, or a list."""
    if not values:
        return True
    if any(value is None for value in values):
        return UNKNOWN
    read = [_scalar(value or "") for value in values]
    return read[0] if len(read) == 1 else read


def _scalar(text: str) -> Any:
    """As YAML reads it, which is how Hydra and people mean it."""
    if "${unknown:}" in text:
        return UNKNOWN
    try:
        return bounded_yaml.safe_load(text) if text else None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return text


def _put(root: dict[str, Any], lines: dict[str, int], path: str, value: Any, line: int, in_branch: bool) -> None:
    """Puts a value at a dotted path; later ones win, as on a command line."""
    at, parts = root, path.split(".")
    for part in parts[:-1]:
        below = at.get(part)
        if not isinstance(below, dict):
            below = at[part] = {}
        at = below
    at[parts[-1]] = UNKNOWN if in_branch else value
    for count in range(1, len(parts) + 1):
        lines.setdefault(".".join(parts[:count]), line)
    lines[path] = line
