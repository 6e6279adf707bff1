"""Jobs whose coordinator is on one of their hosts: keeps this machine's folder of such a job up to date.

The job's real folder is on that host, unless this machine and that host share a job store. Its state is fetched when
a command looks at it; when the job is over, everything in the folder is fetched once, logs included, and from then on
the job is like any other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from distrun import backends
from distrun.errors import DistrunError
from distrun.ssh.failure import LastLines, Where, classify
from distrun.ssh.openssh import OWN_FAILURE, Child
from distrun.ssh.resolve import ALIVE_COUNT, ALIVE_S, GONE, RELAY
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.jobfolder import JobFolder

# Reaches the host of a job's coordinator by the `ssh` program: commands there, and a relay to the control socket.
#
# `ssh HOST` runs a few lines of Python there that connect its standard streams to the socket. An sshd that has too many
# logins at a time drops new connections before it has said a word (MaxStartups, by default some from the tenth on).
# `is_dropped` recognizes that, and `pauses` says how long to wait between attempts.


ANSWER_S = 10.0
"""How long a host may take to answer."""
END_S = 5.0
"""How long the end of the ssh program is awaited."""
RETRY_S = 30.0
"""How long all pauses between attempts take, when a host drops connections."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0
IGNORING_KEYS = 'trap "" INT QUIT TSTP; exec "$@"'
"""Shell text that runs a program to which the terminal's keys mean nothing: they are for us."""


def ssh_argv(login: str, command: str, connect_s: float = ANSWER_S, may_ask: bool = True) -> list[str]:
    """Return how to run a command on a host whose loss is noticed within ALIVE_S * ALIVE_COUNT seconds.

    Args:
        login: what a user types before a command to run it there: `ssh -p 2222 ann@d1`.
        command: for the login shell there.
        connect_s: how long connecting may take, whole seconds.
        may_ask: ssh may ask the user, for a password or about a host key.
    """
    program, *flags, host = shlex.split(login)
    limits = {"ConnectTimeout": connect_s, "ServerAliveInterval": ALIVE_S, "ServerAliveCountMax": ALIVE_COUNT}
    options = [word for name, value in limits.items() for word in ("-o", f"{name}={value:.0f}")]
    quiet = [] if may_ask else ["-o", "BatchMode=yes"]
    return [program, "-T", *options, *quiet, *flags, "--", host, command]


def is_dropped(code: int | None, said: str) -> bool:
    """Return whether a host dropped the connection because it has too many, so that it may take the next one.

    Args:
        code: exit code of the ssh program.
        said: what it wrote to stderr.
    """
    return code == OWN_FAILURE and classify(said, Where("")).is_passing


def pauses() -> Iterator[float]:
    """Give the seconds to wait before each further attempt; in all they are at most RETRY_S.

    They grow, and are random, so that many clients that were dropped together do not come back together.
    """
    import random  # only needed here, and its import takes long

    left_s, longest_s = RETRY_S, FIRST_PAUSE_S
    while left_s > 0:
        pause_s = min(left_s, random.uniform(longest_s / 2, longest_s))
        left_s -= pause_s
        longest_s = min(LONGEST_PAUSE_S, longest_s * 2)
        yield pause_s


def retried(attempt: Callable[[], tuple[int, str]], wait: Callable[[float], object] = time.sleep) -> tuple[int, str]:
    """Return what an attempt comes to that the host did not drop, or, after RETRY_S, the last one.

    Args:
        attempt: runs the ssh program; returns its exit code and what it wrote to stderr.
        wait: waits so many seconds; False: there is to be no other attempt.
    """
    left = pauses()
    while True:
        code, said = attempt()
        pause_s = next(left, None) if is_dropped(code, said) else None
        if pause_s is None or wait(pause_s) is False:
            return code, said


class SshRelay:
    """The `ssh` program, whose standard input and output are a connection to a socket on another host.

    What it writes to stderr goes to ours. Held until `show` is what the caller tells in its own words, or not at all
    because there may be another attempt: that the host dropped the connection, and that nothing listens. If ssh may
    not ask the user, nothing of it is shown.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, login: str, path: str, may_ask: bool = True) -> None:
        command = shlex.join(["python3", "-I", "-c", RELAY, path])
        argv = ["sh", "-c", IGNORING_KEYS, "sh", *ssh_argv(login, command, may_ask=may_ask)]
        self.socket, its = socket.socketpair()
        try:
            self._child = subprocess.Popen(argv, stdin=its.fileno(), stdout=its.fileno(), stderr=subprocess.PIPE)
        except OSError:
            self.socket.close()
            raise
        finally:
            its.close()
        assert self._child.stderr is not None  # asked for above
        self._last_lines = LastLines()
        self._held: list[bytes] | None = []
        self._is_shown = may_ask
        self._reader = threading.Thread(target=self._read, args=(self._child.stderr,), name="ssh-stderr", daemon=True)
        self._reader.start()

    def ended(self, limit_s: float) -> int | None:
        """Wait, at most so long, for its end; return its exit code, None if it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(limit_s)
            self._reader.join(limit_s)  # a master connection that it left behind (ControlPersist) may hold stderr
        return self._child.returncode

    @property
    def said(self) -> str:
        """The last lines that it wrote to stderr."""
        return self._last_lines.text

    def show(self) -> None:
        """Hold nothing of what it says from now on, and show what was held."""
        held, self._held = self._held or [], None
        for line in held if self._is_shown else ():
            os.write(2, line)

    def close(self) -> None:
        """End it."""
        _end(self._child)

    def _read(self, stderr: IO[bytes]) -> None:
        with stderr, contextlib.suppress(OSError):
            for line in stderr:
                self._last_lines.feed(line)
                text = line.decode("utf-8", "replace")
                if self._held is not None and (text.startswith(GONE) or classify(text, Where("")).is_passing):
                    self._held.append(line)
                elif self._is_shown:
                    os.write(2, line)


