"""Token evidence as readings: further ones for the known causes, and the causes that only tokens can name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from foreshock_service.diagnosis.causes import ANY, CAUSES, Cause, Reading, above, below, hint
from foreshock_service.diagnosis.figures import Figures
from foreshock_service.diagnosis.tokens.inspect import CHUNKS, Sums
from foreshock_service.diagnosis.tokens.rows import Fit
from foreshock_service.rules.interface import Edge

EVERY: Final[frozenset[Edge | None]] = ANY | {None}
HARMLESS: Final = frozenset({"numeric_noise", "length_confounding"})
"""Causes that are no fault."""
ENOUGH: Final = 30
"""Tokens or rows below which a share says nothing."""
FEW: Final = 10


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the ill steps' tokens say of one pair. None where it cannot be told."""

    moved_share: float | None
    """rows whose log-probs fit another row, of those that can be told apart"""
    earlier_share: float | None
    """… of those that moved, the share that fits a row of the step before"""
    shifted_share: float | None
    one_token: float | None
    """largest share of Σδ² that one token id carries, over its share of the tokens, where that share is half or more"""
    worst_token: int | None
    token_share: float | None
    """its share of Σδ²"""
    one_rank: float | None
    """worst rank's mean |δ| over the median of the others"""
    worst_rank: str | None
    chunk: int | None
    """the chunk size at whose multiples |δ| stands out most"""
    chunk_ratio: float | None
    first_ratio: float | None
    """mean |δ| of first tokens over that of all"""
    last_ratio: float | None
    positive: float | None
    """share of the tokens with a sign that have δ > 0"""
    unlikely: float | None
    """share of tokens that side b gave less than one in a thousand"""
    lag_growth: float | None
    """mean |δ| at the largest version lag over that at the smallest"""
    mixed_groups: float | None
    """share of advantage groups that hold more than one prompt"""
    uncentred_groups: float | None
    """share of advantage groups whose advantages do not sum to zero"""


def gather(sums: Sums, ranks: Mapping[str, Sequence[float]], rows: Fit) -> Evidence:
    """The evidence in the sums of the ill steps; `ranks` are tokens, Σ|δ|, Σδ² by rank."""
    chunk, chunk_ratio = _chunk(sums)
    token, share, excess = _token(sums)
    rank, one_rank = _rank(ranks)
    signed = sums.signs[0] + sums.signs[1]
    everything = sums.ends[2]
    means = {lag: s[1] / s[0] for lag, s in sums.lags.items() if lag >= 0 and s[0] >= ENOUGH}
    return Evidence(
        moved_share=rows.moved / rows.tellable if rows.tellable >= FEW else None,
        earlier_share=rows.earlier / rows.moved if rows.moved else None,
        shifted_share=rows.shifted / rows.rows if rows.rows >= FEW else None,
        one_token=excess,
        worst_token=token,
        token_share=share,
        one_rank=one_rank,
        worst_rank=rank,
        chunk=chunk,
        chunk_ratio=chunk_ratio,
        first_ratio=_ratio(sums.ends[0], everything),
        last_ratio=_ratio(sums.ends[1], everything),
        positive=float(sums.signs[0] / signed) if signed >= ENOUGH else None,
        unlikely=float(sums.signs[2] / everything[0]) if everything[0] >= 1000 else None,
        lag_growth=means[max(means)] / means[min(means)] if len(means) > 1 and means[min(means)] > 0 else None,
        mixed_groups=_mixed(sums),
        uncentred_groups=_uncentred(sums),
    )


def causes(e: Evidence) -> tuple[Cause, ...]:
    """The known causes with the tokens' readings beside the statistics', then those that only tokens can name."""
    further = _further(e)
    known = tuple(
        msgspec.structs.replace(cause, read=_joined(cause.read, further[cause.name]))
        if cause.name in further
        else cause
        for cause in CAUSES
    )
    return known + _own(e)


def _joined(
    read: Callable[[Figures], Sequence[Reading]], more: Sequence[Reading]
) -> Callable[[Figures], Sequence[Reading]]:
    return lambda figures: [*read(figures), *more]


def _further(e: Evidence) -> dict[str, list[Reading]]:
    return {
        "misaligned_rows": [
            above("share of rows whose log-probs fit another row better than their own", e.moved_share, 0.2, 4.0),
            hint(above("… most of them a row of the step before", e.earlier_share, 0.5, 0.5)),
        ],
        "shifted_labels": [
            hint(above("share of rows that fit their own row one place further", e.shifted_share, 0.3, 4.0)),
            hint(below("no row fits another one", e.moved_share, 0.05, 1.0)),
        ],
        "special_tokens": [
            above("one token id's share of Σδ² over its share of the tokens", e.one_token, 5.0, 3.0, veto=True),
        ],
        "stale_kv_cache": [above("first tokens over all, by tokens", e.first_ratio, 2.0, 1.0)],
        "stale_engine_weights": [hint(above("mean |δ| grows with the version lag", e.lag_growth, 1.5, 2.0))],
        "truncation": [
            _one_sided(e, 2.0),
            hint(below("share of tokens less likely than one in a thousand: the tail is cut", e.unlikely, 0.0, 1.0)),
        ],
    }


