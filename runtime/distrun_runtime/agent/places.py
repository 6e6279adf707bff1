"""The folders that tasks run in: they are there, or they are made for the files that will be copied into them."""

from __future__ import annotations

import errno
import os
from typing import List

from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.contract.folder import MARKER, identity
from distrun_runtime.contract.plan import Plan, Sync

_MARKER_TEXT = b"distrun copies files into this folder. Without this file it never deletes any here.\n"


def check(plan: Plan, host: str) -> None:
    """See to the folders of the plan's tasks.

    Raises:
        Refusal: one is missing, cannot be made or used, or has too little room.
    """
    if plan.sync is not None:
        make(plan.cwd, plan.sync, host)
    for cwd in dict.fromkeys(task.cwd for task in plan.tasks if task.cwd):
        if not _is_copied(cwd, plan):
            _must_be(cwd, plan, host)


def check_copied(plan: Plan, host: str) -> None:
    """See to the folders of tasks that come with the files. Raises Refusal."""
    for cwd in dict.fromkeys(task.cwd for task in plan.tasks if task.cwd):
        if _is_copied(cwd, plan):
            _must_be(cwd, plan, host)


def _is_copied(cwd: str, plan: Plan) -> bool:
    """Whether a folder is where files are copied to, or below it."""
    place = os.path.normpath(expand(plan.cwd))
    return plan.sync is not None and (os.path.normpath(expand(cwd)) + os.sep).startswith(place.rstrip(os.sep) + os.sep)


def expand(folder: str) -> str:
    """Return the path that a folder of the plan means here: `~` is the home of the user of this host."""
    return os.path.expanduser(folder)


def _expanded(cwd: str, host: str) -> str:
    folder = expand(cwd)
    if folder.startswith("~"):  # as it stands it would be a folder `~NAME` below the home directory
        text = "there is no user %s on %s" % (cwd.partition("/")[0], host)
        raise Refusal("folder", text, "give a directory of a user that all hosts have")
    return folder


def make(cwd: str, sync: Sync, host: str) -> None:
    """Make the folder that the tree of `sync` is copied to, and look whether it can take it. Raises Refusal.

    The text that runs before the host's rsync (distrun/sync/remote.py) makes and judges it by the same rules. Both are
    needed: here all hosts are judged before anything is copied to any; there the folder is as rsync will find it, also
    for `distrun sync`, which has no agents.
    """
    folder = _expanded(cwd, host)
    try:
        os.makedirs(folder, exist_ok=True)
        names = os.listdir(folder)
    except OSError as err:
        kind = "disk" if err.errno in (errno.ENOSPC, errno.EDQUOT) else "folder"
        raise Refusal(
            kind, "cannot make %s on %s: %s" % (err.filename or cwd, host, err.strerror), "give another --sync-dst-dir"
        ) from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise Refusal("folder", "%s on %s cannot be written to" % (cwd, host), "give another --sync-dst-dir")
    is_ours = MARKER in names
    if not names:
        _check_room(cwd, folder, sync, host)
        _mark(folder, cwd, host)
    elif sync.delete and not is_ours and not _is_same(folder, sync):
        raise Refusal(
            "folder",
            "--sync-delete would remove files of yours: %s on %s has files, and not from distrun (no %s in it)"
            % (cwd, host, MARKER),
            "leave --sync-delete out, or give a new folder; if all in it may go:  ssh %s touch %s/%s"
            % (host, cwd, MARKER),
        )


def _check_room(cwd: str, folder: str, sync: Sync, host: str) -> None:
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    short: List[str] = []
    if free < sync.size:
        short.append("%s free, %s needed" % (_size(free), _size(sync.size)))
    if info.f_files and info.f_favail < sync.files:  # some file systems count no inodes
        short.append("%d more files possible, %d needed" % (info.f_favail, sync.files))
    if short:
        raise Refusal(
            "disk",
            "too little room in %s on %s: %s" % (cwd, host, "; ".join(short)),
            "make room, or leave files out with --sync-exclude",
        )


def _mark(folder: str, cwd: str, host: str) -> None:
    try:
        descriptor = os.open(os.path.join(folder, MARKER), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.write(descriptor, _MARKER_TEXT)
        finally:
            os.close(descriptor)
    except OSError as err:
        kind = "disk" if err.errno in (errno.ENOSPC, errno.EDQUOT) else "folder"
        raise Refusal(kind, "cannot write into %s on %s: %s" % (cwd, host, err.strerror)) from None


def _must_be(cwd: str, plan: Plan, host: str) -> None:
    folder = _expanded(cwd, host)
    fix = "" if plan.backend == "local" else "copy it there with --sync-dst-dir DIR, or mount it"
    if not os.path.isdir(folder):
        what = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise Refusal("folder", "%s %s on %s" % (cwd, what, host), fix)
    if not os.access(folder, os.X_OK):
        raise Refusal("folder", "%s on %s may not be entered" % (cwd, host), fix)


def _is_same(folder: str, sync: Sync) -> bool:
    """Return whether the source is that very folder: then this is the launching machine, and nothing is copied."""
    return bool(sync.identity) and identity(folder) == sync.identity


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return "%.3g %s" % (count, unit)
        count /= 1024
    return "%.3g TiB" % count
