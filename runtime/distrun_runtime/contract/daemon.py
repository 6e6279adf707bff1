"""Forks processes that survive the terminal, the connection or the login from which they are started."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from pathlib import Path
from typing import Iterable, Optional, Set

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
    user = pwd.getpwuid(os.geteuid()).pw_name
    return None if os.path.exists(root + os.path.join(_LINGER, user)) else f"loginctl enable-linger {user}"


def ends_at_logout(root: str = "") -> bool:
    """Return whether a logout ends this process and what it starts. `root`: where the system's files are; for tests."""
    return _is_of_a_login(root) and _kills_users(root)


def _is_of_a_login(root: str) -> bool:
    """Return whether this process belongs to a login session, as systemd-logind counts them."""
    try:
        text = Path(root + "/proc/self/cgroup").read_text("utf-8", "replace")
    except OSError:
        return False
    return any(part.startswith("session-") and part.endswith(".scope") for part in text.replace("\n", "/").split("/"))


def _kills_users(root: str) -> bool:
    settings = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    drop_ins = {path.name: path for folder in _DROP_INS for path in sorted(Path(root + folder).glob("*.conf"))}
    for path in [*(Path(root + name) for name in _CONFIG), *(drop_ins[name] for name in sorted(drop_ins))]:
        with contextlib.suppress(OSError):
            for line in path.read_text("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() in settings:
                    settings[name.strip()] = value.strip()
    user = pwd.getpwuid(os.geteuid()).pw_name
    only = settings["KillOnlyUsers"].split()
    return (
        settings["KillUserProcesses"].lower() in _TRUE
        and (not only or user in only)
        and user not in settings["KillExcludeUsers"].split()
    )
