"""The files of a copy: how many, how large, in which order; and which files git has.

rsync itself is asked, by a dry run into an empty folder, so that its rules are those of the copy.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import re
import stat
import subprocess
import tarfile
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from distrun.errors import SyncError, UsageError
from distrun.formats import number_of
from distrun.formats import size as size_text
from distrun.sync import rsync, rules
from distrun.sync.rules import IGNORE_FILE, CopyRules
from distrun_runtime.contract import environ, facts
from distrun_runtime.contract.folder import leads_out
from distrun_runtime.contract.session import CHUNK

BIG_SIZE = 1 << 30
BIG_FILES = 50_000
"""Above these the user has probably forgotten to leave something out."""
SHOWN = 3
LIST_S = 600.0
"""How long rsync may take to look at everything."""
VANISHED = 24
"""rsync's code for files that were removed meanwhile, which does no harm to a list."""
GIT_S = 120.0
"""How long git may take for one repository."""
DEPTH = 16
"""Repositories within repositories."""

_LINE = re.compile(rb"(\d+) [<>c.h*]([fLd])\S* (.*)")
_ESCAPED = re.compile(rb"\\#(\d{3})")
_STATS = (re.compile(rb"Number of files: ([\d,.]+)"), re.compile(rb"Total file size: ([\d,.]+)"))


@dataclass(frozen=True)
class Tree:
    """What would be copied to an empty folder."""

    files: int = 0
    """Files and links."""
    size: int = 0
    """Bytes."""
    biggest: tuple[tuple[str, int, int], ...] = ()
    """The folders (and files) of the source with the most bytes or files: name, files, bytes."""
    sums: tuple[Sequence[int], ...] = field(default=(), repr=False, compare=False)
    """`sums` of the source and of each extra; empty: rsync does not list."""
    lacks: frozenset[str] = frozenset()
    """Those that were asked for and are not copied."""

    def text(self) -> str:
        """Return the size in words."""
        return f"{number_of(self.files, 'file')}, {size_text(self.size)}"

    def warnings(self) -> list[str]:
        """Return what to tell the user before a large tree is sent."""
        if self.size <= BIG_SIZE and self.files <= BIG_FILES:
            return []
        parts = [f"{name} ({number_of(files, 'file')}, {size_text(size)})" for name, files, size in self.biggest]
        text = f"{self.text()} are to be copied to each host"
        if parts:
            text += f"; the most is in {', '.join(parts)}"
        return [f"{text}; leave out what the job does not need: --sync-exclude PATTERN, or {rules.IGNORE_FILE}"]


def scan(source: str, wanted: CopyRules, asked: Iterable[str] = ()) -> Tree:
    """Return what a copy of the folder `source` would send to an empty folder, extras included.

    `asked`: paths of files in the copy; `lacks` has those that are not sent, if rsync can list names.

    Raises:
        UsageError: the source or an extra does not exist; --sync-gitignore outside a repository.
        SyncError: there is no rsync here, or it fails.
    """
    if not os.path.isdir(source):
        raise UsageError(f"there is no directory {source} to copy")
    tree = Tree()
    lacks = frozenset(asked if rsync.find().has("--out-format") else ())
    for name, path, output in _listings(source, wanted):
        if lacks:
            below = [b""] if output is None else (each[0] for each in _listed(output))
            lacks -= {os.path.normpath(os.path.join(name, os.fsdecode(each))) for each in below}
        if output is not None:
            more = summary(output)
        else:
            size = os.path.getsize(path)
            more = Tree(1, size, sums=([0, 0, size],))
        biggest = _biggest([*tree.biggest, (name, more.files, more.size)]) if name else more.biggest
        tree = Tree(tree.files + more.files, tree.size + more.size, biggest, (*tree.sums, *more.sums), lacks)
    return tree


@dataclass(frozen=True)
class TreeEntry:
    """A file, folder or link that is copied."""

    name: bytes
    """Its path in the copy."""
    path: bytes
    """Its path here."""
    follows: bool = False
    """If it is a link, what it leads to is copied."""


