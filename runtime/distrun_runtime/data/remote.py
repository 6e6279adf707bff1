"""An object of an object store as bytes to be sliced: read in blocks, ahead of need, and kept on this machine's disk.

The blocks of objects that have a version are in `distrun/data` of the user's cache, which the processes of a machine
share: at most DISTRUN_DATA_CACHE_BYTES, those that were used least recently go first. A block is found by the object's
address, version and size, so one of an earlier version is never taken for one of this.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import hashlib
import os
import shutil
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from distrun_runtime.contract import environ, private
from distrun_runtime.data.objectstores import ObjectReader, redacted
from distrun_runtime.errors import DataError, TimedOut

Result = TypeVar("Result")

BLOCK_BYTES = 1 << 20
"""What one request brings."""
AHEAD_BLOCKS = 8
"""Blocks that are expected soon and are requested at the same time."""
KEPT_BLOCKS = 8
"""Blocks in memory besides those, and as many are on their way to the disk: an open object takes
(AHEAD_BLOCKS + 2 * KEPT_BLOCKS) * BLOCK_BYTES of memory at most."""
WRITE_TRIES = 100
"""A block for which the disk has no time within so many hundredths of a second is not kept there."""

GUARD_S = 30.0
"""Seconds after the deadline of a request in which its thread must have told of it."""

KIND = "data"
FREE_BYTES = 1 << 30
"""Bytes of the disk that the cache leaves free."""
COUNT = "used"
"""The file with the bytes of the cache; it saves looking at all files for each one that is added."""
STALE_S = 60.0
"""Age from which a file that is not whole is a dead process's."""


@dataclass(frozen=True)
class RemoteObject:
    """An object as it was when it was opened."""

    url: str = field(repr=False)
    """It may have a query string that is a secret."""
    size: int
    version: str
    block_bytes: int = BLOCK_BYTES
    """The whole size if the server does not answer ranges."""


def opened(url: str) -> RemoteBytes:
    """Return the bytes of an object, whose version is that of now.

    Raises:
        FileNotFoundError, PermissionError, OSError, ImportError: as `ObjectReader` and its `get`.
        TimedOut: the server did not answer.
    """
    timeout_s = environ.read("DISTRUN_DATA_TIMEOUT")
    reader = ObjectReader(url, timeout_s)
    # One byte: a server tells more about a failed GET than about a failed HEAD, and many addresses are for GET only.
    piece = _result(asyncio.run_coroutine_threadsafe(reader.get(0, 1), reader.loop), url, timeout_s)
    block_bytes = BLOCK_BYTES if piece.is_range else max(1, piece.size)
    return RemoteBytes(RemoteObject(url, piece.size, piece.version, block_bytes))


def exists(url: str) -> bool:
    """Return whether there is such an object. Raises as `opened`."""
    try:
        opened(url)
    except FileNotFoundError:
        return False
    return True