def _one_sided(e: Evidence, weight: float) -> Reading:
    lopsided = None if e.positive is None else max(e.positive, 1.0 - e.positive)
    return above("share of the differences of one sign, beyond rounding", lopsided, 0.98, weight)


def _own(e: Evidence) -> tuple[Cause, ...]:
    """Those of which something is known."""
    found = []
    if e.one_rank is not None:
        rank = above(f"mean |δ| of {e.worst_rank} over the median of the other ranks", e.one_rank, 5.0, 3.0, veto=True)
        found.append(
            Cause(
                name="one_rank", title=f"One rank alone disagrees: {e.worst_rank}", edges=EVERY, read=lambda _: [rank],
                decided_by=("weights.checksum of that rank", "the same rows scored on another rank"),
            )
        )  # fmt: skip
    if e.chunk is not None:
        chunk = above(f"mean |δ| at multiples of {e.chunk} tokens over the rest", e.chunk_ratio, 3.0, 3.0, veto=True)
        found.append(
            Cause(
                name="chunk_boundaries", title=f"Tokens at the boundaries of chunks of {e.chunk} are off", edges=EVERY,
                read=lambda _: [chunk],
                decided_by=("the chunk size of the log-prob kernel, of chunked prefill or of context parallelism",),
            )
        )  # fmt: skip
    if e.mixed_groups is not None:
        mixed = [
            above("share of advantage groups with several prompts", e.mixed_groups, 1e-9, 3.0, veto=True),
            hint(above("share of groups whose advantages do not sum to zero", e.uncentred_groups, 0.1, 0.5)),
        ]
        found.append(
            Cause(
                name="mixed_groups", title="Advantage groups hold answers to more than one prompt", edges=EVERY,
                read=lambda _: mixed, decided_by=("the group ids beside the prompts",),
            )
        )  # fmt: skip
    return tuple(found)


def _ratio(part: Sequence[float], whole: Sequence[float]) -> float | None:
    if part[0] < FEW or not whole[1]:
        return None
    return float(part[1] / part[0] / (whole[1] / whole[0]))


def _chunk(sums: Sums) -> tuple[int | None, float | None]:
    """The smallest size whose multiples stand out nearly as far as any: multiples of 512 are multiples of 256 too."""
    everything = sums.ends[2]
    ratios: dict[int, float] = {}
    for size, at in zip(CHUNKS, sums.chunks, strict=True):
        rest = everything[:2] - at[:2]
        if at[0] >= ENOUGH and rest[0] >= ENOUGH and rest[1] > 0:
            ratios[size] = float(at[1] / at[0] / (rest[1] / rest[0]))
    if not ratios:
        return None, None
    best = max(ratios, key=lambda size: (ratios[size], -size))
    return best, ratios[best]


def _token(sums: Sums) -> tuple[int | None, float | None, float | None]:
    """Worst token id, its share of Σδ², and that over its share of the tokens (0 where it carries less than half)."""
    known = sums.token_ids >= 0
    table = sums.token_sums[known]
    if not table.size or table[:, 2].sum() <= 0 or table[:, 0].sum() < ENOUGH:
        return None, None, None
    worst = int(np.argmax(table[:, 2]))
    share = float(table[worst, 2] / table[:, 2].sum())
    excess = share / float(table[worst, 0] / table[:, 0].sum()) if share >= 0.5 else 0.0
    return int(sums.token_ids[known][worst]), share, excess


def _rank(ranks: Mapping[str, Sequence[float]]) -> tuple[str | None, float | None]:
    means = {rank: sums[1] / sums[0] for rank, sums in ranks.items() if sums[0] >= ENOUGH}
    if len(means) < 2:
        return None, None
    worst = max(means, key=lambda rank: means[rank])
    others = float(np.median([mean for rank, mean in means.items() if rank != worst]))
    return worst, means[worst] / max(others, 1e-12)


def _mixed(sums: Sums) -> float | None:
    known = [g for g in sums.groups.values() if g.prompts]
    return sum(len(g.prompts) > 1 for g in known) / len(known) if known else None


def _uncentred(sums: Sums) -> float | None:
    """|Σ advantage| against what chance signs would give; groups of one, or without spread, tell nothing."""
    known = [g for g in sums.groups.values() if g.sequences > 1 and g.squares > 1e-12]
    if len(known) < FEW:
        return None
    off = [abs(g.advantage) > 0.1 * math.sqrt(g.sequences * g.squares) for g in known]
    return sum(off) / len(off)
