"""Alert mails to a real SMTP server: whole, threaded by incident, over TLS, and retried only where that helps."""

from __future__ import annotations

import datetime
import logging
import ssl
from collections.abc import Callable, Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from foreshock_service.alerts.base import Later, Message, Never, new_client
from foreshock_service.alerts.email import Email, EmailConfigError
from foreshock_service.alerts.registry import configured
from foreshock_service.settings import Settings
from foreshock_service.store.engine import Store
from tests.servers import free_port

NOW = 1_800_000_000.0


class Post:
    """What aiosmtpd asks for each mail. `refuse` are the answers to coming receivers, `answer` that to the mail."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.receivers: list[list[str]] = []
        self.refuse: list[str] = []
        self.answer = "250 taken"

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any) -> str:
        if self.refuse:
            return self.refuse.pop(0)
        envelope.rcpt_tos.append(address)
        return "250 ok"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        if self.answer.startswith("250"):
            self.mails.append(message_from_bytes(envelope.content, policy=policy.default))  # type: ignore[arg-type]
            self.receivers.append(list(envelope.rcpt_tos))
        return self.answer


class Server:
    """A real SMTP server with its post."""

    def __init__(self, **options: Any) -> None:
        self.post = Post()
        self.port = free_port()
        self._controller = Controller(self.post, hostname="127.0.0.1", port=self.port, **options)
        self._controller.start()
        self._stopped = False

    def stop(self) -> None:
        if not self._stopped:
            self._controller.stop()
        self._stopped = True


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(**options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def channel(server: Server, receivers: str = "ada@example.org", login: str = "", **more: Any) -> Email:
    url = f"{more.pop('scheme', 'smtp')}://{login}127.0.0.1:{server.port}"
    return Email(new_client(), url, "Foreshock <fs@example.org>", receivers, "http://foreshock.example", **more)


def message(event: str = "incident.opened", delivery_id: str = "d1", **changes: Any) -> Message:
    incident = {
        "id": "inc1", "rule": "rollout_mismatch", "severity": "critical", "attempt": 1, "onset_step": 25,
        "opened_step": 27, "message": "δ grew: engine at fault\nBcc: eve@example.org",
        "evidence": [{"signal": "mismatch.kl_k3", "value": 0.125, "expected": 5e-4}],
    } | changes  # fmt: skip
    told = [{"id": "c1", "kind": "resync_engine", "became": "proposed", "reason": "push the weights"}]
    payload = {
        "run": "lab/run", "path": "/runs/lab/run", "incident": incident, "cause": "stale engine weights",
        "commands": told,
    }  # fmt: skip
    return Message(delivery_id=delivery_id, event=event, payload=payload, created_at=NOW)


def test_a_mail_says_what_since_when_why_on_what_evidence_and_where(serve: Callable[..., Server]) -> None:
    server = serve()
    channel(server, "ada@example.org, Bob <bob@example.org>").send(message(), NOW)
    (mail,) = server.post.mails
    assert server.post.receivers == [["ada@example.org", "bob@example.org"]]
    assert mail["Subject"] == "[Foreshock] critical: lab/run: rollout_mismatch opened"
    assert mail["Message-ID"] == "<d1@foreshock.invalid>"
    assert mail["Date"].datetime.timestamp() == NOW
    body = mail.get_content()
    for part in (
        "δ grew: engine at fault", "since step 25, seen at step 27", "stale engine weights",
        "mismatch.kl_k3 = 0.125 (usual: 0.0005)", "resync_engine: proposed. push the weights",
        "http://foreshock.example/runs/lab/run",
    ):  # fmt: skip
        assert part in body
    assert mail["Bcc"] is None


def test_mails_of_one_incident_are_one_thread(serve: Callable[..., Server]) -> None:
    server = serve()
    sending = channel(server)
    sending.send(message(), NOW)
    sending.send(message("incident.resolved", "d2"), NOW)
    opened, resolved = server.post.mails
    assert opened["References"] == resolved["References"] == "<incident.inc1@foreshock.invalid>"
    assert opened["Message-ID"] != resolved["Message-ID"]


def test_a_storm_is_one_mail(serve: Callable[..., Server]) -> None:
    server = serve()
    storm = [message(delivery_id=f"d{i}", rule=f"rule_{i}") for i in range(120)]
    channel(server).send_digest(storm, NOW)
    (mail,) = server.post.mails
    assert mail["Subject"] == "[Foreshock] 120 alerts: 120 x incident.opened"
    assert "rule_99 opened" in mail.get_content()
    assert "… and 20 more" in mail.get_content()


@pytest.mark.parametrize(
    ("answer", "expected"), [("451 come again", Later), ("452 full", Later), ("550 no", Never), ("554 spam", Never)]
)
def test_the_server_says_later_or_never(serve: Callable[..., Server], answer: str, expected: type[Exception]) -> None:
    server = serve()
    server.post.answer = answer
    with pytest.raises(expected, match=answer[:3]):
        channel(server).send(message(), NOW)
    server.post.answer = "250 taken"
    server.post.refuse = [answer]
    with pytest.raises(expected, match=answer[:3]):
        channel(server).send(message(), NOW)
    assert server.post.mails == []


def test_one_refused_receiver_does_not_repeat_the_mail_to_the_others(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    server.post.refuse = ["550 unknown"]
    with caplog.at_level(logging.WARNING):
        channel(server, "ada@example.org,bob@example.org").send(message(), NOW)
    assert server.post.receivers == [["bob@example.org"]]
    assert "1 receivers refused" in caplog.text


def test_a_server_that_is_away_is_tried_again(serve: Callable[..., Server]) -> None:
    server = serve()
    server.stop()
    with pytest.raises(Later, match="ConnectionRefusedError"):
        channel(server).send(message(), NOW)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


def _login(_server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> AuthResult:
    good = isinstance(data, LoginPassword) and (data.login, data.password) == (b"ada", b"pa ss")
    return AuthResult(success=good, handled=False)


def test_a_password_travels_under_starttls_and_a_wrong_one_is_refused(
    serve: Callable[..., Server], certificate: Path
) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate)
    server = serve(tls_context=own, require_starttls=True, authenticator=_login, auth_required=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    channel(server, login="ada:pa%20ss@", context=trusting).send(message(), NOW)
    assert len(server.post.mails) == 1
    with pytest.raises(Never, match="answered 535"):
        channel(server, login="ada:wrong@", context=trusting).send(message(), NOW)


def test_an_untrusted_certificate_gets_neither_mail_nor_password(
    serve: Callable[..., Server], certificate: Path
) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate)
    server = serve(tls_context=own, require_starttls=True, authenticator=_login)
    with pytest.raises(Later, match="not trusted"):
        channel(server, login="ada:pa%20ss@").send(message(), NOW)
    assert server.post.mails == []


def test_a_password_is_not_sent_in_the_clear_beyond_this_machine(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    sending = channel(server, login="ada:pa%20ss@")
    monkeypatch.setattr("foreshock_service.alerts.email._is_local", lambda _: False)
    with pytest.raises(Never, match="not sent in the clear"):
        sending.send(message(), NOW)


def test_smtps_speaks_tls_from_the_first_byte(serve: Callable[..., Server], certificate: Path) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate)
    server = serve(ssl_context=own)
    trusting = ssl.create_default_context(cafile=str(certificate))
    channel(server, scheme="smtps", context=trusting).send(message(), NOW)
    assert len(server.post.mails) == 1


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"smtp_url": "http://mail"}, "SMTP_URL"),
        ({"smtp_url": "smtp://mail:port"}, "SMTP_URL"),
        ({"email_to": ""}, "EMAIL_TO"),
        ({"email_from": "nobody"}, "EMAIL_FROM"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name_without_their_secret(
    changes: dict[str, str], wrong: str, store: Store
) -> None:
    good = {"smtp_url": "smtp://u:s3cret@mail", "email_from": "fs@example.org", "email_to": "ada@example.org"}
    with pytest.raises(EmailConfigError, match=wrong) as refused:
        configured(Settings(**(good | changes)), store)  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)
