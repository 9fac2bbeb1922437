"""The seed's real geometry (64 × 8 rows, 8 ranks, 2,048 + 12,288 tokens, 43,008 and 30,732): counting, no training.

``python -m lab.roll_onpolicy.geometry`` prints, for three laws of response length, what mixing groups does to the
advantages, how much a row weighs in the gradient under micro-batch normalisation, how many optimizer steps a rollout
takes, and how much of ``approxkl`` comes from truncated rows. Rewards and lengths are drawn (a pass rate ~ Beta(0.7,
0.7), harder prompts answered longer); the partition, the advantages and the weights are ``own_path``'s, equal to ROLL's
functions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lab.roll_onpolicy.own_path import OwnPath
from lab.roll_onpolicy.path import Rows, Settings

PROMPTS, GROUP, PROMPT, RESPONSE = 64, 8, 2048, 12288
SEED = Settings(ranks=8, round_to=128, budget_infer=43008, budget_train=30732)
LAWS = {"short": (900, 0.8, 0.02), "middle": (2500, 0.9, 0.08), "long": (5000, 0.8, 0.2)}
GRADIENT_ACCUMULATION = 64


def batch(law: str, seed: int) -> Rows:
    """512 rows; tokens are not needed and left zero."""
    median, spread, truncated = LAWS[law]
    rng = np.random.default_rng(seed)
    rate = np.repeat(rng.beta(0.7, 0.7, PROMPTS), GROUP)
    prompt = np.repeat(rng.integers(60, 400, PROMPTS), GROUP)
    length = np.exp(np.log(median) + spread * 0.6 * (1 - 2 * rate) + rng.normal(0, spread * 0.6, rate.size))
    length = np.clip(length, 8, RESPONSE).astype(int)
    length[rng.random(rate.size) < truncated * (1 - rate) * 2] = RESPONSE
    score = (rng.random(rate.size) < rate) & (length < RESPONSE)
    place = torch.arange(PROMPT + RESPONSE)[None]
    begin, end = torch.tensor(prompt)[:, None], torch.tensor(prompt + length)[:, None]
    attention = (place < end).float()
    response = ((place >= begin) & (place < end)).float()
    return Rows(torch.zeros(1, 1, dtype=torch.long), attention, response, torch.tensor(score).float(), RESPONSE)


def figures(law: str, seed: int) -> dict[str, float]:
    """One drawn batch."""
    rows, path = batch(law, seed), OwnPath()
    plain = replace(SEED, whiten=False)
    right, mixed = (path.advantages(rows, replace(plain, groups=g)) for g in ("ordered", "mixed"))
    kept = right.final_NT.sum(1) > 0
    a, b = (x.values_NT.amax(1) + x.values_NT.amin(1) for x in (right, mixed))  # one value a row
    silent = kept & (a.abs() < 1e-6)
    all_wrong = (rows.scores_N.view(-1, GROUP).sum(1) == 0).repeat_interleave(GROUP) & kept
    training = path.partition(rows, SEED.budget_train, SEED)
    sizes = torch.tensor([len(m.rows_B) for m in training[0]], dtype=torch.float64)
    weight = torch.zeros(PROMPTS * GROUP, dtype=torch.float64)
    for rank in training:
        for micro in rank:
            weight[micro.rows_B] = 1.0 / (len(training) * len(rank) * len(micro.rows_B))
    cut = rows.response_NS[:, 1:].sum(1) >= RESPONSE - 1
    return {
        "mixed groups": mixed.mixed, "correlation of the advantages": float(np.corrcoef(a[kept], b[kept])[0, 1]),
        "advantage mass on prompts without signal": float(b[silent].abs().sum() / b[kept].abs().sum()),
        "mean advantage of all-wrong prompts": float(b[all_wrong].mean()) if all_wrong.any() else float("nan"),
        "micro-batches a rank": float(len(sizes)), "optimizer steps": -(-len(sizes) // GRADIENT_ACCUMULATION),
        "heaviest row over lightest": float(sizes.max() / sizes.min()), "truncated rows": float(cut.float().mean()),
        "their weight in approxkl until 2026-02-04": float(weight[cut].sum()),
    }  # fmt: skip


def table(seeds: int = 4) -> dict[str, dict[str, float]]:
    """Means over drawn batches, by law."""
    result: dict[str, dict[str, float]] = {}
    for law in LAWS:
        drawn = [figures(law, seed) for seed in range(seeds)]
        result[law] = {name: float(np.nanmean([d[name] for d in drawn])) for name in drawn[0]}
    return result


def main() -> int:
    torch.set_num_threads(1)
    result: dict[str, Any] = table()
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
