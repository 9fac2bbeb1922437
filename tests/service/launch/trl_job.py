"""A real TRL GRPO run of a tiny model, started by the launcher: TRL's own configuration parser and resume option.

`--crash_at N`: the first start dies before step N. `--wait_at N`: it waits at step N until a command is there.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser

import foreshock
from foreshock.adapters import trl as foreshock_trl

WORDS = ["<pad>", "<eos>", "<unk>", "add", "=", *[str(i) for i in range(59)]]


@dataclass
class Play:
    crash_at: int = 0
    wait_at: int = 0


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [sum(w.isdigit() and int(w) % 3 == 0 for w in c.split()) / 8 for c in completions]


class Fate(TrainerCallback):
    def __init__(self, play: Play) -> None:
        self.play = play

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if foreshock.resumed() is None and self.play.crash_at and state.global_step + 1 == self.play.crash_at:
            os._exit(9)


def main() -> None:
    args, play = TrlParser((GRPOConfig, Play)).parse_args_and_config()
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    rows = [{"prompt": f"add {i % 59} {(7 * i) % 59} ="} for i in range(32)]
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(config), reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Fate(play)],
    )  # fmt: skip
    attached = foreshock_trl.attach(trainer, run="lab/trl")
    if play.wait_at and foreshock.resumed() is None:
        monitor = attached.monitor
        end_step = monitor.end_step

        def wait_then_end(step: int) -> None:
            if step == play.wait_at:
                until = time.monotonic() + 60
                while not len(monitor._process.inbox) and time.monotonic() < until:
                    time.sleep(0.02)
            end_step(step)

        monitor.end_step = wait_then_end
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    history = [(e["step"], e["loss"], e["reward"]) for e in trainer.state.log_history if "loss" in e]
    print(json.dumps({"from": args.resume_from_checkpoint, "step": trainer.state.global_step, "history": history}))


main()