def members(source: str, wanted: CopyRules) -> list[TreeEntry]:
    """Return what a copy of the folder `source` has, extras included; a folder comes before what is in it.

    Raises:
        UsageError, SyncError: as `scan`; the rsync here is too old to list names.
    """
    tool = rsync.find()
    if not tool.has("--out-format"):
        raise SyncError(f"a newer rsync is needed to list the files than {tool.program} {tool.version}", rsync.INSTALL)
    found = []
    for name, path, output in _listings(source, wanted):
        below, top = os.fsencode(name), os.fsencode(path)
        if output is None:
            found.append(TreeEntry(below, top, follows=True))
            continue
        names = [each.rstrip(b"/") for each, _, _ in _listed(output)]
        found += [TreeEntry(os.path.join(below, each), os.path.join(top, each)) for each in names if each != b"."]
    # An extra may take the place of a file of the source, as it would by rsync, which copies it afterwards.
    return list({each.name: each for each in found}.values())


def _listings(source: str, wanted: CopyRules) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield of the folder `source`, then of each extra: its name in the copy, its path, what rsync lists of it.

    The name of the folder is empty; nothing is listed of an extra that is a file. Raises as `scan`.
    """
    tool = rsync.find()
    filters = rules.filters(wanted, source)
    yield "", source, _dry_run(tool, filters, source, chosen(tool, wanted, filters, source))
    for extra in wanted.extra:
        if not os.path.exists(extra.source):
            raise UsageError(f"--sync-extra: there is no {extra.source}")
        is_folder = os.path.isdir(extra.source)
        yield extra.name, extra.source, _dry_run(tool, rules.extra_filters(), extra.source) if is_folder else None


def chosen(tool: rsync.Tool, wanted: CopyRules, filters: Sequence[str], source: str) -> list[bytes] | None:
    """Return the files of --sync-gitignore that no pattern leaves out; None: rsync chooses by itself.

    rsync does not match patterns against the parent folders of the names in a list, so a run without a list matches
    them here.

    Raises:
        UsageError: `source` is in no git repository.
        SyncError: rsync fails, or is too old to list names.
    """
    if not wanted.gitignore:
        return None
    names = git_files(source)
    if not tool.has("--out-format"):
        raise SyncError(f"--sync-gitignore needs a newer rsync than {tool.program} {tool.version}", rsync.INSTALL)
    kept = {name for name, _ in entries(_dry_run(tool, filters, source))}
    return [name for name in names if name in kept]


def _dry_run(tool: rsync.Tool, filters: Sequence[str], source: str, names: Sequence[bytes] | None = None) -> bytes:
    """Return what rsync prints about a copy of the folder `source`, or of `names` in it, to an empty folder.

    Raises:
        SyncError: it fails.
    """
    env = {**environ.snapshot(), "LC_ALL": "C"}
    with tempfile.TemporaryDirectory(prefix="distrun-scan-") as empty:
        files_from = "" if names is None else "-"
        command = rsync.listing(tool, filters, os.path.join(source, ""), empty + "/", files_from)
        data = b"" if names is None else b"\0".join(names)
        try:
            result = subprocess.run(command, env=env, input=data, capture_output=True, timeout=LIST_S, check=False)
        except subprocess.TimeoutExpired as err:
            text = f"rsync has not listed the files of {source} after {LIST_S:g} s"
            hint = f"leave out large folders with --sync-exclude PATTERN, or {rules.IGNORE_FILE}"
            raise SyncError(text, hint) from err
    if result.returncode not in (0, VANISHED):
        words = " ".join(os.fsdecode(result.stderr).split())
        raise SyncError(f"rsync cannot list {source}: {rsync.meaning(result.returncode)}: {words}")
    return result.stdout


# ---------------------------------------------------------------------- what a dry run prints


def summary(output: bytes) -> Tree:
    """Return the tree that a dry run lists. No side effects."""
    files = size = 0
    tops: dict[bytes, tuple[int, int]] = {}
    for name, length in entries(output):
        top = name.split(b"/", 1)[0]
        before = tops.get(top, (0, 0))
        tops[top] = (before[0] + 1, before[1] + length)
        files, size = files + 1, size + length
    biggest = _biggest([(os.fsdecode(name), *sizes) for name, sizes in tops.items()])
    if files:
        return Tree(files, size, biggest, (sums(output),))
    # An rsync that cannot list prints its statistics only.
    found = [pattern.search(output) for pattern in _STATS]
    files, size = (int(re.sub(rb"\D", b"", each.group(1))) if each else 0 for each in found)
    return Tree(files, size)


def _biggest(named: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    by_size = sorted(named, key=lambda each: -each[2])[:SHOWN]
    by_files = sorted(named, key=lambda each: -each[1])[:1]
    return tuple(dict.fromkeys([*by_size, *by_files]))


def entries(output: bytes) -> list[tuple[bytes, int]]:
    """Return path and bytes of each file and link (0 bytes) of a dry run."""
    return [(name, size) for name, kind, size in _listed(output) if kind != b"d"]


def _listed(output: bytes) -> list[tuple[bytes, bytes, int]]:
    """Return path, kind (`f`, `d` or `L`) and bytes of each line of a dry run; those of a folder end with a slash."""
    found = []
    for match in map(_LINE.fullmatch, output.split(b"\n")):
        if match is not None:
            kind = match.group(2)
            name = _ESCAPED.sub(lambda escaped: bytes([int(escaped.group(1), 8)]), match.group(3))
            found.append((name, kind, int(match.group(1)) if kind == b"f" else 0))
    return found


def sums(output: bytes) -> array[int]:
    """Return for each n the bytes of the first n entries of a dry run, in rsync's order, the folder itself first.

    During a copy rsync reports how many entries it has passed, but not the size of those that it did not send.
    """
    found = array("Q", [0, 0])
    for name, _, size in _listed(output):
        if name != b"./":
            found.append(found[-1] + size)
    return found


# ---------------------------------------------------------------------- the files of git


def git_files(source: str) -> list[bytes]:
    """Return the paths, relative to `source`, of the files that git tracks there or would add, each once.

    Repositories within it (submodules and others) are asked themselves. Deleted files are left out.

    Raises:
        UsageError: there is no git, `source` is in no repository, or git fails.
    """
    root = os.fsencode(source)
    found: dict[bytes, None] = {}

    def add(below: bytes, depth: int) -> None:
        for name in _ls_files(os.path.join(root, below)):
            path = os.path.join(below, name.rstrip(b"/"))
            full = os.path.join(root, path)
            if os.path.isdir(full) and not os.path.islink(full):
                # A submodule, or a repository that this one does not know: listed as one name.
                if depth and os.path.lexists(os.path.join(full, b".git")):
                    add(path, depth - 1)
            elif os.path.lexists(full):
                found[path] = None

    add(b"", DEPTH)
    return list(found)


def _ls_files(folder: bytes) -> list[bytes]:
    name = os.fsdecode(folder)
    command = ["git", "-C", name, "ls-files", "-co", "--exclude-standard", "-z"]
    env = {**environ.snapshot(), "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S, check=False
        )
    except FileNotFoundError as err:
        raise UsageError("--sync-gitignore needs git, which is not on this machine", "install git") from err
    except subprocess.TimeoutExpired as err:
        text = f"--sync-gitignore: git has not listed the files of {name} after {GIT_S:g} s"
        raise UsageError(text, f"see what it waits for: git -C {name} ls-files; or leave --sync-gitignore out") from err
    if result.returncode:
        words = " ".join(os.fsdecode(result.stderr).split())
        raise UsageError(
            f"--sync-gitignore: git cannot list the files of {name}: {words}",
            "without --sync-gitignore everything but the usual caches is copied; `.distrunignore` says what not",
        )
    return [each for each in result.stdout.split(b"\0") if each]


# A snapshot of the files to be copied: one tar archive in a temporary file, from which every host gets the same bytes.
#
# Which files are in it is what rsync lists (`tree.members`), so its rules are those of a copy by rsync. The temporary
# file has no name: it is gone when this process is, however that ends.


CHANGED = "is it written to by another program? Leave it out with --sync-exclude"


def check_channel_size(tree: Tree) -> None:
    """Check that a tree is not too large for the agents' channels.

    Raises:
        UsageError: it is; with what to do instead.
    """
    if tree.size <= facts.CHANNEL_COPY_LIMIT:
        return
    most = ", ".join(f"{name} ({size_text(size)})" for name, _, size in tree.biggest)
    raise UsageError(
        f"--sync-dst-dir: {tree.text()} are too much to be sent to the job's agents, which take "
        f"{size_text(facts.CHANNEL_COPY_LIMIT)}" + (f"; the most is in {most}" if most else ""),
        f"leave out what the job does not need: --sync-exclude PATTERN, or {IGNORE_FILE}; or work in a directory that "
        "all hosts share, without --sync-dst-dir; or have the job read its data from where the hosts find it",
    )


class Snapshot:
    """The archive. Any thread may read it."""

    def __init__(self, file: IO[bytes], ends: array[int], size: int, left_out: tuple[str, ...]) -> None:
        self.total = os.fstat(file.fileno()).st_size
        """Bytes of the archive."""
        self.files = len(ends)
        """Files and links."""
        self.size = size
        """Their bytes."""
        self.left_out = left_out
        """Links that lead out of the folder, each as `NAME -> TARGET`."""
        self._file = file
        self._ends = ends
        self._reading = threading.Lock()

    def close(self) -> None:
        """Free it. Its readers are told."""
        with self._reading:
            self._file.close()

    def passed(self, offset: int) -> int:
        """Return how many files and links are before this offset of the archive."""
        return bisect.bisect_right(self._ends, offset)

    def pieces(self, told: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the archive. Before each piece, `told` gets its offset; what that raises ends the archive."""
        offset = 0
        while True:
            told(offset)
            with self._reading:
                if self._file.closed:
                    raise SyncError("the copy is over")
                piece = os.pread(self._file.fileno(), CHUNK, offset)
            if not piece:
                return
            yield piece
            offset += len(piece)


