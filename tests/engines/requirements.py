"""Requirements of an installed distribution without torch and its kin, one a line: `requirements.py NAME`."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

KIN = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")


def needed(name: str) -> list[str]:
    """The requirements whose markers hold, extras left out."""
    found = [Requirement(text) for text in metadata.requires(name) or ()]
    wanted = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{one.name}{_extras(one)}{one.specifier}" for one in wanted if one.name.lower() not in KIN]


def _extras(one: Requirement) -> str:
    return f"[{','.join(sorted(one.extras))}]" if one.extras else ""


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1])))
