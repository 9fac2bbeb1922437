"""Checkpoints that restore a run to the bit: weights, optimizer, schedule, random state and data position."""

import pickle
from dataclasses import asdict
from pathlib import Path

import torch

from .trainer import Schedule, Trainer

#: What a checkpoint holds, in the words of the wire.
SCOPE = ("weights", "optimizer", "scheduler", "rng", "data")


class CheckpointError(Exception):
    """The file is absent, unreadable or not a checkpoint of this lab."""


def save(trainer: Trainer, folder: Path, step: int) -> Path:
    """Writes the state after `step`; the file appears whole or not at all. About 1.2 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:05d}.pt"
    part = path.with_suffix(".part")
    torch.save(
        {
            "step": step,
            "weights": {name: w.detach().clone() for name, w in trainer.parameters.master.items()},
            "optimizer": trainer.parameters.optimizer.state_dict(),
            "schedule": asdict(trainer.schedule),
            "generator": trainer.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "data_position": trainer.data_position,
            "version": trainer.version,
        },
        part,
    )
    part.replace(path)
    return path


def restore(trainer: Trainer, path: Path) -> int:
    """Puts the trainer back to the checkpoint and returns its step. Raises CheckpointError, with nothing changed.

    The weight version moves on rather than back: version 40 of one attempt is not version 40 of the next.
    """
    try:
        state = torch.load(path, weights_only=True)
        step, weights = int(state["step"]), state["weights"]
        schedule = Schedule(**state["schedule"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot restore {path}: {error}") from error
    master = trainer.parameters.master
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in master.items()}:
        raise CheckpointError(f"cannot restore {path}: its tensors are not this model's")
    trainer.parameters.rebuild_references()
    for name, weight in weights.items():
        master[name].copy_(weight)
    trainer.parameters.optimizer.load_state_dict(state["optimizer"])
    trainer.schedule = schedule
    trainer.generator.set_state(state["generator"])
    torch.set_rng_state(state["torch_rng"])
    trainer.data_position = int(state["data_position"])
    trainer.version += 1
    trainer.parameters.gather()
    return step
