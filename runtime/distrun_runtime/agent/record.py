"""Keeps a job's private folder on a host: its token, its spool, and the record of what was started.

    HOSTDIR/JOB.NONCE/PLACE/{token, agent.json, spool/, killed}

HOSTDIR is $XDG_RUNTIME_DIR/distrun or, without one, /tmp/distrun-UID: mode 0700, owned by the user, no link. A detached
job's is /var/tmp/distrun-UID: the others may be removed when the user logs out. If another user has made a
folder of that name, it is one with a random suffix.
PLACE is the agent's place, called as the host where a host has one. A machine may have several, and so may several
hosts of a job that are one machine (a test, containers that share /tmp).
The record lets the guard, `distrun kill` and a sweep end exactly what was started; it is rewritten whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from distrun_runtime.contract import environ, facts, lasting, process
from distrun_runtime.contract.process import Identity
from distrun_runtime.errors import ContractError, PreflightFailure

VERSION = 1
TOKEN = "token"
RECORD = "agent.json"
KILLED = "killed"
"""File that says: `distrun kill` on this host ended the job."""
FREE_BYTES = 1024 * 1024
FREE_FILES = 16
"""What must be free on the disk of the folder."""


class Record(NamedTuple):
    """What an agent started, for those who must end it if the agent cannot."""

    job: str
    host: str
    guard: Identity
    agent: Identity
    grace_s: float
    tasks: Tuple[Tuple[str, Identity], ...] = ()
    """(name, leader) of the tasks that were not reaped; a leader's process id is also its group and session."""
    known: Tuple[Identity, ...] = ()
    """Other processes that were seen to belong to the job."""
    lease_s: float = facts.LEASE_S
    """How long the agent goes on without hearing from its coordinator. The file's time says when it last heard."""
    nonce: str = ""
    """`Plan.nonce`."""

    def to_json(self) -> Dict[str, Any]:
        """Return the record as JSON-able values."""
        return {
            "version": VERSION,
            "job": self.job,
            "host": self.host,
            "guard": self.guard._asdict(),
            "agent": self.agent._asdict(),
            "grace_s": self.grace_s,
            "tasks": [dict(who._asdict(), name=name, pgid=who.pid) for name, who in self.tasks],
            "known": [who._asdict() for who in self.known],
            "lease_s": self.lease_s,
            "nonce": self.nonce,
        }


