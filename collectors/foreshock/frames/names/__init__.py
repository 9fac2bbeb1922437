"""Each framework's names for our signals, with sign, unit and estimator: one file a framework, read from its own code.

Of two names for one signal the first in a table wins. docs/aliases.md is made of these tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from foreshock.frames.catalogue import SCALARS
from foreshock.frames.names import (
    areal,
    generic,
    ms_swift,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    roll,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from foreshock.frames.names.base import Alias, Table, no, to

GENERIC: Final = generic.TABLE
FRAMEWORKS: Final[Mapping[str, Table]] = {
    "trl": trl.TABLE,
    "verl": verl.TABLE,
    "roll": roll.TABLE,
    "slime": slime.TABLE,
    "nemo-rl": nemo_rl.TABLE,
    "openrlhf": openrlhf.TABLE,
    "skyrl": skyrl.TABLE,
    "areal": areal.TABLE,
    "ms-swift": ms_swift.TABLE,
    "prime-rl": prime_rl.TABLE,
    "open-instruct": open_instruct.TABLE,
    "tinker": tinker.TABLE,
}
"""In order of preference where the names fit several alike."""

PATTERNS: Final[tuple[tuple[str, Alias], ...]] = (
    (r"val-core/.+/(acc|reward)/mean@\d+", to("reward.validation", "verl's validation")),
    (r"val/test_score/.+", to("reward.validation", "verl's validation, older releases")),
    (r"eval/.+/(reward|score|accuracy|acc|pass@1|avg_score)", to("reward.validation")),
    (r"eval/(reward|score|accuracy|mean_reward|all/avg_score)", to("reward.validation")),
    (r"eval_rewards?/.+", Alias(None, "one of several evaluation rewards", may_be_nan=True)),
    (r"rewards/.+", Alias(None, "one of several reward functions; NaN where it does not apply", may_be_nan=True)),
    (r"critic/.+", no("of the critic")),
)
"""For every framework, after its table; the whole name must match."""


def scalars(framework: str, logged: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """What a framework logs of a step, under our names, for adapters in its process. Figures of pairs are left out:
    there they are measured. `without`: signals that the adapter measures itself."""
    found: dict[str, tuple[int, Any]] = {}
    for name, value in logged.items():
        place, alias = _known(framework, str(name))
        if alias is None or alias.signal is None or alias.signal not in SCALARS or alias.signal in without:
            continue
        if alias.signal not in found or place < found[alias.signal][0]:
            found[alias.signal] = place, alias.value(value)
    return {signal: value for signal, (_, value) in found.items()}


@lru_cache(maxsize=1 << 12)
def _known(framework: str, name: str) -> tuple[int, Alias | None]:
    """(place in the table, meaning) of a name as its framework logs it."""
    table = FRAMEWORKS[framework]
    if name in table:
        return list(table).index(name), table[name]
    for place, (pattern, alias) in enumerate(PATTERNS, start=len(table)):
        if re.fullmatch(pattern, name):
            return place, alias
    return -1, None
