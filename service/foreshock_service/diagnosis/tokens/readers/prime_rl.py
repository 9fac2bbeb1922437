"""prime-rl's token export, `token_exports/step_N/rank_R.jsonl` (`enable_token_export`, its schema version 1).

One line a sequence: `trainer_logprobs` are the training forward's, `inference_logprobs` the engine's; there are no old
ones. Its exporter writes null for a non-finite number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from foreshock.dumps.schema import VERSION, About
from foreshock_service.diagnosis.tokens.batches import Array, Batch, DumpError, StepKey, Unit

SUFFIX: Final = ".jsonl"
SCHEMA_VERSION: Final = 1
BATCH_TOKENS: Final = 1 << 17
_NAME = re.compile(r"rank_\d+\.jsonl$")


class Line(msgspec.Struct):
    """What is read of a line."""

    schema_version: int
    step: int
    rank: int
    micro_step: int
    token_ids: list[int]
    loss_mask: list[bool]
    trainer_logprobs: list[float | None]
    inference_logprobs: list[float | None]
    advantages: list[float | None] = []
    export_sequence_idx: int = 0


def units(path: Path) -> list[Unit]:
    """The file is one unit. Raises DumpError where its name is not the exporter's."""
    if not _NAME.search(path.name):
        raise DumpError(f"{path}: no token export of prime-rl (rank_R.jsonl)")
    return [Unit(path, "prime_rl")]


def read(unit: Unit) -> Iterator[Batch]:
    """Batches of whole sequences of one micro-step. Raises DumpError for a line that is none of the exporter's."""
    waiting: list[Line] = []
    for line in _lines(unit.path):
        full = sum(len(w.token_ids) for w in waiting) >= BATCH_TOKENS
        if waiting and (full or (line.step, line.micro_step) != (waiting[0].step, waiting[0].micro_step)):
            yield _batch(waiting)
            waiting = []
        waiting.append(line)
    if waiting:
        yield _batch(waiting)


def _lines(path: Path) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    line = decoder.decode(raw)
                except msgspec.MsgspecError as error:
                    if not raw.endswith(b"\n"):
                        return  # the exporter is still writing it
                    raise DumpError(f"{path}:{number}: no line of prime-rl's token export: {error}") from None
                if line.schema_version > SCHEMA_VERSION:
                    raise DumpError(f"{path}:{number}: schema version {line.schema_version} is not known")
                sizes = {len(line.token_ids), len(line.loss_mask), len(line.trainer_logprobs)}
                if len(sizes | {len(line.inference_logprobs)}) != 1:
                    raise DumpError(f"{path}:{number}: its columns differ in length")
                if line.token_ids:
                    yield line
    except OSError as error:
        raise DumpError(f"{path}: {error}") from None


def _batch(lines: list[Line]) -> Batch:
    def joined(name: str, kind: Any) -> Array:
        return np.concatenate([np.array(getattr(line, name), dtype=kind) for line in lines])

    columns = {
        "token": joined("token_ids", np.int64),
        "mask": joined("loss_mask", bool),
        "current": joined("trainer_logprobs", np.float32),
        "rollout": joined("inference_logprobs", np.float32),
    }
    if all(len(line.advantages) == len(line.token_ids) for line in lines):
        columns["advantage"] = joined("advantages", np.float32)
    lengths = np.array([len(line.token_ids) for line in lines])
    columns["sample"] = np.repeat(np.array([line.export_sequence_idx for line in lines]), lengths)
    first = lines[0]
    return Batch(
        key=StepKey("", 0, first.step), role="trainer", rank=first.rank, optimizer_step=0,
        edges=np.concatenate([[0], np.cumsum(lengths)]), columns=columns, about=About(version=VERSION),
    )  # fmt: skip
