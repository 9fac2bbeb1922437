"""The limits of acting: every number that policy, gates, verdicts and checkpoints use, declared once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """How much, how often and how long. Shared by all runs of a service; `Settings` fills the two it exposes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_per_run: int = Field(6, ge=0, description="Commands that policy may have approved per run.")
    budget_per_kind: dict[str, int] = Field(
        {"rollback": 2, "resync_trainer": 3, "resync_engine": 3, "checkpoint_now": 2, "pause": 1, "stop": 1},
        description="The same per action kind; kinds not named may take the whole budget.",
    )
    cooldown_steps: int = Field(5, ge=0, description="Steps between two commands of one kind within an attempt.")
    proposal_expiry_s: float = Field(3600.0, gt=0, description="Seconds that a proposal waits for a person.")
    command_expiry_s: float = Field(600.0, gt=0, description="Seconds from approval to the latest accept.")
    accepted_limit_s: float = Field(
        3600.0, gt=0, description="Seconds after which an accepted command without an outcome counts as lost."
    )
    expired_retries: int = Field(2, ge=0, description="New tries of what was approved and expired unaccepted.")
    judge_steps: int = Field(8, ge=1, description="Steps in which a command must show that it helped.")
    rollback_judge_steps: int = Field(15, ge=1, description="The same for a rollback, whose reward must recover.")
    clean_steps: int = Field(3, ge=1, description="Consecutive steps in band that count as back to baseline.")
    promote_steps: int = Field(5, ge=1, description="Clean steps after a checkpoint before it is healthy.")
    onset_margin_steps: int = Field(1, ge=0, description="Steps before the estimated onset that are distrusted too.")
    checkpoint_grace_steps: int = Field(3, ge=0, description="Steps for the host to save its own first checkpoint.")
    act_on: Literal["warning", "critical"] = Field("critical", description="Least severity that policy acts on.")
    verify_checkpoints: bool = Field(
        False, description="Ask the service's own file system whether a checkpoint exists before rolling back to it."
    )


DEFAULTS = Limits()
