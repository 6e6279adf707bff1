"""The folder on a host that files are copied to: found, made and checked.

What is in that folder is on the import path of the tasks. So only the user and root may be able to put anything
there, or another folder in its place. The agent asks for it before a job (agent/preflight.py), and the program
that runs rsync on the host asks again (distrun/sync/receiver.py). It sends this very file, which imports nothing of
distrun's.

The path is followed from / on, and each folder is judged before it is entered. What was judged cannot be changed by
anybody else afterwards, so the path stays safe to use by its name.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import time
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Tuple

MARKER = ".distrun-sync"
"""File that says: this folder was made, or was empty, when distrun first copied into it. Only there it may delete."""
PARTIAL = ".distrun-part-"
"""Begins the names of folders in it that hold what has arrived until everything has."""
ON = ".on"
"""Ends the name of a link that is there while a copy runs, `PARTIAL` and the copy's name before it.

It is in the source, where it leads to `SOURCE`, and in each folder that gets the files, where it leads to the name of
the host that gets them. Hosts that share a folder know it by this link, for its name is unique.
"""
SOURCE = "."
STAGE = ".new"
"""Ends the name of the folder in which files wait that come over the agents' channels."""
STALE_S = 86400.0
"""What a copy that was killed has left there is removed after so long, seconds."""
LOOK_S = 5.0
"""How long the files that are there already are looked at. The agent must answer its coordinator meanwhile."""
SHOWN = 4
LINKS = 40
"""A path with more links is taken for a circle, as the system does."""

_MARKER_TEXT = "distrun copies files into this folder. Without this file it never deletes any here.\n"
_LAST = "The last copy: "
_OWN = "give a directory of your own, such as --sync-dst-dir '~/job' (in quotes: your home directory there)"


class FolderUnfit(Exception):
    """The folder cannot be used. `kind` is `folder` or `disk`, `fix` what to do about it."""

    def __init__(self, kind: str, text: str, fix: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.fix = fix


class PreparedFolder(NamedTuple):
    """The folder, ready for the files."""

    path: str
    """Absolute and without links."""
    is_source: bool
    """The source is that very folder: there is nothing to copy."""
    notes: Tuple[str, ...]
    """What the user should know."""


def prepare(
    folder: str,
    on: str = "",
    *,
    size: int = 0,
    files: int = 0,
    delete: bool = False,
    source: str = "",
    mark: str = "",
    marks: bool = True,
) -> PreparedFolder:
    """Make the folder and look whether it can take a tree of `files` files and `size` bytes.

    `on` is put behind the folder in messages (` on h1`). The tree's own folder is recognized by `source`, its
    `identity`, or by `mark`, the name of a link in it (`ON`). With `marks`, an empty folder gets the marker.

    Raises:
        Unfit: it cannot.
    """
    where = folder + on
    try:
        path, notes = follow(expand(folder, on), where, make=True)
        names = os.listdir(path)
        own(path, where, notes)
    except OSError as err:
        raise FolderUnfit(_kind(err), f"cannot make {where}: {err.filename}: {err.strerror}", _OWN) from None
    is_source = (bool(source) and identity(path) == source) or (bool(mark) and holder(path, mark) == SOURCE)
    if not is_source:
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise FolderUnfit("folder", f"{where} cannot be written to", _OWN)
        if not names:
            _check_room(path, where, size, files)
            if marks:
                _mark(path, where)
        elif delete and MARKER not in names:
            raise FolderUnfit(
                "folder",
                f"--sync-delete would remove your own files: {where} has files that distrun did not copy (no {MARKER} "
                "in it)",
                "leave --sync-delete out, or give a new folder; if all in it may go, on that host: "
                f"touch {path}/{MARKER}",
            )
    return PreparedFolder(path, is_source, tuple(notes))


def expand(folder: str, on: str = "") -> str:
    """Return the absolute path of a folder here: `~` is expanded, other relative paths begin at the home directory.

    Raises:
        Unfit: there is no such user.
    """
    path = os.path.expanduser(folder)
    if path.startswith("~"):  # as it stands it would be a folder `~NAME`
        name = path.partition("/")[0]
        raise FolderUnfit("folder", f"there is no user {name}{on}", _OWN)
    return os.path.join(os.path.expanduser("~"), path)


def follow(path: str, where: str, make: bool = False) -> Tuple[str, Dict[str, None]]:
    """Return an absolute path without links, and notes for the user. With `make`, missing folders are made.

    Raises:
        Unfit: another user could put another folder in its place, or files into it.
        OSError: it is not there, cannot be made, or is not a folder.
    """
    notes: Dict[str, None] = {}
    at, todo, links = "/", _names(path), 0
    _judge(at, os.lstat(at), where, notes, is_last=not todo)
    while todo:
        name = todo.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        at = os.path.join(at, name)
        try:
            info = os.lstat(at)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # another process was quicker; whose it is will be seen now
                os.mkdir(at, 0o755)
            info = os.lstat(at)
        _judge(at, info, where, notes, is_last=not todo)
        if stat.S_ISLNK(info.st_mode):
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), at)
            target = os.readlink(at)
            todo += _names(target)
            at = "/" if target.startswith("/") else os.path.dirname(at)
    _judge(at, os.lstat(at), where, notes, is_last=True)
    return at, notes


