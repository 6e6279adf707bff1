"""Facts about processes, and signals that reach the right one.

Two ways to everything: Linux (`/proc`, pidfd, subreaper) and what every POSIX system has (`ps`, process groups).
DISTRUN_PORTABLE=1 forces the second. The portable way is weaker: a start time has a resolution of one second, a
process that left its group and session and lost its parent is found only where `ps` shows environments, and
between looking and signalling a process id could be given to another.

Standard library only, Python 3.8.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from distrun_runtime.contract import environ

TASKS_SIGNALS = ("USR1", "USR2")
"""Signals that mean nothing to distrun: they are for tasks, if the user says so (`Plan.forward_signals`)."""

SAME_WARNING_S = 30.0
"""A signal that comes from several sources within this time is one warning; one that a source repeats is another."""

_HAS_PROCFS = sys.platform.startswith("linux") and os.path.exists("/proc/self/stat")
_DEAD = ("Z", "X")
_OF_PS = "ps:"
"""Begins a start that ps has told."""
_LSTART = "%a %b %d %H:%M:%S %Y"
_PS_S = 10.0
_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Identity(NamedTuple):
    """One process for good: a process id is given again, the pair of id and start is not."""

    pid: int
    start: str
    """Opaque. `proc:BOOT:TICKS` or `ps:SECONDS`; empty where nothing could be learnt."""


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    start: str
    """As in `Identity`."""
    state: str
    """One letter, as ps shows it: R, S, D, T, Z ..."""

    @property
    def identity(self) -> Identity:
        """The process for good."""
        return Identity(self.pid, self.start)

    @property
    def is_dead(self) -> bool:
        """Over, only waiting to be reaped."""
        return self.state in _DEAD


def is_new_warning(last: Dict[str, Tuple[str, float]], name: str, source: str, now: float) -> bool:
    """Return whether a signal is to be given to tasks: no other source brought it just before. No clock.

    Queue systems signal one host of a job, or all at nearly the same time. `last`: what source brought each signal that
    was given last, and when; kept up to date.
    """
    before, at = last.get(name, (source, now))
    if before != source and now - at < SAME_WARNING_S:
        return False
    last[name] = source, now
    return True


def is_portable() -> bool:
    """Return whether only the portable ways are used: no /proc here, or DISTRUN_PORTABLE=1."""
    return bool(environ.read("DISTRUN_PORTABLE")) or not _HAS_PROCFS


def has_pidfd() -> bool:
    """Return whether a signal can be sent to a process that is held by a descriptor (Linux 5.3, Python 3.9)."""
    if is_portable() or not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=None)
def own_pid() -> int:
    """Return what `os.getpid` does, without a system call each time."""
    os.register_at_fork(after_in_child=own_pid.cache_clear)
    return os.getpid()


def become_subreaper() -> bool:
    """Make orphans below this process its children, instead of init's; return whether that worked (Linux 3.4)."""
    if is_portable():
        return False
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def identity(pid: int) -> Identity:
    """Return the process that has this id now.

    Raises:
        ProcessLookupError: there is none.
    """
    for process in table([pid]):
        return process.identity
    raise ProcessLookupError(f"no process has the id {pid}")


def pipe_identity(descriptor: int) -> str:
    """Return what tells a pipe from any other file, for DISTRUN_PUBLISH_PIPE. Raises OSError."""
    info = os.fstat(descriptor)
    return f"{info.st_dev}:{info.st_ino}"


def is_alive(who: Identity) -> bool:
    """Return whether that very process still runs. One that waits to be reaped is dead."""
    # Its row is read in the way in which its start was learnt.
    rows = _table_of_ps([who.pid]) if who.start.startswith(_OF_PS) else [_row_of_proc(who.pid)]
    return any(row is not None and _is_same_start(row.start, who.start) and not row.is_dead for row in rows)


def is_among(who: Identity, rows: Mapping[int, Process]) -> bool:
    """Return whether that very process is one of `rows` (a table by pid), and not dead. Nothing is looked at again."""
    row = rows.get(who.pid)
    if row is None:
        return False
    if row.start.startswith(_OF_PS) != who.start.startswith(_OF_PS):  # learnt in another way: they cannot be compared
        return is_alive(who)
    return _is_same_start(row.start, who.start) and not row.is_dead


def table(pids: Optional[Iterable[int]] = None) -> List[Process]:
    """Return the process table, or its rows for `pids` (those that exist), dead ones included."""
    if is_portable():
        return _table_of_ps(None if pids is None else list(pids))
    rows = (_row_of_proc(pid) for pid in (ids() if pids is None else pids))
    return [row for row in rows if row is not None]


def ids() -> List[int]:
    """Return the ids of all processes, dead ones included. Only with /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def has_children() -> bool:
    """Return whether this process has children, dead ones included. Only on Linux.

    If a subreaper has none, there is no process below it: an orphan would be its child.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError as err:
        return err.errno != errno.ECHILD  # after another error it cannot be known
    return True


