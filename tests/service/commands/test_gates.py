"""The budget of a run: the service's limits, with what an operator said for this run laid over them."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock_service.commands.gates import budget_of
from foreshock_service.commands.limits import Limits
from foreshock_service.store.models import Run

LIMITS = Limits(budget_per_run=6, budget_per_kind={"rollback": 2, "pause": 1})


@pytest.mark.parametrize(
    ("said", "whole", "by_kind"),
    [
        ({}, 6, {"rollback": 2, "pause": 1}),
        ({"limit": 0}, 0, {"rollback": 2, "pause": 1}),
        ({"limit": None, "kinds": {"rollback": 0}}, 6, {"rollback": 0, "pause": 1}),
        ({"limit": 9, "kinds": {"scale_lr": 4}}, 9, {"rollback": 2, "pause": 1, "scale_lr": 4}),
        ({"rollback": 2}, 6, {"rollback": 2, "pause": 1}),
    ],
)
def test_what_an_operator_said_overrides_the_services_limits_and_what_was_spent_does_not(
    said: dict[str, Any], whole: int, by_kind: dict[str, int]
) -> None:
    assert budget_of(Run(budget=said), LIMITS) == (whole, by_kind)
