"""Real sglang and vLLM servers on the CPU, with our plugin inside, each private to a test session."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "collectors"),
}  # fmt: skip
ENVIRONMENT = {
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "all"},
    "vllm": {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1", "VLLM_SERVER_DEV_MODE": "1",
    },
}  # fmt: skip
ARGUMENTS = {
    "sglang": (
        "-m", "sglang.launch_server", "--model-path", "{model}", "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
        "--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--max-running-requests", "16",
        "--context-length", "4096", "--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup",
        "--weight-version", "v0", "--host", "127.0.0.1", "--port", "{port}",
    ),
    "vllm": (
        "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", "tiny",
        "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "16", "--enforce-eager",
        "--enable-scale-out", "--host", "127.0.0.1", "--port", "{port}",
    ),
}  # fmt: skip


class EngineServer:
    """One engine's server, started at once; `start` again after `stop` is the same server at the same address.

    `stop` ends it by its own handle. `python` is the engines' own, see install.sh.
    """

    def __init__(self, kind: str, python: Path, model: Path, folder: Path, environment: Mapping[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.kind, self.url = kind, f"http://127.0.0.1:{port}"
        self.log = folder / f"{kind}.log"
        self._command = [str(python), *(one.format(model=model, port=port) for one in ARGUMENTS[kind])]
        said = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
        self._environment = said | COMMON | ENVIRONMENT[kind] | dict(environment)
        self.start()

    def start(self) -> None:
        """Returns once it answers. Raises RuntimeError with the end of its log where it does not in ten minutes."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.log.parent, env=self._environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._wait(600)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.kind} ended with {self.process.returncode}:\n{self.text()[-4000:]}")
            try:
                if httpx.get(self.url + "/health", trust_env=False, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"{self.kind} did not answer in {seconds:.0f} s:\n{self.text()[-4000:]}")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, *signals: int) -> None:
        """Ends the server and the children that it started (its own process group), by SIGTERM, then SIGKILL."""
        group = self.process.pid
        for how in signals or (15, 9):
            try:
                os.killpg(group, how)
            except ProcessLookupError:
                return
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                continue
