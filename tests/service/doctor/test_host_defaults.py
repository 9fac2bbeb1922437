"""What a file leaves out is read with the host's own defaults: of the installed verl and TRL, of slime's and OpenRLHF's
source where SLIME_HOME and OPENRLHF_HOME give it. Read as text, nothing is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreshock_service.doctor import commandline, openrlhf, slime, trl, verl
from foreshock_service.doctor.document import Document

MINIMAL = {
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=x\n",
    "trl": "train --use_vllm true\n",
    "slime": "train --rollout-batch-size 4 --num-rollout 1\n",
    "openrlhf": "train --vllm.num_engines 1 --actor.model_name_or_path x\n",
}


class Noting(Document):
    """Notes each default that the doctor takes for a key that is not there."""

    def __init__(self, text: str) -> None:
        read = commandline.parse(text)
        super().__init__(read.root, read.lines)
        self.taken: dict[str, Any] = {}

    def get(self, path: str, default: Any = None) -> Any:
        found = super().get(path, default)
        if not found.present and default is not None:
            self.taken[path] = default
        return found


def package(name: str) -> Path:
    # From the distribution, since another test may hold a module of this name that has no place.
    return Path(str(importlib.metadata.distribution(name).locate_file(name)))


def test_verls_defaults_are_those_of_its_composed_configuration() -> None:
    noting = Noting(MINIMAL["verl"])
    verl.examine(noting, None)
    text = (package("verl") / "trainer/config/_generated_ppo_trainer.yaml").read_text()
    megatron = (package("verl") / "trainer/config/_generated_ppo_megatron_trainer.yaml").read_text()
    composed, other = yaml.safe_load(text), yaml.safe_load(megatron)
    checked = 0
    for path, default in noting.taken.items():
        said = at(composed, path) if at(composed, path) is not None else at(other, path)
        if said is None or (isinstance(said, str) and "${" in said):
            continue  # required, or taken from another key as here
        assert float(said) == float(default) if isinstance(default, int | float) else said == default, path
        checked += 1
    assert checked >= 15


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def test_trls_defaults_are_those_of_its_grpo_config() -> None:
    noting = Noting(MINIMAL["trl"])
    trl.examine(noting, None)
    fields: dict[str, Any] = {}
    for path in ("trainer/grpo_config.py", "trainer/model_config.py"):
        for node in ast.walk(ast.parse((package("trl") / path).read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                fields[node.target.id] = default_of(node.value)
    own = {path: default for path, default in noting.taken.items() if "." not in path and path in fields}
    assert len(own) >= 8
    # `epsilon_high` is None there: then it is `epsilon`.
    assert {p: fields[p] for p in own if fields[p] is not None} == {
        p: d for p, d in own.items() if fields[p] is not None
    }


def default_of(node: ast.expr) -> Any:
    """`x: T = 1` or `x: T = field(default=1, …)`."""
    if isinstance(node, ast.Call):
        given = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        return None if given is None else default_of(given)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@pytest.mark.real_source
@pytest.mark.parametrize(
    ("variable", "path", "host", "examine"),
    [
        ("SLIME_HOME", "slime/utils/arguments.py", "slime", slime.examine),
        ("OPENRLHF_HOME", "openrlhf/cli/train_ppo_ray.py", "openrlhf", openrlhf.examine),
    ],
)
def test_the_real_options_have_the_defaults_that_are_taken(variable: str, path: str, host: str, examine: Any) -> None:
    home = os.environ.get(variable)
    if not home:
        pytest.skip(f"{variable} is not set: {host}'s source is not here")
    options: dict[str, Any] = {}
    for node in ast.walk(ast.parse((Path(home) / path).read_text())):
        if isinstance(node, ast.Call) and re.search("add_argument|reset_arg", ast.unparse(node.func)):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
            flags = {keyword.arg: keyword.value for keyword in node.keywords}
            if names:
                switch = "action" in flags and ast.unparse(flags["action"]) == "'store_true'"
                given = default_of(flags["default"]) if "default" in flags else None
                options[str(names[0])[2:].replace("-", "_")] = False if switch and given is None else given
    noting = Noting(MINIMAL[host])
    examine(noting, None)
    known = {name: default for name, default in noting.taken.items() if options.get(name) is not None}
    assert len(known) >= 10
    assert known == {name: options[name] for name in known}
