"""Processes and the terminal from which they are started: some survive it, some take its signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Type

from distrun_runtime.contract import environ, process
from distrun_runtime.errors import ContractError


def fork(keep: Iterable[int] = ()) -> int:
    """Fork a process that survives this one's terminal. Return its pid here, and 0 there.

    It is a grandchild in a session of its own, in the root folder, and SIGHUP means nothing to it; the umask stays.
    Its streams are still ours. All other descriptors, but for those to `keep`, are closed. No thread may run here that
    it needs.

    Raises:
        ContractError: the system has no room for it.
        OSError: not even for the process that is to start it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            told = file.readline()  # not to the end: a daemon that is stopped at its birth holds the pipe
        os.waitpid(between, 0)
        if not told:
            raise ContractError("the system has no room for another process; see: ulimit -u")
        return int(told)
    try:
        os.close(reading)
        os.setsid()
        pid = os.fork()  # no leader of its session: it can never get a terminal
        if pid:
            os.write(writing, b"%d\n" % pid)
            os._exit(0)
        os.close(writing)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it
        os.chdir("/")
        close_all_but({0, 1, 2, *keep})
    except BaseException:
        os._exit(1)
    return 0


def close_all_but(kept: Set[int]) -> None:
    """Close all descriptors of this process but these."""
    at = 0
    for fd in sorted(kept):
        if at < fd:  # an empty range would close all
            os.closerange(at, fd)
        at = fd + 1
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(at, most if 0 < most < 65536 else 65536)


# Whether a logout ends a user's processes, and what they need to go on (systemd-logind's KillUserProcesses).


_CONFIG = ("/usr/lib/systemd/logind.conf", "/etc/systemd/logind.conf")
_DROP_INS = ("/usr/lib/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d")
"""Later ones win; within the folders, by the files' names, whatever their folder."""
_LINGER = "/var/lib/systemd/linger"
_TRUE = ("1", "yes", "y", "true", "t", "on")
WHY = "a logout ends all your processes here (KillUserProcesses of systemd-logind)"
SCOPE = ("--user", "--scope", "--quiet", "--collect", "--")
"""Arguments of systemd-run, before those of a program that is to go on after a logout."""


def needs_linger(root: str = "") -> Optional[str]:
    """Return the line to type before processes of this user can go on after a logout; None: none.

    `root`: where the system's files are; for tests. Only where `ends_at_logout`.
    """
    user = process.user_name()
    is_there = bool(user) and os.path.exists(root + os.path.join(_LINGER, user))
    return None if is_there else f"loginctl enable-linger {user}".rstrip()


def ends_at_logout(root: str = "") -> bool:
    """Return whether a logout ends this process and what it starts. `root`: where the system's files are; for tests."""
    return _is_of_a_login(root) and kills_processes(root)


def _is_of_a_login(root: str) -> bool:
    """Return whether this process belongs to a login session, as systemd-logind counts them."""
    try:
        text = Path(root + "/proc/self/cgroup").read_text("utf-8", "replace")
    except OSError:
        return False
    return any(part.startswith("session-") and part.endswith(".scope") for part in text.replace("\n", "/").split("/"))


