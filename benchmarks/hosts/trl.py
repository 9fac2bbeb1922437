"""What watching adds to a step of TRL's GRPOTrainer on this CPU: the same tiny run with and without, in turn.

    python -m benchmarks.hosts.trl [--runs 6] [--steps 12]

Time is the CPU time of the training thread, per step (generation, scoring, update); the first two steps of a run are
left out. Prints the median with, without, and the median of the differences between neighbouring runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from foreshock.adapters import trl as adapter

WORDS = ["<pad>", "<eos>", "<unk>", "add", "=", *[str(i) for i in range(251)]]


class Clock(TrainerCallback):
    """CPU seconds of each step of the training thread, this adapter's boundary included."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        now = time.thread_time()
        if self.began:
            self.took.append(now - self.began)
        self.began = now


def trainer_of(steps: int, folder: str) -> GRPOTrainer:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=GRPOConfig(
            output_dir=folder, per_device_train_batch_size=8, num_generations=4, max_completion_length=48,
            max_steps=steps, logging_steps=100, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"add {i} ="} for i in range(64)]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
        ),
    )  # fmt: skip


def run(steps: int, watched: bool) -> float:
    """Median CPU milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = trainer_of(steps, folder), Clock()
        if watched:
            adapter.attach(trainer, run="bench/trl", url="http://127.0.0.1:9", spool_dir=folder, finish_s=0.1)
        trainer.add_callback(clock)
        trainer.train()
    return 1e3 * statistics.median(clock.took[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[bool, list[float]] = {False: [], True: []}
    for index in range(options.runs):
        for watched in (False, True) if index % 2 else (True, False):
            found[watched].append(run(options.steps, watched))
    bare, added = found[False], [w - b for w, b in zip(found[True], found[False], strict=True)]
    share = statistics.median(added) / statistics.median(bare)
    print(f"bare {statistics.median(bare):.2f} ms a step, added {statistics.median(added):.2f} ms ({share:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