def own(path: str, where: str, notes: Dict[str, None], limit_s: float = LOOK_S) -> None:
    """Look for files in a folder that others own or can change, the nearest first.

    Raises:
        Unfit: there are such.
    """
    found: List[str] = []
    todo: Deque[str] = deque([path])
    count, deadline = 0, time.monotonic() + limit_s
    while todo and len(found) < SHOWN:
        try:
            entries = os.scandir(todo.popleft())
        except OSError:  # it has gone, or cannot be read
            continue
        with entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                fault, note = _fault(entry.path, info, is_last=True)
                if fault:
                    found.append(f"{os.path.relpath(entry.path, path)} ({fault})")
                elif stat.S_ISDIR(info.st_mode):
                    todo.append(entry.path)
                if note:
                    notes[f"{where}: {note} files in it"] = None
                count += 1
                if count % 256 == 0 and time.monotonic() > deadline:
                    text = "%s: only the nearest %d files in it were checked for files of others"
                    notes[text % (where, count)] = None
                    todo.clear()
                    break
    if found:
        more = " and others" if len(found) >= SHOWN else ""
        raise FolderUnfit(
            "folder",
            "{} has files that others own or can change, and the job could run them: {}{}".format(
                where, ", ".join(sorted(found)[: SHOWN - 1]), more
            ),
            "on that host, remove them or make them yours (chown, chmod go-w); or " + _OWN,
        )


