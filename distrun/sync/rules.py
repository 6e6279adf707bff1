"""The user's rules of a copy: which files, what else, and to which folder; and the filter options that rsync gets.

The first pattern that matches a path decides. Their order:

1. distrun's own files
2. --sync-exclude
3. `.distrunignore` in the source. Its syntax is that of rsync's --exclude-from: one pattern a line, `#` begins a
   comment, `+ PATTERN` keeps what a later pattern would leave out.
4. `DEFAULT_EXCLUDES`, without --sync-gitignore. With it, git's list of files says what is copied (`tree.py`). Patterns
   of .gitignore are never given to rsync, which reads them differently.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distrun.errors import UsageError
from distrun_runtime.contract.folder import MARKER, PARTIAL

IGNORE_FILE = ".distrunignore"

DEFAULT_EXCLUDES = (
    # Version control: the history is often larger than the files.
    ".git",
    ".hg",
    ".svn",
    # Compiled Python: the host compiles for its own version.
    "__pycache__",
    "*.py[co]",
    # Environments do not work in another place. `venv` without a dot only as a folder.
    ".venv",
    "venv/",
    ".tox",
    ".nox",
    "node_modules",
    # Caches of tools, and of distrun.
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".distrun",
    ".DS_Store",
)
"""Left out of every copy, in any folder. `+ NAME` in .distrunignore includes one again."""


@dataclass(frozen=True)
class Extra:
    """A file or folder outside the source that is copied too (--sync-extra)."""

    source: str
    """Its absolute path on this machine."""
    name: str
    """Its path below the destination."""


@dataclass(frozen=True)
class CopyRules:
    """The files that the user wants to be copied."""

    excludes: tuple[str, ...] = ()
    """--sync-exclude, in order."""
    gitignore: bool = False
    """Copy the files that git tracks or would add (`git ls-files -co --exclude-standard`)."""
    extra: tuple[Extra, ...] = ()


def make_rules(
    excludes: Iterable[str] = (), gitignore: bool = False, extra: Iterable[str] = (), *, cwd: str, delete: bool = False
) -> CopyRules:
    """Return the rules of a command's options. Relative paths of --sync-extra are below `cwd`.

    Raises:
        UsageError: an empty pattern, an extra outside the destination, or options that contradict each other.
    """
    excludes = tuple(excludes)
    for pattern in excludes:
        if not pattern.strip() or "\0" in pattern or "\n" in pattern:
            raise UsageError(f"--sync-exclude: expected a pattern, found {pattern!r}")
    if gitignore and delete:
        raise UsageError(
            "--sync-delete and --sync-gitignore do not go together: what git ignores would be lost or kept by chance",
            f"leave one of them out; patterns for both copying and deleting belong in {IGNORE_FILE}",
        )
    return CopyRules(excludes, gitignore, tuple(parse_extra(word, cwd) for word in extra))


def parse_extra(word: str, cwd: str) -> Extra:
    """Read `SRC[:DST]`. DST is a path below the destination; default: the last part of SRC.

    Raises:
        UsageError: no SRC, or a DST that is not below the destination.
    """
    source, colon, name = word.rpartition(":")
    if not colon:
        source, name = word, ""
    if not source or "\0" in word:
        raise UsageError(f"--sync-extra: expected SRC or SRC:DST, found {word!r}")
    source = os.path.normpath(os.path.join(cwd, os.path.expanduser(source)))
    wanted = name or os.path.basename(source)
    normal = posixpath.normpath(wanted)
    if normal.startswith(("/", "../", "~")) or normal in ("..", ".") or not wanted:
        raise UsageError(
            f"--sync-extra {word}: expected DST to be a path below the directory of the copy, found {wanted!r}"
        )
    return Extra(source, normal)


def check_folder(folder: str, option: str = "--sync-dst-dir") -> None:
    """Check a destination.

    Raises:
        UsageError: it is empty, the root of the file system, or names a user or variable as only a shell would read it.
    """
    if not folder or "\0" in folder:
        raise UsageError(f"{option}: expected a directory on the hosts, found {folder!r}")
    if folder.startswith("~") and not re.fullmatch(r"~[A-Za-z0-9._+-]*(/.*)?", folder, re.DOTALL):
        raise UsageError(f"{option}: expected ~/DIR or ~USER/DIR, found {folder!r}", f"./{folder} is a name")
    if folder.startswith("$"):
        home = re.sub(r"\A\$(HOME|\{HOME\})(?=/|\Z)", "~", folder)
        fix = f"write {home}" if home != folder else f"./{folder} is a name"
        raise UsageError(f"{option}: variables are not expanded on the hosts: {folder!r}", fix)
    if not folder.strip("/."):
        raise UsageError(f"{option}: {folder!r} cannot take copies", "name one of its own, like ~/job")


def filters(rules: CopyRules, source: str) -> list[str]:
    """Return rsync's filter options for the copy of `source`. Reads its `.distrunignore`.

    Raises:
        UsageError: `.distrunignore` cannot be read.
    """
    patterns = ["/" + MARKER, PARTIAL + "*", *rules.excludes, *_ignore_file(source)]
    if not rules.gitignore:
        patterns += DEFAULT_EXCLUDES
    return [*protected(rules), *("--exclude=" + pattern for pattern in patterns)]


def extra_filters() -> list[str]:
    """Return rsync's filter options for the copy of an extra."""
    return ["--exclude=" + pattern for pattern in (PARTIAL + "*", *DEFAULT_EXCLUDES)]


def protected(rules: CopyRules) -> list[str]:
    """Return filters that protect extras, which are not in the source, from --delete."""
    found: dict[str, None] = {}
    for extra in rules.extra:
        parts = extra.name.split("/")
        for end in range(1, len(parts) + 1):
            found["--filter=P /" + literal("/".join(parts[:end]))] = None
        found[f"--filter=P /{literal(extra.name, always=True)}/**"] = None
    return list(found)


def literal(path: str, always: bool = False) -> str:
    """Return a pattern that matches exactly `path`.

    In a pattern without wildcards rsync takes a backslash literally. `always`: the whole pattern will have a wildcard.
    """
    return re.sub(r"([*?\[\\])", r"\\\1", path) if always or re.search(r"[*?\[]", path) else path


def _ignore_file(source: str) -> Sequence[str]:
    path = Path(source) / IGNORE_FILE
    try:
        text = os.fsdecode(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as err:
        raise UsageError(f"cannot read {path}: {err.strerror or err}") from err
    lines = re.split(r"[\r\n]+", text)
    return [line for line in lines if line.strip() and not line.startswith(("#", ";")) and "\0" not in line]
