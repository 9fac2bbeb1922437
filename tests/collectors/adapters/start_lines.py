"""Follows a host's page as a new user would: its lines, in the host's real entry point, as far as a CPU comes.

`python start_lines.py HOST HOME PAGE FOLDER`, in a process of its own. Real: the host's modules, its parser or
configuration classes with their checks, and its code up to the call that reaches our hook. Not real: packages that
want a GPU (`absent`), the Ray cluster, and what stands in a `Standin` here. Prints what was reached, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions
from absent import pretend

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class ReachedError(Exception):
    """As far as a CPU comes."""


def fenced(page: Path, kind: str) -> list[str]:
    """The page's blocks of that language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == kind]


class Standin:
    """A name that it takes any call of."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Standin()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Standin()


def openrlhf(page: Path, home: Path, folder: Path) -> dict[str, Any]:
    """The page's command, by OpenRLHF's own parser and `train`, up to the driver's actor."""
    pretend("deepspeed", "vllm", "flash_attn", "pylatexenc", "sympy")
    import ray

    words = shlex.split(fenced(page, "bash")[0].replace("\\\n", " "))
    environment = json.loads(next(w for w in words if w.startswith("--runtime-env-json")).partition("=")[2])
    os.environ.update(environment["env_vars"])
    command = words[words.index("--") + 1 :]
    assert command[:2] == ["python3", "-m"]
    assert command[-1] == "…"
    own = ["--reward.remote_url", "http://127.0.0.1:1", "--data.prompt_dataset", "none", "--vllm.num_engines", "0"]
    sys.argv = [command[2], *command[3:-1], *own]
    from openrlhf.trainer.ray import launcher

    reached: dict[str, Any] = {"groups": []}

    class Group(Standin):
        def __init__(self, nodes: int, gpus: int, actor: Any, **named: Any) -> None:
            reached["groups"].append([base.__name__ for base in actor.__ray_metadata__.modified_class.__mro__])

    launcher.RayActorGroup = Group
    ray.is_initialized = lambda: True

    def remote(self: Any, *given: Any, **named: Any) -> Any:
        reached["driver"] = [base.__name__ for base in self.__ray_metadata__.modified_class.__mro__]
        raise ReachedError

    ray.actor.ActorClass.remote = remote
    with contextlib.suppress(ReachedError):
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    return reached | {"environment": environment["env_vars"]}


def skyrl(page: Path, home: Path, folder: Path) -> dict[str, Any]:
    """The page's script with SkyRL's own configuration, checks, experiment and trainer, up to `train`."""
    pretend(
        "pybase64", "vllm", "flash_attn", "skyrl_gym", "loguru", "jaxtyping", "deepspeed", "ring_flash_attn", "polars",
        "func_timeout", "cloudpathlib", "s3fs", "gcsfs", "litellm",
    )  # fmt: skip
    import ray
    from skyrl.train.entrypoints import main_base
    from skyrl.train.utils import utils

    utils.initialize_ray = lambda cfg: None
    ray.remote = lambda **_: lambda function: SimpleNamespace(remote=function)
    ray.get = lambda value: value
    ray.nodes = list
    base = main_base.BasePPOExp

    def begin(self: Any, cfg: Any) -> None:
        vars(self).update(cfg=cfg, tokenizer=Standin(), train_dataset=[1], eval_dataset=None, colocate_pg=None)

    base.__init__ = begin
    reached: dict[str, Any] = {}

    def run(self: Any) -> None:
        trainer = self.get_trainer(
            cfg=self.cfg, tracker=Standin(), tokenizer=self.tokenizer, train_dataset=None, eval_dataset=None,
            inference_engine_client=Standin(), generator=Standin(), colocate_pg=None,
        )  # fmt: skip
        reached["trainer"] = type(trainer).__module__
        reached["callbacks"] = [type(each).__name__ for each in trainer._callback_handler.callbacks]

    base.run = run
    sys.argv = ["train.py", f"trainer.ckpt_path={folder}", f"trainer.export_path={folder}", "trainer.logger=console"]
    exec(compile(fenced(page, "python")[0], str(page), "exec"), {"__name__": "__main__"})
    return reached


