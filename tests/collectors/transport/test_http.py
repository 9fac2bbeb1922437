"""TLS is verified, certificates of one's own authority are taken by file, and addresses must make sense."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreshock.settings import Settings
from foreshock.transport.http import Answer, Http
from tests.fake_service import FakeService


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    made = tmp_path / "service.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "key.pem"), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture
def secure(service: FakeService, certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    listening = service._server.socket
    service._server.socket = context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)
    return f"https://localhost:{service.port}"


def ask(**settings: object) -> Answer:
    http = Http(Settings(timeout_s=3.0, **settings))  # type: ignore[arg-type]
    try:
        return http.get("/v1/runs/lab/x/health?wait=0")
    finally:
        http.close()


def test_an_unknown_authority_is_not_trusted_and_its_file_makes_it_so(secure: str, certificate: Path) -> None:
    refused = ask(url=secure)
    assert (refused.status, "CERTIFICATE_VERIFY_FAILED" in refused.error) == (0, True)
    assert ask(url=secure, ca_file=str(certificate)).status == 200
    assert ask(url=secure.replace("localhost", "127.0.0.1"), ca_file=str(certificate)).status == 0


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_verification_can_be_switched_off_on_purpose(secure: str) -> None:
    assert ask(url=secure, verify_tls=False).status == 200


def test_a_connection_is_kept(service: FakeService) -> None:
    ports: set[int] = set()
    service.misbehave = lambda request: bool(ports.add(request.client_address[1]))
    http = Http(Settings(url=service.url))
    for _ in range(5):
        assert http.get("/v1/runs/lab/x/health?wait=0").ok
    http.close()
    assert len(ports) == 1


@pytest.mark.parametrize("url", ["localhost:8720", "ftp://x", "http://", "x"])
def test_an_address_that_makes_no_sense_is_an_error_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="url must be"):
        Http(Settings(url=url))


def test_a_missing_authority_file_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Http(Settings(url="https://x", ca_file="/nowhere.pem"))


@pytest.mark.parametrize(
    ("status", "keep"),
    [(0, True), (204, True), (302, True), (401, True), (403, True), (408, True), (429, True), (500, True), (503, True),
     (200, False), (400, False), (404, False), (409, False), (410, False), (413, False), (422, False), (426, False)],
)  # fmt: skip
def test_which_answers_keep_the_data(status: int, keep: bool) -> None:
    assert Answer(status=status).keep is keep