class RemoteBytes:
    """The bytes of an object of one version: `data[begin:end]`, read in blocks.

    Raises:
        DataError: when read, an object that has changed since it was opened; both versions are named.
        OSError, TimedOut: as `ObjectReader.get`.

    Threads: any. A copy in another process reads the same version; so does a forked process.
    """

    def __init__(self, found: RemoteObject) -> None:
        self.found = found
        self._timeout_s = environ.read("DISTRUN_DATA_TIMEOUT")
        # Without a version, the object of today cannot be told from that of yesterday.
        self._cache = DiskCache.of_user() if found.version else None
        # A server that answers ranges today may have sent the whole object yesterday, which is a block of another size.
        which = (found.url, found.version, found.size, found.block_bytes)
        self._digest = hashlib.sha256(repr(which).encode()).hexdigest()[:40]
        self._start()

    def _start(self) -> None:
        """Initialize the state of this process. A forked process cannot use that of its parent."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._reader: ObjectReader | None = None
        self._blocks: OrderedDict[int, concurrent.futures.Future[bytes]] = OrderedDict()
        self._ahead: set[int] = set()
        """Blocks that are expected and not read yet."""
        self._coming: Iterator[int] = iter(())
        self._whole: set[int] = set()
        """Blocks that were once found whole on the disk, or written there."""
        self._writing: dict[int, bytes] = {}
        """Blocks that are on their way to the disk."""

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteBytes, (self.found,)

    def __len__(self) -> int:
        return self.found.size

    def __getitem__(self, wanted: slice) -> bytes:
        """Return bytes; a slice has no step."""
        self._check_process()
        begin, end, _ = wanted.indices(self.found.size)
        each = self.found.block_bytes
        parts: list[bytes] = []
        blocks = self._blocks_of(begin, end) if begin < end else range(0)
        for block in blocks:
            first, last = max(0, begin - block * each), min(end - block * each, each)
            part = self._kept_part(block, first, last)
            if part is None:
                futures = [self._block(near) for near in blocks[block - blocks[0] :][:AHEAD_BLOCKS]]
                part = self._content(block, futures[0])[first:last]
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _kept_part(self, block: int, first: int, last: int) -> bytes | None:
        """Return a part of a block on the disk that was whole when it was read or written here, as shuffling reads."""
        if self._cache is None or block in self._blocks or block not in self._whole:
            return None
        with self._lock:
            self._ahead.discard(block)
            self._go_ahead()
        return self._cache.read_part(self._name(block), first, last)

    def find(self, what: bytes, begin: int) -> int:
        """Return where these bytes first are, from `begin`; -1: nowhere."""
        each = self.found.block_bytes
        while begin < self.found.size:
            end = (begin // each + 1) * each + len(what) - 1
            at = self[begin:end].find(what)
            if at >= 0:
                return begin + at
            begin = end - len(what) + 1
        return -1

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request soon, in this order, the blocks of these ranges of bytes; what was expected before is forgotten.

        Arguments:
            ranges: a range is asked for when those before are read. While it is, the lock is held.
        """
        self._expect(block for begin, end in ranges for block in self._blocks_of(begin, end))

    def expect_all(self, begin: int, end: int) -> None:
        """Request soon the blocks of a range, each when those before are read."""
        self._expect(self._blocks_of(begin, end))

    def _blocks_of(self, begin: int, end: int) -> range:
        each = self.found.block_bytes
        return range(begin // each, -(-min(end, self.found.size) // each))

    def _expect(self, blocks: Iterable[int]) -> None:
        self._check_process()
        with self._lock:
            self._ahead.clear()  # those in memory stay a while: most are expected again
            self._coming = iter(blocks)
            self._go_ahead()

    def _go_ahead(self) -> None:
        """Forget old blocks, and request expected ones. The lock is held."""
        for old in [old for old in self._blocks if old not in self._ahead][:-KEPT_BLOCKS]:
            del self._blocks[old]
        while len(self._ahead) < AHEAD_BLOCKS:
            block = next(self._coming, None)
            if block is None:
                return
            if block not in self._ahead:
                self._ahead.add(block)
                is_kept = block in self._writing or (self._cache is not None and self._cache.has(self._name(block)))
                if block not in self._blocks and not is_kept:
                    self._blocks[block] = self._request(block)

    def _block(self, block: int) -> concurrent.futures.Future[bytes]:
        """Return a block that is in memory, on the disk, or requested now."""
        with self._lock:
            self._ahead.discard(block)
            if block not in self._blocks:
                content = self._writing.get(block)
                if content is None and self._cache is not None:
                    content = self._cache.read(self._name(block))
                    if content is not None:
                        self._whole.add(block)
                self._blocks[block] = self._request(block) if content is None else _done(content)
            self._blocks.move_to_end(block)
            found = self._blocks[block]
            self._go_ahead()
        return found

    def _content(self, block: int, future: concurrent.futures.Future[bytes]) -> bytes:
        try:
            return _result(future, self.found.url, self._timeout_s)
        except BaseException:
            with self._lock:
                self._blocks.pop(block, None)  # it is requested anew if it is read again
            raise

    def _request(self, block: int) -> concurrent.futures.Future[bytes]:
        if self._reader is None:
            self._reader = ObjectReader(self.found.url, self._timeout_s)
        return asyncio.run_coroutine_threadsafe(self._fetch(self._reader, block), self._reader.loop)

    async def _fetch(self, reader: ObjectReader, block: int) -> bytes:
        """Return a block of the object's version from the store, and let a thread write it to the disk."""
        found = self.found
        begin = block * found.block_bytes
        end = min(begin + found.block_bytes, found.size)
        piece = await reader.get(begin, end)
        if not piece.size:
            piece = await reader.get(0, 1)  # it ends before: what is it now?
        if (len(piece.content), piece.version, piece.size) != (end - begin, found.version, found.size):
            raise DataError(
                f"{redacted(found.url)} has changed while it was read: version {found.version or 'without a name'} of"
                f" {found.size} bytes was opened, version {piece.version or 'without a name'} of {piece.size} bytes is"
                " there now. fix: start the job anew; give new data a new name"
            )
        for _ in range(WRITE_TRIES):
            if len(self._writing) < KEPT_BLOCKS:
                break
            await asyncio.sleep(0.01)  # the disk is slower than the store, and memory has its bound
        if self._cache is not None and len(self._writing) < KEPT_BLOCKS:
            self._writing[block] = piece.content
            reader.loop.run_in_executor(None, self._write, self._cache, block, piece.content)
        return piece.content

    def _write(self, cache: DiskCache, block: int, content: bytes) -> None:
        try:
            cache.write(self._name(block), content)
            self._whole.add(block)
        finally:
            self._writing.pop(block, None)

    def _name(self, block: int) -> str:
        return f"{self._digest}-{block}"

    def _check_process(self) -> None:
        if self._process != os.getpid():
            self._start()


def _result(future: concurrent.futures.Future[Result], url: str, timeout_s: float) -> Result:
    """Return what a request brings. Its own deadline comes before this one, unless its thread is dead."""
    try:
        return future.result(timeout_s + GUARD_S)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
    future.cancel()
    raise TimedOut(f"{redacted(url)}: the thread that reads it did nothing for {timeout_s + GUARD_S:g} s")


def _done(content: bytes) -> concurrent.futures.Future[bytes]:
    future: concurrent.futures.Future[bytes] = concurrent.futures.Future()
    future.set_result(content)
    return future


class DiskCache:
    """Blocks on this machine's disk, for all processes of the user: at most `limit` bytes of files in a folder.

    A file is written whole or not at all, and one that is damaged is not read (`contract.private`). What fails, such as
    a full disk, costs the block its place in the cache and nothing else.

    Threads and processes: any.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder, self._limit = folder, limit

    @classmethod
    def of_user(cls) -> DiskCache | None:
        """Return the cache of this user; None: it is not wanted, or cannot be made, which a warning says."""
        limit = environ.read("DISTRUN_DATA_CACHE_BYTES")
        if not limit:
            return None
        try:
            folder = private.make_cache(KIND)
            private.check(folder, closes=True)
        except OSError as error:
            warnings.warn(
                f"data of object stores is not kept on the disk: {error}. fix: set XDG_CACHE_HOME to a folder of yours,"
                " or DISTRUN_DATA_CACHE_BYTES=0",
                stacklevel=2,
            )
            return None
        return cls(folder, limit)

    def has(self, name: str) -> bool:
        """Return whether there is such a block."""
        return os.path.exists(self._path(name))

    def read(self, name: str) -> bytes | None:
        """Return a block; None: it is not there, or damaged."""
        with contextlib.suppress(OSError):
            content = private.read_cached(self._path(name))
            os.utime(self._path(name))  # the least recently used go first
            return content or None
        return None

    def read_part(self, name: str, begin: int, end: int) -> bytes | None:
        """Return bytes of a block that was read or written before; None: it is not there any more."""
        with contextlib.suppress(OSError), open(self._path(name), "rb", buffering=0) as file:
            os.utime(file.fileno())
            part = os.pread(file.fileno(), end - begin, private.HEAD_BYTES + begin)
            return part if len(part) == end - begin else None
        return None

    def write(self, name: str, content: bytes) -> None:
        """Add a block, in place of others if there is no room."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._folder).free > FREE_BYTES + len(content):
                private.write_cached(self._path(name), content, self._rename)

    def _rename(self, fresh: str, path: str) -> None:
        """Give a whole file its name. Raises OSError: there is no room for it."""
        size = os.path.getsize(fresh)
        room = self._limit - size
        with private.locked(self._folder):
            # Within the lock, so that the files are never more than the limit.
            used = self._used()
            if used > room:
                used = self._shrink(min(room, self._limit * 9 // 10))
            if used > room:
                raise OSError(errno.ENOSPC, f"the cache has room for {self._limit} bytes", path)
            self._note(used + size)
            os.replace(fresh, path)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _used(self) -> int:
        """Return the bytes of all files, or a little more; the lock is held."""
        with contextlib.suppress(OSError, ValueError), open(self._path(COUNT), encoding="ascii") as file:
            return int(file.read())
        return self._shrink(self._limit)

    def _note(self, used: int) -> None:
        with open(
            self._path(COUNT), "w", encoding="ascii", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            file.write(str(used))

    def _shrink(self, target: int) -> int:
        """Remove files, the least recently used first, down to so many bytes; return what is left. The lock is held."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                is_new = entry.name.startswith(private.FRESH)
                with contextlib.suppress(FileNotFoundError):  # another process renames its new file
                    info = entry.stat(follow_symlinks=False)
                    if entry.name != COUNT and not (is_new and time.time() - info.st_mtime < STALE_S):
                        found.append((0 if is_new else info.st_mtime_ns, info.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        for used_ns, size, path in sorted(found):
            if used <= target and used_ns:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        self._note(used)
        return used