def take_snapshot(source: str, wanted: CopyRules) -> Snapshot:
    """Return a snapshot of a folder, extras included. Blocks: as long as it takes to read them all.

    Raises:
        UsageError: the rules cannot be read, or there is too much.
        SyncError: there is no rsync here, a file cannot be read, or there is no room for the archive.
    """
    try:
        file = tempfile.TemporaryFile(prefix="distrun-sync-")  # noqa: SIM115 - the snapshot keeps it open
    except OSError as err:
        raise _no_room(err) from err
    try:
        return _write(file, members(source, wanted))
    except BaseException:
        file.close()
        raise


def _write(file: IO[bytes], found: list[TreeEntry]) -> Snapshot:
    ends = array("Q")
    left_out: list[str] = []
    size = 0
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for member in found:
            with contextlib.ExitStack() as stack:
                try:
                    info, content = _opened(member, stack)
                except FileNotFoundError:  # it was removed after rsync had listed it
                    continue
                except OSError as err:
                    raise SyncError(f"cannot read {os.fsdecode(member.path)}: {err.strerror or err}") from err
                if info.issym() and leads_out(info.name, info.linkname):
                    left_out.append(f"{info.name} -> {info.linkname}")
                    continue
                size += info.size
                if size > facts.CHANNEL_COPY_LIMIT:
                    check_channel_size(Tree(len(ends), size))
                _add(tar, info, content, os.fsdecode(member.path))
            if not info.isdir():
                ends.append(tar.offset)
    try:
        file.flush()
    except OSError as err:
        raise _no_room(err) from err
    return Snapshot(file, ends, size, tuple(left_out))


