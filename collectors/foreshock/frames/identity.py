"""Who this process is: run, launch, role, rank, world. Discovered from what launchers set; arguments win.

A launch id is the same in all processes of one launch and new at each restart: an attempt begins with it.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Mapping

import msgspec

RUN_NAME = re.compile(r"^(?!\.+/)[A-Za-z0-9._-]{1,128}/(?!\.+\Z)[A-Za-z0-9._-]{1,128}\Z")
"""No part of dots alone: names become folders. `\\Z`, because `$` lets a line end pass."""
LAUNCH = re.compile(r"^[\x21-\x7e]{1,128}\Z")
ROLES = ("trainer", "rollout", "driver")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one launch of one run."""

    run: str
    launch: str
    role: str
    rank: int
    world: int


def discover(
    run: str | None,
    *,
    project: str = "default",
    launch: str | None = None,
    role: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Identity:
    """The identity from arguments, else the environment, else torch.distributed where it is initialised.

    Raises ValueError for a malformed name, an unknown role, or a rank outside the world.
    """
    environment = os.environ if environment is None else environment
    role = role or environment.get("FORESHOCK_ROLE") or "trainer"
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    found_rank, found_world = _place(environment)
    rank = found_rank if rank is None else int(rank)
    world = max(found_world, rank + 1) if world is None else int(world)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside a world of {world}")
    return Identity(
        run=run_name(run or environment.get("FORESHOCK_RUN", ""), project),
        launch=launch_id(launch, environment),
        role=role,
        rank=rank,
        world=world,
    )


def run_name(name: str, project: str = "default") -> str:
    """`project/name`; a name without a project gets `project`. Raises ValueError where either part is malformed."""
    full = name if "/" in name else f"{project}/{name}"
    if not RUN_NAME.match(full):
        raise ValueError(
            "run must be `name` or `project/name`, each 1 to 128 of letters, digits, '.', '_', '-', not dots alone; "
            f"not {name!r}"
        )
    return full


def launch_id(given: str | None, environment: Mapping[str, str]) -> str:
    """The launch: given, FORESHOCK_LAUNCH, torchelastic's, Ray's, Slurm's, else random for this process alone."""
    if given or environment.get("FORESHOCK_LAUNCH"):
        launch = given or environment["FORESHOCK_LAUNCH"]
        if not LAUNCH.match(launch):
            raise ValueError(f"launch must be 1 to 128 printable characters without blanks, not {launch!r}")
        return launch
    ray = _ray_job(environment)
    if ray:
        return ray
    candidates = (
        ("torchelastic", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    )
    for prefix, variable, restarts in candidates:
        value = environment.get(variable)
        # torchrun without --rdzv-id calls every launch of every job "none".
        if not value or value == "none":
            continue
        launch = f"{prefix}-{value}-{environment.get(restarts, '0')}"
        if LAUNCH.match(launch):
            return launch
    return f"process-{uuid.uuid4().hex}"


def _ray_job(environment: Mapping[str, str]) -> str:
    """The Ray job that this process works for; empty outside of one. Never starts or imports Ray.

    Job ids count from 1 in every Ray session, so the session's name goes with it. RAY_JOB_ID is the last resort: in
    a worker that Ray started ahead of its job it is nil (ffffffff).
    """
    ray, job, session = sys.modules.get("ray"), environment.get("RAY_JOB_ID", ""), ""
    try:
        if ray is not None and ray.is_initialized():
            job = str(ray.get_runtime_context().get_job_id())
            session = str(ray._private.worker._global_node.session_name)
    except Exception:
        session = ""
    launch = f"ray-{job}-{session}".rstrip("-")
    return launch if job and set(job) != {"f"} and LAUNCH.match(launch) else ""


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        try:
            found = int(environment[rank]), int(environment[world])
        except (KeyError, ValueError):
            continue
        if 0 <= found[0] < found[1]:
            return found
    return 0, 1
