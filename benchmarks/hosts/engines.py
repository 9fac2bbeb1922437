"""Real rollout engines' log-probs, joined by the watch with a trainer's own; and what the watch costs.

    out/engines/bin/python -m benchmarks.hosts.engines sglang|vllm --model DIR [--only mismatch|throughput]

Run by the engines' own Python (tests/engines/install.sh) with PYTHONPATH=collectors. The trainer is transformers'
teacher-forced forward of the same weights in float32; Δ = trainer − engine. Each case says what the two sides mean,
and whether Foreshock, told the truth, compares them. `throughput` alternates generations with and without the watch on
one engine, by the clock and by the CPU time of all its processes. Prints one JSON object, and the cases as a Markdown
table.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false",
    SGLANG_USE_CPU_ENGINE="1", SGLANG_CPU_OMP_THREADS_BIND="all", VLLM_TARGET_DEVICE="cpu",
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_HOST_IP="127.0.0.1",
)  # fmt: skip

import psutil
import torch

import foreshock
from foreshock import Monitor, Semantics
from foreshock.adapters.engine_asking import Asking
from foreshock.adapters.engine_samples import Samples
from foreshock.frames.comparable import differences
from foreshock.stats.merge import statistics as statistics_of
from foreshock.stats.pair import PairAccumulator

TEXTS = (
    "def read(self, path):\n", "class Error(Exception):\n", "import os\nimport ", "    return self._", "for name in ",
    "if not isinstance(", '"""Return the ', "    def __init__(self, ", "try:\n    ", "with open(", "raise ValueError(",
    "lambda x: ", "assert ", "while True:\n", "    elif ", "from collections import ",
)  # fmt: skip
QUESTIONS = (
    "Why is the sky blue?", "Write a haiku about rain.", "What is 17 times 23?", "Name three rivers in Asia.",
    "Explain recursion to a child.", "How do vaccines work?", "Give me a recipe for pancakes.", "Who wrote Hamlet?",
    "Translate 'good morning' to French.", "What is a prime number?", "Tell me a short story about a fox.",
    "Why do leaves change colour?", "Write a Python function that reverses a list.", "What causes tides?",
    "List four uses of copper.", "How far is the Moon?",
)  # fmt: skip
CHATTY_VOCABULARY = 10_000
"""Tokens from which a model's tokenizer is no longer the tiny one's, which was trained on code alone."""
TOP_K = 100
NAMES = ("tokens", "abs_mean", "abs_max", "kl_k1", "kl_k2", "kl_k3", "ratio_min", "ratio_max", "ess_token", "slope")


class Trainer:
    """Scores whole sequences in float32: log-probs [B, T] of sampled tokens, as a trainer would."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Sequence[int]], tokens_BT: torch.Tensor, lengths: Sequence[int], **how: Any
    ) -> Any:
        """`temperature` divides the logits; `top_k` renormalises over the largest."""
        out_BT = torch.zeros(tokens_BT.shape)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            ids = torch.tensor([[*prompt, *tokens_BT[row, :length].tolist()]])
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float() / how.get("temperature", 1.0)
            if how.get("top_k"):
                logits = logits.masked_fill(logits < logits.topk(how["top_k"], -1).values[:, -1:], -torch.inf)
            out_BT[row, :length] = logits.log_softmax(-1).gather(-1, tokens_BT[row, :length, None])[:, 0]
        return out_BT


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Questions in the chat's template for a model that was taught to chat, beginnings of code for the tiny one."""
    if len(tokenizer) < CHATTY_VOCABULARY:
        return [tokenizer(text)["input_ids"] for text in TEXTS]
    said = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in said]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def meaning(temperature: float = 1.0, top_k: int = 0) -> Semantics:
    """What the trainer says of its log-probs."""
    return Semantics(
        engine="transformers", source="rescore", temperature=temperature, penalties="none",
        truncation=f"top_k={top_k}" if top_k else "none", normaliser="kept_set" if top_k else "full_vocabulary",
    )  # fmt: skip


