"""Lets megatron-core run where there is no CUDA, on gloo, in a process of its own; and a tiny GPT for it.

Every piece replaces a call that would raise on a CPU-only torch; none touches arithmetic.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, POSITIONS = 96, 24


def install_shims() -> None:
    """Before megatron.core is used."""
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu

    def on_cpu(factory: Any) -> Any:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        answer = kind(self) if dtype is None else kind(self, dtype, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return answer.replace("torch.", "torch.cuda.", 1) if dtype is None and "megatron" in caller else answer

    torch.Tensor.type = type_
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def begin(tensor: int = 1, context: int = 1) -> None:
    """Joins the world of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    install_shims()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
    model_parallel_cuda_manual_seed(7)


def make_gpt(tensor: int = 1, hidden: int = 32, layers: int = 2, vocabulary: int = VOCABULARY) -> Any:
    """A GPT of two layers; the same weights whatever the tensor-parallel size."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=2 * hidden,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=tensor,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary, max_sequence_length=512, parallel_output=True, position_embedding_type="rope",
    )  # fmt: skip
    for layer in model.decoder.layers:  # before 0.16 a gated unit's start depends on the tensor-parallel size
        halves = 0.02 * torch.randn(2, 2 * hidden, hidden, generator=torch.Generator().manual_seed(layer.layer_number))
        own = halves.chunk(tensor, 1)[parallel_state.get_tensor_model_parallel_rank()]
        layer.mlp.linear_fc1.weight.data.copy_(own.reshape(-1, hidden))
    return model


def make_optimizer(model: Any, distributed: bool = False, overlap: bool = False, lr: float = 1e-2) -> tuple[Any, Any]:
    """The model in DDP, and its optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
        ),
        module=model,
    )
    # 0.13's optimizer asks DDP whether gathers overlap and has no setting of its own.
    own = {"overlap_param_gather": overlap} if "overlap_param_gather" in OptimizerConfig.__dataclass_fields__ else {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            use_distributed_optimizer=distributed,
            clip_grad=1.0,
            **own,
        ),
        [ddp],
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    if overlap:  # as Megatron's own loop does
        model.config.no_sync_func = ddp.no_sync
    model.config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def batches(rows: int = 8, size: int = 2) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of made-up rollouts, the same in every process: old and rollout log-probs far from the model's."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    tokens = torch.randint(0, VOCABULARY, (rows, POSITIONS + 1), generator=draw)
    lengths = torch.randint(6, POSITIONS - 2, (rows, 1), generator=draw)
    place = torch.arange(POSITIONS)[None]
    old = -4.5 + 0.6 * normal(rows, POSITIONS)
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": place.expand(rows, -1),
        "mask": ((place >= 2) & (place < 2 + lengths)).float(),
        "old_log_probs": old,
        "rollout_log_probs": old + 0.05 * normal(rows, POSITIONS) - 0.02,
        "row": torch.arange(rows),
    }
    return [{name: value[start : start + size] for name, value in whole.items()} for start in range(0, rows, size)]
