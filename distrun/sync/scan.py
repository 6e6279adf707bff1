"""What a copy would bring to an empty folder: files and bytes, by the rules and the program of the copy itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from distrun.errors import UsageError
from distrun.sync import listing, rules, tool
from distrun.sync.rules import Rules
from distrun.sync.units import count, size_text

BIG_SIZE = 1 << 30
BIG_FILES = 50_000
"""Past these a user has probably forgotten to leave something out."""
SHOWN = 3

_STATS = (re.compile(rb"Number of files: ([\d,.]+)"), re.compile(rb"Total file size: ([\d,.]+)"))


@dataclass(frozen=True)
class Tree:
    """What would be copied."""

    files: int = 0
    """Files and links."""
    size: int = 0
    """Bytes."""
    biggest: tuple[tuple[str, int, int], ...] = ()
    """Folders (and files) of the source itself: name, files, bytes; those that matter most."""
    sums: tuple[Sequence[int], ...] = field(default=(), repr=False, compare=False)
    """`listing.sums` of the source and of each extra; empty: rsync does not list."""

    def text(self) -> str:
        """Return the size in words."""
        return "%s, %s" % (count(self.files, "file"), size_text(self.size))

    def warnings(self) -> list[str]:
        """Return what to tell the user before so much is sent."""
        if self.size <= BIG_SIZE and self.files <= BIG_FILES:
            return []
        parts = ["%s (%s, %s)" % (name, count(files, "file"), size_text(size)) for name, files, size in self.biggest]
        text = "%s are to be copied to each host" % self.text()
        if parts:
            text += "; the most is in %s" % ", ".join(parts)
        return [text + "; leave out what the job does not need: --sync-exclude PATTERN, or %s" % rules.IGNORE_FILE]


def scan(source: str, wanted: Rules) -> Tree:
    """Return what a copy of the folder `source` would bring to an empty place, extras included.

    Raises:
        UsageError: the source, or an extra, is not there; --sync-gitignore and no repository.
        SyncError: there is no rsync here, or it fails.
    """
    if not os.path.isdir(source):
        raise UsageError("there is no directory %s to copy" % source)
    program = tool.find()
    filters = rules.filters(wanted, source)
    tree = summary(listing.run(program, filters, source, listing.chosen(program, wanted, filters, source)))
    for extra in wanted.extra:
        if not os.path.exists(extra.source):
            raise UsageError("--sync-extra: there is no %s" % extra.source)
        if os.path.isdir(extra.source):
            more = summary(listing.run(program, rules.extra_filters(), extra.source))
        else:
            size = os.path.getsize(extra.source)
            more = Tree(1, size, sums=([0, 0, size],))
        named = (extra.name, more.files, more.size)
        sums = (*tree.sums, *more.sums)
        tree = Tree(tree.files + more.files, tree.size + more.size, _top([*tree.biggest, named]), sums)
    return tree


def summary(output: bytes) -> Tree:
    """Return what rsync's listing says. Pure."""
    files = size = 0
    sums: tuple[Sequence[int], ...] = (listing.sums(output),)
    tops: dict[bytes, tuple[int, int]] = {}
    for name, length in listing.entries(output):
        top = name.split(b"/", 1)[0]
        before = tops.get(top, (0, 0))
        tops[top] = (before[0] + 1, before[1] + length)
        files, size = files + 1, size + length
    if not files:
        # An rsync that cannot list itself gives its statistics only.
        sums = ()
        found = [pattern.search(output) for pattern in _STATS]
        files, size = (int(re.sub(rb"\D", b"", each.group(1))) if each else 0 for each in found)
    return Tree(files, size, _top([(os.fsdecode(name), *sizes) for name, sizes in tops.items()]), sums)


def _top(named: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    by_size = sorted(named, key=lambda each: -each[2])[:SHOWN]
    by_files = sorted(named, key=lambda each: -each[1])[:1]
    return tuple(dict.fromkeys([*by_size, *by_files]))
