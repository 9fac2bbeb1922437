"""From a framework's names to our signals: which framework speaks, what its names mean, and what cannot be translated.

Some names are shared and mean different things (`approx_kl` has three meanings and two signs), so the framework is
guessed from all names together before any is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from foreshock.frames import catalogue
from foreshock.frames.names import FRAMEWORKS, GENERIC, PATTERNS
from foreshock.frames.names.base import Alias, to

DECIDE_STEPS: Final = 20
"""Steps after which new names no longer change the guess."""
MAX_HOST_NAMES: Final = 1024
VITAL: Final = frozenset({"reward.mean", "loss", "grad.norm", "entropy.mean", "reference.kl_k3", "mismatch.kl_k3",
                          "mismatch.abs_mean", "policy.kl_k2", "length.mean"})  # fmt: skip
"""A row with none of these is no training step (a configuration, an evaluation, a summary)."""
PROVES_NOTHING_AT_ZERO: Final = ("policy.", "update.", "mismatch.", "mismatch_current.", "entropy.", "is_weight.")
"""Signals whose host writes 0 for what it does not compute: until they were once not 0 they are missing."""
_COMPILED: Final = tuple((re.compile(pattern), alias) for pattern, alias in PATTERNS)
_PREFIX: Final = re.compile(
    r"^(?:train|training|metrics|agent|(?:ppo_|grpo_)?actor(?:/update|/compute_logp)?|policy|episode)/"
)
_AVERAGED: Final = re.compile(r"^(?:mean|avg|average)[_/]|[_/](?:mean|avg|average)$")
_BARE: Final = frozenset({"trl", "ms-swift", "roll", "areal", "open-instruct", "tinker"})
"""Frameworks whose names stand behind one more prefix, depending on who logs them."""
_UNNAMED: Final = re.compile(r"[^A-Za-z0-9_./\-]+")


@lru_cache(maxsize=1 << 14)
def meaning(name: str, framework: str | None) -> Alias | None:
    """What a name means where `framework` speaks (None: nobody known). None for an unknown name."""
    if catalogue.find(name) is not None:
        return to(name)
    table = FRAMEWORKS.get(framework or "", {})
    bare = _PREFIX.sub("", name)
    for candidate in (name, bare) if framework in _BARE else (name,):
        if found := table.get(candidate):
            return found
    if framework is None and (agreed := _agreed(name)):
        return agreed
    for pattern, alias in _COMPILED:
        if pattern.fullmatch(name) or pattern.fullmatch(bare):
            return alias
    return GENERIC.get(general := _general(bare)) or GENERIC.get(_AVERAGED.sub("", general))


def _agreed(name: str) -> Alias | None:
    """What a name means where nobody is known to speak, and all who have the name mean the same by it."""
    found = [table[name] for table in FRAMEWORKS.values() if name in table]
    meanings = {msgspec.structs.replace(alias, note="") for alias in found}
    return found[0] if len(meanings) == 1 else None


def guess(names: Iterable[str]) -> str | None:
    """The framework whose table knows most of the names; None where no table knows two of them."""
    given = set(names)
    bare = {_PREFIX.sub("", name) for name in given}
    best, most = None, 1
    for framework, table in FRAMEWORKS.items():
        wanted = given | bare if framework in _BARE else given
        known = sum(name in table for name in wanted)
        if known > most:
            best, most = framework, known
    return best


def _general(name: str) -> str:
    return name.lower().replace(" ", "_")


def is_training(values: Mapping[str, float]) -> bool:
    """True for a row of training, in any framework's words."""
    return any(map(_is_vital, values))


@lru_cache(maxsize=1 << 14)
def _is_vital(name: str) -> bool:
    bare = _PREFIX.sub("", name)
    general = _general(bare)
    return name in VITAL or not VITAL_NAMES.isdisjoint((name, bare, general, _AVERAGED.sub("", general)))


