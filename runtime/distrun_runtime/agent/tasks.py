"""Start one task: its pipes, its environment, its session; and say why it could not be started.

Every string is bytes here: arguments and values reach the program exactly as they were typed, whatever this
host's locale is.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Tuple

from distrun_runtime.agent.members import Family
from distrun_runtime.agent.outlet import Outlet
from distrun_runtime.agent.publish import Publisher
from distrun_runtime.agent.spool import Spool
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Task
from distrun_runtime.contract.process import Identity

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class CannotStart(Exception):
    """A task could not be started. `code` is the exit code that a shell would give."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass
class Running:
    """A task that was started: what the agent's loop keeps of it."""

    task: Task
    leader: Identity
    family: Family
    outlets: Tuple[Outlet, Outlet]
    publisher: Publisher
    started: float
    child: subprocess.Popen[bytes]
    was_signalled: bool = False
    """We sent it a signal, so that its end is no failure of its own."""
    exit: Dict[str, object] = field(default_factory=dict)
    """Members of its `exited` message, once it was reaped."""

    @property
    def is_reaped(self) -> bool:
        """Its first process is over and was waited for."""
        return self.family.is_reaped


def environment(
    base: Mapping[bytes, bytes],
    unset: Iterable[str],
    *added: Mapping[str, str],
) -> Dict[bytes, bytes]:
    """Return a task's environment: `base` without what `unset` names (a `*` at the end matches the rest), plus `added`.

    Pure. The later of `added` wins.
    """
    names = [exact(name) for name in unset]
    whole = {name for name in names if not name.endswith(b"*")}
    starts = tuple(name[:-1] for name in names if name.endswith(b"*"))
    env = {
        name: value for name, value in base.items() if name not in whole and not (starts and name.startswith(starts))
    }
    for more in added:
        env.update((exact(name), exact(value)) for name, value in more.items())
    return env


def exact(text: str) -> bytes:
    """Return the bytes that a string of the plan stands for (UTF-8, odd bytes as surrogates)."""
    return text.encode("utf-8", "surrogateescape")


def words(task: Task) -> List[bytes]:
    """Return a task's argument list; `~` of the program is the home of the user of this host."""
    return [os.path.expanduser(exact(word)) if not at else exact(word) for at, word in enumerate(task.argv)]


def start(task: Task, env: Dict[bytes, bytes], spool_folder: str) -> Running:
    """Start a task in a session of its own, with no input, and return it.

    Its pipes are non-blocking; `env` gets DISTRUN_PUBLISH_FD.

    Raises:
        CannotStart: with the exit code (126, 127) and the reason.
    """
    argv = words(task)
    _check(task, argv, env)
    ours: List[int] = []
    theirs: List[int] = []
    try:
        for _ in range(3):
            reading, writing = os.pipe()
            ours.append(reading)
            theirs.append(writing)
            os.set_blocking(reading, False)
        env[b"DISTRUN_PUBLISH_FD"] = b"%d" % theirs[2]
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=theirs[0],
            stderr=theirs[1],
            pass_fds=(theirs[2],),
            cwd=os.path.expanduser(exact(task.cwd)) or None,
            env=env,
            start_new_session=True,
        )
        started = time.time()
    except (OSError, ValueError) as err:
        for descriptor in ours:
            os.close(descriptor)
        raise _why(task, argv, err) from err
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    leader = _identity(child.pid)
    paths = [os.path.join(spool_folder, "%s.%s" % (task.name, stream)) for stream in ("out", "err")]
    outlets = (Outlet(task.name, "out", ours[0], Spool(paths[0])), Outlet(task.name, "err", ours[1], Spool(paths[1])))
    return Running(task, leader, Family(task.name, leader), outlets, Publisher(task.name, ours[2]), started, child)


def _identity(pid: int) -> Identity:
    try:
        return process.identity(pid)
    except ProcessLookupError:
        return Identity(pid, "")  # ps could not be run; a child of ours cannot lose its id before we reap it


def _check(task: Task, argv: List[bytes], env: Mapping[bytes, bytes]) -> None:
    """Find out beforehand what exec could only say ambiguously."""
    if not argv or not argv[0]:
        raise CannotStart(NOT_FOUND, "%s has an empty command" % task.name)
    cwd = os.path.expanduser(exact(task.cwd))
    if cwd and not os.path.isdir(cwd):
        what = "is not a folder" if os.path.exists(cwd) else "does not exist"
        raise CannotStart(NOT_EXECUTABLE, "the working folder %s %s on this host" % (task.cwd, what))
    if cwd and not os.access(cwd, os.X_OK):
        raise CannotStart(NOT_EXECUTABLE, "the working folder %s cannot be entered: no permission" % task.cwd)
    folders = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    places = [b""] if b"/" in argv[0] else folders
    found = [os.path.join(cwd or b".", place, argv[0]) for place in places]
    found = [path for path in found if os.path.exists(path)]
    if not found:
        where = "" if b"/" in argv[0] else " (in no folder of the task's PATH)"
        if argv[0] == b"python" and any(os.path.exists(os.path.join(place, b"python3")) for place in folders):
            where = " (in no folder of the task's PATH, but there is python3: type that)"
        word, equals, _ = _text(argv[0]).partition("=")  # of an assignment only the name: its value may be a secret
        raise CannotStart(NOT_FOUND, "command not found: %s%s" % (word + "=..." if equals else word, where))
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        what = "is a folder" if os.path.isdir(found[0]) else "is not executable; chmod +x it or name its interpreter"
        raise CannotStart(NOT_EXECUTABLE, "%s %s" % (_text(found[0]), what))


def _why(task: Task, argv: List[bytes], err: Exception) -> CannotStart:
    number = err.errno if isinstance(err, OSError) else None
    if number == errno.ENOENT:
        # The file is there (it was checked): what its first line names is not.
        return CannotStart(NOT_EXECUTABLE, "%s: the interpreter in its first line does not exist" % _text(argv[0]))
    if number == errno.ENOEXEC:
        return CannotStart(
            NOT_EXECUTABLE, "%s is neither a program of this machine nor a script with a #! line" % _text(argv[0])
        )
    return CannotStart(NOT_EXECUTABLE, "%s cannot be started: %s" % (task.name, err))


def _text(words: bytes) -> str:
    return words.decode("utf-8", "replace")
