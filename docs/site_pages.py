"""The docs site takes in the pages that live beside the code, so that a link works on the site as it does in the tree.

`docs/` is the site's root. READMEs of other rooms become pages under their own path (`lab/README.md`, …), the
project's README becomes `about.md`; a link from any page to another is resolved in the tree and written as the site
needs it. A link to something that is no page (a source file, a folder) is shown as its path, since the site doesn't
carry it. Used by mkdocs (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "lab/**/*.md", "benchmarks/**/*.md")
RENAMED = {"README.md": "about.md", "README.zh-CN.md": "about.zh-CN.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside `docs/` and the pictures that they show."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, RENAMED.get(place, place), abs_src_path=str(path)))
            for picture in sorted(path.parent.glob("*.png")) if path.parent != ROOT else []:
                files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Rewrites links out of a page's own folder to where the site holds their target."""
    here = Path(page.file.abs_src_path or "").relative_to(ROOT).as_posix()
    fences = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else _links(part, here, page.file, files) for part in fences)


def _links(text: str, here: str, page: File, files: Files) -> str:
    def one(match: re.Match[str]) -> str:
        bang, label, link = match.groups()
        target, _, anchor = link.partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match.group()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        uri = place.removeprefix("docs/") if place.startswith("docs/") else RENAMED.get(place, place)
        if files.get_file_from_path(uri) is None and files.get_file_from_path(f"{uri}/README.md") is not None:
            uri = f"{uri}/README.md"
        if files.get_file_from_path(uri) is None:
            return f"{label} (`{place}`)"
        relative = posixpath.relpath(uri, posixpath.dirname(page.src_uri) or ".")
        return f"{bang}[{label}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(one, text)
