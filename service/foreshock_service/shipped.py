"""Finds what is shipped beside the code: migrations, the lab, dashboards, web assets."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "_shipped"
CHECKOUT = PACKAGE.parents[1]


def shipped(name: str) -> Path:
    """The folder `name` under `_shipped` in an installed wheel, else in the checkout.

    Editable installs hide folders that the wheel maps, hence the two places.
    Raises FileNotFoundError naming both places.
    """
    for root in (SHIPPED, CHECKOUT):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(f"{name!r} is neither in {SHIPPED} nor in {CHECKOUT}: the installation is incomplete")