def kills_processes(root: str = "") -> bool:
    """Return whether systemd-logind ends what this user's logins leave behind. `root`: as above."""
    settings = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    drop_ins = {path.name: path for folder in _DROP_INS for path in sorted(Path(root + folder).glob("*.conf"))}
    for path in [*(Path(root + name) for name in _CONFIG), *(drop_ins[name] for name in sorted(drop_ins))]:
        with contextlib.suppress(OSError):
            for line in path.read_text("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() in settings:
                    settings[name.strip()] = value.strip()
    user = process.user_name()
    only = settings["KillOnlyUsers"].split()
    return (
        settings["KillUserProcesses"].lower() in _TRUE
        and (not only or user in only)
        and user not in settings["KillExcludeUsers"].split()
    )


# Starts a process that goes on when we, our connection and the login have ended.


PYTHON = "{python}"
"""Word of an argument list that stands for the interpreter of the agent."""
WORDS_BYTES = 4096
"""Of what it wrote to stderr, the last bytes are in the error if it fails."""


def start(argv: Sequence[str], data: bytes, env: Mapping[str, str], limit_s: float, folder: str) -> str:
    """Start a process that goes on without us, and without the login; return its first line: all is well.

    It has no descriptor of ours. Where a logout ends a user's processes, it is started below the user's own service
    manager.

    Args:
        argv: its arguments; the program by its path, or PYTHON.
        data: its standard input.
        env: variables that are added to ours.
        limit_s: how long the line is waited for; 0: it prints none, and is not waited for.
        folder: private, for a moment: what it is given and says goes through files without a name.

    Raises:
        ContractError: it would not survive a logout, it ended without a line, or the line did not come in time.
        OSError: the system refused something.
    """
    words = [sys.executable if word == PYTHON else word for word in argv]
    if ends_at_logout():
        line = needs_linger()
        if line is not None:
            raise ContractError(f"{WHY}; allow yours to go on, once: {line}")
        words = ["systemd-run", *SCOPE, *words]
    every = {**environ.snapshot(), **env}
    given, said = _file(folder, data), _file(folder)
    reading, writing = os.pipe()
    try:
        if not fork(keep=(given, writing, said)):
            _become(words, every, (given, writing, said))
        os.close(writing)
        writing = -1
        return _first_line(reading, said, limit_s) if limit_s else ""
    finally:
        for fd in (given, said, reading, writing):
            if fd >= 0:
                os.close(fd)


def _file(folder: str, data: bytes = b"") -> int:
    """Return a descriptor of a file that has no name, at its beginning: what is in it may be secret."""
    path = os.path.join(folder, "input-" + os.urandom(8).hex())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _become(argv: List[str], env: Dict[str, str], streams: Sequence[int]) -> None:
    """Be the process, in the daemon; never returns."""
    try:
        for to, fd in enumerate([os.dup(fd) for fd in streams]):
            os.dup2(fd, to)
        os.execvpe(argv[0], argv, env)
    except BaseException as err:
        with contextlib.suppress(OSError):
            os.write(2, f"{argv[0]}: {err}\n".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _first_line(fd: int, said: int, limit_s: float) -> str:
    until = time.monotonic() + limit_s
    found = b""
    while b"\n" not in found:
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            raise ContractError(f"it did not get ready within {limit_s:g} s{_words(said)}")
        data = os.read(fd, 65536)
        if not data:
            raise ContractError(f"it ended at once{_words(said)}")
        found += data
    return found.partition(b"\n")[0].decode("utf-8", "replace")


def _words(said: int) -> str:
    size = os.fstat(said).st_size
    text = os.pread(said, WORDS_BYTES, max(0, size - WORDS_BYTES)).decode("utf-8", "replace").strip()
    return f": {text}" if text else ""


# What reaches a process by signals.


ALL = ("INT", "TERM", "HUP", "TSTP", *process.TASKS_SIGNALS)


class Interrupts:
    """While it is entered, in the main thread, `put` gets the names of signals of `names`; elsewhere nothing is done.

    It is called in another thread.

    A signal that was ignored before (nohup) stays ignored, and handlers of others for signals that are for tasks stay.
    Everything is put back at the end.

    A Python handler runs only when the main thread comes to it, and the system may deliver a signal to any thread:
    then the main thread's wait is not interrupted, and two Ctrl-C within it become one. So the interpreter's wakeup
    descriptor is used, which gets one byte for each signal whatever the threads do, and a thread of ours reads it.
    """

    def __init__(self, put: Callable[[str], None], names: Sequence[str] = ALL) -> None:
        self._put = put
        self._names = names
        self._before: Dict[int, Any] = {}
        self._wakeup_before = -1
        self._write_fd = -1
        self._reader: Optional[threading.Thread] = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._reader = threading.Thread(target=self._read, args=(read_fd,), name="signals", daemon=True)
        self._reader.start()
        for name in self._names:
            number = signal.Signals["SIG" + name]
            before = signal.getsignal(number)
            free = (signal.SIG_DFL, process.do_nothing)
            # None: a handler that is not Python's; it could not be put back.
            if before in free if name in process.TASKS_SIGNALS else before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, process.do_nothing)  # the byte on the wakeup descriptor has said it
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._reader is None:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._write_fd)
        self._reader.join()

    def _read(self, read_fd: int) -> None:
        while True:
            numbers = os.read(read_fd, 64)
            if not numbers:
                os.close(read_fd)
                return
            for number in numbers:
                if number in self._before:  # others of this process are not ours
                    self._put(signal.Signals(number).name[3:])
