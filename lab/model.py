"""A causal transformer of about 100,000 parameters, computed in emulated bfloat16.

Shapes: B sequences, S tokens, D width, V vocabulary. Weights are a dict of named tensors, so that a pass can be
handed any mixture of fresh and stale tensors. Matrix products run in float32 and their results are rounded to
bfloat16 where a real stack would store them: the same numbers on every CPU, with or without bfloat16 instructions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]

VOCABULARY = 16
WIDTH = 64
HEADS = 4
LAYERS = 2
POSITIONS = 15

#: A product over this many rows or more is reduced in one piece, a shorter one in two (see `reduced_linear`).
ONE_PIECE_ROWS = 64


def initial_weights(seed: int) -> Weights:
    """101,632 float32 numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    weights = {"token": normal(VOCABULARY, WIDTH, std=0.05), "position": normal(POSITIONS, WIDTH, std=0.05)}
    for layer in range(LAYERS):
        weights[f"{layer}.norm1"] = torch.ones(WIDTH)
        weights[f"{layer}.qkv"] = normal(3 * WIDTH, WIDTH, std=WIDTH**-0.5)
        weights[f"{layer}.out"] = normal(WIDTH, WIDTH, std=WIDTH**-0.5 / 2)
        weights[f"{layer}.norm2"] = torch.ones(WIDTH)
        weights[f"{layer}.up"] = normal(4 * WIDTH, WIDTH, std=WIDTH**-0.5)
        weights[f"{layer}.down"] = normal(WIDTH, 4 * WIDTH, std=(4 * WIDTH) ** -0.5 / 2)
    weights["norm"] = torch.ones(WIDTH)
    weights["head"] = normal(VOCABULARY, WIDTH, std=WIDTH**-0.5)
    return weights


def rounded(x: Tensor) -> Tensor:
    """x to the nearest bfloat16, kept as float32; the gradient is rounded alike on its way back."""
    return x.bfloat16().float()


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), scale, 1e-6)


def reduced_linear(x_BSD: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ, its sum over the inner axis cut in two pieces, each rounded, when the micro-batch is short.

    GPU libraries choose such a cut (split-K) by the shape of the product, so one sequence gets slightly different
    log-probabilities in micro-batches of different sizes. On a CPU float32 rows do not feel their neighbours, and
    without this the healthy floor of `policy.kl_k2` would be exactly zero.
    """
    if x_BSD.shape[0] >= ONE_PIECE_ROWS:
        return rounded(F.linear(x_BSD, weight))
    half = weight.shape[1] // 2
    first = rounded(F.linear(x_BSD[..., :half], weight[:, :half]))
    return rounded(first + rounded(F.linear(x_BSD[..., half:], weight[:, half:])))


def forward(weights: Weights, ids_BS: Tensor, responses: int, dropout: float = 0.0) -> Tensor:
    """Logits of the last `responses` tokens, [B, responses, V], each from the tokens before it."""
    B, S = ids_BS.shape
    x = rounded(weights["token"][ids_BS] + weights["position"][:S])
    for layer in range(LAYERS):
        h = rounded(normalised(x, weights[f"{layer}.norm1"]))
        qkv = rounded(F.linear(h, weights[f"{layer}.qkv"]))
        q, k, v = qkv.view(B, S, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, WIDTH)
        x = rounded(x + _dropped(reduced_linear(attended, weights[f"{layer}.out"]), dropout))
        h = F.linear(normalised(x, weights[f"{layer}.norm2"]), weights[f"{layer}.up"])
        h = F.gelu(rounded(h), approximate="tanh")
        x = rounded(x + _dropped(reduced_linear(h, weights[f"{layer}.down"]), dropout))
    x = x[:, -responses - 1 : -1]
    return F.linear(normalised(x, weights["norm"]), weights["head"])


def _dropped(x: Tensor, share: float) -> Tensor:
    return F.dropout(x, share, training=True) if share > 0 else x
