"""A YAML file whose every value knows its line; `${a.b}` is followed, other interpolations stay unknown.

Reads as OmegaConf would where that needs no code: absolute and relative references, and text around them. Resolvers
(`${now:…}`, `${oc.env:…}`) and references to keys of other files (Hydra's `defaults:`) give `UNKNOWN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from foreshock.frames.redaction import REDACTED, scrubbed, secret_name
from foreshock_service.bounded_yaml import node_of


class UnreadableError(Exception):
    """The file is no configuration that can be read; the message says why and where."""


class _Unknown:
    """A value that this file alone does not tell."""

    def __repr__(self) -> str:
        return "unknown"

    def __bool__(self) -> bool:
        return False


UNKNOWN: Final = _Unknown()
MAX_BYTES: Final = 4 << 20
_MAX_DEPTH: Final = 20
_MAX_KEYS: Final = 50_000
_REFERENCE: Final = re.compile(r"\$\{([^${}]*)\}")


@dataclass(frozen=True)
class Value:
    """`value` after interpolation; `line` 1-based, None where the key is absent and `value` is the default."""

    path: str
    value: Any
    line: int | None

    @property
    def present(self) -> bool:
        return self.line is not None

    @property
    def known(self) -> bool:
        return self.value is not UNKNOWN

    def quote(self) -> str:
        """As evidence: `line 147: actor_infer.generating_args.top_k: 100`."""
        where = f"line {self.line}" if self.line is not None else "default"
        hidden = isinstance(self.value, str) and self.value and secret_name(self.path.rpartition(".")[2])
        return f"{where}: {self.path}: {REDACTED if hidden else _shown(self.value)}"


class Document:
    """The parsed file. `lines` maps every dotted path to its line."""

    def __init__(self, root: dict[str, Any], lines: dict[str, int]) -> None:
        self.root = root
        self.lines = lines

    def get(self, path: str, default: Any = None) -> Value:
        """The value at a dotted path; where it is absent, `default` without a line."""
        found, value = self._find(path)
        if not found:
            return Value(path, default, None)
        return Value(path, self._resolved(value, path, 0), self.lines.get(path))

    def has(self, path: str) -> bool:
        return self._find(path)[0]

    def number(self, path: str, default: float | None = None) -> Value:
        """As `get`, with 1e-6 and "1e-6" read as numbers; UNKNOWN where it is none."""
        found = self.get(path, default)
        value = found.value
        if isinstance(value, str):
            try:
                value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
            except ValueError:
                value = UNKNOWN
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            value = UNKNOWN
        return Value(path, value, found.line)

    def _find(self, path: str) -> tuple[bool, Any]:
        at: Any = self.root
        for part in path.split("."):
            if isinstance(at, dict) and part in at:
                at = at[part]
            elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
                at = at[int(part)]
            else:
                return False, None
        return True, at

    def _resolved(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, list):
            return [self._resolved(item, path, depth) for item in value]
        if isinstance(value, dict):
            return {k: self._resolved(v, f"{path}.{k}", depth) for k, v in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > _MAX_DEPTH:
            return UNKNOWN
        whole = _REFERENCE.fullmatch(value.strip())
        if whole:
            return self._referred(whole.group(1), path, depth)
        unknown = False

        def text(match: re.Match[str]) -> str:
            nonlocal unknown
            found = self._referred(match.group(1), path, depth)
            unknown = unknown or found is UNKNOWN or isinstance(found, dict | list)
            return str(found)

        replaced = _REFERENCE.sub(text, value)
        return UNKNOWN if unknown or "${" in replaced else replaced

    def _referred(self, reference: str, path: str, depth: int) -> Any:
        reference = reference.strip()
        if ":" in reference:
            return UNKNOWN
        if reference.startswith("."):
            up = len(reference) - len(reference.lstrip("."))
            parents = path.split(".")[:-up]
            reference = ".".join([*parents, reference.lstrip(".")])
        reference = re.sub(r"\[(\w+)\]", r".\1", reference)
        found, value = self._find(reference)
        return self._resolved(value, reference, depth + 1) if found else UNKNOWN


def read(path: Path) -> Document:
    """Reads a YAML file. Raises UnreadableError for what is no readable YAML mapping, with the line where it stops."""
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """The file's text. Raises UnreadableError where it is absent, too large or no text."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no configuration")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UnreadableError(f"{path} is not UTF-8 text") from None


def parse(text: str, name: str = "the text") -> Document:
    """As `read`, from a text."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        raise UnreadableError(f"{name} is no text: {error}"[:300]) from None
    try:
        node = node_of(loader)
        if node is None:
            raise UnreadableError(f"{name} is empty")
        if not isinstance(node, yaml.MappingNode):
            raise UnreadableError(f"{name} is no mapping of keys to values")
        lines: dict[str, int] = {}
        root = _built(loader, node, "", lines, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UnreadableError(f"{name} is no valid YAML{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UnreadableError(f"{name} is no valid YAML: {error}") from None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise UnreadableError(f"{name} holds a value that cannot be: {error}"[:300]) from None
    finally:
        loader.dispose()
    return Document(root, lines)


def _built(loader: yaml.SafeLoader, node: yaml.Node, path: str, lines: dict[str, int], depth: int) -> Any:
    """Python values of a node, noting each key's line. Later keys win over earlier ones and over `<<`."""
    if depth > 100 or len(lines) > _MAX_KEYS:
        raise UnreadableError(f"line {node.start_mark.line + 1}: nested too deeply, or aliases that multiply")
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            below = f"{path}.{key}" if path else key
            lines[below] = key_node.start_mark.line + 1
            built[key] = _built(loader, value_node, below, lines, depth + 1)
        return built
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            below = f"{path}.{index}"
            lines[below] = item.start_mark.line + 1
            items.append(_built(loader, item, below, lines, depth + 1))
        return items
    return loader.construct_object(node, deep=True)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = scrubbed(str(value)[:4096])
    return text if len(text) <= 60 else text[:57] + "…"