READ_SIZE = 256 * 1024
HEADER_LIMIT = 4096
REMOVE_S = 60.0
"""How long the removal of a job's folder on a host may take."""
_NAME = re.compile(
    r"(state|outcome)\.json|(events|events\.1|metrics)\.jsonl|coordinator\.log|logs/[A-Za-z0-9][A-Za-z0-9._-]*"
)
ASK = """
import json, os, select, socket, sys, time
jobs, asked = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
tail, until = int(sys.argv[3]), time.monotonic() + float(sys.argv[4])
out = sys.stdout.buffer
def tell(job, name, size, age_s=0.0):
    out.write(json.dumps({"job": job, "name": name, "size": size, "age_s": age_s}).encode() + bytes([10]))
def read(job, path, name, most=0):
    try:
        file = open(path, "rb")
    except OSError:
        return
    with file:
        found = os.fstat(file.fileno())
        size = min(found.st_size, most or found.st_size)
        file.seek(found.st_size - size)
        tell(job, name, size, max(0.0, time.time() - found.st_mtime))
        while size:
            data = file.read(min(size, 65536))
            if not data:
                sys.exit("%s became shorter" % name)
            out.write(data)
            size -= len(data)
peers = {}
for job, folder, path in jobs:
    names = ["state.json"] if folder else []
    if not path and os.path.exists(folder + "/outcome.json"):
        names += ["events.1.jsonl", "events.jsonl", "metrics.jsonl", "coordinator.log"]
        names += ["logs/" + name for name in os.listdir(folder + "/logs")] + ["outcome.json"]
    if tail and folder:
        read(job, folder + "/events.jsonl", "events.jsonl", tail)
    for name in names:
        read(job, folder + "/" + name, name)
    if path:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(1.0)
        try:
            peer.connect(path)
            peer.sendall(asked)
            peers[peer] = job
        except OSError:
            tell(job, "", 0)
out.flush()
while peers and time.monotonic() < until:
    for peer in select.select(list(peers), [], [], max(0.0, until - time.monotonic()))[0]:
        try:
            data = peer.recv(65536)
        except OSError:
            data = b""
        tell(peers[peer], "frames" if data else "", len(data))
        out.write(data)
        out.flush()
        if not data:
            del peers[peer]
"""
"""Runs on a coordinator's host. Writes files of jobs, and frames of their coordinators for some time, each after a line
of JSON; an empty name: no more frames. Without the path of a socket: all files of a job that is over."""


class NotAsked(DistrunError):
    """The host of a job's coordinator cannot be asked."""

    exit_code = facts.EXIT_HOST_LOST


class CannotRun(NotAsked):
    """Not even the program that would ask it, ssh, can be run here."""


class NotRemoved(DistrunError):
    """The folder of a job on its coordinator's host is still there."""


def is_elsewhere(folder: JobFolder) -> bool:
    """Return whether what is known of a job has to be fetched from one of its hosts."""
    where = folder.control()
    return where is not None and bool(where.get("folder")) and not folder.is_finished


def refreshed(folder: JobFolder, may_ask: bool = True) -> str:
    """Fetch what is new of a job, if it has to be fetched; return a warning if that fails.

    If its host drops the connection because it has too many, this is tried again for some time. `may_ask`: ssh may ask
    the user for a password.
    """
    if not is_elsewhere(folder):
        return ""
    where = folder.control()
    assert where is not None  # of `is_elsewhere`
    try:
        code, said = retried(lambda: _fetch(folder, where, may_ask))
    except NotAsked as err:
        return f"{err}; {err.hint}"
    why = said.splitlines()[-1] if said else f"ssh ended with code {code}"
    text = f"job {folder.id}: its coordinator's host {where['host']} cannot be asked: {why}"
    return f"{text}; what is known here is older; try: {where['login']} true" if code else ""


