"""Sort the digits: a task whose reward a few lines can verify.

Shapes: N prompts, R response positions. A prompt is three to six digits, padded to six, and a separator; the answer
is the same digits in order and an end token. The reward is 1 for exactly that and 0 otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, SEPARATOR, END = 10, 11, 12
SHORTEST, LONGEST = 3, 6
PROMPT_LENGTH = LONGEST + 1
RESPONSE_LENGTH = LONGEST + 2


@dataclass(frozen=True)
class Prompts:
    """`ids_NP` prompt tokens, `targets_NR` the right answers (END after the end), `lengths_N` digits in each."""

    ids_NP: Tensor
    targets_NR: Tensor
    lengths_N: Tensor

    def repeated(self, times: int) -> "Prompts":
        """Each prompt `times` times in a row: the rows of a GRPO group stay together."""
        return Prompts(*(t.repeat_interleave(times, 0) for t in (self.ids_NP, self.targets_NR, self.lengths_N)))


def draw_prompts(count: int, generator: torch.Generator) -> Prompts:
    """`count` prompts from the generator's stream."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    digits = torch.randint(0, 10, (count, LONGEST), generator=generator)
    digits = digits.masked_fill(torch.arange(LONGEST)[None] >= lengths, PAD)
    in_order = digits.sort(1).values  # PAD sorts behind every digit
    targets = torch.full((count, RESPONSE_LENGTH), END)
    targets[:, :LONGEST] = in_order.masked_fill(in_order == PAD, END)
    return Prompts(torch.cat([digits, torch.full((count, 1), SEPARATOR)], 1), targets, lengths[:, 0])


def training_prompts(seed: int, position: int, count: int) -> Prompts:
    """Batch number `position` of the data set `seed`: a pure function, so the data position is one integer."""
    return draw_prompts(count, torch.Generator().manual_seed(seed * 1_000_003 + position))


def validation_prompts(step: int, count: int) -> Prompts:
    """The validation batch of a step: the same in every run and attempt, never trained on."""
    return draw_prompts(count, torch.Generator().manual_seed(7_000_000_000 + step))


def reward(tokens_NR: Tensor, mask_NR: Tensor, truncated_N: Tensor, prompts: Prompts) -> Tensor:
    """[N] 1.0 where the answer is exact and ended, else 0.0."""
    exact = ((tokens_NR == prompts.targets_NR) | (mask_NR == 0)).all(1)
    ended = (mask_NR.sum(1) == prompts.lengths_N + 1) & ~truncated_N
    return (exact & ended).float()
