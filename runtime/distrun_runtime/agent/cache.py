"""Keeps the bundled runtime in the user's cache, `$XDG_CACHE_HOME/distrun` (~/.cache without that variable).

    runtime/DIGEST/distrun_runtime/...   one folder a version, unpacked from the archive that the launcher sends
    runtime/DIGEST/.files                what is in it; a folder of which something is missing does not count

Only folders that belong to this user and that only this user can write to are used (`contract.private`). A version
appears whole or not at all, so any number of agents may share one home. If the cache cannot be
written, the job's private folder is used.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import List, Mapping, Optional

from distrun_runtime.contract import private
from distrun_runtime.contract.private import FRESH
from distrun_runtime.errors import PreflightFailure

# What unpacks is imported where it is used: usually the folder exists. Those modules are a tenth of an agent's start.
SIZE_LIMIT = 64 * 1024 * 1024
"""Bytes, unpacked."""
RUNTIME = "runtime"
LIST = ".files"
UNUSED_S = 30 * 86400.0
"""A version that was not used for so long is removed when another is added."""
USED_S = 86400.0
"""How often a running job notes that it uses a version."""
STALE_S = 86400.0
"""What another agent began to unpack so long ago was given up."""


def find(digest: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of that version; empty if there is none, or not a whole one of this user's alone."""
    name = _checked(digest)
    try:
        path = os.path.join(private.cache_folder(RUNTIME, env), name)
        if not private.is_ours(os.lstat(path)) or not _is_whole(path, digest):
            return ""
        with contextlib.suppress(OSError):
            os.utime(path)
    except (OSError, ValueError):
        return ""
    return path


def note_use(path: str) -> None:
    """Note once a day that a running job uses a folder of the cache: else another agent might remove it as unused.

    Errors are ignored.
    """
    import time

    if _is_digest(os.path.basename(path)):
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime < time.time() - USED_S:
                os.utime(path)


def keep(digest: str, archive: bytes, private: str) -> str:
    """Unpack an archive and return its folder, in the cache or else below `private`.

    Raises:
        PreflightFailure: it is not what the digest says, it names files outside of its folder, or it fits nowhere.
    """
    try:
        return install(digest, archive)
    except OSError as in_cache:
        import shutil

        path = os.path.join(private, RUNTIME)
        try:
            shutil.rmtree(path, ignore_errors=True)
            _unpack(digest, archive, path)
        except OSError as err:
            text = f"the runtime cannot be unpacked: {in_cache}; nor in {private}: {err.strerror or err}"
            raise PreflightFailure("disk", text, "make room, or set XDG_CACHE_HOME") from None
        return path


def install(digest: str, archive: bytes, env: Optional[Mapping[str, str]] = None) -> str:
    """Unpack an archive in the cache and return its folder; unused versions are removed.

    Raises:
        PreflightFailure: it is not what the digest says, or it names files outside of its folder.
        OSError: the cache cannot be written, or is not this user's.
    """
    import hashlib
    import shutil
    import tempfile

    if hashlib.sha256(archive).hexdigest() != _checked(digest):
        raise PreflightFailure("protocol", "the runtime that was sent is not the one of the plan (its digest differs)")
    parent = private.make_cache(RUNTIME, env)
    path = os.path.join(parent, digest)
    fresh = tempfile.mkdtemp(prefix=FRESH, dir=parent)
    try:
        _unpack(digest, archive, os.path.join(fresh, "tree"))
        if os.path.lexists(path) and not find(digest, env):
            # Broken: a part of it was removed, or it is not ours. Renamed, so that no agent sees it half removed.
            os.rename(path, os.path.join(fresh, "old"))
        with contextlib.suppress(OSError):  # another agent was first
            os.rename(os.path.join(fresh, "tree"), path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _thin_out(parent)
    if not find(digest, env):
        raise OSError(f"{path} cannot be made")
    return path


def _thin_out(parent: str) -> None:
    """Remove versions that were not used for long, and what was left half unpacked."""
    import shutil
    import time

    now = time.time()
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            is_fresh = name.startswith(FRESH)
            if is_fresh or _is_digest(name):
                with contextlib.suppress(OSError):
                    if os.lstat(path).st_mtime < now - (STALE_S if is_fresh else UNUSED_S):
                        going = os.path.join(parent, f"{FRESH}going-{name}")
                        os.rename(path, going)
                        shutil.rmtree(going, ignore_errors=True)


def _unpack(digest: str, archive: bytes, target: str) -> None:
    """Write the files of a zip, and the list of them, below `target`. Raises OSError, PreflightFailure."""
    import io
    import zipfile

    rows: List[str] = []
    os.mkdir(target, 0o700)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as whole:
            if sum(entry.file_size for entry in whole.infolist()) > SIZE_LIMIT:
                raise PreflightFailure("protocol", f"the runtime that was sent is over {SIZE_LIMIT} bytes")
            for entry in whole.infolist():
                parts = entry.filename.split("/")
                if entry.filename.endswith("/") and _is_plain(parts[:-1]):
                    continue
                if not _is_plain(parts):
                    raise PreflightFailure("protocol", f"the runtime that was sent names a file {entry.filename!r}")
                path = os.path.join(target, *parts)
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with open(path, "xb") as file:
                    file.write(whole.read(entry))
                rows.append(f"{entry.file_size} {entry.filename}")
        with open(os.path.join(target, LIST), "x", encoding="utf-8", newline="\n") as listed:
            listed.writelines(line + "\n" for line in [f"{digest} {len(rows)}", *rows])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as err:
        raise PreflightFailure("protocol", f"the runtime that was sent is not an archive: {err}") from None


def _is_whole(path: str, digest: str) -> bool:
    """Whether everything that was unpacked is still there. Raises OSError, ValueError."""
    with open(os.path.join(path, LIST), encoding="utf-8", newline="\n") as listed:
        head, *rows = listed.read().split("\n")[:-1] or [""]
    if head != f"{digest} {len(rows)}":
        return False
    for row in rows:
        size, _, name = row.partition(" ")
        info = os.lstat(os.path.join(path, name))
        if not stat.S_ISREG(info.st_mode) or info.st_size != int(size):
            return False
    return True


def _is_plain(parts: List[str]) -> bool:
    """Whether a path stays below the folder where it begins."""
    return all(part not in ("", ".", "..") and not set(part) & set("\\\0\n") for part in parts)


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _checked(digest: str) -> str:
    if not _is_digest(digest):
        raise PreflightFailure("protocol", f"{digest!r} is no digest of a runtime")
    return digest
