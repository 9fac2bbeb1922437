"""What ROLL did when: the behaviours that decide findings, by version, commit date or the source itself.

Each date is the day the change became public in alibaba/ROLL (2025-10-29 cec5234a, 2025-12-08 v0.1.3, 2026-02-04
v0.2.0 3077befc). A source tree is read, never imported: by what its code says, so that forks count for what they are.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TAGS: Final = {
    "v0.1.0": "2025-09-01", "v0.1.1": "2025-10-23", "v0.1.3": "2025-12-08", "v0.2.0": "2026-02-04",
    "v0.2.1": "2026-03-09", "v0.3.0": "2026-06-18",
}  # fmt: skip
FLASH: Final = dt.date(2025, 10, 29)
"""Dynamic batching in the RLVR pipeline."""
REUSE: Final = dt.date(2025, 12, 8)
"""The old log-prob may be the detached current one."""
V020: Final = dt.date(2026, 2, 4)
"""Groups kept whole, global normalisation, cleared shard caches, `logprobs` a setting, train_infer_correction."""


@dataclass(frozen=True)
class RollVersion:
    """True, False, or None where the version is not known. `name` says how it was found."""

    name: str
    mixes_groups: bool | None = None
    micro_batch_mean: bool | None = None
    reuses_old: bool | None = None
    clears_shards: bool | None = None
    logprobs_setting: bool | None = None
    correction: bool | None = None


UNKNOWN_VERSION: Final = RollVersion("version not given")


def by_date(day: dt.date, name: str) -> RollVersion:
    """What upstream's main branch did on a day."""
    after = day >= V020
    return RollVersion(
        name,
        mixes_groups=FLASH <= day < V020,
        micro_batch_mean=not after,
        reuses_old=day >= REUSE,
        clears_shards=after,
        logprobs_setting=after,
        correction=after,
    )


def by_tag(tag: str) -> RollVersion:
    """A released version, as `v0.2.0` or `0.2.0`. Raises ValueError for one that is not known."""
    key = tag if tag.startswith("v") else f"v{tag}"
    if key not in TAGS:
        raise ValueError(f"ROLL {tag!r} is not known; known are {', '.join(TAGS)}; or give --roll-commit-date")
    return by_date(dt.date.fromisoformat(TAGS[key]), f"ROLL {key}")


def by_source(home: Path) -> RollVersion:
    """A checkout, by what its code says. Raises ValueError where it is none."""
    pipeline = _text(home / "roll/pipeline/rlvr/rlvr_pipeline.py")
    if not pipeline:
        raise ValueError(f"{home} is no ROLL checkout: roll/pipeline/rlvr/rlvr_pipeline.py is missing")
    numbered = pipeline.find('"prompt_id"] = torch.arange')
    return RollVersion(
        f"ROLL at {home.name}",
        mixes_groups="dynamic_batching_shard" in pipeline and numbered > pipeline.find("dynamic_batching_shard(") >= 0,
        micro_batch_mean="global_valid_samples" not in _text(home / "roll/utils/functionals.py"),
        reuses_old="get_old_log_probs_with_cache" in _text(home / "roll/pipeline/base_worker.py"),
        clears_shards="cached_param_buffer_shard_list"
        in _text(home / "roll/distributed/strategy/megatron_strategy.py"),
        logprobs_setting="logprobs:" in _text(home / "roll/configs/generating_args.py"),
        correction="train_infer_correction" in _text(home / "roll/configs/base_config.py"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
