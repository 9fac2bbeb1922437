"""The door's joint: arguments and environment → identity, settings, consent → a `Monitor`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from foreshock import settings as settings_module
from foreshock.control.executor import Broadcast, Gather
from foreshock.frames.identity import discover
from foreshock.frames.plain import plain
from foreshock.monitor import Monitor
from foreshock.process import Consent
from foreshock.transport.stream import Extras
from foreshock.wire.commands import COMMAND_KINDS, MODES


def init(
    run: str | None = None,
    config: Any = None,
    *,
    role: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    launch: str | None = None,
    capabilities: Collection[str] = (),
    mode: str = "observe",
    controller: bool | None = None,
    expected_ranks: Mapping[str, int] | None = None,
    broadcast: Broadcast | None = None,
    gather: Gather | None = None,
    **settings: Any,
) -> Monitor:
    """A monitor of this process's part of a run. Without a `url` (argument or FORESHOCK_URL) it does nothing, cheaply.

    `run` is `project/name` or `name` (FORESHOCK_RUN); `config` the host's configuration, kept with the run, secrets
    redacted. `role` is trainer, rollout or driver; rank, world and launch are found from what launchers set
    (`frames.identity`). `capabilities` are the command kinds that the host can really carry out; a kind with a handler
    (`Monitor.on`) counts too. `mode` is the run's first mode: observe, approve or auto. `controller`: this process
    receives the commands; by default the driver, or rank 0 of the trainers. `expected_ranks` is role → world size; by
    default this role's world, where it was given or is above 1. A step is complete as soon as all of them reported.
    `broadcast(object)` gives every rank the controller's object; with it all ranks carry out commands together, and
    it is called at every `end_step` on every rank. `gather(object)` gives every rank the list of all ranks' objects;
    with it a command that one rank objects to (`Monitor.on`) is refused for all. `settings`: see
    `foreshock.settings.Settings`.

    Raises ValueError for a malformed name, kind, mode or setting: at the start of a run, not later.
    """
    loaded = settings_module.load(settings)
    if not loaded.url and not run:
        run = "unnamed"  # nothing will be sent
    identity = discover(run, project=loaded.project, launch=launch, role=role, rank=rank, world=world)
    unknown = sorted(set(capabilities) - set(COMMAND_KINDS))
    if unknown:
        raise ValueError(f"unknown capability {unknown[0]!r}; known are {', '.join(COMMAND_KINDS)}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if controller is None:
        controller = identity.role == "driver" or (identity.role == "trainer" and identity.rank == 0)
    if expected_ranks is None and (world is not None or identity.world > 1):
        expected_ranks = {identity.role: identity.world}
    extras = Extras(controller, dict(expected_ranks) if expected_ranks else None)
    consent = Consent(frozenset(capabilities), mode, {} if config is None else as_mapping(config))
    return Monitor(identity, loaded, extras, consent, broadcast, gather)


def as_mapping(config: Any) -> dict[str, Any]:
    """The host's configuration as it is kept with the run."""
    copied = plain(config)
    return copied if isinstance(copied, dict) else {"config": copied}
