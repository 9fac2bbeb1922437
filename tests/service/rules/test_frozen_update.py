"""The optimizer reports steps and nothing moves."""

from __future__ import annotations

from tests.service.rules.streams import changed, healthy, opened, view

RULE = "frozen_update"


def test_unmoved_digests_are_critical_at_the_second_step() -> None:
    (incident,) = opened(changed(healthy(40), 20, weights__changed_share=0.0), RULE)
    assert (incident.opened, incident.severity, incident.first.onset_step) == (21, "critical", 20)


def test_a_healthy_run_moves() -> None:
    assert opened(healthy(60), RULE) == []


def test_one_step_without_movement_is_no_finding() -> None:
    views = healthy(20)
    views[10] = view(10, {**views[10].values, "weights.changed_share": 0.0})
    assert opened(views, RULE) == []


def test_nothing_is_said_while_updates_are_skipped_or_the_learning_rate_or_the_gradient_is_zero() -> None:
    for still in ({"update__skipped": 1.0}, {"lr": 0.0}, {"grad__norm": 0.0}):
        assert opened(changed(healthy(40), 20, weights__changed_share=0.0, **still), RULE) == []


def test_a_share_of_moved_tensors_is_movement() -> None:
    assert opened(changed(healthy(40), 20, weights__changed_share=0.02), RULE) == []


def test_an_update_norm_of_zero_counts_although_no_digest_is_taken() -> None:
    views = [view(i, {"grad.norm": 0.7, "lr": 1e-6, "norm.update_ratio": 0.0 if i > 5 else 1e-4}) for i in range(20)]
    assert opened(views, RULE)[0].opened == 7


def test_log_probs_alone_are_believed_only_after_several_steps_and_only_warn() -> None:
    views = [view(i, {"grad.norm": 0.7, "update.abs_mean": 0.0}) for i in range(10)]
    (incident,) = opened(views, RULE)
    assert incident.opened == 3
    assert incident.severity == "warning"
    assert opened([view(i, {"grad.norm": 0.7, "update.abs_mean": 1e-4}) for i in range(10)], RULE) == []


def test_no_gradient_and_no_kl_though_rewards_differ_warns_at_the_second_step() -> None:
    still = {"grad.norm": 0.0, "lr": 4e-8, "reference.kl_k3": 0.0, "group.zero_std": 0.5}
    (incident,) = opened([view(i, still) for i in range(1, 3)], RULE)
    assert (incident.opened, incident.severity) == (2, "warning")


def test_no_gradient_is_right_where_rewards_are_equal_and_the_weights_have_moved() -> None:
    for kl, dead in ((0.0, 1.0), (0.01, 0.5)):
        values = {"grad.norm": 0.0, "reference.kl_k3": kl, "group.zero_std": dead}
        assert opened([view(i, values) for i in range(9)], RULE) == []
