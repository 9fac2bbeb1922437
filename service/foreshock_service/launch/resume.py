"""How each host is told to go on from a checkpoint: its own options, put into the command that starts it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

import msgspec

FIELDS: Final = ("checkpoint", "directory", "step")
"""What a template may hold: the announced path · its folder, where the host wants that · the step."""


class Host(msgspec.Struct, frozen=True):
    """`words`: what its command holds (regular expressions, all of them). Without a template it reads the
    environment."""

    name: str
    template: tuple[str, ...]
    words: tuple[str, ...]
    sentence: str


HOSTS: Final[dict[str, Host]] = {
    host.name: host
    for host in (
        Host(
            "trl", ("--resume_from_checkpoint", "{checkpoint}"), (r"(^|/)trl$",),
            "`trl grpo …`, and scripts that call `trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)`.",
        ),
        Host(
            "hf", ("--resume_from_checkpoint", "{checkpoint}"), (),
            "any script on `TrainingArguments`, with the same call.",
        ),
        Host(
            "verl", ("trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"),
            (r"^verl\.trainer\.",),
            "`python -m verl.trainer.main_ppo …`; the path is a `global_step_N` folder.",
        ),
        Host(
            "megatron", ("--load", "{directory}", "--ckpt-step", "{step}"), (r"(^|/)pretrain_\w+\.py$",),
            "Megatron-LM scripts; a path that ends in `iter_0000010` gives its folder.",
        ),
        Host(
            "slime", ("--load", "{directory}", "--ckpt-step", "{step}"), (r"(^|/)train(_async)?\.py$", r"^--rollout-"),
            "slime's `train.py`, as Megatron.",
        ),
        Host(
            "roll", (), (r"(^|/)start_\w+_pipeline\.py$",),
            "reads its YAML alone: write `resume_from_checkpoint: ${oc.env:FORESHOCK_RESUME_FROM,false}` there.",
        ),
        Host("env", (), (), "anything that reads `foreshock.resumed()` or `FORESHOCK_RESUME_FROM`."),
    )
}  # fmt: skip


def recognise(command: Sequence[str]) -> Host | None:
    """The host whose command this is, where that is beyond doubt."""
    for host in HOSTS.values():
        if host.words and all(any(re.search(word, part) for part in command) for word in host.words):
            return host
    return None


def template_of(text: str) -> tuple[str, ...]:
    """A template from `--resume-arg`. Raises ValueError where a field is unknown or none is named."""
    words = tuple(shlex.split(text))
    unknown = [field for field in re.findall(r"\{([^}]*)\}", text) if field not in FIELDS]
    if unknown:
        raise ValueError(f"unknown field {{{unknown[0]}}}; there are {', '.join('{' + f + '}' for f in FIELDS)}")
    if not re.search(r"\{(checkpoint|directory)\}", text):
        raise ValueError("a resume option needs {checkpoint} or {directory}")
    return words


def resuming(command: Sequence[str], template: Sequence[str], checkpoint: str, step: int | None) -> list[str]:
    """The command with the options of `template`; those that it already holds are replaced. Raises ValueError where
    the step is needed and not known."""
    if step is None and any("{step}" in word for word in template):
        raise ValueError("this host needs the checkpoint's step, and it is not known")
    fields = {"checkpoint": checkpoint, "directory": directory(checkpoint), "step": "" if step is None else str(step)}
    return [*_without(command, template), *(_filled(word, fields) for word in template)]


def directory(checkpoint: str) -> str:
    """The folder that holds a checkpoint named for its iteration; else the path itself."""
    path = PurePath(checkpoint)
    return str(path.parent) if re.fullmatch(r"(iter_|global_step_?|step[-_])\d+", path.name) else checkpoint


def _filled(word: str, fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _without(command: Sequence[str], template: Sequence[str]) -> list[str]:
    """The command without what the template sets: `--flag value`, `--flag=value`, `key=value`, `+key=value`."""
    flags = {word.partition("=")[0] for word in template if word.startswith("-")}
    keys = {word.partition("=")[0].lstrip("+") for word in template if "=" in word and not word.startswith("-")}
    kept: list[str] = []
    skip = False
    for index, word in enumerate(command):
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in flags:
            follows = index + 1 < len(command) and not command[index + 1].startswith("-")
            skip = not equals and follows
            continue
        if equals and name.lstrip("+") in keys:
            continue
        kept.append(word)
    return kept
