"""What the `ps` program tells about processes: the way of every POSIX system. Standard library only, Python 3.8."""

from __future__ import annotations

import os
import time
from typing import Dict, List, Optional, Set, Tuple

from distrun_runtime.contract import environ

Row = Tuple[int, int, int, int, str, str]
"""(pid, ppid, pgid, sid, start, state)."""

_LSTART = "%a %b %d %H:%M:%S %Y"
_LIMIT_S = 10.0


def rows(pids: Optional[List[int]] = None) -> List[Row]:
    """Return the process table, or its rows for `pids`, without the `ps` that was run for it."""
    if pids is not None and not pids:
        return []
    found: List[Row] = []
    for line in _run(*_chosen(pids), "-o", "pid=,ppid=,pgid=,stat=,lstart=,comm=").splitlines():
        words = line.split()
        if len(words) < 9 or (int(words[1]) == os.getpid() and os.path.basename(words[-1]) == "ps"):
            continue
        pid = int(words[0])
        try:
            sid = os.getsid(pid)  # ps has no form of the session id that all systems share
        except OSError:
            sid = 0
        found.append((pid, int(words[1]), int(words[2]), sid, _start(words[4:9]), words[3][:1]))
    return found


def environs(pids: Optional[List[int]] = None) -> Dict[int, Dict[str, str]]:
    """Return environments as ps shows them: what `e` adds to the command line (Linux, macOS, BSD)."""
    if pids is not None and not pids:
        return {}
    which = ("ax",) if pids is None else ("-p", ",".join(str(pid) for pid in pids))
    plain = _by_pid(_run(*which, "-ww", "-o", "pid=,command="))
    full = _by_pid(_run(*(("axeww",) if pids is None else ("eww", *which)), "-o", "pid=,command="))
    # Cut the command line off, so that a mark among its arguments is none.
    return {
        pid: _pairs(full[pid][len(text) :].split()) for pid, text in plain.items() if full.get(pid, "").startswith(text)
    }


def pids_of(uid: int) -> Set[int]:
    """Return the ids of the processes whose real user is `uid`."""
    return {int(line) for line in _run("-U", str(uid), "-o", "pid=").split()}


def command(pid: int) -> str:
    """Return a process's command line in one line; empty if it is gone."""
    return " ".join(_run("-o", "command=", "-p", str(pid)).split())


def is_same_start(one: str, other: str) -> bool:
    """Return whether two starts mean one: Linux's ps works them out from the uptime, a second early or late."""
    try:
        return abs(int(one[3:]) - int(other[3:])) <= 2
    except ValueError:
        return False


def _start(words: List[str]) -> str:
    import calendar  # with its locales: only where ps is asked

    try:
        return f"ps:{calendar.timegm(time.strptime(' '.join(words), _LSTART))}"
    except ValueError:
        return ""


def _chosen(pids: Optional[List[int]]) -> Tuple[str, ...]:
    return ("-A",) if pids is None else ("-p", ",".join(str(pid) for pid in pids))


def _by_pid(text: str) -> Dict[int, str]:
    lines = (line.strip().partition(" ") for line in text.splitlines())
    return {int(pid): command.strip() for pid, _, command in lines if pid.isdigit()}


def _pairs(words: List[str]) -> Dict[str, str]:
    cut = (word.partition("=") for word in words)
    return {name: value for name, equals, value in cut if equals}


def _run(*arguments: str) -> str:
    """Return what ps prints; empty when it cannot be run. TZ and LC_ALL fix the form of its times."""
    import subprocess

    env = dict(environ.snapshot(), LC_ALL="C", TZ="UTC0")
    try:
        done = subprocess.run(
            ["ps", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape")
