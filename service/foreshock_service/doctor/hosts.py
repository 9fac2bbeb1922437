"""Which hosts' configurations are known: one line each, and how a file is read and recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from foreshock_service.doctor import commandline, openrlhf, python_call, roll, slime, trl, verl
from foreshock_service.doctor.document import Document, UnreadableError, parse, text_of
from foreshock_service.doctor.finding import Finding
from foreshock_service.doctor.roll_version import RollVersion

SCRIPTS: Final = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")


class Host(NamedTuple):
    """A host: whether a document is its, what the document implies, and its mark for people."""

    name: str
    recognises: Callable[[Document], bool]
    examine: Callable[[Document, str | None], list[Finding]] | None
    """With the host's version, where given. None for ROLL, which has versions of its own kind."""
    mark: str


HOSTS: Final[tuple[Host, ...]] = (
    Host("roll", roll.recognises, None, "actor_train and actor_infer"),
    Host("verl", verl.recognises, verl.examine, "actor_rollout_ref"),
    Host("openrlhf", openrlhf.recognises, openrlhf.examine, "--vllm.num_engines, --rollout.batch_size"),
    Host("slime", slime.recognises, slime.examine, "--rollout-batch-size with --num-rollout"),
    Host("trl", trl.recognises, trl.examine, "num_generations, use_vllm, max_completion_length"),
)
"""In the order in which they are asked: the surest marks first."""


def read(path: Path) -> Document:
    """A YAML or JSON file, a start script, or a Python file with a GRPOConfig. Raises UnreadableError."""
    text = text_of(path)
    if path.suffix == ".py":
        return python_call.parse(text, str(path))
    if path.suffix in SCRIPTS or text.startswith("#!"):
        return commandline.parse(text, str(path))
    return parse(text, str(path))


def find(document: Document, path: Path, name: str | None) -> Host:
    """The host asked for, else the first that recognises the document. Raises UnreadableError where there is none."""
    for host in HOSTS:
        if host.name == name or (name is None and host.recognises(document)):
            return host
    if name is not None:
        raise UnreadableError(f"--host {name!r} is not known; known are {', '.join(h.name for h in HOSTS)}")
    marks = "; ".join(f"{host.name}: {host.mark}" for host in HOSTS)
    raise UnreadableError(f"{path} is no configuration that is known ({marks}); --host says whose it is")


def examine(host: Host, document: Document, version: str | None, roll_version: RollVersion) -> list[Finding]:
    """Everything that the document implies, worst first. Raises ValueError for a version that is none."""
    if host.examine is None:
        return roll.examine(document, roll_version)
    return host.examine(document, version)
