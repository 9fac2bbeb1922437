"""The ladder: one change at a time from an exactly consistent on-policy step. Each rung states its change and its size.

A rung's fields are the deviations from the baseline; the trainer (``train.py``) reads them and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.roll_onpolicy.policy import Numerics

EXACT = Numerics()


@dataclass(frozen=True)
class Rung:
    """One condition. Lags are optimizer steps; ``stale_share`` says which parameters of a stale pass are old."""

    name: str
    family: str  # numeric, mode, weights, rows, advantages, engine, together
    change: str
    seed_partitions: bool = False  # scoring at the seed's own budget; False: the training partition
    pad_scoring: bool = False  # scoring rows padded to the full length, as without dynamic batching
    scoring: Numerics = EXACT
    training: Numerics = EXACT
    stale_scoring: int = 0
    stale_training: int = 0
    stale_share: str = "all"  # all, half (the other rank's shard), rank1 (every parameter of one rank)
    frozen_after: int = -1  # no update reaches the model's parameters after this step
    normalisation: str = "global"
    groups: str = "ordered"
    mask_truncated: bool = True
    old_from: str = "scoring"  # previous (last step's tensor) or misordered (rows of the scoring partition's order)
    unfused: bool = False
    top_k: int = 0
    engine_lag: int = 0
    engine: Numerics = EXACT

    def in_bf16(self) -> Rung:
        """The same rung with every trainer pass in bfloat16 (the engine keeps its own numerics)."""
        both = (replace(n, bf16=True) for n in (self.scoring, self.training))
        scoring, training = both
        return replace(self, scoring=scoring, training=training, engine=replace(self.engine, bf16=True))


SPLIT = Numerics(split_k=True)
SEED_TRAINING = Numerics(split_k=True, recompute=True, noise=0.05)

BASELINE = Rung("identical", "numeric", "nothing: one partition, one mode, one set of weights in both passes")

LADDER: tuple[Rung, ...] = (
    BASELINE,
    Rung("other partition", "numeric", "scoring at the seed's 43,008 : 30,732 ratio, this CPU's kernels",
         seed_partitions=True),
    Rung("other partition, split-K", "numeric", "the same where a kernel's sum order follows its rows (emulated GPU)",
         seed_partitions=True, scoring=SPLIT, training=SPLIT),
    Rung("padding length", "numeric", "scoring rows padded to the full length", pad_scoring=True),
    Rung("recompute", "mode", "full activation recomputation in the training pass", training=Numerics(recompute=True)),
    Rung("unfused log-prob", "numeric", "scoring by the vocab-parallel kernel's arithmetic, training by log_softmax",
         unfused=True),
    Rung("bf16 logits in scoring", "numeric", "scoring logits rounded to bfloat16, training logits float32",
         scoring=Numerics(logits_bf16=True)),
    Rung("noise 0.05", "numeric", "noise of 0.05 on the training logits: about 7e-4, a large bfloat16 floor",
         training=Numerics(noise=0.05)),
    Rung("noise 0.2", "numeric", "noise of 0.2: sixteen times that", training=Numerics(noise=0.2)),
    Rung("noise 0.8", "numeric", "noise of 0.8: two hundred and fifty times that", training=Numerics(noise=0.8)),
    Rung("dropout 0.1", "mode", "dropout in the training pass (0 in Qwen2.5)", training=Numerics(dropout=0.1)),
    Rung("micro-batch normalisation", "advantages", "ROLL until 2026-02-04: each micro-batch averages its own rows",
         normalisation="micro_batch"),
    Rung("mixed groups", "advantages", "ROLL 2025-10-29 to 2026-02-04: groups of 8 length-neighbours",
         groups="mixed", seed_partitions=True),
    Rung("mixed groups, truncated kept", "advantages", "the same without max_len_mask: truncated rows stay in the loss",
         groups="mixed", seed_partitions=True, mask_truncated=False),
    Rung("stale scoring, lag 1", "weights", "old log-probs from the previous step's weights", stale_scoring=1),
    Rung("stale scoring, lag 8", "weights", "old log-probs from the weights of 8 steps ago", stale_scoring=8),
    Rung("stale half shard, lag 1", "weights", "training forward: the other rank's half of the buffer one step old",
         stale_training=1, stale_share="half"),
    Rung("stale rank, lag 1", "weights", "training forward: rank 1 one step old",
         stale_training=1, stale_share="rank1"),
    Rung("stale training, lag 1", "weights", "training forward: all parameters one step old", stale_training=1),
    Rung("stale half shard, lag 4", "weights", "training forward: half of the buffer four steps old",
         stale_training=4, stale_share="half"),
    Rung("stale training, lag 8", "weights", "training forward: all parameters eight steps old", stale_training=8),
    Rung("frozen parameters", "weights", "off-load with Megatron-core 0.14: the gather uses cached shards",
         frozen_after=1),
    Rung("old of another batch", "rows", "old log-probs are the previous step's tensor", old_from="previous"),
    Rung(
        "old log-probs zero",
        "rows",
        "the zeros that ROLL puts there when it means to reuse the current ones, read because sample_uuid is missing",
        old_from="zeros",
    ),
    Rung("rows misordered", "rows", "old log-probs left in the scoring partition's row order", old_from="misordered",
         seed_partitions=True),
    Rung("top-k sampling", "engine", "the sampler keeps top_k tokens, the trainer scores the full vocabulary", top_k=6),
    Rung("engine stale 4", "engine", "the rollout engine is 4 updates behind", engine_lag=4),
    Rung("bf16 engine", "engine", "the rollout engine rounds to bfloat16", engine=Numerics(bf16=True)),
    Rung("seed without fault", "together", "two partitions, split-K, noise 0.05, recomputation, top-k, bf16 engine, "
         "micro-batch normalisation", seed_partitions=True, scoring=SPLIT, training=SEED_TRAINING,
         top_k=6, engine=Numerics(bf16=True), normalisation="micro_batch"),
    Rung("seed with mixed groups", "together", "the same on the ROLL of the report: groups mixed as well",
         seed_partitions=True, scoring=SPLIT, training=SEED_TRAINING, top_k=6,
         engine=Numerics(bf16=True), normalisation="micro_batch", groups="mixed"),
)  # fmt: skip

#: what CI runs: one of each family that a minute allows
SMALL = ("identical", "other partition, split-K", "dropout 0.1", "mixed groups", "old of another batch")


#: what runs in bfloat16 as well: the numeric rungs, and those whose size the rounding may hide
IN_BF16 = (
    "identical", "other partition", "other partition, split-K", "padding length", "recompute", "unfused log-prob",
    "dropout 0.1", "mixed groups", "stale half shard, lag 1", "stale rank, lag 1", "seed without fault",
    "seed with mixed groups",
)  # fmt: skip


#: rungs that differ from the baseline by rounding at most: their runs repeat its course, so one seed is enough
ONE_SEED = (
    "other partition",
    "other partition, split-K",
    "padding length",
    "recompute",
    "unfused log-prob",
    "bf16 logits in scoring",
)


#: rungs that may crash, and the one they are judged by: five seeds in float32, so that "four of five" can be told
FIVE_SEEDS = (
    "identical", "mixed groups", "mixed groups, truncated kept", "stale training, lag 1", "stale training, lag 8",
    "old of another batch", "rows misordered", "seed without fault", "seed with mixed groups",
)  # fmt: skip


def named(name: str) -> Rung:
    """The rung of that name; KeyError lists the names."""
    for rung in LADDER:
        if rung.name == name:
            return rung
    raise KeyError(f"no rung {name!r}; there are {[r.name for r in LADDER]}")
