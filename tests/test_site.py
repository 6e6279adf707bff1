"""The documentation site as built: code blocks, signatures, names in one piece, palettes, links between pages."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parent.parent
EDIT_URL = "https://git.example.com/group/distrun/edit/main/docs/"
BUILD_SECONDS = 500


def build(target: Path, edit_url: str) -> subprocess.CompletedProcess[str]:
    """Build the site as scripts/docs does, into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    env = {**os.environ, "DOCS_EDIT_URL": edit_url, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site as a builder makes it that sets the address of edit links."""
    target = tmp_path_factory.mktemp("docs") / "site"
    result = build(target, EDIT_URL)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_SECONDS + 60)]


def pages(site: Path) -> list[Path]:
    found = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(found) >= 20
    return found


def article(page: Path) -> str:
    """Return the HTML of a page's own text, without navigation and footer."""
    (found,) = re.findall(r"<article\b.*?</article>", page.read_text("utf-8"), re.DOTALL)
    return str(found)


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def code_blocks(page: Path) -> list[str]:
    return [text_of(block) for block in re.findall(r"<pre\b.*?</pre>", article(page), re.DOTALL)]


def outside_code_blocks(page: Path) -> str:
    return re.sub(r"<pre\b.*?</pre>", "", article(page), flags=re.DOTALL)


def test_examples_in_docstrings_are_code_blocks_with_their_lines(site: Path) -> None:
    store = "\n".join(code_blocks(site / "api" / "kvstore.html"))
    assert 'with kvstore.create("dist_sync") as kv:\n    kv.init("w", weight)\n    kv.push("w", gradient)\n' in store
    data = "\n".join(code_blocks(site / "api" / "data.html"))
    assert ">>> split_input_slice(10, [3, 1])\n[slice(0, 8, None), slice(8, 10, None)]\n" in data
    assert ">>> epochs = Epochs(\"abc\", size=2)\n>>> list(epochs), list(epochs)\n(['a', 'b'], ['c', 'a'])\n" in data


def test_no_code_is_left_between_the_words_of_the_reference(site: Path) -> None:
    for page in sorted((site / "api").glob("*.html")):
        rest = outside_code_blocks(page)
        assert "<blockquote>" not in rest, page.name  # what `>>>` at the margin of a docstring becomes
        assert ">>>" not in text_of(rest), page.name
        for paragraph in re.findall(r"<p>(.*?)</p>", rest, re.DOTALL):
            assert not re.search(r"\n {2,}\S", paragraph), "%s: %s" % (page.name, paragraph[:200])


def test_the_reference_has_nothing_that_is_not_for_users(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        assert "Not for users" not in text_of(article(page)), page.name


def test_trainer_page_shows_the_constructor_and_no_internal_class(site: Path) -> None:
    page = site / "api" / "trainer.html"
    (constructor,) = (block for block in code_blocks(page) if block.startswith("Trainer("))
    for parameter in (
        "params",
        "optimizer",
        "optimizer_params",
        "kvstore",
        "compression_params",
        "update_on_kvstore",
    ):
        assert re.search(r"^ +%s: " % parameter, constructor, re.MULTILINE), constructor
    assert "kvstore: str | KVStoreBase | None = 'dist_sync'" in constructor.replace('"', "'")
    shown = text_of(article(page))
    assert [name for name in ("Keeping", "Settings", "Bases:") if name in shown] == []


def test_reference_names_no_internal_base(site: Path) -> None:
    for page in sorted((site / "api").glob("*.html")):
        for bases in re.findall(r"Bases: (.*?)</p>", article(page), re.DOTALL):
            known = {"RuntimeFault", "KVError", "Rule", "Exception"}
            names = re.split(r",\s*", text_of(bases).strip())
            assert all(name in known or name.endswith("Error") for name in names), "%s: %s" % (page.name, names)


@pytest.mark.parametrize("name", ["Parameter", "Reader", "SplitSampler", "Factor", "Cosine"])
def test_classes_that_scripts_construct_have_a_signature(site: Path, name: str) -> None:
    blocks = [block for page in sorted((site / "api").glob("*.html")) for block in code_blocks(page)]
    assert [block for block in blocks if block.startswith(name + "(")], name


def test_options_and_paths_in_code_marks_break_only_between_words(site: Path) -> None:
    launching = article(site / "index.html") + article(site / "clusters.html")
    # A browser breaks after a hyphen, unless it is told not to.
    assert "<code>--sync-dst-dir</code>" not in launching
    assert '<span class="whole">--sync-dst-dir</span>' in launching
    for page in pages(site):
        for code in re.findall(r"<code>(.*?)</code>", outside_code_blocks(page), re.DOTALL):
            for piece in re.findall(r'<span class="whole">(.*?)</span>', code):
                assert len(html.unescape(piece)) <= 60, "%s: %s would be cut off on a narrow page" % (page.name, piece)
    assert re.search(
        r"<h1[^>]*>distrun_<wbr>runtime\.<wbr>kvstore\.<wbr>schedule<", article(site / "api" / "schedule.html")
    )
    style = (site / "site.css").read_text("utf-8")
    assert re.search(r"\.whole \{[^}]*white-space: nowrap", style)
    assert re.search(r"\.md-typeset code \{[^}]*word-break: normal", style)


def test_marked_names_are_found_by_the_search_as_they_are_written(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text("utf-8")
    assert "DISTRUN_WORKER_ADDRESSES" in index
    assert "--sync-dst-dir" in index


def test_search_takes_options_and_messages_as_plain_words(site: Path) -> None:
    node = shutil.which("node") or pytest.skip("needs node on PATH")
    typed = {"--sync-dst-dir": "sync-dst-dir", "distrun: error: -n *": "distrun error n", "~/job": "/job"}
    stub = "class Worker { postMessage(message) { console.log(message.data.replace(/ +/g, ' ')); } }\n"
    calls = "".join("new Worker().postMessage({type: 2, data: %s});\n" % json.dumps(query) for query in typed)
    program = stub + (site / "search.js").read_text("utf-8") + calls
    result = subprocess.run([node, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == list(typed.values())
    assert 'src="search.js"' in (site / "index.html").read_text("utf-8")


def test_long_lines_of_code_wrap(site: Path) -> None:
    style = (site / "site.css").read_text("utf-8")
    assert re.search(r"pre > code \{[^}]*white-space: pre-wrap", style)
    for page in pages(site):
        assert 'site.css">' in page.read_text("utf-8"), page.name


def test_every_page_has_both_palettes_and_the_choice_of_the_system(site: Path) -> None:
    for page in pages(site):
        text = page.read_text("utf-8")
        media = re.findall(r'data-md-color-media="([^"]*)"', text)
        assert {"(prefers-color-scheme: light)", "(prefers-color-scheme: dark)", "(prefers-color-scheme)"} <= set(media)
        assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="([^"]*)"', text)), page.name
        assert text.count('name="__palette"') == 3, page.name


def test_every_page_leads_to_the_previous_and_the_next(site: Path) -> None:
    start, seen = site / "index.html", 0
    page: Path | None = start
    chain = []
    while page is not None:
        assert page not in chain
        chain.append(page)
        text = page.read_text("utf-8")
        following = re.findall(r'<a href="([^"]*)" class="md-footer__link md-footer__link--next"', text)
        before = re.findall(r'<a href="([^"]*)" class="md-footer__link md-footer__link--prev"', text)
        assert len(before) == (page != start), page.name
        seen += len(before)
        page = (page.parent / following[0]).resolve() if following else None
    # The page of examples/ is reached by links only.
    assert {page.resolve() for page in pages(site) if page.parent.name != "examples"} <= set(chain)
    assert seen == len(chain) - 1


def test_edit_links_lead_to_the_source_of_each_page(site: Path) -> None:
    links = {
        page.relative_to(site).as_posix(): re.findall(r'<a href="([^"]*)"[^>]*rel="edit"', page.read_text("utf-8"))
        for page in pages(site)
    }
    root = EDIT_URL.removesuffix("docs/")
    assert links["kvstore.html"] == [root + "docs/kvstore.md"]
    assert links["api/trainer.html"] == [root + "docs/api/trainer.md"]
    assert links["index.html"] == [root + "README.md"]
    assert links["CHANGELOG.html"] == [root + "CHANGELOG.md"]
    # Pages that programs write: edit the table; measure again.
    assert links["environment.html"] == [root + "runtime/distrun_runtime/contract/environ.py"]
    assert links.pop("benchmarks.html") == []
    for page, (link,) in links.items():
        assert (ROOT / link.removeprefix(root)).is_file(), "%s: %s" % (page, link)


def test_no_edit_links_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCS_EDIT_URL", raising=False)
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert config.edit_uri is None
    assert config.repo_url is None


def test_an_address_of_edit_links_without_a_scheme_is_refused(tmp_path: Path) -> None:
    result = build(tmp_path / "site", "git.example.com/group/distrun/")
    assert result.returncode != 0
    assert "DOCS_EDIT_URL: expected the address that edits the folder docs/" in result.stderr
    assert "found 'git.example.com/group/distrun/'" in result.stderr
    assert not (tmp_path / "site" / "index.html").exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in [*pages(site), site / "404.html"]:
        text = page.read_text("utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)\"", text)
        fetched += re.findall(r"<link\b[^>]*rel=\"(?:stylesheet|icon|preconnect|preload)\"[^>]*href=\"([^\"]*)\"", text)
        fetched += re.findall(r"<link\b[^>]*href=\"([^\"]*)\"[^>]*rel=\"(?:stylesheet|icon|preconnect|preload)\"", text)
        assert len(fetched) >= 4, page.name
        assert [one for one in fetched if re.match(r"(?:https?:)?//", one)] == [], page.name
        # With this part the theme's script asks the repository's host for numbers of stars.
        assert 'data-md-component="source"' not in text, page.name
        assert 'class="mermaid"' not in text, page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text("utf-8")), style.name


def test_written_pages_say_so_in_a_comment_only(site: Path) -> None:
    for name in ("environment", "benchmarks"):
        source = (ROOT / "docs" / (name + ".md")).read_text("utf-8")
        opening = source.partition("## ")[0]
        assert re.match(r"<!--.*(?:written by).*?-->\n", opening, re.DOTALL | re.IGNORECASE), name
        visible = text_of(article(site / (name + ".html")).partition("<h2")[0])
        assert not re.search(r"written by|do not edit|not this page", visible, re.IGNORECASE), name
        assert "<title>%s" % {"environment": "Environment", "benchmarks": "Benchmarks"}[name] in (
            site / (name + ".html")
        ).read_text("utf-8")
