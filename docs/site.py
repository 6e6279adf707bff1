"""Builds the site from docs/ and from pages of the checkout's root, with edit links and unbroken names in code.

A hook of mkdocs (`hooks` in mkdocs.yml); nothing else imports it.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINKED = ("hosts.example", "LICENSE", "examples/*", "pyproject.toml", "tests/**/*.py", "scripts/*", "runtime/**/*.py")
"""Files that pages may link to; those that do are copied."""
WRITTEN = {"environment.md": "runtime/distrun_runtime/contract/environ.py", "benchmarks.md": None}
"""Pages that programs write, and the file to edit instead, if there is one."""

LONGEST = 32
"""Characters of a name in code marks that stay together on a line; a longer one may break between its words."""

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


def on_page_content(markup: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Give the page its edit link, if the builder has set an address; keep names in code marks in one piece."""
    name = page.file.src_uri
    source = WRITTEN.get(name, "docs/" + name if (ROOT / "docs" / name).exists() else name)
    # The address is that of docs/.
    page.edit_url = urljoin(config.edit_uri, "../" + source) if config.edit_uri and source else None
    parts = re.split(r"(<pre\b.*?</pre>)", markup, flags=re.DOTALL)
    parts[::2] = [_INLINE.sub(lambda match: "<code>%s</code>" % _unbroken(match.group(1)), part) for part in parts[::2]]
    return "".join(parts)


_INLINE = re.compile(r"<code>([^<]*)</code>")


def _unbroken(code: str) -> str:
    """Return the HTML of code with marks where browsers may break its lines: at blanks, and within long names."""
    return "".join(part if part.isspace() else _word(html.unescape(part)) for part in re.split(r"(\s+)", code))


def _word(word: str) -> str:
    pieces = [word]
    if len(word) > LONGEST:
        pieces = [
            part for piece in _OUTER.split(word) for part in ([piece] if len(piece) <= LONGEST else _INNER.split(piece))
        ]
    # Letters and digits have no place where a browser breaks.
    quoted = (html.escape(piece, quote=False) for piece in _joined(pieces))
    return "<wbr>".join(one if re.fullmatch(r"\w*", one) else '<span class="whole">%s</span>' % one for one in quoted)


_OUTER = re.compile(r"(?<=\w[/,=])(?=\w)|(?<=::)(?=\w)|(?<=\w)(?=[\[({])")  # between names
_INNER = re.compile(r"(?<=\w[_-])(?=\w)")  # between the words of a name, where the first is not enough


def _joined(pieces: list[str]) -> list[str]:
    """Return the pieces put together to as few as possible that are not too long."""
    joined = [""]
    for piece in pieces:
        if joined[-1] and len(joined[-1]) + len(piece) > LONGEST:
            joined.append("")
        joined[-1] += piece
    return joined


def _up(target: str, depth: int) -> str:
    steps = len(re.match(r"(?:\.\./)*", target).group(0)) // 3  # type: ignore[union-attr]
    return target.removeprefix("../") if steps > depth else target
