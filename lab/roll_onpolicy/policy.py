"""A two-layer Qwen2-shaped policy (RMSNorm, RoPE, grouped heads, SwiGLU) small enough for thousands of steps on a CPU.

Shapes: B rows, S positions, V vocabulary, D hidden. Attention is causal and ignores padding on the right, as ROLL's
Megatron path does. ``Numerics`` says how a pass computes; two passes over the same weights may differ in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Weights = dict[str, Tensor]

VOCAB, HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 32, 48, 2, 4, 2, 96
HEAD = HIDDEN // HEADS


@dataclass(frozen=True)
class Numerics:
    """How one pass computes.

    ``bf16``: weights, every linear's output, every norm and the residual are rounded to bfloat16, sums are float32, as
    tensor cores do. ``split_k``: a linear's inner sum is split in parts whose number follows the number of rows, as a
    GPU library chooses its kernel; *an emulation*, for this CPU's kernels give a row the same bits in any batch.
    ``logits_bf16``: the logits alone are rounded. ``noise``: normal noise of that deviation on the logits, drawn anew
    in every forward: *synthetic*, it asks what a disagreement of a given size does, whatever causes it. ``dropout``: on
    the residual branches. ``recompute``: activations are computed again in the backward pass.
    """

    bf16: bool = False
    split_k: bool = False
    logits_bf16: bool = False
    noise: float = 0.0
    dropout: float = 0.0
    recompute: bool = False


def initial_weights(seed: int) -> Weights:
    """Float32 weights by one generator; the same seed gives the same bits."""
    draw = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * scale

    weights = {"embedding": normal(VOCAB, HIDDEN, 1.0), "norm": torch.ones(HIDDEN), "head": normal(VOCAB, HIDDEN, 0.1)}
    for layer in range(LAYERS):
        weights |= {
            f"{layer}.norm1": torch.ones(HIDDEN), f"{layer}.norm2": torch.ones(HIDDEN),
            f"{layer}.qkv": normal((HEADS + 2 * KEY_HEADS) * HEAD, HIDDEN, HIDDEN**-0.5),
            f"{layer}.out": normal(HIDDEN, HIDDEN, 0.5 * HIDDEN**-0.5),
            f"{layer}.up": normal(2 * INNER, HIDDEN, HIDDEN**-0.5),
            f"{layer}.down": normal(HIDDEN, INNER, 0.5 * INNER**-0.5),
        }  # fmt: skip
    return weights


def rounded(x: Tensor, numerics: Numerics) -> Tensor:
    """x as bfloat16 holds it, if this pass computes in bfloat16; the gradient is rounded likewise."""
    return x.bfloat16().float() if numerics.bf16 else x


def linear(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    """x · weightᵀ with one rounding at the end; under ``split_k`` the sum's order follows the number of rows."""
    rows = x.numel() // x.shape[-1]
    parts = (4 if rows <= 128 else 2 if rows <= 320 else 1) if numerics.split_k else 1
    if parts == 1:
        return rounded(x @ weight.T, numerics)
    pieces = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    total = None
    for piece, columns in pieces:
        product = piece @ columns.T
        total = product if total is None else total + product
    assert total is not None
    return rounded(total, numerics)


def _norm(x: Tensor, scale: Tensor, numerics: Numerics) -> Tensor:
    return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale, numerics)


def rotation(positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [S, HEAD/2], of the rotary embedding."""
    angle = positions_S[:, None] / 10000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    one, two = x.chunk(2, -1)
    cosine, sine = turn
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], -1)


@dataclass
class Cache:
    """Keys and values of the positions done so far, by layer; [B, heads, S, HEAD]."""

    keys: list[Tensor]
    values: list[Tensor]


def _attention(x: Tensor, weights: Weights, layer: int, turn: tuple[Tensor, Tensor], cache: Cache | None,
               numerics: Numerics) -> Tensor:  # fmt: skip
    rows, length, _ = x.shape
    qkv = linear(x, weights[f"{layer}.qkv"], numerics).view(rows, length, -1, HEAD).transpose(1, 2)
    q, k, v = qkv.split([HEADS, KEY_HEADS, KEY_HEADS], 1)  # type: ignore[no-untyped-call]
    q, k = _rotate(q, turn), _rotate(k, turn)
    if cache is not None:
        if len(cache.keys) > layer:
            k, v = torch.cat([cache.keys[layer], k], 2), torch.cat([cache.values[layer], v], 2)
            cache.keys[layer], cache.values[layer] = k, v
        else:
            cache.keys.append(k)
            cache.values.append(v)
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
    return linear(rounded(mixed, numerics).transpose(1, 2).reshape(rows, length, -1), weights[f"{layer}.out"], numerics)


def _layer(x: Tensor, weights: Weights, layer: int, turn: tuple[Tensor, Tensor], cache: Cache | None,
           numerics: Numerics) -> Tensor:  # fmt: skip
    def dropped(branch: Tensor) -> Tensor:
        return torch.nn.functional.dropout(branch, numerics.dropout) if numerics.dropout else branch

    attended = _attention(_norm(x, weights[f"{layer}.norm1"], numerics), weights, layer, turn, cache, numerics)
    x = rounded(x + dropped(attended), numerics)
    gate, up = linear(_norm(x, weights[f"{layer}.norm2"], numerics), weights[f"{layer}.up"], numerics).chunk(2, -1)
    inner = rounded(torch.nn.functional.silu(gate) * up, numerics)
    return rounded(x + dropped(linear(inner, weights[f"{layer}.down"], numerics)), numerics)


def forward(weights: Weights, ids_BS: Tensor, numerics: Numerics, cache: Cache | None = None, start: int = 0) -> Tensor:
    """Logits [B, S, V] in float32; with a cache, of the new positions only (they begin at ``start``)."""
    turn = rotation(torch.arange(start, start + ids_BS.shape[1]))
    x = rounded(weights["embedding"][ids_BS], numerics)
    for layer in range(LAYERS):
        if numerics.recompute and torch.is_grad_enabled():
            x = checkpoint(_layer, x, weights, layer, turn, cache, numerics, use_reentrant=False)
        else:
            x = _layer(x, weights, layer, turn, cache, numerics)
    logits = linear(_norm(x, weights["norm"], numerics), weights["head"], numerics)
    if numerics.noise:
        logits = logits + numerics.noise * torch.randn(logits.shape)
    return logits.bfloat16().float() if numerics.logits_bf16 else logits


def as_numerics(weights: Weights, numerics: Numerics) -> Weights:
    """The weights as this pass holds them: bfloat16 copies of the optimizer's float32 masters, or the masters."""
    return {name: rounded(w, numerics) for name, w in weights.items()}
