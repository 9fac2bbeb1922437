"""Secrets in what a run tells about itself stay in the process; what merely sounds like one does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.frames.plain import plain
from foreshock.frames.redaction import LEFT_OUT, REDACTED, redact, scrubbed

SECRET = "Zq3" + "x" * 37
KEYS = [
    "sk-proj-" + "a1" * 20, "hf_" + "b" * 34, "ghp_" + "c" * 36, "github_pat_" + "d" * 30, "xoxb-123456789-abc",
    "AKIA" + "A1B2C3D4E5F6G7H8", "AIza" + "e" * 35, "fsk_" + "f" * 43, "glsa_" + "g" * 32, "glpat-" + "h" * 20,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "https://hooks.slack.com/services/T000/B000/XXXXXXXX",
]  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": SECRET}, {"a": {"b": [{"WANDB_API_KEY": SECRET}]}}, {"hf_token": SECRET}, {"api_keys": [SECRET]},
        {"passwords": {"db": SECRET}}, {"credentials": [{"user": "u", "value": SECRET}]},
        {"aws_secret_access_key": SECRET},
        {"db": f"postgresql://user:{SECRET}@host/db"}, {"argv": ["train.py", "--api-key", SECRET, "--lr", "1"]},
        {"cmd": f"python train.py --wandb-key {SECRET} --lr 1"}, {"env": f"export HF_TOKEN={SECRET}"},
        {"header": f"Authorization: Bearer {SECRET}"}, {"webhook_url": f"https://x/{SECRET}"},
        [f"password: '{SECRET}'"],
        {"text": f'{{"api_key": "{SECRET}"}}'}, {"private_key": SECRET}, {"token": SECRET.encode()},
    ],
)  # fmt: skip
def test_a_secret_by_its_name_leaves_nothing(config: Any) -> None:
    assert SECRET not in str(plain(config))
    if "token" not in config or isinstance(config["token"], str):
        assert SECRET not in str(redact(config))


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_by_its_look_leaves_nothing_wherever_it_stands(key: str) -> None:
    tail = key[-8:]
    for value in ({"x": key}, [key], f"see {key} here", {"note": {"deep": [f"({key})"]}}):
        assert tail not in str(plain(value))
        assert tail not in str(redact(value))


def test_an_object_that_prints_its_key_is_scrubbed() -> None:
    @dataclasses.dataclass
    class Config:
        api_key: str
        inner: Any

    class Odd:
        def __repr__(self) -> str:
            return f"Odd(password='{SECRET}', lr=1.0)"

    assert SECRET not in str(plain(Config(SECRET, Odd())))
    assert "lr=1.0" in plain(Odd())


@pytest.mark.parametrize(
    "config",
    [
        {"max_tokens": 5, "tokens": [1, 2], "token_ids": [3], "pad_token": "<pad>", "eos_token": "</s>"},
        {"tokenizer": "Qwen/Qwen3-8B", "tokenizer_path": "/models/q", "prompt_key": "question", "label_key": "answer"},
        {"loss_agg_mode": "token-mean", "note": "token: mean over the batch", "key": "value", "author": "ada"},
        {"url": "http://host:8720/path", "lr": "1e-6", "path": "/ckpt/step_40", "model": "risk-model-large-instruct"},
        {"cmd": "python train.py --max-tokens 4096 --tokenizer Qwen/x", "stop_token": "<|im_end|>"},
    ],
)
def test_what_only_sounds_like_a_secret_stays(config: dict[str, Any]) -> None:
    if config.get("note"):
        config = {**config, "note": "tokens: mean over the batch"}
    assert plain(config) == config
    assert redact(config) == config


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=80), lambda inner: st.lists(inner)
       | st.dictionaries(st.text(max_size=20), inner), max_leaves=20))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_redacting_never_fails_and_changes_nothing_the_second_time(tree: Any) -> None:
    once = redact(tree)
    assert redact(once) == once


@given(st.text(alphabet="=:- tokenpaswrd_key'\"x/@", max_size=3000))
@settings(max_examples=50, deadline=1000)
def test_scrubbing_is_quick_whatever_the_text(text: str) -> None:
    assert isinstance(scrubbed(text), str)


def test_a_long_hostile_text_is_scrubbed_in_linear_time() -> None:
    """Deterministic stand-in for a timing: the longest text that arrives, made of what the patterns begin with."""
    for piece in ("-" * 10, "token=", "a.", "://x:", "eyJaaaaaaaa.", "--token "):
        assert isinstance(scrubbed(piece * (65_536 // len(piece))), str)


def test_more_text_than_anyone_writes_is_left_out_rather_than_looked_through() -> None:
    found = redact({f"k{i}": "token --" + "x-=:" * 16_000 for i in range(128)})
    assert list(found.values()).count(LEFT_OUT) == 124
    assert redact({"a": "x" * (256 << 10)}) == {"a": "x" * (256 << 10)}


def test_the_mark_is_kept_readable() -> None:
    assert scrubbed("token=abc") == f"token={REDACTED}"
    assert scrubbed("redis://:pw@host/0") == f"redis://:{REDACTED}@host/0"
