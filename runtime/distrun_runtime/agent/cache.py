"""The bundled runtime on a host: one folder a version, unpacked from the archive that the launcher sends.

    $XDG_CACHE_HOME/distrun/runtime/DIGEST/distrun_runtime/...        (~/.cache without that variable)

A folder appears whole or not at all, so that any number of agents may share one home. Where it cannot be written the
job's private folder does.
"""

from __future__ import annotations

import contextlib
import os
import stat

from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.contract import environ

# What unpacks is imported where it does: mostly the folder is there, and those modules are a tenth of an agent's start.
PACKAGE = "distrun_runtime"
SIZE_LIMIT = 64 * 1024 * 1024
"""Bytes, unpacked."""


def root() -> str:
    """Return the folder of all versions."""
    named = environ.text("XDG_CACHE_HOME")
    cache = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "distrun", "runtime")


def find(digest: str) -> str:
    """Return the folder of that version; empty if there is none, or not one of this user's alone."""
    folder = os.path.join(root(), _checked(digest))
    try:
        for each in (os.path.dirname(root()), root(), folder):
            if not _is_private(each):
                return ""
        os.stat(os.path.join(folder, PACKAGE, "__init__.py"))
    except OSError:
        return ""
    return folder


def keep(digest: str, archive: bytes, private: str) -> str:
    """Unpack an archive and return its folder, in the cache or else below `private`.

    Raises:
        Refusal: it is not what the digest says, it names files outside of its folder, or it fits nowhere.
    """
    import hashlib
    import shutil

    if hashlib.sha256(archive).hexdigest() != _checked(digest):
        raise Refusal("protocol", "the runtime that was sent is not the one of the plan (its digest differs)")
    try:
        return _keep_in_cache(digest, archive)
    except OSError as in_cache:
        folder = os.path.join(private, "runtime")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            _unpack(archive, folder)
        except OSError as err:
            text = "the runtime cannot be unpacked: %s; nor in %s: %s" % (in_cache, private, err.strerror or err)
            raise Refusal("disk", text, "make room, or set XDG_CACHE_HOME") from None
        return folder


def _keep_in_cache(digest: str, archive: bytes) -> str:
    import shutil
    import tempfile

    parent = root()
    os.makedirs(os.path.dirname(os.path.dirname(parent)), mode=0o700, exist_ok=True)
    for each in (os.path.dirname(parent), parent):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
        if not _is_private(each):
            raise OSError("%s is not a folder of this user's alone" % each)
    folder = os.path.join(parent, digest)
    fresh = tempfile.mkdtemp(prefix=".new-", dir=parent)
    try:
        _unpack(archive, os.path.join(fresh, "tree"))
        if os.path.lexists(folder) and not find(digest):
            # Broken: somebody removed a part of it, or it is not ours. Renamed, so that nobody sees it half removed.
            os.rename(folder, os.path.join(fresh, "old"))
        with contextlib.suppress(OSError):  # another agent was first
            os.rename(os.path.join(fresh, "tree"), folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not find(digest):
        raise OSError("%s cannot be made" % folder)
    return folder


def _unpack(archive: bytes, folder: str) -> None:
    """Write the files of a zip below `folder`. Raises OSError, Refusal."""
    import io
    import zipfile

    os.mkdir(folder, 0o700)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as whole:
            if sum(entry.file_size for entry in whole.infolist()) > SIZE_LIMIT:
                raise Refusal("protocol", "the runtime that was sent is over %d bytes" % SIZE_LIMIT)
            for entry in whole.infolist():
                parts = entry.filename.split("/")
                if entry.filename.endswith("/") and _is_plain(parts[:-1]):
                    continue
                if not _is_plain(parts):
                    raise Refusal("protocol", "the runtime that was sent names a file %r" % entry.filename)
                path = os.path.join(folder, *parts)
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with open(path, "xb") as file:
                    file.write(whole.read(entry))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as err:
        raise Refusal("protocol", "the runtime that was sent is no archive: %s" % err) from None


def _is_plain(parts: list[str]) -> bool:
    """Whether a path stays where it begins."""
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)


def _is_private(folder: str) -> bool:
    """Whether nobody else may write there. Raises OSError."""
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o022


def _checked(digest: str) -> str:
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise Refusal("protocol", "%r is no digest of a runtime" % digest)
    return digest
