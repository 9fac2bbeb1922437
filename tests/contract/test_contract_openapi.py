"""The OpenAPI document against the service itself: schemathesis asks every operation, in-process, bounded.

No server error, no undocumented status, no undocumented media type, no body that breaks its schema; near and far.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from fastapi.testclient import TestClient
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

from foreshock_service.app import create_app
from foreshock_service.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestWarning")

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 12
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    url = f"sqlite:///{tmp_path_factory.mktemp('openapi') / 'foreshock.db'}"
    app = create_app(Settings(database_url=url, request_rate_per_s=1e5, ingest_rate_per_s=1e5, max_wait_s=0.05))
    with TestClient(app, base_url="http://localhost:8720", client=("127.0.0.1", 5)) as client:
        frame = {"sequence": 1, "step": 1, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"loss": "nan"}}
        envelope = {"protocol": 1, "client": "c" * 32, "sequence": 1, "run": "math/q", "launch": "l", "frames": [frame]}
        assert client.post("/v1/ingest", json=envelope).status_code == 200
        yield client


def _operations() -> dict[str, Any]:
    app = create_app(Settings(database_url="sqlite:////nowhere/never-opened.db"))
    document = schemathesis.openapi.from_dict(app.openapi())
    return {found.ok().label: found.ok() for found in document.get_all_operations()}


OPERATIONS = _operations()


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_answers_are_as_documented(near: TestClient, label: str) -> None:
    operation = OPERATIONS[label]

    @BOUNDED
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        case.validate_response(_send(near, case), checks=CHECKS)

    ask()
    assert near.get("/readyz").status_code == 200


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_wrong_input_is_a_documented_4xx(near: TestClient, label: str) -> None:
    operation = OPERATIONS[label]
    if not (operation.body or operation.path_parameters or operation.query):
        assert near.request(operation.method, operation.path).status_code == 200
        return

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def ask(case: Any) -> None:
        answer = _send(near, case)
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance, content_type_conformance])

    try:
        ask()
    except Unsatisfiable:  # every text is a valid one there
        return


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_without_a_token_the_refusal_is_documented_too(near: TestClient, label: str) -> None:
    far = TestClient(near.app, base_url="http://foreshock.example", client=("203.0.113.7", 5))

    @settings(BOUNDED, max_examples=2)
    @given(case=OPERATIONS[label].as_strategy())
    def ask(case: Any) -> None:
        answer = _send(far, case)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code in (401, 404, 413, 422) or OPERATIONS[label].path in ("/healthz", "/readyz")

    ask()


def _send(client: TestClient, case: Any) -> Any:
    sent = case.as_transport_kwargs(base_url=str(client.base_url))
    params = dict(sent.get("params") or {})
    if case.operation.path == "/v1/events":
        params["for_s"] = 0.01
    if "wait" in params:
        params["wait"] = 0
    body = {"content" if isinstance(sent.get("data"), bytes | str) else "data": sent.get("data")}
    if "json" in sent:
        body = {"json": sent["json"]}
    headers = {k: v for k, v in (sent.get("headers") or {}).items() if v is not None and k.lower() != "authorization"}
    return client.request(sent["method"], sent["url"], params=params, headers=headers, **body)
