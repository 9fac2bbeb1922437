"""The page: real rows, safe against what they hold, pressed only by whom it should be."""

from __future__ import annotations

import re
from typing import Any

import pytest

MARKUP = "<script>alert(1)</script>"


@pytest.fixture
def ill(house):
    """A run with an incident, and a proposal whose reason is markup."""
    house.started(mode="approve")
    house.step(1, {"loss": "nan"})
    house.wait_for(lambda: house.near.get("/v1/incidents").json()["incidents"])
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": MARKUP}
    house.command = house.near.post("/v1/runs/math/q/commands", json=body).json()["id"]
    house.incident = house.near.get("/v1/incidents").json()["incidents"][0]["id"]
    return house


def log_in(house: Any, *scopes: str, project: str | None = None) -> Any:
    far = house.far()
    answer = far.post("/login", data={"token": house.token(*scopes, project=project)})
    assert answer.status_code == 303, answer.text
    return far


def csrf_in(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    assert found
    return found[1]


@pytest.mark.parametrize("path", ["/", "/runs/math/q"])
def test_the_page_shows_runs_incidents_and_commands_without_running_what_they_hold(ill, path: str) -> None:
    answer = ill.near.get(path)
    assert answer.status_code == 200
    for shown in ("math/q", "critical", "non_finite", "scale_lr", "proposed", "&lt;script&gt;alert(1)"):
        assert shown in answer.text
    assert MARKUP not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("path", ["/", "/login", "/runs/math/q", "/static/page.css", "/static/live.js"])
def test_the_page_needs_nothing_from_elsewhere(ill, path: str) -> None:
    text = ill.near.get(path).text
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text)
    assert " style=" not in text
    assert " onclick" not in text


def test_nothing_but_the_pages_own_files_is_served(house) -> None:
    for name in ("../page.py", "..%2fpage.py", "page.py", "%2e%2e/templates/run.html"):
        assert house.near.get(f"/static/{name}").status_code in (404, 405)


def test_buttons_work_near_without_a_login(ill) -> None:
    assert ill.near.post(f"/commands/{ill.command}/approve").status_code == 303
    assert ill.near.get(f"/v1/commands/{ill.command}").json()["state"] == "approved"
    assert ill.near.post(f"/incidents/{ill.incident}/acknowledge").status_code == 303
    assert ill.near.post(f"/incidents/{ill.incident}/resolve").status_code == 303
    assert ill.near.get(f"/v1/incidents/{ill.incident}").json()["status"] == "resolved"


def test_a_button_that_comes_too_late_says_so(ill) -> None:
    ill.near.post(f"/commands/{ill.command}/reject")
    answer = ill.near.post(f"/commands/{ill.command}/approve")
    assert answer.status_code == 409
    assert "rejected" in answer.text
    assert ill.near.post(f"/commands/{ill.command}/dance").status_code == 404


def test_another_sites_form_presses_nothing(ill) -> None:
    answer = ill.near.post(f"/commands/{ill.command}/approve", headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert ill.near.get(f"/v1/commands/{ill.command}").json()["state"] == "proposed"


def test_strangers_are_sent_to_the_login(ill) -> None:
    far = ill.far()
    for path in ("/", "/runs/math/q"):
        answer = far.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert far.post(f"/commands/{ill.command}/approve").status_code == 401
    assert far.post("/login", data={"token": "wrong"}).status_code == 401
    assert far.post("/login", data={"token": ill.token("ingest")}).status_code == 401
    assert far.post("/login", data={"token": ill.token("read")}, headers={"Origin": "http://evil"}).status_code == 403


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(house) -> None:
    answer = house.far().post("/login", data={"token": house.token("read")})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie


def test_a_login_presses_buttons_only_with_its_csrf_value(ill) -> None:
    far = log_in(ill, "operate")
    csrf = csrf_in(far.get("/").text)
    url = f"/commands/{ill.command}/approve"
    assert far.post(url).status_code == 403
    assert far.post(url, data={"csrf": "0" * 64}).status_code == 403
    assert far.post(url, data={"csrf": csrf}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert ill.near.get(f"/v1/commands/{ill.command}").json()["state"] == "proposed"
    assert far.post(url, data={"csrf": csrf}).status_code == 303
    assert ill.near.get(f"/v1/commands/{ill.command}").json()["state"] == "approved"


def test_a_login_may_use_the_api_with_the_csrf_header(ill) -> None:
    far = log_in(ill, "operate")
    csrf = csrf_in(far.get("/").text)
    url = f"/v1/incidents/{ill.incident}/acknowledge"
    assert far.get("/v1/runs").status_code == 200
    assert far.post(url).status_code == 403
    assert far.post(url, headers={"X-Foreshock-CSRF": csrf}).status_code == 200


def test_a_reader_sees_no_buttons_and_presses_none(ill) -> None:
    far = log_in(ill, "read")
    page = far.get("/").text
    assert "<button>approve</button>" not in page
    csrf = csrf_in(page)
    assert far.post(f"/commands/{ill.command}/approve", data={"csrf": csrf}).status_code == 403


def test_a_login_sees_its_own_project_only(ill) -> None:
    far = log_in(ill, "operate", project="other")
    page = far.get("/").text
    assert "math/q" not in page
    assert far.get("/runs/math/q").status_code == 403
    answer = far.post(f"/commands/{ill.command}/approve", data={"csrf": csrf_in(page)})
    assert answer.status_code == 404


def test_logging_out_forgets_and_revoking_the_token_logs_out(ill) -> None:
    far = log_in(ill, "read")
    assert far.post("/logout").status_code == 403
    assert far.post("/logout", data={"csrf": csrf_in(far.get("/").text)}).status_code == 303
    assert far.get("/").status_code == 303
    again = log_in(ill, "read")
    for token in ill.near.get("/v1/tokens").json()["tokens"]:
        ill.near.delete(f"/v1/tokens/{token['id']}")
    assert again.get("/").status_code == 303
