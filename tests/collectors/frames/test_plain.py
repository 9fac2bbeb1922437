"""Whatever a host calls its configuration becomes plain, bounded and free of secrets."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.frames.plain import plain
from foreshock.wire import Envelope, Notice
from foreshock.wire.codec import decode_envelope, encode


@dataclasses.dataclass
class Config:
    lr: float = 1e-6
    path: Path = Path("/x")
    wandb_api_key: str = "s3cret"


def test_hosts_objects_become_plain_values() -> None:
    config = {"c": Config(), "n": argparse.Namespace(a=1), "t": (1, 2), "s": {3}, "np": np.float32(0.5),
              "i": np.int64(2), "tensor": torch.zeros(3), "fn": len, 5: "five", "big": 1 << 70}  # fmt: skip
    assert plain(config) == {
        "c": {"lr": 1e-6, "path": "/x", "wandb_api_key": "[redacted]"}, "n": {"a": 1}, "t": [1, 2], "s": [3], "np": 0.5,
        "i": 2, "tensor": "<Tensor>", "fn": "<built-in function len>", "5": "five", "big": str(1 << 70),
    }  # fmt: skip


def test_secrets_are_redacted_and_tokens_of_text_are_not() -> None:
    kept = plain({"hf_token": "abc", "password": "x", "max_tokens": "4096", "tokenizer": "qwen", "pad_token_id": "7"})
    assert kept == {"hf_token": "[redacted]", "password": "[redacted]", "max_tokens": "4096", "tokenizer": "qwen",
                    "pad_token_id": "7"}  # fmt: skip


def test_size_and_depth_are_bounded_even_for_a_cycle() -> None:
    cycle: dict[str, Any] = {"wide": list(range(100_000))}
    cycle["self"] = cycle
    assert len(msgspec.json.encode(plain(cycle))) < 100_000


_hosts = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(_hosts)
def test_what_is_plain_can_be_sent_and_stored(value: Any) -> None:
    notice = Notice(sequence=1, kind="started", sealed_s=0.0, data={"config": plain(value)})
    envelope = Envelope(protocol=1, client="0" * 32, sequence=1, run="a/b", launch="c", notices=[notice])
    assert decode_envelope(encode(envelope)).notices[0].kind == "started"
