"""Builds the site from docs/ and from pages of the checkout's root, with edit links and unbroken names in code.

A hook of mkdocs (`hooks` in mkdocs.yml); nothing else imports it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINKED = ("hosts.example", "LICENSE", "examples/*", "pyproject.toml", "tests/**/*.py", "scripts/*", "runtime/**/*.py")
"""Files that pages may link to; those that do are copied."""
WRITTEN = {"environment.md": "runtime/distrun_runtime/contract/environ.py", "benchmarks.md": None}
"""Pages that programs write, and the file to edit instead, if there is one."""

LONGEST = 32
"""Characters of a name in code marks that stay together on a line; a longer one may break between its words."""
SHORT = 22
"""The same in titles, which are larger, and in the table of contents, which is narrow."""

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig, **_: Any) -> None:
    """Return if the address of edit links is one; raise PluginError if not."""
    if config.edit_uri and not re.match(r"https?://[^/]+/", config.edit_uri):
        raise PluginError(
            "DOCS_EDIT_URL: expected the address that edits the folder docs/, such as"
            " https://git.example.com/group/distrun/edit/main/docs/, found %r" % config.edit_uri
        )


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


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Give the page its edit link, and point links to where the site has what they mean."""
    name = page.file.src_uri
    page.edit_url = _edit_url(name, config.edit_uri)
    if name in PAGES:
        # The root's pages stand beside those of docs/.
        return _LINK.sub(lambda match: "](" + match.group(1).removeprefix("docs/"), markdown)
    depth = name.count("/")
    # In the checkout a page of docs/ reaches the root by one step more than on the site.
    return _LINK.sub(lambda match: "](" + _up(match.group(1), depth), markdown)


def on_page_content(markup: str, page: Any, **_: Any) -> str:
    """Keep names in one piece: in code marks, in the page's title and in its table of contents."""
    _mark_toc(page.toc)
    markup = re.sub(r"(<h1\b[^>]*>)([^<]*)", lambda match: match.group(1) + _title(match.group(2)), markup)
    parts = re.split(r"(<pre\b.*?</pre>)", markup, flags=re.DOTALL)
    parts[::2] = [_INLINE.sub(lambda match: "<code>%s</code>" % _code(match.group(1)), part) for part in parts[::2]]
    return "".join(parts)


def _edit_url(name: str, address: str | None) -> str | None:
    """Return where a page is edited.

    Arguments:
        name: of the page on the site.
        address: where the folder docs/ is edited, with "/" at the end; or None.
    """
    source = WRITTEN.get(name, "docs/" + name if (ROOT / "docs" / name).exists() else name)
    return urljoin(address, "../" + source) if address and source else None


_INLINE = re.compile(r"<code>([^<]*)</code>")
_OUTER = re.compile(r"(?<=\w[/,=])(?=\w)|(?<=::)(?=\w)|(?<=\w)(?=[\[({])")  # between names
_INNER = re.compile(r"(?<=\w[_.-])(?=\w)")  # between the words of a name, where the first is not enough


def _code(code: str) -> str:
    """Return the HTML of code with marks where browsers may break its lines: at blanks, and within long names."""
    return "".join(part if part.isspace() else _word(html.unescape(part)) for part in re.split(r"(\s+)", code))


def _word(word: str) -> str:
    pieces = [word]
    if len(word) > LONGEST:
        names = _OUTER.split(word)
        pieces = _joined([part for name in names for part in (_INNER.split(name) if len(name) > LONGEST else [name])])
    # Letters, digits and underscores have no place where a browser breaks.
    quoted = (html.escape(piece, quote=False) for piece in pieces)
    return "<wbr>".join(one if re.fullmatch(r"\w*", one) else '<span class="whole">%s</span>' % one for one in quoted)


def _joined(pieces: list[str]) -> list[str]:
    """Return the pieces put together to as few as possible that are not too long."""
    joined = [""]
    for piece in pieces:
        if joined[-1] and len(joined[-1]) + len(piece) > LONGEST:
            joined.append("")
        joined[-1] += piece
    return joined


def _title(title: str) -> str:
    """Return the HTML of a title whose long names may break between their words."""
    return "".join("<wbr>".join(_INNER.split(one)) if len(one) > SHORT else one for one in re.split(r"(\s+)", title))


def _mark_toc(entries: Iterable[Any]) -> None:
    for entry in entries:
        entry.title = _title(entry.title)
        _mark_toc(entry.children)


def _up(target: str, depth: int) -> str:
    steps = len(re.match(r"(?:\.\./)*", target).group(0)) // 3  # type: ignore[union-attr]
    return target.removeprefix("../") if steps > depth else target
