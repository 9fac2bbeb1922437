"""`foreshock launch`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from foreshock_service.cli.out import say


def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The command that starts the job.")],
    host: Annotated[
        str | None, typer.Option(help="trl, hf, verl, megatron, slime, roll or env; default: told by the command.")
    ] = None,
    resume_arg: Annotated[
        str | None, typer.Option(help="The job's own resume option, as '--load {directory} --ckpt-step {step}'.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts in all, after crashes and for rollbacks.")] = 3,
    backoff_s: Annotated[
        float, typer.Option(min=0, help="Seconds before the first restart after a crash; doubles.")
    ] = 5.0,
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds between SIGTERM and SIGKILL.")] = 30.0,
) -> None:
    """Run a job and supervise it: rollback and crash stop it and start it again at a checkpoint.

    Exit code: the job's own; 128 + n after signal n; 0 after a stop that was asked for.
    """
    from foreshock_service.launch.plan import Options, Plan
    from foreshock_service.launch.quarantine import quarantined
    from foreshock_service.launch.resume import HOSTS, recognise, template_of
    from foreshock_service.launch.supervisor import Supervisor

    if host is not None and host not in HOSTS:
        raise typer.BadParameter(f"unknown host {host!r}; known are {', '.join(HOSTS)}")
    if host is not None and resume_arg is not None:
        raise typer.BadParameter("give one of --host and --resume-arg")
    try:
        template = template_of(resume_arg) if resume_arg is not None else None
    except ValueError as error:
        raise typer.BadParameter(f"--resume-arg: {error}") from None
    known = HOSTS[host] if host is not None else recognise(command)
    if template is None and known is not None:
        template = known.template
    if template is None:
        say(
            "foreshock launch: this command's resume option is not known (--host, --resume-arg): a crash starts it "
            "as it is, rollbacks are not announced",
            err=True,
        )
    options = Options(template=template, max_restarts=max_restarts, backoff_s=backoff_s, grace_s=grace_s)
    plan = Plan(options, quarantined)
    # Straight out: nothing of ours may run after a job that was ended by a signal.
    code = Supervisor(command, plan, grace_s).run()
    os._exit(code)
