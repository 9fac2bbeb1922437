"""How frameworks print a step on one line. Each parser takes a line and gives a Row, or None for a line that is noise.

step:12 - actor/entropy:0.31 - actor/grad_norm:0.8                     verl, and NeMo-like loggers      pairs
{'loss': 0.1, 'grad_norm': 0.8, 'epoch': 0.01}                         Hugging Face, TRL                mapping
[2026-…] rollout 3: {'rollout/raw_reward': 0.4}                        slime, OpenRLHF, ROLL (JSON)     mapping
========== Step 3/100 ==========  and then  • Loss: 0.1                NeMo-RL                          Blocks
Episode [1/20]: 5%|█| 3/60 [00:10<…, policy_loss=0.1, reward=0.4]      OpenRLHF, custom loops           bar
Step 3 | Reward: 0.31 | Entropy: 0.4                                   prime-rl, custom loops           labelled
"""

from __future__ import annotations

import re
from typing import Final

from foreshock_service.check.readers.base import Row
from foreshock_service.check.readers.numbers import number, split_step

_NUMBER: Final = r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"
_VERL: Final = re.compile(r"(?:^|[\s)])step:\s?(\d{1,15}) - (.*)$")
_ITEM: Final = re.compile(
    r"['\"]([^'\"]{1,128})['\"]\s*:\s*(?:[\w.]+\(\[?\s*)?['\"]?(" + _NUMBER + r")\s*(?=[,}\])'\"]|$)", re.IGNORECASE
)
_BEFORE: Final = re.compile(
    r"(?:^|[^\w/])(step|global[ _]step|iteration|iter|rollout|perf|eval)\s*[:=#]?\s*(\d{1,15})\s*(?:/\s*\d+)?\W*$",
    re.IGNORECASE,
)
_HEADING: Final = re.compile(r"=+\s*Step\s+(\d{1,15})\s*(?:/\s*\d+)?\s*=+", re.IGNORECASE)
_BULLET: Final = re.compile(r"^\s*[•\-*]\s*([^:]{1,64}):\s*(" + _NUMBER + r")\s*(?:\(.*)?$", re.IGNORECASE)
_BAR: Final = re.compile(r"(\d{1,15})/(\d{1,15}) \[[^\]]*?[,\]]?\s*([\w/.\-]+=[^\]]*)\]?")
_POSTFIX: Final = re.compile(r"([A-Za-z][\w/.\-]{0,63})=(" + _NUMBER + r")(?=[,\s\]]|$)", re.IGNORECASE)
_STEP: Final = re.compile(
    r"(?<!micro )(?<!micro)\b(?:global[ _])?(?:step|iter(?:ation)?|update)\s*[:=#]?\s*(\d{1,15})\b", re.IGNORECASE
)
_LABEL: Final = re.compile(
    r"(?:^|[|,;]|\s-|\s{2}|\]|\s)\s*([A-Za-z][\w/.\-]{0,47}(?: [A-Za-z][\w/.\-]{0,23}){0,3})\s*[:=]\s*("
    + _NUMBER
    + r")(?=[\s|,;\])s%]|$)",
    re.IGNORECASE,
)
MAX_LOOSE: Final = 4096
"""Characters; longer lines are no tqdm bar and no labelled step, and would cost the looser patterns much time."""
ASIDE: Final = frozenset({"rollout", "perf", "eval"})
"""slime counts rollouts and optimizer steps apart: a line of the former belongs to the step that follows."""


def pairs(line: str) -> Row | None:
    """verl's `step:N - name:value - …`."""
    if "step:" not in line or (found := _VERL.search(line)) is None:
        return None
    values: dict[str, float] = {}
    for item in found[2].split(" - "):
        name, _, said = item.rpartition(":")
        value = number(said)
        if name and value is not None:
            values[name.strip()] = value
    return Row(int(found[1]), split_step(values)[1])


def mapping(line: str) -> Row | None:
    """A Python or JSON mapping somewhere on the line, with the step before it or inside it."""
    start = line.find("{'")
    if start < 0 and (start := line.find('{"')) < 0:
        return None
    values = {name: float(said.replace("_", "")) for name, said in _ITEM.findall(line, start)}
    if not values:
        return None
    step, values = split_step(values)
    if step is None and (before := _BEFORE.search(line[max(0, start - 64) : start])):
        step = None if before[1].lower() in ASIDE else int(before[2])
    return Row(step, values)


class Blocks:
    """NeMo-RL: a heading with the step, then one bullet a figure."""

    def __init__(self) -> None:
        self._step: int | None = None

    def __call__(self, line: str) -> Row | None:
        if heading := _HEADING.search(line):
            self._step = int(heading[1])
            return None
        if self._step is None or (bullet := _BULLET.match(line)) is None:
            return None
        name = bullet[1].strip().lower().replace(" ", "_")
        return Row(self._step, {name: float(bullet[2].replace("_", ""))})


def bar(line: str) -> Row | None:
    """A tqdm bar with figures behind it. An inner bar (`Train epoch`) counts once, when it is full, and has no step."""
    if "=" not in line or len(line) > MAX_LOOSE or (found := _BAR.search(line)) is None:
        return None
    values = {name: float(said.replace("_", "")) for name, said in _POSTFIX.findall(found[3])}
    if not values:
        return None
    if "epoch" in line[: found.start()].lower():
        return Row(None, values) if found[1] == found[2] else None
    return Row(int(found[1]), values)


def labelled(line: str) -> Row | None:
    """`Step 3 | Reward: 0.31 | …` and its relatives: a step and at least two named figures."""
    if len(line) > MAX_LOOSE or (found := _STEP.search(line)) is None:
        return None
    values: dict[str, float] = {}
    for name, said in _LABEL.findall(line, found.end()):
        values[name.strip().lower().replace(". ", "_").replace(" ", "_")] = float(said.replace("_", ""))
    return Row(int(found[1]), split_step(values)[1]) if len(values) > 1 else None
