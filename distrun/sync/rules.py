"""What is copied and what is not, as options for rsync. The first pattern that fits a path decides.

In this order: distrun's own files, --sync-exclude, `.distrunignore` in the source (the syntax of rsync's
--exclude-from: one pattern a line, `#` begins a comment, `+ PATTERN` keeps what a later pattern would leave out),
then `DEFAULT_EXCLUDES`. With --sync-gitignore git's own list of files takes the place of the defaults; patterns of
.gitignore are never given to rsync, which would read them in another way.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distrun.errors import UsageError
from distrun_runtime.contract.folder import MARKER

PARTIAL = ".distrun-part-"
"""Beginning of the names of folders that hold updates until all have arrived."""
IGNORE_FILE = ".distrunignore"

DEFAULT_EXCLUDES = (
    # The history of a version control, which is often larger than the files.
    ".git",
    ".hg",
    ".svn",
    # What Python makes of sources: made again on the host, for its own version.
    "__pycache__",
    "*.py[co]",
    # Environments do not work in another place; `venv` without a dot only as a folder.
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
"""Left out of every copy, in any folder. `+ NAME` in .distrunignore brings one back."""


@dataclass(frozen=True)
class Extra:
    """Something outside the source that goes along (--sync-extra)."""

    source: str
    """An absolute path here: a file or a folder."""
    name: str
    """Where it comes to be, below the destination."""


@dataclass(frozen=True)
class Rules:
    """What the user asked for."""

    excludes: tuple[str, ...] = ()
    """--sync-exclude, in order."""
    gitignore: bool = False
    """Copy what git knows of or would (`git ls-files -co --exclude-standard`)."""
    extra: tuple[Extra, ...] = ()


def make_rules(
    excludes: Iterable[str] = (), gitignore: bool = False, extra: Iterable[str] = (), *, cwd: str, delete: bool = False
) -> Rules:
    """Return the rules that options say. Pure. Relative paths of --sync-extra are below `cwd`.

    Raises:
        UsageError: an empty pattern, an extra that would not come to be below the destination, or what does not go
            together.
    """
    excludes = tuple(excludes)
    for pattern in excludes:
        if not pattern.strip() or "\0" in pattern or "\n" in pattern:
            raise UsageError("--sync-exclude: expected a pattern, found %r" % pattern)
    if gitignore and delete:
        raise UsageError(
            "--sync-delete and --sync-gitignore do not go together: what git ignores would be lost or kept by chance",
            "leave one of them out; patterns for both copying and deleting belong in %s" % IGNORE_FILE,
        )
    return Rules(excludes, gitignore, tuple(parse_extra(word, cwd) for word in extra))


def parse_extra(word: str, cwd: str) -> Extra:
    """Return what `SRC[:DST]` says; DST is a path below the destination, without it the last part of SRC. Pure.

    Raises:
        UsageError: no SRC, or a DST that is not below the destination.
    """
    source, colon, name = word.rpartition(":")
    if not colon:
        source, name = word, ""
    if not source or "\0" in word:
        raise UsageError("--sync-extra: expected SRC or SRC:DST, found %r" % word)
    source = os.path.normpath(os.path.join(cwd, os.path.expanduser(source)))
    wanted = name or os.path.basename(source)
    normal = posixpath.normpath(wanted)
    if normal.startswith(("/", "../", "~")) or normal in ("..", ".") or not wanted:
        raise UsageError(
            "--sync-extra %s: expected DST to be a path below the directory of the copy, found %r" % (word, wanted)
        )
    return Extra(source, normal)


def filters(rules: Rules, source: str) -> list[str]:
    """Return the filter options for the copy of `source`. Reads `.distrunignore` there.

    Raises:
        UsageError: that file cannot be read.
    """
    patterns = ["/" + MARKER, PARTIAL + "*/", *rules.excludes, *_ignore_file(source)]
    if not rules.gitignore:
        patterns += DEFAULT_EXCLUDES
    return [*protected(rules), *("--exclude=" + pattern for pattern in patterns)]


def extra_filters() -> list[str]:
    """Return the filter options for the copy of an extra. Pure."""
    return ["--exclude=" + pattern for pattern in (PARTIAL + "*/", *DEFAULT_EXCLUDES)]


def protected(rules: Rules) -> list[str]:
    """Return filters that keep --delete from extras, which the source does not have. Pure."""
    found: dict[str, None] = {}
    for extra in rules.extra:
        parts = extra.name.split("/")
        for end in range(1, len(parts) + 1):
            found["--filter=P /" + literal("/".join(parts[:end]))] = None
        found["--filter=P /%s/**" % literal(extra.name, always=True)] = None
    return list(found)


def literal(path: str, always: bool = False) -> str:
    """Return a pattern that means exactly `path`. Pure.

    rsync takes a backslash for itself unless the pattern has a wildcard somewhere (`always`: it will).
    """
    return re.sub(r"([*?\[\\])", r"\\\1", path) if always or re.search(r"[*?\[]", path) else path


def _ignore_file(source: str) -> Sequence[str]:
    path = Path(source) / IGNORE_FILE
    try:
        text = os.fsdecode(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as err:
        raise UsageError("cannot read %s: %s" % (path, err.strerror or err)) from err
    lines = re.split(r"[\r\n]+", text)
    return [line for line in lines if line.strip() and not line.startswith(("#", ";")) and "\0" not in line]
