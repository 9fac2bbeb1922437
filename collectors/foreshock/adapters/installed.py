"""What is installed beside us: a monitor says which versions its figures come from."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version_of(package: str) -> str:
    """Of an installed package; empty where it is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
