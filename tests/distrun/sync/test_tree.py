from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fakehosts import write

from distrun.errors import UsageError
from distrun.sync.rules import CopyRules, Extra
from distrun.sync.tree import Tree, git_files, scan, summary


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def source(folder: Path) -> Path:
    write(folder, **{"train.py": "12345", "data/a.bin": "x" * 1000, ".git/HEAD": "ref", "lib/__pycache__/a.pyc": "..."})
    (folder / "link").symlink_to("train.py")
    return folder


def test_files_and_bytes_are_counted_by_the_rules_of_the_copy(tmp_path: Path) -> None:
    folder = source(tmp_path / "it's a [source]")
    tree = scan(str(folder), CopyRules())
    assert (tree.files, tree.size) == (3, 1005)
    assert tree.biggest[0] == ("data", 1, 1000)
    assert tree.text() == "3 files, 1005 B"
    assert scan(str(folder), CopyRules(("data",))).size == 5
    (folder / ".distrunignore").write_text("*.bin\n+ .git\n")
    assert scan(str(folder), CopyRules()).size == 5 + 3 + len("*.bin\n+ .git\n")


def test_what_is_asked_for_and_not_copied_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", **{"a.py": "", "own/__main__.py": "", "sub/b.py": "", "é.py": "", ".venv/bin/x": ""})
    lib = write(tmp_path / "lib", **{"c.py": ""})
    extra = (Extra(str(lib), "lib"), Extra(str(lib / "c.py"), "new/d.py"))
    asked = ("a.py", "own", "sub/b.py", "é.py", ".venv/bin/x", "lib/c.py", "new/d.py", "c.py", "none")
    assert scan(str(folder), CopyRules(("b.py",), extra=extra), asked).lacks == {
        "sub/b.py",
        ".venv/bin/x",
        "c.py",
        "none",
    }
    git(folder, "init", "-q")
    write(folder, **{".gitignore": "a.py\n"})
    assert scan(str(folder), CopyRules(gitignore=True), ("a.py", "own", "sub/b.py")).lacks == {"a.py"}


def test_extras_count_and_must_be_there(tmp_path: Path) -> None:
    folder = source(tmp_path / "s")
    lib = write(tmp_path / "lib", **{"a.so": "1234", "__pycache__/x.pyc": "."})
    extra = (Extra(str(lib), "lib"), Extra(str(lib / "a.so"), "b.so"))
    tree = scan(str(folder), CopyRules(extra=extra))
    assert (tree.files, tree.size) == (5, 1013)
    with pytest.raises(UsageError, match="there is no /not/here"):
        scan(str(folder), CopyRules(extra=(Extra("/not/here", "x"),)))
    with pytest.raises(UsageError, match="there is no directory"):
        scan(str(tmp_path / "nothing"), CopyRules())


def test_what_git_ignores_is_left_out_and_new_and_nested_files_are_not(tmp_path: Path) -> None:
    repo = write(tmp_path / "repo", **{"a.py": "1", "gone.py": "2", ".gitignore": "*.log\n/build/\n", "sub/b.py": "3"})
    other = write(tmp_path / "other", **{"c.py": "4"})
    for folder in (repo, other):
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "x")
    git(repo, "submodule", "add", "-q", str(other), "module")
    write(repo, **{"new é.py": "5", "x.log": "6", "build/out": "7", "module/new.py": "8", "sub/y.log": "9"})
    (repo / "gone.py").unlink()
    names = {name.decode() for name in git_files(str(repo))}
    assert names == {
        "a.py", ".gitignore", ".gitmodules", "sub/b.py", "new é.py", "module/c.py", "module/new.py"
    }  # fmt: skip
    assert {name.decode() for name in git_files(str(repo / "sub"))} == {"b.py"}
    assert scan(str(repo), CopyRules(gitignore=True)).files == 7
    assert scan(str(repo), CopyRules(("module",), gitignore=True)).files == 5
    (repo / "we -> ird\n\\#101 name").touch()
    assert scan(str(repo), CopyRules(gitignore=True)).files == 8


def test_gits_list_needs_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="--sync-gitignore: git cannot list"):
        git_files(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs git"):
        git_files(str(tmp_path))


def test_much_is_warned_of_with_the_folders_that_matter() -> None:
    assert Tree(50_000, 1 << 30, (("data", 1, 1),)).warnings() == []
    (text,) = Tree(60_000, 5, (("data", 59_000, 4),)).warnings()
    assert text.startswith("60000 files, 5 B are to be copied to each host; the most is in data (59000 files, 4 B);")
    assert "--sync-exclude" in text
    assert Tree(1, 3 << 30).warnings()[0].startswith("1 file, 3.0 GiB are")


def test_the_listing_of_an_rsync_that_only_counts_is_understood() -> None:
    tree = summary(b"Number of files: 1,234 (reg: 1,000, dir: 234)\nTotal file size: 5,678 bytes\n")
    assert (tree.files, tree.size) == (1234, 5678)
    assert summary(b"skipping non-regular file\n") == Tree()
