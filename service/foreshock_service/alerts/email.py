"""`email`: plain text by SMTP. Mails of one incident share a reference, so that readers show them as one thread.

The URL is `smtp://user:password@host:587` (STARTTLS where the server offers it) or `smtps://…:465` (TLS from the first
byte). A password travels under TLS alone, except to a server on this machine.
"""

from __future__ import annotations

import logging
import smtplib
import ssl
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, getaddresses
from ipaddress import ip_address
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from foreshock_service.alerts.base import TIMEOUT_S, Channel, Later, Message, Never, digest_id
from foreshock_service.alerts.words import headline, paragraphs

logger = logging.getLogger(__name__)

PORTS: Final = {"smtp": 587, "smtps": 465}
SHOWN_ALERTS: Final = 100


class EmailConfigError(ValueError):
    """The settings name no server, sender or receiver that mail could go by."""


class Email(Channel):
    """One server, one sender, some receivers. Raises EmailConfigError for settings that cannot work."""

    name = "email"

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        sender: str,
        receivers: str,
        public_url: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(client, public_url)
        self._server = _server(url)
        self._sender = sender
        self._receivers = [address for _, address in getaddresses([receivers]) if "@" in address]
        self._context = context or ssl.create_default_context()
        if "@" not in sender or "\n" in sender:
            raise EmailConfigError("FORESHOCK_EMAIL_FROM must be an address, as foreshock@example.com")
        if not self._receivers:
            raise EmailConfigError("FORESHOCK_EMAIL_TO must hold at least one address")

    def send(self, message: Message, now: float) -> None:
        """One alert."""
        parts = [f"{title}\n{text}" for title, text in paragraphs(message)]
        if link := self.link(message.payload):
            parts.append(link)
        mail = self._mail(
            message.delivery_id, f"[Foreshock] {headline(message)}", "\n\n".join(parts), message.created_at
        )
        incident = message.payload.get("incident") or {}
        if incident.get("id"):
            thread = _message_id(f"incident.{incident['id']}")
            mail["In-Reply-To"] = thread
            mail["References"] = thread
        self._send(mail)

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Many alerts as one list, the first hundred by name."""
        counts = Counter(m.event for m in messages)
        kinds = ", ".join(f"{n} x {event}" for event, n in counts.most_common())
        lines = [f"- {headline(m)}" for m in messages[:SHOWN_ALERTS]]
        if len(messages) > SHOWN_ALERTS:
            lines.append(f"… and {len(messages) - SHOWN_ALERTS} more")
        if self.public_url:
            lines += ["", self.public_url]
        subject = f"[Foreshock] {len(messages)} alerts: {kinds}"
        self._send(self._mail(digest_id(messages), subject, "\n".join(lines), now))

    def _mail(self, delivery_id: str, subject: str, body: str, at: float) -> EmailMessage:
        mail = EmailMessage()
        mail["From"] = self._sender
        mail["To"] = ", ".join(self._receivers)
        mail["Subject"] = subject
        mail["Date"] = format_datetime(datetime.fromtimestamp(at, UTC))
        mail["Message-ID"] = _message_id(delivery_id)
        mail["Auto-Submitted"] = "auto-generated"
        mail["X-Foreshock-Delivery"] = delivery_id
        mail.set_content(body + "\n")
        return mail

    def _send(self, mail: EmailMessage) -> None:
        try:
            with self._connect() as smtp:
                refused = smtp.send_message(mail)
        except smtplib.SMTPRecipientsRefused as error:
            _refused([code for code, _ in error.recipients.values()], error)
        except smtplib.SMTPResponseException as error:
            _refused([error.smtp_code], error)
        except smtplib.SMTPNotSupportedError as error:
            raise Never("the mail server lacks what this mail or login needs") from error
        except ssl.SSLCertVerificationError as error:
            raise Later("the mail server's certificate is not trusted") from error
        except (smtplib.SMTPException, OSError) as error:
            raise Later(f"no answer ({type(error).__name__})") from error
        if refused:
            # The others have it: sending again would repeat it to them.
            logger.warning("mail %s: %d receivers refused", mail["X-Foreshock-Delivery"], len(refused))

    def _connect(self) -> smtplib.SMTP:
        secure, host, port, user, password = self._server
        if secure:
            smtp: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=self._context)
        else:
            smtp = smtplib.SMTP(host, port, timeout=TIMEOUT_S)
        try:
            smtp.ehlo()
            if not secure and smtp.has_extn("starttls"):
                smtp.starttls(context=self._context)
                smtp.ehlo()
                secure = True
            if user:
                if not secure and not _is_local(host):
                    raise Never("the mail server offers no TLS: the password is not sent in the clear")
                smtp.login(user, password)
        except BaseException:
            smtp.close()
            raise
        return smtp


def _server(url: str) -> tuple[bool, str, int, str, str]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in PORTS or not parts.hostname or port == -1 or parts.path.strip("/"):
        raise EmailConfigError("FORESHOCK_SMTP_URL must look like smtp://user:password@host:587 or smtps://host")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return parts.scheme == "smtps", parts.hostname, port or PORTS[parts.scheme], user, password


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _message_id(name: str) -> str:
    return f"<{name}@foreshock.invalid>"


def _refused(codes: Sequence[int], error: Exception) -> None:
    """4xx is "later" in SMTP, 5xx "never"; among several receivers one "later" is worth another try."""
    answer = f"answered {', '.join(sorted({str(c) for c in codes}))}"
    if any(code < 500 for code in codes):
        raise Later(answer) from error
    raise Never(answer) from error
