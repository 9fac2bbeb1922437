"""When do two streams of log-probs mean the same?"""

from __future__ import annotations

from typing import Any

import pytest

from foreshock.frames.comparable import differences
from foreshock.wire import Semantics


@pytest.mark.parametrize(
    ("a", "b", "fields"),
    [
        ({}, {}, []),
        ({"temperature": 1.0}, {}, []),
        ({"temperature": 1.0}, {"temperature": 0.7}, ["temperature"]),
        (
            {"engine": "a", "dtype": "bf16", "source": "decode"},
            {"engine": "b", "dtype": "fp8", "source": "rescore"},
            [],
        ),
        ({"truncation": "none"}, {"truncation": "top_k=100"}, ["truncation"]),
        ({"truncation": "none"}, {"truncation": "top_k=-1, top_p=1.0"}, []),
        ({"truncation": "top_p=0.9,top_k=5"}, {"truncation": "TOP_K=5;top_p=0.9"}, []),
        ({"normaliser": "full_vocabulary"}, {"normaliser": "kept_set", "truncation": "top_k=5"}, ["normaliser"]),
        ({"normaliser": "full_vocabulary"}, {"normaliser": "kept_set", "truncation": "none"}, []),
        ({"penalties": "none"}, {"penalties": "repetition_penalty=1.0"}, []),
        ({"penalties": "none"}, {"penalties": "repetition_penalty=1.1"}, ["penalties"]),
    ],
)
def test_only_what_both_said_and_forbids_a_comparison_differs(
    a: dict[str, Any], b: dict[str, Any], fields: list[str]
) -> None:
    assert list(differences(Semantics(**a), Semantics(**b))) == fields
    assert list(differences(Semantics(**b), Semantics(**a))) == fields