def nemo_rl(page: Path, home: Path, folder: Path) -> dict[str, Any]:
    """The page's lines below `setup(…)` of NeMo-RL's own example, which reads its own configuration; then its loop."""
    import nemo_rl_fake as fake
    import transformers

    transformers.AutoProcessor = object  # wants torchvision
    pretend(
        "scipy", "soundfile", "vllm", "flash_attn", "math_verify", "mlflow", "swanlab", "nvidia_resiliency_ext",
        "decord", "pynvml", "transfer_queue", "nemo_automodel", "deep_ep", "sglang",
    )  # fmt: skip
    path, below = home / "examples/run_grpo.py", "            policy_factory=_policy_factory,\n        )\n"
    head, rest = path.read_text().split(below)
    lines = "".join(f"    {line}\n" for line in fenced(page, "python")[0].splitlines())
    script: dict[str, Any] = {"__name__": "run_grpo", "__file__": str(path)}
    exec(compile(head + below + lines + rest, str(path), "exec"), script)

    class Checkpointer(fake.Checkpointer, Standin):
        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

    policy, logger, checkpointer = fake.Policy(), fake.Logger(), Checkpointer()
    reached: dict[str, Any] = {}

    def setup(config: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        reached["config"] = type(config).__module__
        made = [policy, Standin(), None, None, None, None, fake.Loss(), logger, checkpointer, None, config, None, None]
        return tuple(made)

    script |= {
        "init_ray": Standin(), "get_tokenizer": Standin(), "shutdown_environments": Standin(), "setup": setup,
        "configure_generation_config": lambda generation, *_, **__: generation,
        "setup_response_data": lambda *_: (None, None, {}, {}), "get_next_experiment_dir": lambda _: str(folder),
        "grpo_train": lambda *_: fake.grpo_train(policy, logger, checkpointer, fake.Loss(), folder),
    }  # fmt: skip
    sys.argv = ["run_grpo.py"]
    script["main"]()
    return reached | {"loggers": [type(each).__name__ for each in logger.loggers]}


def slime(page: Path, home: Path, folder: Path) -> dict[str, Any]:
    """The page's arguments by slime's own parser; the hooks by slime's own look-up."""
    pretend("sglang", "sglang_router")
    import argparse

    from slime.utils.arguments import get_slime_extra_args_provider
    from slime.utils.misc import load_function

    words = shlex.split("\n".join(line for line in page.read_text().splitlines() if line.startswith("    --")))
    parser = argparse.ArgumentParser()
    get_slime_extra_args_provider()(parser)
    args = parser.parse_args([*words, "--rollout-batch-size", "8"])
    hooks = [args.custom_megatron_before_train_step_hook_path, args.rollout_data_postprocess_path]
    found = [load_function(path) for path in hooks]
    return {"environment": args.train_env_vars, "hooks": [f"{f.__module__}.{f.__name__}" for f in found]}


def prime_rl(page: Path, home: Path, folder: Path) -> dict[str, Any]:
    """The options of the page's first line by prime-rl's own configuration, on one of its own examples."""
    import tomllib

    pretend("verifiers", "renderers")
    sys.modules.setdefault("tomli", tomllib)
    import renderers
    import verifiers.v1 as environments

    renderers.AutoRendererConfig.name = "prime-qwen3"
    environment = Standin()
    vars(environment).update(env_id="reverse-text")
    environments.resolve_env_field = lambda data, annotation: {**data, "env": environment}
    from prime_rl.configs.rl import RLConfig
    from prime_rl.utils.config import cli

    first = shlex.split(fenced(page, "sh")[0].splitlines()[0].partition("&")[0])
    assert first[:4] == ["uv", "run", "rl", "@"]
    example = (home / "examples/basic/reverse-text/rl.toml").read_text()
    (folder / "rl.toml").write_text(example.partition("[orchestrator.renderer]")[0])  # its renderer is a shell here
    config = cli(RLConfig, args=["@", str(folder / "rl.toml"), *first[5:]])
    files = getattr(config.trainer.monitors, "file", None)
    return {"export": config.trainer.enable_token_export, "files": files is not None}


if __name__ == "__main__":
    typing.TypedDict = typing_extensions.TypedDict  # what these hosts' Python has, and 3.11 has not
    host, home, page, folder = sys.argv[1:]
    print(json.dumps(globals()[host](Path(page), Path(home), Path(folder))), flush=True)
    os._exit(0)
