"""The Dockerfile by hadolint's rules that matter here (each named), since neither it nor an engine can be had."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined, comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word.upper(), " ".join(rest.split())))
    return found


FOUND = instructions((ROOT / "Dockerfile").read_text())


def of(word: str) -> list[str]:
    return [rest for name, rest in FOUND if name == word]


def test_bases_are_pinned_and_the_last_stage_is_another_one() -> None:
    bases = of("FROM")
    assert len(bases) == 2
    assert all(re.match(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in bases), "DL3006, DL3007"
    assert " AS build" in bases[0]
    assert " AS " not in bases[1]


def test_it_runs_as_a_user_that_is_not_root_named_by_number() -> None:
    assert of("USER") == ["10001:10001"], "DL3002; Kubernetes' runAsNonRoot needs a number"
    last = len(FOUND) - 1 - [word for word, _ in reversed(FOUND)].index("USER")
    assert not [word for word, _ in FOUND[last:] if word in ("RUN", "COPY")], "nothing is written after it"


def test_what_is_run_is_a_list_so_that_signals_arrive() -> None:
    assert json.loads(of("ENTRYPOINT")[0]) == ["foreshock"], "DL3025"
    assert json.loads(of("CMD")[0]) == ["serve"]
    check = of("HEALTHCHECK")[0]
    assert json.loads(check[check.index("CMD") + 3 :])[0] == "python"


def test_only_copy_never_add_and_only_what_exists() -> None:
    assert of("ADD") == [], "DL3020"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*", "nothing goes to the engine that is not named"
    for rest in of("COPY"):
        if rest.startswith("--from="):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(f"!{source}".startswith(line) for line in ignored if line.startswith("!")), f"{source} is sent"


def test_it_stays_small() -> None:
    runs = " ".join(of("RUN"))
    assert "--no-cache-dir" in runs, "DL3042"
    assert "apt-get" not in runs, "DL3009, DL3015"
    assert "torch" not in runs
    last_stage = FOUND[[i for i, (word, _) in enumerate(FOUND) if word == "FROM"][-1] :]
    assert not [rest for word, rest in last_stage if word == "RUN" and "pip" in rest], (
        "no compiler, no cache, no source"
    )


def test_folders_are_absolute_and_no_secret_is_baked_in() -> None:
    assert all(rest.startswith("/") for rest in of("WORKDIR")), "DL3000"
    baked = " ".join(of("ENV") + of("ARG"))
    assert not re.search("PASSWORD|TOKEN|SECRET", baked)


def test_what_the_wheel_is_made_of_is_copied() -> None:
    import tomllib

    made = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {p.split("/")[0] for p in [*made["packages"], *made["force-include"]]}
    copied = {source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]}
    assert needed <= copied