def descendants(pids: Iterable[int], rows: Optional[List[Process]] = None) -> List[Process]:
    """Return every process below `pids` (they themselves excluded) in `rows`, or in the table as it is now."""
    children: Dict[int, List[Process]] = {}
    for row in table() if rows is None else rows:
        children.setdefault(row.ppid, []).append(row)
    found: List[Process] = []
    seen: Set[int] = set(pids)
    waiting = list(seen)
    while waiting:
        for row in children.get(waiting.pop(), []):
            if row.pid not in seen:
                seen.add(row.pid)
                found.append(row)
                waiting.append(row.pid)
    return found


def ancestors(pid: int, rows: Optional[List[Process]] = None) -> Set[int]:
    """Return the ids of the processes above `pid`: its parent, that one's parent, up to the first."""
    parents = {row.pid: row.ppid for row in (table() if rows is None else rows)}
    above: Set[int] = set()
    while pid in parents and parents[pid] not in above and parents[pid] > 0:
        pid = parents[pid]
        above.add(pid)
    return above


def environ_of(pid: int) -> Dict[str, str]:
    """Return the environment that a process was started with; empty where it may not be read.

    In portable mode it comes from ps: values end at the first blank, and some systems show none.
    """
    if is_portable():
        return _environs_of_ps([pid]).get(pid, {})
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    return _pairs(entry.decode("utf-8", "surrogateescape") for entry in entries)


def environs_of(pids: List[int]) -> Dict[int, Dict[str, str]]:
    """Return what `environ_of` does for several processes, by their ids. In portable mode ps is run only twice."""
    return _environs_of_ps(pids) if is_portable() else {pid: environ_of(pid) for pid in pids}


def marks(job: str, nonce: str, host: Optional[str] = None, place: Optional[str] = None) -> Dict[str, str]:
    """Return the variables by which processes of a job are found (those of one host, or of one place, if given).

    Ids are unique in a store only; with the nonce they are everywhere. A job of an older version has no nonce.
    """
    found = {"DISTRUN_JOB_ID": job, "DISTRUN_JOB_NONCE": nonce}
    if host is not None:
        found["DISTRUN_HOST"] = host
    if place is not None:
        found["DISTRUN_PLACE"] = place
    return found


def has_marks(env: Mapping[str, str], marks: Mapping[str, str]) -> bool:
    """Return whether an environment holds every name and value of `marks`; an empty value means empty or absent."""
    return all(env.get(name, "") == value for name, value in marks.items())


def marked(marks: Mapping[str, str], rows: Optional[List[Process]] = None) -> List[Process]:
    """Return our living processes of `rows` (or of all) whose environment has all `marks` (see `has_marks`).

    Only the calling user's: root can read everybody's environment, and anybody can write anything into his own.
    """
    living = [row for row in (table() if rows is None else rows) if not row.is_dead]
    environs = environs_of([row.pid for row in living])
    return mine([row for row in living if has_marks(environs.get(row.pid, {}), marks)])


def mine(rows: Iterable[Process]) -> List[Process]:
    """Return the processes of `rows` that the calling user started (the real user id), root's own ones for root."""
    if is_portable():
        pids = {int(line) for line in _ps("-U", str(os.geteuid()), "-o", "pid=").split()}
        return [row for row in rows if row.pid in pids]
    return [row for row in rows if _owner(row.pid) == os.geteuid()]


def command_of(pid: int, limit: int = 200) -> str:
    """Return a process's command line for people, at most `limit` characters; empty if it is gone."""
    if is_portable():
        return " ".join(_ps("-o", "command=", "-p", str(pid)).split())[:limit]
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ")
        if not words.strip():
            with open(f"/proc/{pid}/comm", "rb") as file:
                words = b"[" + file.read().strip() + b"]"
    except OSError:
        return ""
    return words.decode("utf-8", "replace").strip()[:limit]


def do_nothing(number: int, frame: object) -> None:
    """Handle a signal that must not end this process. SIG_IGN would reach every task through exec; this does not."""
    del number, frame


def outlive_tasks_signals(handler: Callable[[int, object], None] = do_nothing) -> List[int]:
    """Keep the signals that are for tasks from ending this process, and return those that `handler` gets from now on.

    If another part of the program has set a handler, or ignores the signal, that stays.
    """
    ours: List[int] = []
    for name in TASKS_SIGNALS:
        number = signal.Signals["SIG" + name]
        if signal.getsignal(number) in (signal.SIG_DFL, do_nothing):
            signal.signal(number, handler)
            ours.append(number)
    return ours


