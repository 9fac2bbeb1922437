"""`observe()` on the device path never asks the device for a value.

Without a GPU the promise is checked where it is kept: every operator that PyTorch dispatches is seen, and those that
would wait for a device (a scalar read, a shape that depends on values) fail. `benchmarks/gpu_check.py` checks it on
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foreshock.stats.merge import statistics
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.shapes import sentinel_of

SYNCHRONISING = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "unique_dim", "_unique2", "bincount",
    "unique_consecutive", "equal", "is_nonzero", "repeat_interleave",
}  # fmt: skip


class RefuseSynchronisation(TorchDispatchMode):
    """Raises on any operator whose result on the host depends on values on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name = func.overloadpacket.__name__
        if name in SYNCHRONISING:
            raise AssertionError(f"aten::{name} waits for the device")
        if name in ("index", "index_put", "index_put_"):
            kinds = [i.dtype for i in args[1] if i is not None]
            if torch.bool in kinds or torch.uint8 in kinds:
                raise AssertionError(f"aten::{name} with a mask waits for the device")
        return func(*args, **(kwargs or {}))


def refused(action: Callable[[], Any]) -> bool:
    with RefuseSynchronisation():
        try:
            action()
        except AssertionError:
            return True
    return False


def test_the_check_sees_what_would_wait() -> None:
    x = torch.tensor([0.5, -1.0])
    assert refused(lambda: x.sum().item())
    assert refused(lambda: bool((x > 0).any()))
    assert refused(lambda: float(x[0]))
    assert refused(lambda: x[x > 0])
    assert refused(lambda: torch.nonzero(x))
    assert not refused(lambda: torch.where(x > 0, x, 0.0).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["padded", "packed", "pieces", "split"])
def test_observe_and_collect_never_wait_for_the_device(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b = (-torch.rand(4, 600)).to(dtype)
    a = (b + 0.05 * torch.randn(4, 600)).to(dtype).requires_grad_()
    mask, tokens = torch.rand(4, 600) < 0.7, torch.randint(0, 9, (4, 600))
    options: dict[str, Any] = {"clip_range": (0.8, 1.2), "token_ids": tokens, "seq_ids": torch.arange(4)}
    if layout == "packed":
        a, b, mask, options["token_ids"] = (x.reshape(1, -1) for x in (a, b, mask, tokens))
        options["cu_seqlens"] = torch.tensor([0, 600, 700, 1800, 2400])
    if layout == "pieces":
        positions = torch.arange(600).expand(4, 600)
        options |= {"positions": positions, "lengths": [1200] * 4, "sequence_sums": lambda table: table * 1}
    if layout == "split":
        options["split"] = True
    accumulator = PairAccumulator(on_device=True)
    with RefuseSynchronisation() as seen:
        accumulator.observe(a, b, mask, **options)
        accumulator.observe(a, b, mask, **options)
        accumulator.collect()
    assert seen.calls > 50
    assert accumulator.ready()
    assert statistics(accumulator.record()).values["tokens"] == 2 * int(mask.sum())


def test_the_rounded_sentinels_are_what_the_dtypes_round_to() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert sentinel_of(dtype) == float(torch.tensor(-9999.0, dtype=dtype))