def identity(path: str) -> str:
    """Return what makes a folder of this machine the same one as seen from another login; empty if unknown.

    A path will not do: another machine may have a folder by the same name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino} {boot}"


def holder(path: str, mark: str) -> str:
    """Return where the link `mark` in a folder leads; empty if there is none."""
    try:
        return os.readlink(os.path.join(path, mark))
    except OSError:
        return ""


def note_copy(path: str, run: str, host: str) -> None:
    """Note in the marker of a folder, if it has one, that `host` has got all files of the copy `run`."""
    with contextlib.suppress(OSError):  # then a host that shares the folder copies again, and finds nothing to send
        descriptor = os.open(os.path.join(path, MARKER), os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{_MARKER_TEXT}{_LAST}{run} {host}\n".encode("utf-8", "surrogateescape"))


def copied_to(path: str, run: str) -> str:
    """Return the host that has got the copy `run` into this folder, by its marker; empty if none has."""
    with contextlib.suppress(OSError), open(os.path.join(path, MARKER), "rb") as file:
        for line in file.read(4096).decode("utf-8", "surrogateescape").splitlines():
            if line.startswith(f"{_LAST}{run} "):
                return line[len(f"{_LAST}{run} ") :]
    return ""


def leads_out(name: str, target: str) -> bool:
    """Return whether the link `name`, a path below the folder, leads out of it. No side effects.

    `..` counts only at the beginning of its target: behind the name of another link, it is unknown where it leads.
    """
    parts = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] in ("..", "."):
        ups += 1
    rises = parts[:ups].count("..")
    return not target or target.startswith("/") or rises > name.count("/") or ".." in parts[ups:]


def _names(path: str) -> List[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _judge(path: str, info: os.stat_result, where: str, notes: Dict[str, None], *, is_last: bool) -> None:
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISLNK(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    fault, note = _fault(path, info, is_last)
    if fault:
        which = "the link " + path if stat.S_ISLNK(info.st_mode) else path
        named = where if (where + " ").startswith(path + " ") else f"{where}: {which}"
        is_mine = info.st_uid == os.geteuid() and not info.st_mode & stat.S_ISVTX
        raise FolderUnfit(
            "folder",
            f"{named} is {fault}, so others could change what the job runs",
            f"on that host: chmod go-w {path}; or {_OWN}" if is_mine else _OWN,
        )
    if note:
        notes[f"{where}: {note} {path}"] = None


def _fault(path: str, info: os.stat_result, is_last: bool) -> Tuple[str, str]:
    """Return who else can change a file or folder, and a note if a group can that the user belongs to.

    In a folder with the sticky bit, such as /tmp, others can add files and not replace what is there: on the way
    (not `is_last`) that is enough, since whatever stands there is judged too.
    """
    if info.st_uid not in (0, os.geteuid()):
        return f"owned by {_user(info.st_uid)}", ""
    if stat.S_ISLNK(info.st_mode) or (info.st_mode & stat.S_ISVTX and stat.S_ISDIR(info.st_mode) and not is_last):
        return "", ""
    mode = stat.S_IMODE(info.st_mode)
    if mode & stat.S_IWOTH:
        return f"writable by everyone (mode {mode:04o})", ""
    if mode & stat.S_IWGRP:
        if _has_list(path):  # then these bits are the most that anybody in the list may do
            if os.geteuid() == 0:
                return "writable by users in its access list", ""
            return "", "an access list lets others change"
        if not _is_private(info.st_gid):
            if os.geteuid() == 0 or info.st_gid not in (os.getegid(), *os.getgroups()):
                return f"writable by the group {_group(info.st_gid)} (mode {mode:04o})", ""
            return "", f"the members of your group {_group(info.st_gid)} can change"
    return "", ""


def _has_list(path: str) -> bool:
    """Return whether a file has an access list (setfacl), as far as this system tells."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except (OSError, AttributeError):
        return False


def _is_private(gid: int) -> bool:
    """Return whether a group is root's, or one that has this user only (many systems give each user one)."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:  # not `process.user_name`: this file is sent to hosts alone
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _check_room(path: str, where: str, size: int, files: int) -> None:
    info = os.statvfs(path)
    free = info.f_bavail * info.f_frsize
    short: List[str] = []
    if free < size:
        short.append(f"{_size(free)} free, {_size(size)} needed")
    if info.f_files and info.f_favail < files:  # some file systems count no inodes
        short.append(f"{info.f_favail} more files possible, {files} needed")
    if short:
        text = f"too little room in {where}: {'; '.join(short)}"
        raise FolderUnfit("disk", text, "make room, or leave files out with --sync-exclude")


def _mark(path: str, where: str) -> None:
    try:
        descriptor = os.open(os.path.join(path, MARKER), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.write(descriptor, _MARKER_TEXT.encode("ascii"))
        finally:
            os.close(descriptor)
    except OSError as err:
        text = f"cannot write into {where}: {err.strerror}"
        raise FolderUnfit(_kind(err), text, _OWN) from None


def _kind(err: OSError) -> str:
    return "disk" if err.errno in (errno.ENOSPC, errno.EDQUOT) else "folder"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