def send_signal(who: Identity, number: int) -> bool:
    """Send a signal to that very process; return False if it is gone.

    Raises:
        PermissionError: it belongs to another user now (a set-user-id program).
    """
    if not has_pidfd():
        if not is_alive(who):
            return False
        try:
            os.kill(who.pid, number)
        except ProcessLookupError:
            return False
        return True
    try:
        held = os.pidfd_open(who.pid)
    except OSError:
        return False
    try:
        # Looked at after it is held: from here on the descriptor cannot come to mean another process.
        if not is_alive(who):
            return False
        signal.pidfd_send_signal(held, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(held)
    return True


@functools.lru_cache(maxsize=None)
def boot_id() -> str:
    """Return what this boot of this machine is called; empty where the system does not say (it is not Linux)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _row_of_proc(pid: int) -> Optional[Process]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The command may hold blanks and brackets: the last bracket ends it (proc(5), /proc/pid/stat).
    fields = text[text.rindex(b")") + 2 :].split()
    start = f"proc:{boot_id()[:8]}:{int(fields[19])}"
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), start, fields[0].decode("ascii"))


def _owner(pid: int) -> Optional[int]:
    # Not the owner of /proc/PID: that is root for whatever may not be dumped, an ssh-agent for instance.
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            words = next((line.split() for line in file if line.startswith(b"Uid:")), [])
    except OSError:
        return None
    return int(words[1]) if len(words) > 1 else None


def _pairs(entries: Iterable[str]) -> Dict[str, str]:
    cut = (entry.partition("=") for entry in entries)
    return {name: value for name, equals, value in cut if equals}


def why(err: OSError) -> str:
    """Return why the system refused something; of too many open files also the limit, and what raises it."""
    if err.errno != errno.EMFILE:
        return err.strerror or str(err)
    import resource  # not needed by most processes

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "" if hard == resource.RLIM_INFINITY else f"; the system's own limit is {hard}"
    return f"too many open files: a process may have {soft} here (raise it before: ulimit -n 4096{more})"


def allow_open_files(wanted: int) -> int:
    """Raise this process's soft limit of open files to `wanted`, or as near as the hard limit allows.

    Most systems have a soft limit of 1024, which is meant for programs that call select(2), and a hard limit that is
    much higher. Processes that are started later inherit it. Return the soft limit that holds now.
    """
    import resource  # not needed by most processes

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else wanted
    reached = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    except (OSError, ValueError):  # systems with a limit of their own below the hard one
        return soft
    return reached


def user_name() -> str:
    """Return the name of this process's user; empty: it has none, as in some containers."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


# What the `ps` program tells about processes: the portable way.


def _table_of_ps(pids: Optional[List[int]]) -> List[Process]:
    """Return the process table, or its rows for `pids`, without the `ps` that was run for it."""
    if pids is not None and not pids:
        return []
    found: List[Process] = []
    which = ("-A",) if pids is None else ("-p", ",".join(map(str, pids)))
    for line in _ps(*which, "-o", "pid=,ppid=,pgid=,stat=,lstart=,comm=").splitlines():
        words = line.split()
        if len(words) < 9 or (int(words[1]) == os.getpid() and os.path.basename(words[-1]) == "ps"):
            continue
        pid = int(words[0])
        try:
            sid = os.getsid(pid)  # ps has no form of the session id that all systems share
        except OSError:
            sid = 0
        found.append(Process(pid, int(words[1]), int(words[2]), sid, _start_of_ps(words[4:9]), words[3][:1]))
    return found


def _environs_of_ps(pids: List[int]) -> Dict[int, Dict[str, str]]:
    """Return environments as ps shows them: what `e` adds to the command line (Linux, macOS, BSD)."""
    which = ("-p", ",".join(map(str, pids)))
    plain = _by_pid(_ps(*which, "-ww", "-o", "pid=,command=")) if pids else {}
    full = _by_pid(_ps("eww", *which, "-o", "pid=,command=")) if pids else {}
    # Cut the command line off, so that a mark among its arguments is none.
    return {
        pid: _pairs(full[pid][len(text) :].split()) for pid, text in plain.items() if full.get(pid, "").startswith(text)
    }


def _is_same_start(one: str, other: str) -> bool:
    """Return whether two starts mean one: Linux's ps works them out from the uptime, a second early or late."""
    if not (one.startswith(_OF_PS) and other.startswith(_OF_PS)):
        return one == other
    try:
        return abs(int(one[len(_OF_PS) :]) - int(other[len(_OF_PS) :])) <= 2
    except ValueError:
        return False


def _start_of_ps(words: List[str]) -> str:
    import calendar  # with its locales: only where ps is asked

    try:
        return f"{_OF_PS}{calendar.timegm(time.strptime(' '.join(words), _LSTART))}"
    except ValueError:
        return ""


def _by_pid(text: str) -> Dict[int, str]:
    lines = (line.strip().partition(" ") for line in text.splitlines())
    return {int(pid): command.strip() for pid, _, command in lines if pid.isdigit()}


def _ps(*arguments: str) -> str:
    """Return what ps prints; empty when it cannot be run. TZ and LC_ALL fix the form of its times."""
    import subprocess

    env = dict(environ.snapshot(), LC_ALL="C", TZ="UTC0")
    try:
        done = subprocess.run(
            ["ps", *arguments], stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_PS_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape")
