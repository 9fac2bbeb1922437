"""The docs keep their word: links lead somewhere, and every `foreshock` command in them exists with its options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from foreshock_service.cli.table import COMMANDS, command

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
SHELL = re.compile(r"```(?:sh|bash|shell|console)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link, picture in LINK.findall(text):
        target = (link or picture).partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def shell_lines() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in SHELL.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                bare = line.removeprefix("$ ").strip()
                if re.match(r"(\S+=\S* )*(\.venv/bin/)?foreshock ", bare):
                    found.append((str(page.relative_to(ROOT)), bare))
    return found


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_every_foreshock_command_exists_with_its_options(page: str, line: str) -> None:
    # Bracketed parts are optional in synopses; words in capitals stand for values.
    words = shlex.split(line.replace("[", "").replace("]", "").replace("…", ""), comments=True)
    while "=" in words[0]:
        words.pop(0)
    words = words[1:]
    if not words or words[0].startswith("-"):
        return
    entries = {entry.name: entry for entry in COMMANDS}
    for name in words[0].split("|"):
        assert name in entries, f"{page}: no command {name!r}"
        found = command(entries[name])
        rest = words[1:]
        if isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
            sub = rest.pop(0)
            for one in sub.split("|"):
                assert one in found.commands, f"{page}: no command `foreshock {name} {one}`"
            found = found.commands[sub.split("|")[0]]
        known = {option for parameter in found.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in rest:
            if word == "--":
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in known | {"--help"}, f"{page}: `{line}` has no {word}"


def test_the_readme_names_every_room_of_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    for room in ("collectors/foreshock", "service/foreshock_service", "lab", "benchmarks", "docs"):
        assert f"({room}" in readme


def test_the_site_builds_and_holds_every_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        build,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "faq.html", "about.html", "rules/index.html", "lab/index.html", "quickstart.zh-CN.html"):
        said = (tmp_path / page).read_text()
        assert 'src="http' not in said
        assert 'rel="stylesheet" href="http' not in said