NEVER_NAN: Final = frozenset(
    {"lr", "length.mean", "length.max", "length.truncated", "time.step_s", "reward.validation"}
)
"""Signals that no illness turns into NaN: where one is, an export (pandas, mostly) filled a hole."""


def has_holes(values: Mapping[str, float]) -> bool:
    """True for a row in which a NaN stands for a value that was not logged."""
    return any(math.isnan(value) and _is_never_nan(name) for name, value in values.items())


@lru_cache(maxsize=1 << 14)
def _is_never_nan(name: str) -> bool:
    found = [alias for framework in (None, *FRAMEWORKS) if (alias := meaning(name, framework)) is not None]
    return any(alias.signal in NEVER_NAN for alias in found)


VITAL_NAMES: Final = frozenset(
    name
    for table in (*FRAMEWORKS.values(), GENERIC)
    for name, alias in table.items()
    if alias.signal in VITAL
)  # fmt: skip


class Translator:
    """Translates the steps of one log. Memory is bounded by the number of names."""

    def __init__(self) -> None:
        self.framework: str | None = None
        self.used: dict[str, Alias] = {}
        """Name → meaning, for what was read."""
        self.untranslated: dict[str, str] = {}
        """Name → reason, for names that are known and cannot be read."""
        self._names: set[str] = set()
        self._ranks: dict[str, int] = {}
        self._alive: set[str] = set()
        self._withheld: set[str] = set()
        self._steps = 0

    @property
    def always_zero(self) -> list[str]:
        """Signals that were 0 throughout and were therefore taken as missing."""
        return sorted(self._withheld - self._alive)

    def translate(self, raw: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
        """(signal → value, signal → reason why it is missing). Unknown names stay, for a NaN in them is a finding."""
        self._learn(raw)
        values: dict[str, float] = {}
        ranks: dict[str, int] = {}
        for name, value in raw.items():
            alias = meaning(name, self.framework)
            if alias is None:
                if len(self._names) < MAX_HOST_NAMES or name in self._names:
                    values.setdefault(_own(name), value)
                continue
            if alias.signal is None:
                self.untranslated.setdefault(name, alias.note)
                if not math.isfinite(value) and not alias.may_be_nan:
                    values.setdefault(_own(name), value)
                continue
            rank = self._rank(name)
            if alias.signal in ranks and ranks[alias.signal] <= rank:
                continue
            ranks[alias.signal] = rank
            values[alias.signal] = alias.value(value)
            self.used.setdefault(name, alias)
        return values, self._without_dead(values)

    def _learn(self, raw: Mapping[str, float]) -> None:
        self._steps += 1
        new = [name for name in raw if name not in self._names]
        if new and len(self._names) < MAX_HOST_NAMES:
            self._names.update(new)
            if self._steps <= DECIDE_STEPS:
                self.framework = guess(self._names)

    def _rank(self, name: str) -> int:
        """Place of a name in its table: the first wins where several feed one signal."""
        rank = self._ranks.get(name)
        if rank is None:
            keys = [*FRAMEWORKS.get(self.framework or "", {}), *GENERIC]
            bare = _PREFIX.sub("", name)
            general = _general(bare)
            spellings = (name, bare, general, _AVERAGED.sub("", general))
            rank = next((i for i, key in enumerate(keys) if key in spellings), len(keys))
            self._ranks[name] = rank
        return rank

    def _without_dead(self, values: dict[str, float]) -> dict[str, str]:
        missing = {}
        for signal in [s for s in values if s.startswith(PROVES_NOTHING_AT_ZERO)]:
            if signal in self._alive:
                continue
            if values[signal] == 0.0:
                del values[signal]
                self._withheld.add(signal)
                missing[signal] = "detached" if signal.startswith("policy.") else "not_reported"
            else:
                self._alive.add(signal)
        return missing


def _own(name: str) -> str:
    """A host's own name made fit to be a signal's, so that it cannot be taken for one of ours."""
    return f"host.{_UNNAMED.sub('_', name)}"[: catalogue.MAX_NAME]
