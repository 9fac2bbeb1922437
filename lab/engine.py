"""The rollout engine: its own weights, its own KV cache, its own arithmetic, its own log-probabilities.

Shapes: N prompts, B = N × samples sequences, R response positions, H heads, D width of a head.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import HEADS, LAYERS, POSITIONS, WIDTH, Weights, normalised, rounded
from .task import END, PROMPT_LENGTH, RESPONSE_LENGTH, Prompts

NAME, VERSION = "lab", "1"

Loader = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the engine samples; the defaults are what the trainer scores."""

    temperature: float = 1.0
    top_k: int = 0
    greedy: bool = False
    longest: int = RESPONSE_LENGTH
    force_end: bool = False


@dataclass(frozen=True)
class Rollout:
    """`tokens_BR`, their `log_probs_BR` as the engine saw them, `mask_BR` 1 up to the end token, `truncated_B`."""

    tokens_BR: Tensor
    log_probs_BR: Tensor
    mask_BR: Tensor
    truncated_B: Tensor


def checksum(weights: Weights) -> int:
    """CRC-32 over the names and the bfloat16 bytes of all tensors: below 2³²."""
    value = 0
    for name, digest in digests(weights).items():
        value = zlib.crc32(digest.to_bytes(4, "big"), zlib.crc32(name.encode(), value))
    return value


def digests(weights: Weights) -> dict[str, int]:
    """CRC-32 of each tensor's bfloat16 bytes."""
    return {
        name: zlib.crc32(w.detach().bfloat16().contiguous().view(torch.uint8).numpy().tobytes())
        for name, w in weights.items()
    }


def bfloat16_loader(_name: str, weight: Tensor) -> Tensor:
    """The healthy loader: weights as bfloat16."""
    return rounded(weight.detach())


class Engine:
    """Generates with the weights it was last given. `loader` is how it stores a tensor on arrival."""

    def __init__(self) -> None:
        self.loader: Loader = bfloat16_loader
        self.version = -1
        self._weights: Weights = {}
        self._cache: list[tuple[Tensor, Tensor]] = []

    def load(self, weights: Weights, version: int) -> None:
        """Takes a copy of the weights under this version."""
        self._weights = {name: self.loader(name, w) for name, w in weights.items()}
        self.version = version

    def flush(self) -> None:
        """Drops the KV cache; the next generation allocates and fills a new one."""
        self._cache = []

    @property
    def checksum(self) -> int:
        """Of the weights that the next generation will use."""
        return checksum(self._weights)

    @torch.no_grad()
    def generate(self, prompts: Prompts, samples: int, generator: torch.Generator, sampling: Sampling) -> Rollout:
        """`samples` answers to each prompt. Log-probabilities are of the distribution that was sampled from."""
        B = prompts.ids_NP.shape[0] * samples
        x_BD = self._prefill(prompts.ids_NP, samples)
        tokens = torch.full((B, RESPONSE_LENGTH), END)
        log_probs, mask = torch.zeros(B, RESPONSE_LENGTH), torch.zeros(B, RESPONSE_LENGTH)
        alive = torch.ones(B, dtype=torch.bool)
        for t in range(sampling.longest):
            log_probs_BV = self._distribution(x_BD, sampling)
            if sampling.greedy:
                chosen = log_probs_BV.argmax(-1)
            else:
                chosen = torch.multinomial(log_probs_BV.exp(), 1, generator=generator)[:, 0]
            last = t == sampling.longest - 1
            if last and sampling.force_end:
                chosen = torch.full_like(chosen, END)
            tokens[:, t] = torch.where(alive, chosen, END)
            log_probs[:, t] = log_probs_BV.gather(1, chosen[:, None])[:, 0].clamp_min(-60) * alive
            mask[:, t] = alive.float()
            alive = alive & (chosen != END)
            if last or not alive.any():
                break
            x_BD = self._decode(tokens[:, t], PROMPT_LENGTH + t)
        return Rollout(tokens, log_probs, mask, alive)

    def _distribution(self, x_BD: Tensor, sampling: Sampling) -> Tensor:
        logits = F.linear(normalised(x_BD, self._weights["norm"]), self._weights["head"]) / sampling.temperature
        if sampling.top_k:
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k, -1).values[:, -1:], -1e9)
        return F.log_softmax(logits, -1)

    def _prefill(self, ids_NP: Tensor, samples: int) -> Tensor:
        W, (N, P) = self._weights, ids_NP.shape
        B = N * samples
        if not self._cache or self._cache[0][0].shape[0] != B:
            shape = (B, HEADS, POSITIONS, WIDTH // HEADS)
            self._cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(LAYERS)]
        x = rounded(W["token"][ids_NP] + W["position"][:P])
        for layer, (keys, values) in enumerate(self._cache):
            qkv = F.linear(normalised(x, W[f"{layer}.norm1"]), W[f"{layer}.qkv"])
            q, k, v = rounded(qkv).view(N, P, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            keys[:, :, :P], values[:, :, :P] = k.repeat_interleave(samples, 0), v.repeat_interleave(samples, 0)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(N, P, WIDTH)
            x = self._rest_of_layer(layer, x, a)
        return x[:, -1].repeat_interleave(samples, 0)

    def _decode(self, tokens_B: Tensor, position: int) -> Tensor:
        W, B = self._weights, tokens_B.shape[0]
        x = rounded(W["token"][tokens_B] + W["position"][position])
        for layer, (keys, values) in enumerate(self._cache):
            qkv = F.linear(normalised(x, W[f"{layer}.norm1"]), W[f"{layer}.qkv"])
            q, keys[:, :, position], values[:, :, position] = rounded(qkv).view(B, 3, HEADS, WIDTH // HEADS).unbind(1)
            upto = position + 1
            a = F.scaled_dot_product_attention(q[:, :, None], keys[:, :, :upto], values[:, :, :upto])
            x = self._rest_of_layer(layer, x, a.reshape(B, WIDTH))
        return x

    def _rest_of_layer(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        W = self._weights
        x = rounded(x + F.linear(attended, W[f"{layer}.out"]))
        h = F.gelu(F.linear(normalised(x, W[f"{layer}.norm2"]), W[f"{layer}.up"]), approximate="tanh")
        return rounded(x + F.linear(h, W[f"{layer}.down"]))
