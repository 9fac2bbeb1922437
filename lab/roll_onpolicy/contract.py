"""Compares our own trainer path with ROLL's functions on random batches: ``python -m lab.roll_onpolicy.contract HOME``.

Prints one JSON line with the largest difference of each part over the cases; exits 1 when a partition differs. Run in a
process of its own, for importing ROLL is global.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from lab.roll_onpolicy.own_path import OwnPath
from lab.roll_onpolicy.path import LossInput, Partition, Path, Rows, Settings
from lab.roll_onpolicy.rungs import named
from lab.roll_onpolicy.train import Plan, Run

PROMPT, RESPONSE, VOCAB = 4, 28, 32


def batch(seed: int, count: int, law: str) -> Rows:
    """Right-padded rows by a law of lengths: uniform, all equal, all truncated, length one, a few truncated."""
    draw = torch.Generator().manual_seed(seed)
    length = {
        "uniform": torch.randint(1, RESPONSE + 1, (count,), generator=draw),
        "equal": torch.full((count,), RESPONSE // 2),
        "truncated": torch.full((count,), RESPONSE),
        "one": torch.ones(count, dtype=torch.long),
        "mixture": torch.where(torch.rand(count, generator=draw) < 0.2, RESPONSE,
                               torch.randint(1, 9, (count,), generator=draw)),
    }[law]  # fmt: skip
    prompt = torch.randint(1, PROMPT + 1, (count // 8,), generator=draw).repeat_interleave(8)
    place = torch.arange(PROMPT + RESPONSE)[None]
    attention = (place < (prompt + length)[:, None]).float()
    response = attention * (place >= prompt[:, None])
    ids = torch.randint(2, VOCAB, attention.shape, generator=draw) * attention.long()
    return Rows(ids, attention, response, (torch.rand(count, generator=draw) < 0.5).float(), RESPONSE)


def same_partition(a: Partition, b: Partition) -> bool:
    flat = [[(m.rows_B.tolist(), m.length) for rank in p for m in rank] for p in (a, b)]
    return flat[0] == flat[1]


def losses(
    path: Path, rows: Rows, partition: Partition, settings: Settings, seed: int
) -> tuple[float, float, torch.Tensor]:
    """(loss, approxkl, gradient of a shared table of logits) of one step, as the trainer accumulates it."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, VOCAB, generator=draw).requires_grad_()
    advantages = path.advantages(rows, settings)
    total, approxkl, ranks = torch.zeros(()), 0.0, len(partition)
    for rank in partition:
        for micro in rank:
            at, length = micro.rows_B, micro.length
            logits = table[rows.ids_NS[at, :length]] + 0.0
            response = rows.response_NS[at, :length]
            old = OwnPath().log_probs(logits, rows.ids_NS[at, :length], response).detach()
            old = old + 0.1 * torch.randn(old.shape, generator=draw) * response[:, 1:]
            part = LossInput(
                logits, rows.ids_NS[at, :length], response, old, advantages.values_NT[at, : length - 1],
                advantages.final_NT[at, : length - 1], rows.scores_N.numel(), int(rows.response_NS[:, 1:].sum()),
                int((advantages.final_NT.sum(1) > 0).sum()), len(rank), ranks,
            )  # fmt: skip
            out = path.loss(part, settings)
            total = total + out.loss / len(rank) / ranks
            approxkl += out.approxkl if settings.normalisation == "global" else out.approxkl / len(rank) / ranks
    total.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return float(total.detach()), approxkl, table.grad


def trajectory(real: Any) -> dict[str, Any]:
    """Four steps of training on either path: equal rollouts, and the largest difference of the gradient norm."""
    name = "mixed groups" if real.groups == "mixed" else "other partition"
    rung = replace(named(name), normalisation=real.normalisation)
    plan = Plan(steps=4, prompts=8, warm_steps=120)
    mine, theirs = (Run(rung, path, 0, plan).run() for path in (OwnPath(), real))
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "equal_rollouts": all(a["reward_all"] == b["reward_all"] and a["length"] == b["length"] for a, b in pairs),
        "grad_norm": max(abs(a["grad_norm"] - b["grad_norm"]) for a, b in pairs),
    }


def compare(home: str) -> dict[str, object]:
    """Largest differences over 30 cases, and what the source is."""
    from lab.roll_onpolicy.real_path import RealPath

    real, own = RealPath(home), OwnPath()
    worst = {"advantages": 0.0, "final_mask": 0.0, "loss": 0.0, "approxkl": 0.0, "gradient": 0.0, "log_probs": 0.0}
    cases = partitions = 0
    mixed: list[float] = []
    for seed, law in enumerate(["uniform", "equal", "truncated", "one", "mixture"] * 6):
        base = Settings(ranks=(1, 2, 4)[seed % 3], budget_infer=200, budget_train=120)
        settings = replace(base, normalisation=real.normalisation, groups=real.groups)
        rows = batch(seed, 32, law)
        both = [path.partition(rows, budget, settings) for budget in (200, 120) for path in (own, real)]
        partitions += (not same_partition(both[0], both[1])) + (not same_partition(both[2], both[3]))
        a, b = own.advantages(rows, settings), real.advantages(rows, settings)
        mixed.append(b.mixed)
        worst["advantages"] = max(worst["advantages"], float((a.values_NT - b.values_NT).abs().max()))
        worst["final_mask"] = max(worst["final_mask"], float((a.final_NT - b.final_NT).abs().max()))
        logits = torch.randn(4, PROMPT + RESPONSE, VOCAB, generator=torch.Generator().manual_seed(seed))
        scored = [p.log_probs(logits, rows.ids_NS[:4], rows.response_NS[:4]) for p in (own, real)]
        worst["log_probs"] = max(worst["log_probs"], float((scored[0] - scored[1]).abs().max()))
        mine = losses(own, rows, both[2], settings, seed)
        theirs = losses(real, rows, both[2], settings, seed)
        worst["loss"] = max(worst["loss"], abs(mine[0] - theirs[0]))
        worst["approxkl"] = max(worst["approxkl"], abs(mine[1] - theirs[1]))
        worst["gradient"] = max(worst["gradient"], float((mine[2] - theirs[2]).abs().max()))
        cases += 1
    raw = torch.randn(1, 8, VOCAB, generator=torch.Generator().manual_seed(0))
    kept = raw.clone()
    extra = (False,) if real.normalisation == "global" else ()
    real.source.log_probs(raw, torch.zeros(1, 8, dtype=torch.long), *extra)
    return {
        "cases": cases, "partitions_that_differ": partitions, "worst": worst, "normalisation": real.normalisation,
        "float32_logits_overwritten": not torch.equal(raw, kept), "groups": real.groups, "trajectory": trajectory(real),
        "mixed": max(mixed), "placeholders": real.source.placeholders,
    }  # fmt: skip


def main() -> int:
    torch.set_num_threads(1)
    result = compare(sys.argv[1])
    print(json.dumps(result))
    return 1 if result["partitions_that_differ"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
