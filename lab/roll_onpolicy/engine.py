"""The rollout engine's part: sample responses from its own copy of the weights and return its own log-probs.

Shapes: N rows, R response positions. The log-probs are over the full vocabulary at temperature 1, as sglang's are,
whatever ``top_k`` the sampler used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.roll_onpolicy import policy
from lab.roll_onpolicy.policy import Cache, Numerics, Weights
from lab.roll_onpolicy.problems import END, PAD, PROMPT, RESPONSE, Problems


@dataclass(frozen=True)
class Rollout:
    """Right-padded rows as ROLL's ``postprocess_generate`` leaves them, and the engine's log-probs (0 off the mask)."""

    ids_NS: Tensor
    response_mask_NS: Tensor
    length_N: Tensor
    ended_N: Tensor
    logp_NT: Tensor  # T = S − 1, position t scores token t + 1


@torch.no_grad()
def generate(weights: Weights, problems: Problems, draw: torch.Generator, numerics: Numerics, top_k: int) -> Rollout:
    """One response a row; ``top_k`` 0 samples the full vocabulary."""
    held = policy.as_numerics(weights, numerics)
    rows = problems.ids_NP.shape[0]
    ids = torch.full((rows, PROMPT + RESPONSE), PAD)
    ids[:, :PROMPT] = problems.ids_NP
    logp = torch.zeros(rows, PROMPT + RESPONSE - 1)
    mask = torch.zeros(rows, PROMPT + RESPONSE)
    alive = torch.ones(rows, dtype=torch.bool)
    cache = Cache([], [])
    at = torch.arange(rows)  # the rows still in the cache: finished ones leave it in batches
    logits = policy.forward(held, ids[:, :PROMPT], numerics, cache)[:, -1]
    for place in range(PROMPT, PROMPT + RESPONSE):
        scored = torch.log_softmax(logits, -1)
        kept = scored
        if top_k:
            floor = scored.topk(top_k, -1).values[:, -1:]
            kept = scored.masked_fill(scored < floor, float("-inf"))
        token = torch.multinomial(torch.softmax(kept, -1), 1, generator=draw)[:, 0]
        going = alive[at]
        ids[at, place] = torch.where(going, token, PAD)
        logp[at, place - 1] = torch.where(going, scored.gather(1, token[:, None])[:, 0], 0.0)
        mask[at, place] = going.float()
        alive[at] = going & (token != END)
        if not alive.any():
            break
        if alive.sum() < 0.7 * len(at):
            keep = alive[at]
            at = at[keep]
            cache.keys, cache.values = [k[keep] for k in cache.keys], [v[keep] for v in cache.values]
        logits = policy.forward(held, ids[at, place : place + 1], numerics, cache, place)[:, -1]
    length = mask.sum(1).long()
    return Rollout(ids, mask, length, ~alive, logp)