def record_from_json(value: Any) -> Record:
    """Return the record that `Record.to_json` gave.

    Raises:
        ContractError: another version, or not of that form.
    """
    try:
        if value["version"] != VERSION:
            raise ContractError(f"agent record of version {value['version']!r}; this program knows {VERSION}")
        return Record(
            job=str(value["job"]),
            host=str(value["host"]),
            guard=_identity(value["guard"]),
            agent=_identity(value["agent"]),
            grace_s=float(value["grace_s"]),
            tasks=tuple((str(task["name"]), _identity(task)) for task in value["tasks"]),
            known=tuple(_identity(who) for who in value["known"]),
            lease_s=float(value["lease_s"]),
            nonce=str(value.get("nonce", "")),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ContractError(f"this is not an agent record: {err!r}") from err


def roots() -> List[str]:
    """Return where HOSTDIR may be, best first."""
    named = environ.text("XDG_RUNTIME_DIR")
    fallback = f"/tmp/distrun-{os.geteuid()}"
    return [os.path.join(named, "distrun"), fallback] if os.path.isabs(named) else [fallback]


def places() -> List[str]:
    """Return where the folders of this user's jobs may be: a later `distrun kill` may have other variables than a job.

    A login through a desktop or a console has XDG_RUNTIME_DIR, one through ssh often has not.
    """
    usual = [f"/run/user/{os.geteuid()}/distrun", f"/tmp/distrun-{os.geteuid()}"]
    names = dict.fromkeys([*roots(), *usual, lasting.root()])
    return [each for name in names for each in lasting.owned(name)]


def private_root() -> str:
    """Return the HOSTDIR that a logout leaves alone, made if need be. Raises ContractError, OSError."""
    root = lasting.own(lasting.root())
    _private(root)
    return root


def every() -> List[str]:
    """Return the folders of all jobs on this machine."""
    found = []
    for root in places():
        try:
            _check(root)
            found += sorted(os.listdir(root))
        except (OSError, ContractError):
            continue
    return [folder for name in dict.fromkeys(found) for folder in _below(name)]


def create(job: str, host: str, token: str, nonce: str = "", lasts: bool = False) -> str:
    """Make the folder of a job on this host, with its token, and return its path. `lasts`: a logout may not remove it.

    Raises:
        ContractError: no root can be used, with the reason for each; or the folder is in use by a living agent.
    """
    _refuse_a_second(job, nonce, host)
    wrong, is_full = [], False
    for name in [lasting.root(), *roots()] if lasts else roots():
        try:
            root = lasting.own(name)
            _private(root)
            parent = os.path.join(root, _name(job, nonce))
            _private(parent)
            folder = os.path.join(parent, safe_name(host))
            _private(folder)
            _check_space(folder)
            _delete(os.path.join(folder, "spool"))  # of an earlier agent of the same job
            os.mkdir(os.path.join(folder, "spool"), 0o700)
            if token:
                write(os.path.join(folder, TOKEN), token.encode("utf-8"))
            return folder
        except (OSError, ContractError) as err:
            wrong.append(str(err))
            is_full = is_full or getattr(err, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
    text = f"no private folder can be made for the job on {host}: {'; '.join(wrong)}"
    raise PreflightFailure("disk" if is_full else "other", text)


def remove(folder: str) -> None:
    """Remove the folder of a job on this host, and the job's if that is empty then. Errors are ignored."""
    _delete(folder)
    with contextlib.suppress(OSError):  # another host of the job lives on this machine
        os.rmdir(os.path.dirname(folder))


def strip(folder: str) -> None:
    """Remove what is in the folder of a job on this host, except the record. Errors are ignored."""
    for name in ("spool", TOKEN, KILLED):
        _delete(os.path.join(folder, name))


def save(folder: str, record: Record) -> None:
    """Write the record. Raises OSError."""
    write(os.path.join(folder, RECORD), json.dumps(record.to_json()).encode("utf-8", "surrogateescape"))


def touch(folder: str) -> None:
    """Note that the agent is alive and was heard from, without writing the record again. Errors are ignored."""
    with contextlib.suppress(OSError):
        os.utime(os.path.join(folder, RECORD))


def note_kill(folder: str) -> None:
    """Note that `distrun kill` ends the job here, before its agent gets a signal. Errors are ignored."""
    with contextlib.suppress(OSError):  # it is for a message only
        write(os.path.join(folder, KILLED), b"")


def is_killed(folder: str) -> bool:
    """Return whether `note_kill` was called for this folder."""
    return os.path.exists(os.path.join(folder, KILLED))


def load(folder: str) -> Record:
    """Return the record of a folder. Raises OSError if there is none, ContractError if it is not ours."""
    with open(os.path.join(folder, RECORD), "rb") as file:
        text = file.read().decode("utf-8", "surrogateescape")
    try:
        return record_from_json(json.loads(text))
    except (RecursionError, OverflowError) as err:
        raise ContractError(f"this is not an agent record: {err!r}") from None


def find(folder: str) -> Optional[Record]:
    """Return the record of a folder; None if there is none that can be read."""
    try:
        return load(folder)
    except (OSError, ContractError, ValueError):
        return None


def folders(job: str, nonce: str = "") -> List[str]:
    """Return the folders of a job on this machine, of all its hosts that are here."""
    return _below(_name(job, nonce))


def _name(job: str, nonce: str) -> str:
    """Return what the folder of a job is called. Two stores may each have a job of that id."""
    return safe_name(f"{job}.{nonce}" if nonce else job)


def _below(name: str) -> List[str]:
    found = []
    for root in places():
        parent = os.path.join(root, name)
        try:
            _check(root)
            _check(parent)
            found += [os.path.join(parent, name) for name in sorted(os.listdir(parent))]
        except (OSError, ContractError):
            continue
    return found


def write(path: str, data: bytes) -> None:
    """Write a file of mode 0600 whole: a reader sees the old or the new one. Raises OSError."""
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(path + ".new", path)


def _delete(path: str) -> None:
    """Remove a file, or a folder with everything in it. Errors are ignored."""
    # Not shutil.rmtree: importing shutil takes longer than the rest of an agent's end.
    with contextlib.suppress(OSError):
        if not os.path.isdir(path) or os.path.islink(path):
            os.unlink(path)
            return
        for name in os.listdir(path):
            _delete(os.path.join(path, name))
        os.rmdir(path)


def safe_name(name: str) -> str:
    """Return a name as one component of a path: no slash, no leading dot."""
    text = "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "-_.:@" else "_" for letter in name)
    return "_" + text if text.startswith(".") or not text else text


def _refuse_a_second(job: str, nonce: str, host: str) -> None:
    for folder in folders(job, nonce):
        other = find(folder)
        if other is not None and other.host == host and process.is_alive(other.agent):
            raise ContractError(
                f"job {job} already has an agent for host {host} on this machine, process {other.agent.pid};"
                f" end it with: distrun kill {job}"
            )


def _check_space(folder: str) -> None:
    """Refuse a disk that is almost full: token, record and output would not fit. Raises OSError."""
    info = os.statvfs(folder)
    if info.f_bavail * info.f_frsize < FREE_BYTES or (info.f_files and info.f_favail < FREE_FILES):
        with contextlib.suppress(OSError):  # only what is empty
            os.rmdir(folder)
            os.rmdir(os.path.dirname(folder))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


def _private(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    _check(folder)


def _check(folder: str) -> None:
    """Refuse a folder that another user could have made, and close one that others can read."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise ContractError(f"{folder} is not a folder (a link?); remove it")
    if info.st_uid != os.geteuid():
        raise ContractError(f"{folder} belongs to user {info.st_uid}, not to {os.geteuid()}; remove it")
    if stat.S_IMODE(info.st_mode) & 0o077:
        os.chmod(folder, 0o700)


def _identity(value: Any) -> Identity:
    return Identity(int(value["pid"]), str(value["start"]))
