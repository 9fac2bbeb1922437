"""Each framework's names for our signals, with sign, unit and estimator: one file a framework, read from its own code.

Of two names for one signal the first in a table wins. docs/aliases.md is made of these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreshock_service.check.names import (
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
from foreshock_service.check.names.base import Alias, Table, no, to

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