def _opened(member: TreeEntry, stack: contextlib.ExitStack) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    """Return the header of a member and, of a file, what it holds. Raises OSError."""
    info = tarfile.TarInfo(member.name.decode("utf-8", "surrogateescape"))
    found = os.stat(member.path) if member.follows else os.lstat(member.path)
    content: IO[bytes] | None = None
    if stat.S_ISREG(found.st_mode):
        flags = os.O_RDONLY | os.O_NONBLOCK | (0 if member.follows else os.O_NOFOLLOW)
        content = stack.enter_context(os.fdopen(os.open(member.path, flags), "rb"))
        found = os.fstat(content.fileno())
        info.size = found.st_size
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(member.path).decode("utf-8", "surrogateescape")
    else:
        raise OSError(errno.EINVAL, "it is no file any more")
    info.mode = stat.S_IMODE(found.st_mode) & 0o777
    info.mtime = int(found.st_mtime)
    return info, content


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, content: IO[bytes] | None, path: str) -> None:
    try:
        tar.addfile(info, content)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_room(err) from err
        raise SyncError(f"{path} became shorter while it was read, or cannot be read: {err}", CHANGED) from err


def _no_room(err: OSError) -> SyncError:
    return SyncError(
        f"a snapshot of the files cannot be kept in {tempfile.gettempdir()}: {err.strerror or err}",
        "make room there, or set TMPDIR to a directory with room for all files",
    )


def left_out_text(snapshot: Snapshot) -> str:
    """Return what to tell of links that are not in the snapshot; empty if there are none."""
    names = snapshot.left_out
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"links that lead out of the directory are not copied: {shown}; --sync-extra TARGET:NAME copies a target"
