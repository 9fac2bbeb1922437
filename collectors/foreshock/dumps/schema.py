"""The dump format: one row a token and observation, its columns and what a file says of itself. docs/dumps.md shows it.

A pair needs no column of its own: it follows from which log-probs a row holds (`PAIR_SIDES`), so that a row which holds
all of them belongs to every pair. Files of version 1 promise that a sequence's tokens stand together, in order, and in
one row group.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

VERSION: Final = 1
METADATA_KEY: Final = b"foreshock.dump"
SUFFIX: Final = ".parquet"
PART_SUFFIX: Final = ".part"
"""Of a file that is being written; readers pass it by."""


class Column(msgspec.Struct, frozen=True):
    """One column: its Arrow type by name, and its sentence. All but `required` ones may be null or absent."""

    name: str
    type: str
    sentence: str
    required: bool = False


COLUMNS: Final[tuple[Column, ...]] = (
    Column("run", "text", "`project/name`."),
    Column("launch", "text", "Launch id: with `generation` it is an attempt."),
    Column("generation", "int32", "Attempts begun in this launch, beside the first."),
    Column("attempt", "int32", "The service's number of the attempt, where this process knew it."),
    Column("step", "int64", "Step, as in `end_step`.", True),
    Column("role", "text", "trainer, rollout or driver."),
    Column("rank", "int32", "Rank of the process within its role.", True),
    Column("optimizer_step", "int32", "Optimizer step within the rollout; 0 is the first.", True),
    Column("batch", "int32", "Number of the observation within the step: one micro-batch of one pair.", True),
    Column("row", "int32", "Row of the micro-batch: one sequence.", True),
    Column("sample", "int64", "The host's id of the sequence."),
    Column("group", "int64", "Advantage group of the sequence."),
    Column("prompt", "int64", "Prompt of the sequence."),
    Column("column", "int32", "Place of the token in the host's row."),
    Column("position", "int32", "Place among the sampled tokens of its response, from 0; null where masked out."),
    Column("token", "int64", "Token id."),
    Column("mask", "bool", "Whether the token counts.", True),
    Column("current", "float32", "Log-prob of the training forward."),
    Column("old", "float32", "Old log-prob: the trainer's scoring pass."),
    Column("rollout", "float32", "Log-prob that the engine told."),
    Column("reference", "float32", "Log-prob of the frozen reference model."),
    Column("advantage", "float32", "Advantage of the token."),
    Column("version_lag", "int32", "Weight versions that the engine was behind when it sampled the token."),
    Column("old_source", "text", "What `old` is (SIGNALS.md): only `same_weights` makes `policy` comparable."),
    Column("clip_low", "float64", "Lower bound of the ratio, where the host clips."),
    Column("clip_high", "float64", "Upper bound of the ratio."),
    Column("piece", "bool", "The row is a part of a sequence (context parallelism)."),
)
LOG_PROBS: Final = ("current", "old", "rollout", "reference")
PAIR_SIDES: Final[dict[str, tuple[str, str]]] = {
    "policy": ("current", "old"),
    "update": ("current", "old"),
    "mismatch": ("old", "rollout"),
    "mismatch_current": ("current", "rollout"),
    "reference": ("reference", "current"),
}
"""Pair → the columns of its sides a and b. `update` are rows of later optimizer steps; those hold no other pair."""


class About(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a file says of itself, as JSON under `foreshock.dump` in the Parquet metadata."""

    version: int
    run: str = ""
    sdk: str = ""
    reason: str = ""
    """`sampled`, `incident`, `asked` or `crashed`."""
    verdict: str = ""
    """Of the service, where that is why."""
    config: dict[str, Any] = {}
    """The host's configuration as told at `init`, secrets redacted."""
    semantics: dict[str, dict[str, Any]] = {}
    """pair → {"a": …, "b": …}."""


def arrow_schema(about: About) -> Any:
    """The pyarrow schema of a file. Raises ImportError without pyarrow."""
    import pyarrow as pa

    types = {
        "text": pa.dictionary(pa.int32(), pa.string()), "int32": pa.int32(), "int64": pa.int64(), "bool": pa.bool_(),
        "float32": pa.float32(), "float64": pa.float64(),
    }  # fmt: skip
    fields = [pa.field(c.name, types[c.type], nullable=not c.required) for c in COLUMNS]
    return pa.schema(fields, metadata={METADATA_KEY: msgspec.json.encode(about)})
