"""Secrets out of what a run tells about itself, before it leaves the process; the service does the same on arrival.

A value is hidden by its name (`api_key`, `db_password`, at any depth), by its look (`sk-…`, `hf_…`, a private key, the
password in a URL), or by what stands before it in a text (`--wandb-key …`, `token=…`). Names of the field that only
look alike (`max_tokens`, `tokenizer`, `prompt_key`) stay. What has neither name nor look of a secret is not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

REDACTED: Final = "[redacted]"
LEFT_OUT: Final = "[too much text]"
MAX_TEXT: Final = 256 << 10
_KEYS = r"(?:api|access|account|private|secret|signing|encryption|auth|wandb|ssh|hf|openai|swanlab|storage)[_-]?keys?"
_GRAVE = rf"secret|passw|passphrase|(?:^|[_-])pwd(?:$|[_-])|credential|{_KEYS}"
_GRAVE_NAME: Final = re.compile(f"(?:{_GRAVE})", re.IGNORECASE)
_NAME: Final = re.compile(f"(?:{_GRAVE}|token|authorization|bearer|cookie|webhook)", re.IGNORECASE)
_HARMLESS: Final = re.compile(
    r"(tokens|tokeni[sz]|token_?ids?$|(max|num|per|min|avg|mean|pad|eos|bos|unk|mask|stop|special)_?token"
    r"|token_?(level|mean|type|budget|count|num|loss|len|length|per|limit|size))",
    re.IGNORECASE,
)
_LOOKS: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|rk|pk)[-_](?:[a-z]{2,8}[-_])*[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeoprs]-[\w-]{8,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|\bfsk_[\w-]{20,}|\bglsa_\w{20,}|\bwandb_v\d_\w{16,}|\beyJ[\w-]{8,2048}\.eyJ[\w-]{8,4096}\.[\w-]*"
    r"|(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/+-]+"
)
_USERINFO: Final = re.compile(r"(?<=://)([^\s/:@'\"]{0,256}):[^\s/@'\"]{1,1024}@")
_BEARER: Final = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_SAID: Final = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{1,128})(?P<between>[\"']?\s{0,4}[=:]\s{0,4}[\"']?)(?P<value>[^\s\"',;&)}\]]{1,4096})"
)
_FLAG: Final = re.compile(r"(?<![\w.-])(?P<name>--?[\w.-]{1,128})(?P<between>\s{1,4})(?P<value>[^\s-]\S{0,4095})")


def secret_name(name: str) -> bool:
    """Whether a value of this name is a secret, if it is a text."""
    return _NAME.search(name) is not None and _HARMLESS.search(name) is None


def grave_name(name: str) -> bool:
    """Whether everything below this name is secret, numbers too: `password`, `api_keys`, `credentials`."""
    return _GRAVE_NAME.search(name) is not None and _HARMLESS.search(name) is None


def scrubbed(text: str) -> str:
    """`text` without what looks like a secret in it. Linear in its length."""
    text = _LOOKS.sub(REDACTED, text)
    if "://" in text:
        text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
    if "=" in text or ":" in text or "-" in text:
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        if _NAME.search(text):
            text = _FLAG.sub(_said, _SAID.sub(_said, text))
    return text


def redact(tree: Any, most_text: int = MAX_TEXT) -> Any:
    """A copy of plain data (dicts, lists, texts, numbers) without its secrets. Recurses as deep as the data is.

    Characters of text beyond `most_text` in all are left out: looking costs about a second a megabyte at worst.
    """
    return _redacted(tree, False, [most_text])


def follows_secret_flag(before: Any) -> bool:
    """Whether an argument list's item announces a secret as the next one: `["--api-key", …]`."""
    return isinstance(before, str) and before.startswith("-") and "=" not in before and secret_name(before)


def _redacted(value: Any, hidden: bool, left: list[int]) -> Any:
    if isinstance(value, str):
        if hidden:
            return REDACTED if value else value
        left[0] -= len(value)
        return scrubbed(value) if left[0] >= 0 else LEFT_OUT
    if isinstance(value, Mapping):
        return {key: _valued(str(key), item, hidden, left) for key, item in value.items()}
    if isinstance(value, list | tuple):
        before: Any = None
        items = []
        for item in value:
            items.append(_redacted(item, hidden or (isinstance(item, str) and follows_secret_flag(before)), left))
            before = item
        return items
    return REDACTED if hidden and value is not None and not isinstance(value, bool) else value


def _valued(name: str, item: Any, hidden: bool, left: list[int]) -> Any:
    if hidden or grave_name(name):
        return _redacted(item, True, left)
    if isinstance(item, str | bytes | list | tuple) and item and secret_name(name):
        return _redacted(item, True, left)
    return _redacted(item, False, left)


def _said(found: re.Match[str]) -> str:
    if not secret_name(found["name"]) or found["value"].startswith(REDACTED[:5]):
        return found[0]
    return f"{found['name']}{found['between']}{REDACTED}"
