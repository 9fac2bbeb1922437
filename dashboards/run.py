"""Run: one attempt of one run over its steps. Incidents and commands are a series and tables here: panels whose x-axis
is the step take no annotations."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import DynamicConfigValue

from dashboards import board
from dashboards.panels import THIS_RUN, WINDOW, listing, number, over_steps, steps_panel
from dashboards.sources import Sql

RUN: Final = "run IN (${run:sqlstring})"
ATTEMPT: Final = "${attempt:sqlstring}::int"
BANDED: Final = frozenset({"policy.kl_k2", "mismatch.kl_k3", "mismatch.ess_token"})
"""Statistics of the two pairs whose healthy range the shipped rules learn."""
EVENTS: Final = f"""
    SELECT s.step,
        count(DISTINCT i.id) FILTER (WHERE i.severity = 'warning') AS "warning incidents",
        count(DISTINCT i.id) FILTER (WHERE i.severity = 'critical') AS "critical incidents",
        count(DISTINCT c.id) AS "commands issued", count(DISTINCT d.id) AS "commands done"
    FROM (SELECT run, attempt, step FROM grafana_steps WHERE {THIS_RUN} AND {WINDOW}) s
        LEFT JOIN grafana_incidents i ON i.run = s.run AND i.attempt = s.attempt AND s.step >= i.opened_step
            AND (i.resolved_step IS NULL OR s.step < i.resolved_step)
        LEFT JOIN grafana_commands c ON c.run = s.run AND c.attempt = s.attempt AND c.issued_step = s.step
        LEFT JOIN grafana_commands d ON d.run = s.run AND d.attempt = s.attempt AND d.done_step = s.step
    GROUP BY s.step ORDER BY s.step"""  # constants of this room # nosec B608
INCIDENTS: Final = f"""
    SELECT rule, severity, status, attempt, edge, onset_step, opened_step, resolved_step, message, opened,
        id AS incident FROM grafana_incidents WHERE {RUN} ORDER BY opened DESC"""  # constants of this room # nosec B608
COMMANDS: Final = f"""
    SELECT kind, state, verdict, attempt, issued_step, at_step, done_step, reason, requested_by, created,
        id AS command FROM grafana_commands WHERE {RUN} ORDER BY created DESC"""  # constants of this room # nosec B608
CHECKPOINTS: Final = f"""
    SELECT attempt, step, status, path, reason, registered FROM grafana_checkpoints WHERE {RUN}
    ORDER BY registered DESC"""  # constants of this room # nosec B608
CLIENTS: Final = f"""
    SELECT role, rank, attempt, last_step, lost, sdk, last_seen, finished FROM grafana_clients
    WHERE {RUN} AND role IN (${{role:sqlstring}}) AND rank::text IN (${{rank:sqlstring}}) ORDER BY role, rank"""  # nosec B608
COMPLETE: Final = f"""
    SELECT step, reported AS "ranks reported", expected AS "ranks expected", segment AS "baseline segment"
    FROM grafana_steps WHERE {THIS_RUN} AND {WINDOW} ORDER BY step"""  # constants of this room # nosec B608


def _worst(signal: str) -> str:
    ranks = "rank::text IN (${rank:sqlstring})"
    merged = f"SELECT step, value FROM grafana_points WHERE {THIS_RUN} AND {WINDOW} AND signal = '{signal}'"  # nosec B608
    worst = f"SELECT step, value, rank FROM grafana_worst WHERE {THIS_RUN} AND {WINDOW} AND signal = '{signal}'"  # nosec B608
    return f"""
        SELECT m.step, m.value AS "all ranks", w.value AS "worst rank", w.rank AS "which rank"
        FROM ({merged}) m LEFT JOIN ({worst} AND {ranks}) w USING (step) ORDER BY m.step"""  # nosec B608


def build() -> dashboard.Dashboard:
    """The board."""
    made = board.new("run", "Foreshock: run", "One run over its steps, with its own healthy range.")
    made = (
        made.with_variable(board.run_choice())
        .with_variable(board.choice("attempt", "Attempt", board.ATTEMPTS))
        .with_variable(board.choice("role", "Role", board.ROLES, many=True))
        .with_variable(board.choice("rank", "Rank", board.RANKS, many=True))
        .with_variable(board.bound("from_step", "From step", "0"))
        .with_variable(board.bound("to_step", "To step", "1000000000"))
    )
    made = _state(made)
    made = _pair(made, "policy", "Policy pair: the trainer against itself, same weights")
    made = _pair(made, "mismatch", "Mismatch pair: the trainer's scoring pass against the rollout engine")
    return _ranks(_training(made))


def _state(made: dashboard.Dashboard) -> dashboard.Dashboard:
    of_run = f"FROM grafana_runs WHERE {RUN}"
    opened = f"SELECT count(*) AS open FROM grafana_incidents WHERE {RUN} AND status <> 'resolved'"  # nosec B608
    events = steps_panel(
        "Incidents and commands", "How many incidents were open at each step, and where commands were issued and done."
    )
    return (
        made.with_row(dashboard.Row("What happened"))
        .with_panel(number("Verdict", "The run's verdict now.", Sql(f"SELECT verdict {of_run}"), "string"))
        .with_panel(number("Status", "What the run itself said last.", Sql(f"SELECT status {of_run}"), "string"))
        .with_panel(number("Last step", "Last evaluated step.", Sql(f"SELECT last_step {of_run}"), "none"))
        .with_panel(number("Attempt", "The attempt that it is in.", Sql(f"SELECT attempt {of_run}"), "none"))
        .with_panel(number("Open incidents", "Not resolved.", Sql(opened), "short", bad_from=1))
        .with_panel(number("Median step", "Seconds.", Sql(f"SELECT median_step_s {of_run}"), "s"))
        .with_panel(events.unit("short").with_target(Sql(EVENTS)).span(24).height(6))
        .with_panel(listing("Incidents", "All of the run, every attempt.", INCIDENTS, width=24))
        .with_panel(listing("Commands", "What was asked of the trainer and whether it helped.", COMMANDS, width=14))
        .with_panel(listing("Checkpoints", "A rollback goes to the newest healthy one.", CHECKPOINTS, width=10))
    )


def _pair(made: dashboard.Dashboard, pair: str, title: str) -> dashboard.Dashboard:
    def s(*statistics: str) -> list[str]:
        return [f"{pair}.{name}" for name in statistics]

    def band(statistic: str) -> str | None:
        return f"{pair}.{statistic}" if f"{pair}.{statistic}" in BANDED else None

    quantiles = s("abs_q50", "abs_q90", "abs_q99", "abs_q999", "abs_max")
    made = (
        made.with_row(dashboard.Row(title))
        .with_panel(over_steps(f"{pair}.kl_k2", s("kl_k2"), band=band("kl_k2"), log=True))
        .with_panel(over_steps(f"{pair}.kl_k3", s("kl_k3"), band=band("kl_k3"), log=True))
        .with_panel(over_steps("Quantiles of |a − b|", quantiles, log=True))
        .with_panel(over_steps("The two curves", s("a_mean", "b_mean")))
        .with_panel(over_steps("One-sided?", s("delta_mean", "delta_std")))
        .with_panel(over_steps("Effective sample share", s("ess_token"), band=band("ess_token")))
        .with_panel(over_steps("Tails and outliers", s("tail_ln2", "seq_outlier", "zero_share")))
        .with_panel(over_steps("Correlation", s("prob_pearson", "logp_pearson", "step_seq_corr")))
    )
    return made.with_panel(over_steps("Non-finite and sentinels", s("nonfinite", "sentinels", "overflow")))


def _training(made: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        made.with_row(dashboard.Row("Training"))
        .with_panel(over_steps("Reward", ["reward.mean"], band="reward.mean"))
        .with_panel(over_steps("Reward: spread and validation", ["reward.min", "reward.max", "reward.validation"]))
        .with_panel(over_steps("Entropy", ["entropy.mean"], band="entropy.mean"))
        .with_panel(over_steps("Gradient norm", ["grad.norm"], band="grad.norm", log=True))
        .with_panel(over_steps("Response length", ["length.mean", "length.max"], band="length.mean"))
        .with_panel(
            over_steps("Truncated, repeated", ["length.truncated", "length.repetition"], band="length.truncated")
        )
        .with_panel(over_steps("Groups", ["group.zero_std", "group.mixed"]))
        .with_panel(over_steps("Clipping", ["update.clip_low", "update.clip_high"]))
        .with_panel(over_steps("Update", ["update.kl_k2"], band="update.kl_k2", log=True))
        .with_panel(over_steps("Loss", ["loss"]))
        .with_panel(over_steps("Learning rate", ["lr"]))
        .with_panel(over_steps("Staleness", ["staleness.mean", "staleness.max"], band="staleness.max"))
        .with_panel(over_steps("Step time", ["time.step_s"]))
    )


def _ranks(made: dashboard.Dashboard) -> dashboard.Dashboard:
    made = made.with_row(dashboard.Row("Ranks"))
    for signal in ("policy.kl_k2", "mismatch.kl_k3"):
        panel = steps_panel(
            f"Worst rank: {signal}", "One rank of 64 at twenty times its floor moves the merged figure by a third."
        )
        which = panel.override_by_name("which rank", _right_axis())
        made = made.with_panel(which.unit("suffix: nats").with_target(Sql(_worst(signal))).span(8))
    complete = steps_panel("Complete?", "Ranks that reported each step, and the baseline's segment.").unit("short")
    made = made.with_panel(complete.with_target(Sql(COMPLETE)))
    return made.with_panel(listing("Clients", "Processes by role and rank.", CLIENTS))


def _right_axis() -> list[DynamicConfigValue]:
    value = DynamicConfigValue
    return [
        value(id_val="unit", value="none"),
        value(id_val="custom.axisPlacement", value="right"),
        value(id_val="custom.drawStyle", value="points"),
    ]