class Rollout:
    """One generation, joined by sample id."""

    def __init__(self, samples: Samples, prompts: Sequence[Sequence[int]], ids: Sequence[str], texts: Any) -> None:
        self.prompts, self.samples, self.ids = prompts, samples, list(ids)
        self.lengths = [len(tokens) for tokens in texts]
        self.tokens_BT = torch.zeros(len(texts), max(self.lengths), dtype=torch.int64)
        mask_BT = torch.zeros(self.tokens_BT.shape, dtype=torch.bool)
        for row, tokens in enumerate(texts):
            self.tokens_BT[row, : len(tokens)] = torch.tensor(list(tokens))
            mask_BT[row, : len(tokens)] = True
        self.found = samples.align(self.ids, self.tokens_BT, mask_BT)
        assert self.found.counts["matched"] == len(texts), self.found.counts

    def against(self, trainer: Trainer, **how: Any) -> dict[str, Any]:
        """The pair's statistics, and whether streams that say this of themselves are compared."""
        a_BT = trainer.score(self.prompts, self.tokens_BT, self.lengths, **how)
        pair = PairAccumulator()
        pair.observe(a_BT, self.found.log_probs_BT, self.found.mask_BT)
        pair.collect()
        values = statistics_of(pair.record()).values
        found: dict[str, Any] = {name: values.get(name) for name in NAMES}
        delta = (a_BT - self.found.log_probs_BT)[self.found.mask_BT]
        found["outside"] = float(((delta.exp() < 0.8) | (delta.exp() > 1.2)).double().mean())
        theirs = self.found.groups[0][0]
        found["differ"] = sorted(differences(meaning(**how), theirs))
        return found


class Timed:
    """The engine's own method, with the CPU seconds that this thread spent in it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self.method, self.took_s = method, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return self.method(*args, **kwargs)
        finally:
            self.took_s += time.thread_time() - began


class SGLang:
    """A real sglang engine on the CPU."""

    def __init__(self, model: str, monitor: Monitor, mode: str = "", **how: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        from foreshock.adapters import sglang

        self.engine = Engine(
            model_path=model, device="cpu", dtype="float32", attention_backend="torch_native",
            sampling_backend="pytorch", disable_overlap_schedule=True, mem_fraction_static=0.3, max_total_tokens=8192,
            max_running_requests=16, context_length=512, grammar_backend="none", disable_cuda_graph=True,
            weight_version="v0", skip_server_warmup=True, log_level="error",
        )  # fmt: skip
        self.bare = Timed(self.engine.generate)
        self.engine.generate = self.bare
        self.watch = sglang.wrap(self.engine, monitor, **how)

    def generate(self, prompts: Sequence[Sequence[int]], length: int, **how: Any) -> Rollout:
        answers = self.engine.generate(input_ids=list(prompts), sampling_params={"max_new_tokens": length} | how)
        ids = [answer["meta_info"]["id"] for answer in answers]
        return Rollout(self.watch.samples, prompts, ids, [answer["output_ids"] for answer in answers])

    def load(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        assert self.engine.begin_weight_update()[0]
        taken, message = self.engine.update_weights_from_tensor(list(weights.items()))
        assert taken, message
        assert self.engine.end_weight_update()[0]

    def once(self, watched: bool, asks: bool, prompts: Sequence[Sequence[int]], length: int) -> int:
        generate = self.engine.generate if watched else self.bare
        params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
        answers = generate(input_ids=list(prompts), sampling_params=params, return_logprob=asks)
        return sum(len(answer["output_ids"]) for answer in answers)


class VLLM:
    """A real vLLM engine on the CPU."""

    def __init__(self, model: str, monitor: Monitor, mode: str = "raw_logprobs", **how: Any) -> None:
        from vllm import LLM

        from foreshock.adapters import vllm

        self.engine = LLM(
            model=model, dtype="float32", max_model_len=512, max_num_seqs=16, enforce_eager=True, logprobs_mode=mode,
            disable_log_stats=True, seed=1,
        )  # fmt: skip
        self.bare = Timed(self.engine.generate)
        self.engine.generate = self.bare
        self.watch = vllm.wrap(self.engine, monitor, **how)

    def _params(self, length: int, **how: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=length, **how)

    def generate(self, prompts: Sequence[Sequence[int]], length: int, **how: Any) -> Rollout:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self.engine.generate(asked, self._params(length, **how), use_tqdm=False)
        ids = [answer.request_id for answer in answers]
        return Rollout(self.watch.samples, prompts, ids, [answer.outputs[0].token_ids for answer in answers])

    def load(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(weights), str(folder / "model.safetensors"))
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        assert self.engine.reset_prefix_cache()

    def once(self, watched: bool, asks: bool, prompts: Sequence[Sequence[int]], length: int) -> int:
        generate = self.engine.generate if watched else self.bare
        params = self._params(length, temperature=1.0, ignore_eos=True, logprobs=0 if asks else None)
        answers = generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


def quantised(weights: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Linear weights rounded to int8 or fp8 per output channel and back; the rest untouched."""
    found = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or "embed" in name or "lm_head" in name:
            found[name] = weight.clone()
            continue
        peak = 127.0 if kind == "int8" else 448.0
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / peak
        if kind == "int8":
            found[name] = (weight / scale).round().clamp(-127, 127) * scale
        else:
            found[name] = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return found


