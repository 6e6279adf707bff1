"""Processes and the terminal from which they are started: some survive it, some take its signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Set, Type

from distrun_runtime.contract import process
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
            told = file.read()
        os.waitpid(between, 0)
        if not told:
            raise ContractError("the system has no room for another process; see: ulimit -u")
        return int(told)
    try:
        os.close(reading)
        os.setsid()
        pid = os.fork()  # no leader of its session: it can never get a terminal
        if pid:
            os.write(writing, b"%d" % pid)
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
