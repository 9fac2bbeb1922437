"""Records answers of the real engines for the fast tests: `python tests/engines/record.py VENV MODEL [sglang|vllm]`.

Requests go as a watched client sends them. Written to tests/collectors/adapters/engine_answers/.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from servers import ROOT, EngineServer

FOLDER = ROOT / "tests" / "collectors" / "adapters" / "engine_answers"
PROMPT = [318, 286, 81, 81, 10, 282, 14, 749, 307, 201, 260]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f"}], "max_tokens": 8, "temperature": 0.7}
TEXT = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "top_k": 20}
SGLANG = {"temperature": 0.7, "top_k": 20, "max_new_tokens": 8}
VLLM = {"temperature": 0.7, "top_k": 20, "max_tokens": 8, "logprobs": 0}
OPENAI = {"return_token_ids": True, "return_meta_info": True}
EXCHANGES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "sglang": {
        "generate": (
            "/generate", {"input_ids": PROMPT, "rid": "fs-1", "sampling_params": SGLANG, "return_logprob": True},
        ),
        "generate_batch": (
            "/generate",
            {"input_ids": [PROMPT, PROMPT[:4]], "sampling_params": SGLANG | {"n": 2}, "return_logprob": True},
        ),
        "generate_stream": (
            "/generate", {"input_ids": PROMPT, "sampling_params": SGLANG, "return_logprob": True, "stream": True},
        ),
        "completions": ("/v1/completions", TEXT | OPENAI | {"logprobs": 0}),
        "completions_stream": ("/v1/completions", TEXT | OPENAI | {"logprobs": 0, "stream": True}),
        "chat": ("/v1/chat/completions", CHAT | OPENAI | {"logprobs": True}),
        "update_disk_failed": ("/update_weights_from_disk", {"model_path": "/nonexistent", "weight_version": "v9"}),
        "weights_checker": ("/weights_checker", {"action": "checksum"}),
    },
    "vllm": {
        "generate": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": VLLM, "request_id": "fs-1"}),
        "generate_several": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": VLLM | {"n": 2}}),
        "generate_stream": (
            "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": VLLM, "stream": True},
        ),
        "completions": ("/v1/completions", TEXT | {"return_token_ids": True, "logprobs": 0}),
        "completions_stream": ("/v1/completions", TEXT | {"return_token_ids": True, "logprobs": 0, "stream": True}),
        "chat": ("/v1/chat/completions", CHAT | {"return_token_ids": True, "logprobs": True}),
        "chat_stream": ("/v1/chat/completions", CHAT | {"return_token_ids": True, "logprobs": True, "stream": True}),
        "weight_checker": ("/weight_checker", {"action": "checksum"}),
    },
}  # fmt: skip


def record(server: EngineServer) -> None:
    """One file per exchange, the answer as it came."""
    FOLDER.mkdir(exist_ok=True)
    for name, (path, request) in EXCHANGES[server.kind].items():
        answer = httpx.post(server.url + path, json=request, timeout=120, trust_env=False)
        said = {
            "url": path, "status": answer.status_code, "content_type": answer.headers.get("content-type", ""),
            "request": request, "body": answer.text,
        }  # fmt: skip
        (FOLDER / f"{server.kind}_{name}.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        print(server.kind, name, answer.status_code)


def main() -> None:
    venv, model, *kinds = sys.argv[1:]
    for kind in kinds or list(EXCHANGES):
        with tempfile.TemporaryDirectory() as folder:
            server = EngineServer(kind, Path(venv).absolute() / "bin" / "python", Path(model), Path(folder), {})
            try:
                record(server)
            finally:
                server.stop()


if __name__ == "__main__":
    main()
