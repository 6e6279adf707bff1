"""What the documentation site takes from outside docs/: pages of the checkout's root, and files that pages link to.

A hook of mkdocs (`hooks` in mkdocs.yml); nothing else imports it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINKED = ("hosts.example", "LICENSE", "examples/*", "pyproject.toml", "tests/**/*.py", "scripts/*", "runtime/**/*.py")
"""Files that pages may link to; those that do are copied."""

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of the root, and the files that any page links to."""
    texts = [(ROOT / name).read_text("utf-8") for name in PAGES]
    texts += [Path(file.abs_src_path or "").read_text("utf-8") for file in files.documentation_pages()]
    wanted = {target.removeprefix("../").removeprefix("../") for text in texts for target in _LINK.findall(text)}
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    for path in sorted({path for pattern in LINKED for path in ROOT.glob(pattern) if path.is_file()}):
        name = path.relative_to(ROOT).as_posix()
        if name in wanted and files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where the site has what they mean: the root's pages stand beside those of docs/."""
    if page.file.src_uri in PAGES:
        return _LINK.sub(lambda match: "](" + match.group(1).removeprefix("docs/"), markdown)
    depth = page.file.src_uri.count("/")
    # In the checkout a page of docs/ reaches the root by one step more than on the site.
    return _LINK.sub(lambda match: "](" + _up(match.group(1), depth), markdown)


def _up(target: str, depth: int) -> str:
    steps = len(re.match(r"(?:\.\./)*", target).group(0)) // 3  # type: ignore[union-attr]
    return target.removeprefix("../") if steps > depth else target
