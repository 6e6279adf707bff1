"""The user's rules of a copy: which files, what else, and to which folder; and the filter options that rsync gets.

The first pattern that matches a path decides. Their order:

1. distrun's own files
2. --sync-exclude
3. `.distrunignore` in the source. Its syntax is that of rsync's --exclude-from: one pattern a line, `#` begins a
   comment, `+ PATTERN` keeps what a later pattern would leave out.
4. folders of fetched results
5. `DEFAULT_EXCLUDES`, without --sync-gitignore. With it, git's list of files says what is copied (`tree.py`). Patterns
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
from distrun_runtime.coordinator.messages import KeepRule

IGNORE_FILE = ".distrunignore"
FETCHED = ".distrun-fetched"
"""File that says: `distrun fetch` made this folder, and gave it its name. It has results, which no job needs."""

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
    """Return rsync's filter options for the copy of `source`. Reads its `.distrunignore`, and looks for `FETCHED`.

    Raises:
        UsageError: `.distrunignore` cannot be read.
    """
    patterns = ["/" + MARKER, PARTIAL + "*", *rules.excludes, *_ignore_file(source)]
    patterns += [f"/{literal(each.parent.name)}/" for each in sorted(Path(source).glob(f"*/{FETCHED}"))]
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


# rsync's patterns as regular expressions, for hosts where no rsync matches them.
#
# Where files go over the agents' channels, `--sync-delete` deletes on the host by what is said here. The copy itself is
# listed by rsync (`tree.py`). The rules are those of "PATTERN MATCHING RULES" in rsync's manual and of its `exclude.c`;
# tests compare them with the program. Patterns and paths are bytes, read as Latin-1: rsync's `?` is one byte.


_EXCLUDE = "--exclude="
_PROTECT = "--filter=P "
_NOTHING = "(?!)"


def keep_rules(filters: Iterable[str]) -> list[KeepRule]:
    """Return which files of a host `--sync-delete` leaves alone, given rsync's filter options (`rules.filters`).

    What a pattern leaves out of the copy is kept. The first rule that fits decides, in rsync too.
    """
    found: list[KeepRule] = []
    for option in filters:
        if option.startswith(_PROTECT):
            found += _rules(option.removeprefix(_PROTECT), keeps=True)
            continue
        pattern, keeps = option.removeprefix(_EXCLUDE), True
        if pattern == "!":
            found.clear()
            continue
        if pattern.startswith(("+ ", "- ")):
            pattern, keeps = pattern[2:], pattern[0] == "-"
        found += _rules(pattern, keeps)
    return found


def is_kept(rules: Sequence[KeepRule], name: str) -> bool:
    """Return whether rules keep a file that only a host has, or a folder that it is in. No side effects."""
    parts = os.fsencode(name).decode("latin-1").split("/")
    for end in range(1, len(parts) + 1):
        path, is_folder = "/" + "/".join(parts[:end]), end < len(parts)
        fits = (rule for rule in rules if is_folder or not rule.only_folders)
        if next((rule.keeps for rule in fits if re.fullmatch(rule.pattern, path, re.DOTALL)), False):
            return True
    return False


def _rules(word: str, keeps: bool) -> list[KeepRule]:
    pattern = os.fsencode(word).decode("latin-1")
    only_folders = len(pattern) > 1 and pattern.endswith("/")
    if only_folders:
        pattern = pattern[:-1]
    if not pattern:
        return []
    is_wild = any(character in pattern for character in "*?[")
    body = _translated(pattern.removeprefix("/")) if is_wild else re.escape(pattern.removeprefix("/"))
    # With a leading `**`, rsync sees the path with its first slash.
    starts = (("/", "/"), ("**", ""), ("", ".*/"))
    start = next(text for begin, text in starts if pattern.startswith(begin))
    rules = [KeepRule(start + body, only_folders, keeps)]
    if pattern.endswith("/***"):  # the folder itself, too
        rules.append(KeepRule(start + body.removesuffix("/.*"), True, keeps))
    return rules


def _translated(pattern: str) -> str:
    """Return the regular expression of a pattern with wildcards."""
    out, at = "", 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "*":
            stars = 1
            while pattern[at : at + 1] == "*":
                stars, at = stars + 1, at + 1
            out += ".*" if stars > 1 else "[^/]*"
        elif character == "?":
            out += "[^/]"
        elif character == "[":
            text, at = _class(pattern, at)
            if not text:
                return _NOTHING
            out += text
        elif character == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(character)
    return out


_NAMED = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "digit": "0-9",
    "lower": "a-z",
    "space": " \\t\\n\\r\\f\\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the regular expression of a `[...]` that begins at `at`, and where it ends; empty: it does not."""
    is_not = pattern[at : at + 1] in ("!", "^")
    at += is_not
    items: list[str] = []
    is_first = True
    while at < len(pattern) and (pattern[at] != "]" or is_first):
        is_first = False
        named = re.compile(r"\[:(\w+):\]").match(pattern, at)
        if named:
            if named[1] not in _NAMED:
                return "", at
            items.append(_NAMED[named[1]])
            at = named.end()
            continue
        low, at = _character(pattern, at)
        if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            high, at = _character(pattern, at + 1)
            if low <= high:
                items.append(f"{_in_class(low)}-{_in_class(high)}")
        else:
            items.append(_in_class(low))
    if at >= len(pattern):
        return "", at
    inside = "".join(items)
    if not inside:
        return ("[^/]" if is_not else _NOTHING), at + 1
    return f"(?!/)[{'^' if is_not else ''}{inside}]", at + 1


def _character(pattern: str, at: int) -> tuple[str, int]:
    if pattern[at] == "\\" and at + 1 < len(pattern):
        at += 1
    return pattern[at], at + 1


def _in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~|" else character
