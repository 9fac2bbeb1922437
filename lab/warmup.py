"""Supervised warm-up: from random weights to a policy that sorts right about four times in ten when it samples.

15 % of the target tokens are replaced by random ones, so the policy is unsure rather than ignorant: greedy decoding
is right nearly always, and the reinforcement learning that follows is mostly sharpening. A short clean warm-up to
the same reward made the RL too slow and noisy (LOG.md).
"""

import argparse
import fcntl
import os
from pathlib import Path

import torch
import torch.nn.functional as F

from .model import VOCABULARY, Weights, forward, initial_weights
from .task import RESPONSE_LENGTH, draw_prompts

STEPS, ROWS, NOISE, LEARNING_RATE = 400, 128, 0.15, 2e-3
RECIPE = f"v1-{STEPS}x{ROWS}-noise{NOISE}-lr{LEARNING_RATE}"


def cache_folder() -> Path:
    """`FORESHOCK_LAB_CACHE`, or ~/.cache/foreshock-lab."""
    return Path(os.environ.get("FORESHOCK_LAB_CACHE") or Path.home() / ".cache" / "foreshock-lab")


def warm_weights(seed: int) -> Weights:
    """The warm policy of a seed, from the cache where it is there; else about 20 s on one core, once.

    A process that finds another at work on the same seed waits for its result.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{RECIPE}-{seed}.pt"
    with (folder / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            torch.save(_train(seed), part)
            part.replace(path)
    weights: Weights = torch.load(path, weights_only=True)
    return weights


def _train(seed: int) -> Weights:
    weights = {name: w.requires_grad_() for name, w in initial_weights(seed).items()}
    optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed + 10**6)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
        prompts = draw_prompts(ROWS, generator)
        mask = (torch.arange(RESPONSE_LENGTH)[None] <= prompts.lengths_N[:, None]).float()
        replaced = torch.rand(prompts.targets_NR.shape, generator=generator) < NOISE
        random_tokens = torch.randint(0, 13, prompts.targets_NR.shape, generator=generator)
        labels = torch.where(replaced, random_tokens, prompts.targets_NR)
        logits = forward(weights, torch.cat([prompts.ids_NP, prompts.targets_NR], 1), RESPONSE_LENGTH)
        losses = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none")
        loss = (losses.view_as(mask) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: w.detach().clone() for name, w in weights.items()}


def main() -> None:
    """`python -m lab.warmup --seed 0 [--seed 1 …]`: fills the cache."""
    parser = argparse.ArgumentParser(description="Supervised warm-up of the lab's policy, cached.")
    parser.add_argument("--seed", type=int, action="append", required=True)
    torch.set_num_threads(1)
    for seed in parser.parse_args().seed:
        warm_weights(seed)
        print(f"seed {seed}: {cache_folder() / f'{RECIPE}-{seed}.pt'}")


if __name__ == "__main__":
    main()