def mismatch(kind: str, model: str, monitor: Monitor, prompts: Sequence[Sequence[int]], length: int) -> dict[str, Any]:
    """The cases of one engine: name → statistics."""
    trainer, cases = Trainer(model), {}
    plain = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    engine: Any = SGLang(model, monitor, ask=True) if kind == "sglang" else VLLM(model, monitor, ask=True)
    cases["control, T=1"] = engine.generate(prompts, length, temperature=1.0).against(trainer)
    warm = engine.generate(prompts, length, temperature=0.7)
    cases["T=0.7, trainer at logits/T"] = warm.against(trainer, temperature=0.7)
    cases["T=0.7, trainer at T=1"] = warm.against(trainer)
    cut = engine.generate(prompts, length, temperature=1.0, top_k=TOP_K)
    cases[f"top_k={TOP_K}, trainer over the full vocabulary"] = cut.against(trainer)
    cases[f"top_k={TOP_K}, trainer renormalised"] = cut.against(trainer, top_k=TOP_K)
    for number in ("int8", "fp8"):
        with tempfile.TemporaryDirectory() as folder:
            weights = quantised(plain, number)
            engine.load(weights, Path(folder))
        rough = engine.generate(prompts, length, temperature=1.0)
        cases[f"{number} weights, trainer unquantised"] = rough.against(trainer)
        same = copy.copy(trainer)
        same.model = copy.deepcopy(trainer.model)
        same.model.load_state_dict(weights)
        cases[f"{number} weights, trainer the same"] = rough.against(same)
    return cases


def processed(model: str, monitor: Monitor, prompts: Sequence[Sequence[int]], length: int) -> dict[str, Any]:
    """vLLM started with `processed_logprobs`."""
    trainer, engine, cases = Trainer(model), VLLM(model, monitor, "processed_logprobs", ask=True), {}
    cases["T=0.7, trainer at logits/T"] = engine.generate(prompts, length, temperature=0.7).against(
        trainer, temperature=0.7
    )
    cut = engine.generate(prompts, length, temperature=1.0, top_k=TOP_K)
    cases[f"top_k={TOP_K}, trainer over the full vocabulary"] = cut.against(trainer)
    cases[f"top_k={TOP_K}, trainer renormalised"] = cut.against(trainer, top_k=TOP_K)
    return {f"processed: {name}": values for name, values in cases.items()}


