"""The envelope: what one client process posts to `/v1/ingest`, and the reply.

Time: no wall clock is trusted. An item carries `sealed_s`, its client's boot clock (`CLOCK_BOOTTIME`, seconds) when it
was sealed; the envelope carries `sent_s`, the same clock when it left. The service takes receipt − (sent_s − sealed_s)
as the event time. A client that adopts the spool of another boot leaves `sent_s` out: the age is then unknown.

Dedupe: `sequence` rises by at least one with every item of a client, over frames and notices alike (gaps are items
that the client dropped, and counted in `losses`). The service keeps the highest it stored and skips what is not above,
so an envelope may be repeated, split or merged differently after a crash and each item is still stored once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foreshock.stats.record import PairRecord
from foreshock.wire.commands import Command


class Semantics(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What a stream of log-probs means (SIGNALS.md, "Semantics travel with every log-prob").

    temperature, truncation, normaliser and penalties must match (or be converted) for two streams to be compared;
    engine, version, source and dtype stratify baselines and never forbid a comparison.
    """

    engine: str = "unknown"
    version: str = ""
    temperature: float | None = None
    """Temperature applied before the log-softmax; None: not said."""
    truncation: str = ""
    """`none`, or what was applied before normalising, as `top_k=100,top_p=0.9`; empty: not said."""
    normaliser: str = ""
    """`full_vocabulary` or `kept_set`; empty: not said."""
    penalties: str = ""
    source: str = ""
    """`decode` or `rescore`."""
    dtype: str = ""


class Frame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank saw of one step.

    `pairs` is keyed by pair name, or `<pair>@lag<n>` where tokens are split by version lag; each is a block of
    `foreshock.stats.packed`, or, as in wire version 1, the record's own fields. `scalars` holds the step's folded
    scalars. `missing` names signals that could not be computed, with the reason; zero is a measurement.
    """

    sequence: int
    step: int
    role: str
    rank: int
    sealed_s: float
    generation: int = 0
    """Completed rollbacks within this launch. (launch, generation) is an attempt; the service numbers them."""
    pairs: dict[str, bytes | PairRecord] = {}
    scalars: dict[str, float] = {}
    missing: dict[str, str] = {}
    semantics: dict[str, dict[str, Semantics]] = {}
    """pair → {"a": …, "b": …}; sent when first seen and when changed."""
    step_s: float | None = None


class Notice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened, in the same sequence as the frames.

    kinds: `started` {config, settings, capabilities, mode, controller} · `finished` {status, detail} ·
    `attempt` {reason, command} · `checkpoint` {path, step, scope, reward} ·
    `settings` {lr, batch, …: a baseline's new segment} ·
    `weights` {version, checksum, changed_share, side, ok} · `flush` {engine} · `note` {text}. Unknown kinds are stored.
    """

    sequence: int
    kind: str
    sealed_s: float
    generation: int = 0
    step: int | None = None
    role: str = ""
    rank: int = 0
    data: dict[str, Any] = {}


class Envelope(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One post of one client. All items belong to one run and one launch."""

    protocol: int
    client: str
    """UUID (hex) of the process, renewed after a fork."""
    sequence: int
    """The highest item sequence in this envelope; without items, the highest ever sent."""
    run: str
    launch: str
    """Same for all processes of one launch; see `foreshock.frames.identity`."""
    sdk: str = ""
    role: str = "trainer"
    rank: int = 0
    sent_s: float | None = None
    controller: bool = False
    expected_ranks: dict[str, int] | None = None
    """role → world size; None: the ranks seen in the last three steps."""
    losses: dict[str, int] = {}
    """Items lost so far, by reason, cumulative over the client's life."""
    frames: list[Frame] = []
    notices: list[Notice] = []


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to an envelope. `commands` is filled for the run's controller only."""

    acknowledged: int
    """Every item of this client up to this sequence is durable."""
    run_verdict: str = "unknown"
    attempt: int | None = None
    mode: str = "observe"
    commands: list[Command] = []
    warnings: list[str] = []
    """What was stored but flagged, in words: a step going backwards, a second claimant of a rank, an absurd clock."""