def _fetch(folder: JobFolder, where: Mapping[str, Any], may_ask: bool) -> tuple[int, str]:
    """Save the files that ASK writes, at least one; return its exit code, or that of ssh, and what it said."""
    saved: list[str] = []

    def take(job: str, name: str, age_s: float, pieces: Iterable[bytes]) -> bool:
        saved.append(save(folder, name, age_s, pieces))
        return True

    try:
        code, said = ask(where["login"], [[folder.id, where["folder"], ""]], take, may_ask=may_ask)
    except CannotRun as err:
        raise NotAsked(f"job {folder.id}: {err}", err.hint) from None
    except OSError as err:
        raise NotAsked(
            f"job {folder.id}: what its coordinator's host sent cannot be written to {folder.path}: {err.strerror}",
            f"is the disk full, or over quota? see: df {folder.path}",
        ) from err
    return (code, said) if saved or code else (1, said or "it has no state of this job")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End ssh so that it can give the terminal back as it was."""
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def ask(
    login: str,
    jobs: Sequence[Sequence[str]],
    take: Callable[[str, str, float, Iterator[bytes]], bool],
    *,
    may_ask: bool,
    until: float = math.inf,
    asked: bytes = b"",
    tail: int = 0,
    limit_s: float = 0.0,
) -> tuple[int, str]:
    """Ask a host about jobs, and hand on what it sends; return the exit code of the ssh program, and what it said.

    Args:
        login: as for `ssh_argv`.
        jobs: of each its id, folder (or ""), and path of its control socket, or "" for all files.
        take: takes job, name, age in seconds and content; returns whether more is wanted. Else the exit code is 0.
        may_ask: ssh may ask the user. Else a Ctrl-C is not for it: it has a session of its own, without a terminal.
        until: when it is given up, monotonic time; then files are limited to what the job store takes, too.
        asked: what is sent to each control socket.
        tail: so many bytes from the end of events.jsonl are wanted.
        limit_s: how long answers of control sockets are waited for.

    Raises:
        NotAsked: ssh cannot be run, or what comes is nothing that ASK writes.
    """
    words = ["python3", "-I", "-c", ASK, json.dumps(jobs), asked.hex(), str(tail), f"{limit_s:.1f}"]
    left_s = until - time.monotonic()
    argv = ssh_argv(login, shlex.join(words), min(ANSWER_S, max(1.0, left_s)), may_ask)
    with tempfile.TemporaryFile() as said:  # a master connection that is left behind would hold a pipe
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=not may_ask
            )
        except OSError as err:
            raise CannotRun(f"cannot run {argv[0]}: {err.strerror}") from None
        kill = functools.partial(_end, child) if may_ask else Child(child).signal
        timer = threading.Timer(max(0.0, left_s), kill)
        timer.daemon = True
        with child:
            assert child.stdout is not None
            try:
                if until < math.inf:
                    timer.start()
                for each in answers(child.stdout, math.inf if until == math.inf else stored.SIZE_LIMIT):
                    if not take(*each):
                        return 0, ""
                code = child.wait()
            finally:
                timer.cancel()
                kill()
        said.seek(0)
        return code, said.read().decode("utf-8", "replace").strip()


def remove(folder: JobFolder, host: str, there: str) -> None:
    """Remove the folder of a job that is over on the host that had its coordinator. No such folder is no error.

    Args:
        folder: the job's folder here.
        host: that host, as the job calls it.
        there: the job's folder there.

    Raises:
        NotAsked: that host cannot be asked.
        NotRemoved: the folder is still there.
        JobStoreError: the job's plan, which says how the host is reached, cannot be read.
    """
    from distrun.fleet import Fleet  # nothing else here needs agents

    plan = folder.plan()
    try:
        known = plan.host_of(host)
    except KeyError:
        raise NotAsked(f"{host} is no host of job {folder.id}") from None
    with Fleet(backends.load(plan.backend), [known]) as fleet:
        answer = fleet.ask("remove", {"job": folder.id, "folder": there}, REMOVE_S)[host]
    if isinstance(answer, Problem):
        is_refused = host in fleet.agents.hellos and answer.kind != "timeout"
        raise (NotRemoved if is_refused else NotAsked)(answer.text)


def answers(stream: IO[bytes], most: float) -> Iterator[tuple[str, str, float, Iterator[bytes]]]:
    """Give the job of what ASK writes, with name, age in seconds, and content. `most`: bytes of one.

    Raises:
        NotAsked: it is nothing that ASK writes.
    """
    while header := stream.readline(HEADER_LIMIT):
        try:
            about = json.loads(header)
            job, name, size, age_s = str(about["job"]), str(about["name"]), int(about["size"]), float(about["age_s"])
        except (ValueError, KeyError, TypeError):
            raise NotAsked(f"the host of the coordinator sent what is no file: {header[:80]!r}") from None
        if not 0 <= size <= most:
            raise NotAsked(f"the host of the coordinator sent a file of {size} bytes: {name!r}")
        yield job, name, age_s, _content(stream, name, size)


def _content(stream: IO[bytes], name: str, size: int) -> Iterator[bytes]:
    while size:
        data = stream.read(min(size, READ_SIZE))
        if not data:
            raise NotAsked(f"the connection ended within {name}, {size} bytes before its end")
        size -= len(data)
        yield data


def save(folder: JobFolder, name: str, age_s: float, pieces: Iterable[bytes]) -> str:
    """Replace a file of the folder as a whole. It gets its age, too: by that of the state, a job is `unknown`.

    Raises:
        NotAsked: no job has such a file.
        OSError: it cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise NotAsked(f"the host of the coordinator sent a file that no job has: {name!r}")
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
