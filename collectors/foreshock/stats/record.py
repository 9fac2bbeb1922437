"""The mergeable state of one pair on one rank and step: what travels, and what every statistic is computed from.

A record holds counts, float64 sums, moments about their own mean, extremes and sketches; nothing in it is an average
of averages, so records of micro-batches, ranks and steps pool exactly (`merge`). δ = a − b, p = e^b, e = e^a − e^b;
a sequence value (`seq_*`) is the mean over that sequence's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

EVIDENCE_TOKENS = 16
DECILES = 10


@dataclass(frozen=True, slots=True)
class EvidenceToken:
    """One of the worst tokens by |a − b|: ids and positions, never text. `token` is −1 where the host gave no token
    ids."""

    sequence: int
    position: int
    token: int
    a: float
    b: float

    @property
    def delta(self) -> float:
        return self.a - self.b


class PairRecord(msgspec.Struct, array_like=True, kw_only=True):
    """Mergeable state of one pair. New fields are only appended, with defaults: old and new peers read each other.

    Empty lists stand for "no token yet". Everything but `masked`, `nonfinite` and `sentinels` is over the tokens
    left when those two are taken out.
    """

    masked: int = 0
    """tokens that the mask counts, whatever they hold"""
    tokens: int = 0
    nonfinite: int = 0
    sentinels: int = 0
    overflow: int = 0
    """tokens whose e^δ is beyond float32"""
    zeros: int = 0
    positives: int = 0
    tail: int = 0
    """tokens with |δ| > ln 2"""
    clip_tokens: int = 0
    """tokens that were observed together with a clip range"""
    clip_low: int = 0
    clip_high: int = 0
    sequences: int = 0
    seq_zeros: int = 0
    """sequences with δ ≡ 0"""
    split: int = 0
    """pieces of sequences that nobody could complete"""
    unplaced: int = 0
    """pieces whose tokens' positions within the response are unknown"""
    logp: list[float] = msgspec.field(default_factory=list)
    """mean b, mean δ, Σ(b−b̄)², Σ(b−b̄)(δ−δ̄), Σ(δ−δ̄)², Σ(δ−δ̄)³, Σ(δ−δ̄)⁴"""
    prob: list[float] = msgspec.field(default_factory=list)
    """mean p, mean e, Σ(p−p̄)², Σ(p−p̄)(e−ē), Σ(e−ē)²"""
    sums: list[float] = msgspec.field(default_factory=list)
    """Σ|δ|, Σ(e^δ−1−δ), Σe^δ, Σe^2δ, Σ|e|"""
    extremes: list[float] = msgspec.field(default_factory=list)
    """min δ, max δ, max |e|"""
    seq_sums: list[float] = msgspec.field(default_factory=list)
    """sums over sequences of the sequence means of δ, ½δ², e^δ−1−δ, |δ|; then the largest sequence mean of |δ|"""
    seq_weights: list[float] = msgspec.field(default_factory=list)
    """with W = Σ_t δ of a sequence: max W, Σe^{W−max}, Σe^{2(W−max)}"""
    first_tokens: int = 0
    first_abs: float = 0.0
    decile_tokens: list[int] = msgspec.field(default_factory=list)
    decile_abs: list[float] = msgspec.field(default_factory=list)
    abs_sketch: list[int] = msgspec.field(default_factory=list)
    """packed sketch (`sketch.pack`) of |δ|"""
    seq_abs_sketch: list[int] = msgspec.field(default_factory=list)
    """of the sequence means of |δ|"""
    seq_corr_sketch: list[int] = msgspec.field(default_factory=list)
    """of 1 − r, r the correlation of a and b within a sequence; sequences without a defined one are left out"""
    evidence_ids: list[int] = msgspec.field(default_factory=list)
    """sequence, position, token id of the worst tokens, flat"""
    evidence_logps: bytes = b""
    """their a and b, as little-endian float32"""
    missing: dict[str, str] = msgspec.field(default_factory=dict)
    """statistic → why it is missing; `*` stands for the whole pair"""

    def evidence(self) -> list[EvidenceToken]:
        """The worst tokens, worst first; a and b to float32 precision. Raises ValueError where ids and values do not
        match."""
        logps = np.frombuffer(self.evidence_logps, dtype="<f4").reshape(-1, 2).tolist()
        if len(self.evidence_ids) != 3 * len(logps):
            raise ValueError(f"{len(self.evidence_ids)} evidence ids do not fit {len(logps)} pairs of log-probs")
        ids = self.evidence_ids
        return [EvidenceToken(ids[3 * i], ids[3 * i + 1], ids[3 * i + 2], a, b) for i, (a, b) in enumerate(logps)]

    def set_evidence(self, tokens: list[EvidenceToken]) -> None:
        """Keeps the worst `EVIDENCE_TOKENS` of `tokens`, in an order that does not depend on theirs."""
        worst = sorted(tokens, key=lambda t: (-abs(t.delta), t.sequence, t.position, t.token, t.a))[:EVIDENCE_TOKENS]
        self.evidence_ids = [part for t in worst for part in (t.sequence, t.position, t.token)]
        self.evidence_logps = np.array([(t.a, t.b) for t in worst], dtype="<f4").tobytes()
