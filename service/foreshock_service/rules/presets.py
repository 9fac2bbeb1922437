"""Absolute bounds by dtype and model kind. They do not travel: they only warn, and only where nothing was learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Presets(BaseModel):
    """Upper bounds of a healthy floor, in the signal's unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    float32: float = Field(gt=0, description="Both passes in float32.")
    bfloat16: float = Field(gt=0, description="bfloat16 or float16, dense; also where the dtype was not said.")
    moe: float = Field(gt=0, description="Mixture of experts: routing flips between passes.")


def preset_for(presets: Presets, settings: Mapping[str, Any]) -> float:
    """The bound that applies to a run's settings (`moe: true`, `dtype: float32`)."""
    if settings.get("moe"):
        return presets.moe
    dtype = settings.get("dtype")
    return presets.float32 if dtype in ("float32", "fp32", "torch.float32") else presets.bfloat16
