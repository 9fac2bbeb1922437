"""The rule pack: YAML in, validated configurations out, with errors that name the key and the line.

    version: 1
    rules:
      entropy_collapse: {mild_ratio: 2.5, severity: warning}
      silent_run: {enabled: false}

A pack starts from the shipped `default.yaml`; a file, then a run's own overrides, are laid over it key by key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from foreshock_service import bounded_yaml
from foreshock_service.rules.illnesses import NAMES, rule_named
from foreshock_service.rules.interface import Rule, RuleConfig

DEFAULT = Path(__file__).with_name("default.yaml")
VERSION = 1
MAX_BYTES = 1 << 20


class PackError(ValueError):
    """The pack cannot be used. The message names the file, the line and the key."""


@dataclass(frozen=True)
class Entry:
    """One rule with the configuration it runs under."""

    rule: Rule[Any, Any]
    config: RuleConfig
    hash: str
    """Of name, configuration and layout of the state: state is kept under it, so another of these starts afresh."""


@dataclass(frozen=True)
class Pack:
    """Rules to evaluate, in order of evidence; switched-off ones are left out of `entries`."""

    entries: tuple[Entry, ...]
    settings: Mapping[str, Mapping[str, Any]]
    """What was said, by rule: the source of `entries`, and what overrides are laid over."""
    hash: str

    def with_overrides(self, overrides: Mapping[str, Mapping[str, Any]] | None, source: str = "overrides") -> Pack:
        """The same pack with a run's own keys laid over it. Raises PackError."""
        return _built(_laid_over(self.settings, overrides, source, {}), source, {}) if overrides else self

    def config(self, name: str) -> RuleConfig | None:
        """The configuration of a rule, None where it is switched off."""
        return next((e.config for e in self.entries if e.rule.name == name), None)


def default_pack() -> Pack:
    """The shipped pack."""
    return parse_pack(DEFAULT.read_text(encoding="utf-8"), str(DEFAULT.name), base={})


def load_pack(path: Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Pack:
    """The shipped pack, with `path` and then `overrides` laid over it. Raises PackError (unreadable files too)."""
    if path is None:
        return default_pack().with_overrides(overrides)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PackError(f"{path}: larger than {MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackError(f"{path}: cannot be read: {error}") from error
    return parse_pack(text, str(path)).with_overrides(overrides)


def parse_pack(text: str, source: str = "rules", base: Mapping[str, Mapping[str, Any]] | None = None) -> Pack:
    """A pack from YAML text laid over `base` (None: the shipped pack). Raises PackError."""
    try:
        said = bounded_yaml.safe_load(text)  # first: it says no to what would compose for ever
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise PackError(f"{source}{where}: not YAML: {getattr(error, 'problem', None) or error}"[:1000]) from error
    lines = _lines(node) if node is not None else {}
    if said is None:
        said = {"version": VERSION}
    if not isinstance(said, dict):
        raise PackError(f"{source}, line 1: expected the keys `version` and `rules`")
    for key in said:
        if key not in {"version", "rules"}:
            raise PackError(
                f"{_where(source, lines, (key,))}: unknown key `{key}`{_guess(str(key), ('version', 'rules'))}"
            )
    if said.get("version", VERSION) != VERSION:
        raise PackError(f"{_where(source, lines, ('version',))}: `version` must be {VERSION}, not {said['version']!r}")
    under = default_pack().settings if base is None else base
    return _built(_laid_over(under, said.get("rules") or {}, source, lines), source, lines)


class PackFile:
    """A pack file that is read again when it changes. A bad new version keeps the last good one and says why."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp = self._stamped()
        self._pack = load_pack(path)
        self.error: str | None = None
        """Why the file as it is now is not in use; None while it is."""

    def current(self) -> Pack:
        """The newest good pack. One `stat` when nothing changed."""
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._pack, self.error = load_pack(self._path), None
            except PackError as error:
                self.error = str(error)
        return self._pack

    def _stamped(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat() if self._path else None
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size) if stat else None


KeyPath = tuple[Any, ...]


def _laid_over(
    base: Mapping[str, Mapping[str, Any]], said: object, source: str, lines: Mapping[KeyPath, int]
) -> dict[str, dict[str, Any]]:
    merged = {name: dict(keys) for name, keys in base.items()}
    if not isinstance(said, Mapping):
        raise PackError(f"{_where(source, lines, ('rules',))}: `rules` must map rule names to their keys")
    for name, keys in said.items():
        if name not in NAMES:
            raise PackError(
                f"{_where(source, lines, ('rules', name))}: unknown rule `{name}`{_guess(str(name), NAMES)}"
            )
        if keys is not None and not isinstance(keys, Mapping):
            raise PackError(f"{_where(source, lines, ('rules', name))}: `{name}` must be a map of keys")
        merged.setdefault(name, {}).update(keys or {})
    return merged


def _built(settings: Mapping[str, Mapping[str, Any]], source: str, lines: Mapping[KeyPath, int]) -> Pack:
    entries = []
    for name in NAMES:
        if name not in settings:
            continue
        rule = rule_named(name)
        try:
            config = rule.config.model_validate(dict(settings[name]))
        except ValidationError as error:
            raise PackError(_explained(error, rule, source, lines)) from error
        if config.enabled:
            entries.append(Entry(rule, config, _hash([name, config.model_dump(mode="json"), _layout(rule.state)])))
    return Pack(tuple(entries), settings, _hash([e.hash for e in entries]))


def _explained(error: ValidationError, rule: Rule[Any, Any], source: str, lines: Mapping[KeyPath, int]) -> str:
    sentences = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        where = _where(source, lines, ("rules", rule.name, *problem["loc"]))
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{where}: `{rule.name}` has no key `{key}`{_guess(key, tuple(rule.config.model_fields))}")
        else:
            sentences.append(f"{where}: `{rule.name}.{key}`: {problem['msg']} (got {repr(problem['input'])[:200]})")
    return "; ".join(sentences)


def _where(source: str, lines: Mapping[KeyPath, int], path: KeyPath) -> str:
    while path and path not in lines:
        path = path[:-1]
    return f"{source}, line {lines[path]}" if path else source


def _guess(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; there are: {', '.join(sorted(known))}"


def _lines(node: yaml.Node, path: KeyPath = ()) -> dict[KeyPath, int]:
    """Path of keys → line (from 1) at which that key stands. Four levels deep: aliases may nest without end."""
    found: dict[KeyPath, int] = {}
    if isinstance(node, yaml.MappingNode) and len(path) < 4:
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            found[(*path, name)] = key.start_mark.line + 1
            found.update(_lines(value, (*path, name)))
    return found


def _layout(state: type[msgspec.Struct]) -> str:
    """The fields of a state, nested ones too: states are stored as arrays, and another layout would be misread."""
    return repr(msgspec.inspect.type_info(state))


def _hash(what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
