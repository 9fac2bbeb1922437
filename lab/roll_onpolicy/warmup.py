"""Supervised warm-up of the policy, once a seed, kept in a cache folder outside the repository."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import torch

from lab.roll_onpolicy import policy, problems
from lab.roll_onpolicy.policy import Numerics, Weights

STEPS, ROWS, RATE, RIGHT = 700, 64, 4e-3, 0.6


def _folder() -> Path:
    root = os.environ.get("FORESHOCK_LAB_CACHE") or Path(tempfile.gettempdir()) / "foreshock-lab"
    return Path(root) / "roll_onpolicy"


def _key(seed: int, steps: int) -> str:
    sources = b"".join(Path(module.__file__ or "").read_bytes() for module in (policy, problems))
    return hashlib.sha256(sources + repr((seed, steps, ROWS, RATE, RIGHT)).encode()).hexdigest()[:16]


def warm_weights(seed: int, steps: int = STEPS) -> Weights:
    """Float32 weights of a policy that answers every second learnable problem. About 20 s the first time."""
    path = _folder() / f"{_key(seed, steps)}.pt"
    if path.exists():
        loaded: Weights = torch.load(path, weights_only=True)
        return loaded
    weights = {name: w.requires_grad_() for name, w in policy.initial_weights(seed).items()}
    optimizer = torch.optim.Adam(list(weights.values()), RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
        ids, mask = problems.demonstrations(ROWS, 10_000 * (seed + 1) + step, RIGHT)
        logits = policy.forward(weights, ids[:, :-1], Numerics())
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        optimizer.zero_grad()
        ((loss * mask[:, 1:]).sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    done = {name: w.detach().clone() for name, w in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save(done, temporary)
    temporary.replace(path)
    return done
