"""Jobs whose coordinator is on one of their hosts: keeps this machine's folder of such a job up to date.

The job's real folder is on that host, unless this machine and that host share a job store. Its state is fetched when
somebody looks; when the job is over, everything that is in the folder is fetched once, logs included, and from then on
the job is like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import IO

from distrun import relay
from distrun.errors import DistrunError
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.jobfolder import JobFolder

READ_SIZE = 256 * 1024
HEADER_LIMIT = 4096
REMOVE_S = 60.0
"""How long the removal of a job's folder on a host may take."""
_NAME = re.compile(
    r"(state|outcome)\.json|(events|events\.1|metrics)\.jsonl|coordinator\.log|logs/[A-Za-z0-9][A-Za-z0-9._-]*"
)
FETCH = """
import json, os, sys, time
os.chdir(sys.argv[1])
names = ["state.json"]
if os.path.exists("outcome.json"):
    names += ["events.1.jsonl", "events.jsonl", "metrics.jsonl", "coordinator.log"]
    names += ["logs/" + name for name in os.listdir("logs")] + ["outcome.json"]
out = sys.stdout.buffer
for name in names:
    if os.path.isfile(name):
        with open(name, "rb") as file:
            found = os.fstat(file.fileno())
            size, age_s = found.st_size, max(0.0, time.time() - found.st_mtime)
            out.write(json.dumps({"name": name, "size": size, "age_s": age_s}).encode() + bytes([10]))
            while size:
                data = file.read(min(size, 65536))
                if not data:
                    sys.exit("%s became shorter" % name)
                out.write(data)
                size -= len(data)
"""


REMOVE = """
import os, shutil, sys
path, job = sys.argv[1:3]
parent, name = os.path.split(path)
if os.path.lexists(path):
    if name != job or os.path.islink(path) or not os.path.isfile(os.path.join(path, "plan.json")):
        sys.exit(path + " is no folder of job " + job)
    doomed = os.path.join(parent, ".removed-" + name)
    os.rename(path, doomed)
    shutil.rmtree(doomed)
"""
"""Removes a job's folder at once for all readers; should it be ended meanwhile, `distrun gc` there goes on."""


class NotAsked(DistrunError):
    """The host of a job's coordinator cannot be asked."""

    exit_code = facts.EXIT_HOST_LOST


class NotRemoved(DistrunError):
    """The folder of a job on its coordinator's host is still there."""


def is_elsewhere(folder: JobFolder) -> bool:
    """Return whether what is known of a job has to be fetched from one of its hosts."""
    where = folder.control()
    return where is not None and bool(where.get("folder")) and not folder.is_finished


def refresh(folder: JobFolder, may_ask: bool = True) -> None:
    """Fetch what is new of a job that `is_elsewhere`. `may_ask`: ssh may ask the user for a password.

    If its host drops the connection because it has too many, this is tried again for some time.

    Raises:
        NotAsked: its host cannot be reached, or has no such folder; or what it sent cannot be written here.
    """
    where = folder.control()
    assert where is not None  # of `is_elsewhere`
    command = shlex.join(["python3", "-I", "-c", FETCH, where["folder"]])
    argv = relay.ssh_argv(where["login"], command, may_ask=may_ask)
    code, said = relay.retried(lambda: _fetch(folder, argv))
    if code:
        raise NotAsked(
            f"job {folder.id}: its coordinator's host {where['host']} cannot be asked: {_why(code, said)}",
            f"what is known here is older; try: {where['login']} true",
        )


def _fetch(folder: JobFolder, argv: list[str]) -> tuple[int, str]:
    """Save what FETCH writes; return its exit code, or that of the ssh program, and what it said. None is a failure."""
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as err:
        raise NotAsked(f"job {folder.id}: cannot run {argv[0]}: {err.strerror}") from None
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            saved = [save(folder, *each) for each in _files(child.stdout)]
        except OSError as err:
            raise NotAsked(
                f"job {folder.id}: what its coordinator's host sent cannot be written to {folder.path}: {err.strerror}",
                f"is the disk full, or over quota? see: df {folder.path}",
            ) from err
        said = child.stderr.read().decode("utf-8", "replace").strip()
    if not saved and not child.returncode:
        return 1, said or "it has no state of this job"
    return child.returncode, said


def remove(folder: JobFolder, login: str, there: str) -> None:
    """Remove the folder of a job that is over on the host that had its coordinator. No such folder is no error.

    Args:
        folder: the job's folder here.
        login: what a user types before a command to run it there.
        there: the job's folder there.

    Raises:
        NotAsked: that host cannot be asked.
        NotRemoved: the folder is still there.
    """
    argv = relay.ssh_argv(login, shlex.join(["python3", "-I", "-c", REMOVE, there, folder.id]))
    code, said = relay.retried(lambda: _remove(argv))
    if code:
        raise (NotAsked if code == relay.OWN_FAILURE else NotRemoved)(_why(code, said))


def _remove(argv: list[str]) -> tuple[int, str]:
    """Run REMOVE; return the exit code of the ssh program, and what it said."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVE_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotAsked(f"it was not removed within {REMOVE_S:.0f} s") from None
    except OSError as err:
        raise NotAsked(f"cannot run {argv[0]}: {err.strerror}") from None
    return done.returncode, done.stderr.decode("utf-8", "replace").strip()


def _why(code: int, said: str) -> str:
    """Return why the ssh program failed, in a line."""
    return said.splitlines()[-1] if said else f"ssh ended with code {code}"


def refreshed(folder: JobFolder, may_ask: bool = True) -> str:
    """Fetch what is new of a job, if it has to be fetched; return a warning if that fails.

    `may_ask`: ssh may ask the user for a password.
    """
    if not is_elsewhere(folder):
        return ""
    try:
        refresh(folder, may_ask)
    except NotAsked as err:
        return f"{err}; {err.hint}"
    return ""


def _files(stream: IO[bytes]) -> Iterator[tuple[str, float, Iterator[bytes]]]:
    """Give name, age in seconds, and content of the files that FETCH writes; what is no file of a job is an error."""
    while header := stream.readline(HEADER_LIMIT):
        try:
            about = json.loads(header)
            name, size, age_s = about["name"], int(about["size"]), float(about["age_s"])
        except (ValueError, KeyError, TypeError):
            raise NotAsked(f"the host of the coordinator sent what is no file: {header[:80]!r}") from None
        if not isinstance(name, str) or not _NAME.fullmatch(name) or size < 0:
            raise NotAsked(f"the host of the coordinator sent a file that no job has: {name!r}")
        yield name, age_s, _content(stream, name, size)


def _content(stream: IO[bytes], name: str, size: int) -> Iterator[bytes]:
    while size:
        data = stream.read(min(size, READ_SIZE))
        if not data:
            raise NotAsked(f"the connection ended within {name}, {size} bytes before its end")
        size -= len(data)
        yield data


def save(folder: JobFolder, name: str, age_s: float, pieces: Iterable[bytes]) -> str:
    """Replace a file of the folder as a whole. It gets its age, too: by that of the state, a job is `unknown`.

    Raises OSError.
    """
    path = folder.path / name
    fresh = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")  # hosts may share the folder
    try:
        with open(fresh, "wb") as file:
            for data in pieces:
                file.write(data)
        when = time.time() - age_s
        os.utime(fresh, (when, when))
        os.replace(fresh, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
    return name