def cpu_s() -> float:
    """CPU seconds of this process and its children: engines compute in processes of their own."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def throughput(engine: Any, prompts: Sequence[Sequence[int]], length: int, runs: int) -> dict[str, Any]:
    """The same tokens with and without the watch in turn, `runs` times each, by what the host and the watch ask for.

    `watch_itself` is the CPU time that the calling thread spends outside of the engine's own method, as a share of a
    watched generation's time.
    """
    share, found = engine.watch.asking.share, {}
    cases = [("host asks for log-probs", True, share), ("host does not ask", False, share)]
    if share < 1.0:
        cases.append(("host does not ask, ask=True", False, 1.0))
    for name, asks, ask in cases:
        engine.watch.asking = Asking(ask)
        # The first responses of a run are asked for in any case: they warm up.
        engine.once(True, asks, prompts, length), engine.once(False, asks, prompts, length)
        took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        own: list[float] = []
        for turn in range(runs):
            for watched in (False, True) if turn % 2 else (True, False):
                began_cpu, inside = cpu_s(), engine.bare.took_s
                began, began_thread = time.perf_counter(), time.thread_time()
                tokens = engine.once(watched, asks, prompts, length)
                wall, thread = time.perf_counter() - began, time.thread_time() - began_thread
                took[watched].append((wall, cpu_s() - began_cpu))
                if watched:
                    own.append((thread - engine.bare.took_s + inside) / wall)
        found[name] = {"ask": ask, "pairs": runs, "watch_itself": round(statistics.median(own), 5)}
        found[name]["bare_tokens_s"] = round(tokens / statistics.median(wall for wall, _ in took[False]), 1)
        for place, clock in enumerate(("wall", "cpu")):
            found[name] |= lost([one[place] for one in took[True]], [one[place] for one in took[False]], clock)
    return found


def lost(watched_s: Sequence[float], bare_s: Sequence[float], clock: str) -> dict[str, float]:
    """Throughput lost: of all runs together, and of the median pair; each with its standard error."""
    count, shares = len(bare_s), [1 - bare / watched for watched, bare in zip(watched_s, bare_s, strict=True)]
    more = [watched - bare for watched, bare in zip(watched_s, bare_s, strict=True)]
    return {
        f"{clock}_lost": round(1 - sum(bare_s) / sum(watched_s), 4),
        f"{clock}_lost_error": round(statistics.stdev(more) / statistics.mean(watched_s) / count**0.5, 4),
        f"{clock}_lost_median": round(statistics.median(shares), 4),
        f"{clock}_lost_median_error": round(1.2533 * statistics.stdev(shares) / count**0.5, 4),
    }


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The cases as they stand on the hosts' pages."""
    lines = [
        "| case | mean abs Δ | k1 | k3 | outside [0.8, 1.2] | token ESS | Foreshock |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        said = "compares" if not case["differ"] else f"`semantics_differ`: {', '.join(case['differ'])}"
        figures = f"{case['abs_mean']:.1e} | {case['kl_k1']:+.1e} | {case['kl_k3']:.1e}"
        lines.append(f"| {name} | {figures} | {case['outside']:.1%} | {case['ess_token']:.4f} | {said} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", choices=("mismatch", "processed", "throughput"), default="mismatch")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = prompts_of(tokenizer)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        monitor = foreshock.init(
            "bench/engines", role="rollout", url="http://127.0.0.1:9", spool_dir=folder, finish_s=0.1
        )
        act: dict[str, Callable[[], dict[str, Any]]] = {
            "mismatch": lambda: mismatch(options.engine, options.model, monitor, prompts, options.tokens),
            "processed": lambda: processed(options.model, monitor, prompts, options.tokens),
            "throughput": lambda: throughput(
                (SGLang if options.engine == "sglang" else VLLM)(options.model, monitor),
                prompts, options.tokens, options.runs,
            ),
        }  # fmt: skip
        found = act[options.only]()
        assert monitor.guard.errors == 0, f"{monitor.guard.errors} errors of our own"
        monitor.finish()
    print(json.dumps({"engine": options.engine, options.only: found}))
    if options.only != "throughput":
        print(table(found))
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # engines leave threads and children that nothing ends otherwise


if __name__ == "__main__":
    main()
