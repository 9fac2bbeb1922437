"""Problems with a verifiable answer and the reward of an RLVR run: some learnable, some out of reach, some trivial.

Shapes: N rows, P prompt tokens, S = P + R positions. A prompt names its kind (a model sees that a problem is hard, as
it does in mathematics); a response thinks for a while, answers with one digit and ends. Harder problems are thought
about for longer, so length goes with difficulty, and a response without an end within R tokens is truncated and earns
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PAD, END, DIGIT, THOUGHT, SEPARATOR = 0, 1, 2, 12, 28
KINDS = (29, 30, 31)  # learnable, out of reach, trivial
PROMPT, RESPONSE = 4, 28
SEQUENCE = PROMPT + RESPONSE
#: 40 % learnable, 40 % out of reach, 20 % trivial: a bimodal pass rate, as mathematics sets have for a 7B base model
SHARES = (0.4, 0.4, 0.2)
THINKING = (0.15, 0.08, 0.25)  # chance to stop thinking, by kind


@dataclass(frozen=True)
class Problems:
    """``ids_NP`` prompt tokens, ``kind_N`` 0 learnable 1 out of reach 2 trivial, ``answer_N`` the right token."""

    ids_NP: Tensor
    kind_N: Tensor
    answer_N: Tensor

    def repeated(self, times: int) -> Problems:
        return Problems(*(t.repeat_interleave(times, 0) for t in (self.ids_NP, self.kind_N, self.answer_N)))


def draw(count: int, seed: int) -> Problems:
    """``count`` problems; a pure function of the seed."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, count, p=SHARES)
    a, b = rng.integers(0, 10, count), rng.integers(0, 10, count)
    ids = np.stack([np.array(KINDS)[kind], a + DIGIT, b + DIGIT, np.full(count, SEPARATOR)], 1)
    return Problems(torch.tensor(ids), torch.tensor(kind), torch.tensor((3 * a + 4) % 10 + DIGIT))


def reward(tokens_NR: Tensor, length_N: Tensor, ended_N: Tensor, problems: Problems) -> Tensor:
    """[N] 1.0 for a response that ends with the right digit (trivial: that ends), else 0.0."""
    last = tokens_NR.gather(1, (length_N - 2).clamp(min=0)[:, None])[:, 0]
    right = (problems.kind_N == 2) | ((problems.kind_N == 0) & (last == problems.answer_N) & (length_N > 1))
    return (right & ended_N).float()


def demonstrations(count: int, seed: int, right: float) -> tuple[Tensor, Tensor]:
    """Rows [N, S] for the warm-up and their response mask: right answers in a share ``right`` of the learnable ones."""
    rng = np.random.default_rng(seed)
    problems = draw(count, seed)
    ids = np.full((count, SEQUENCE), PAD)
    mask = np.zeros((count, SEQUENCE))
    ids[:, :PROMPT] = problems.ids_NP.numpy()
    for row in range(count):
        thought: list[int] = []
        token = int(rng.integers(THOUGHT, SEPARATOR))
        while len(thought) < RESPONSE and rng.random() > THINKING[int(problems.kind_N[row])]:
            token = THOUGHT + (token - THOUGHT + int(rng.choice([1, 2, 5, 7], p=[0.4, 0.3, 0.2, 0.1]))) % 16
            thought.append(token)
        known = rng.random() < right and problems.kind_N[row] != 1
        digit = int(problems.answer_N[row]) if known else DIGIT + int(rng.integers(10))
        response = [*thought, digit, END][:RESPONSE]
        ids[row, PROMPT : PROMPT + len(response)] = response
        mask[row, PROMPT : PROMPT + len(response)] = 1
    return torch.tensor(ids), torch.tensor(mask)
