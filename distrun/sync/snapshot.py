"""A snapshot of the files to be copied: one tar archive in a temporary file, from which every host gets the same bytes.

Which files are in it is what rsync lists (`tree.members`), so its rules are those of a copy by rsync. The temporary
file has no name: it is gone when this process is, however that ends.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import tarfile
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import IO

from distrun.errors import SyncError, UsageError
from distrun.sync.rules import IGNORE_FILE, CopyRules
from distrun.sync.tree import Member, Tree, members
from distrun.units import size as size_text
from distrun_runtime.contract import facts
from distrun_runtime.contract.folder import leads_out
from distrun_runtime.contract.session import CHUNK

SHOWN = 3
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
        """Free it. Whoever reads it hears that."""
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


def _write(file: IO[bytes], found: list[Member]) -> Snapshot:
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


def _opened(member: Member, stack: contextlib.ExitStack) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
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
