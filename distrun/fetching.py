"""Copies files from the folders of a job's hosts to this machine: `distrun fetch`.

The agent of each host lists the files that the patterns name (`agent/query.py`). If several hosts share a folder, one
of them lists its files. Then each host sends its files over a connection of its own, several hosts at a time. It does
not send files that are here already, with the same size and time.

Hosts are not trusted. A file is written only if its name fits a pattern. It is a regular file in a folder that is
reached without following links, and gets its name when it is whole.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrun import backends
from distrun.errors import SyncError, UsageError
from distrun.fleet import Fleet
from distrun.fleet.questions import HostAnswer
from distrun.formats import number_of
from distrun.formats import size as size_text
from distrun.sync.rules import FETCHED
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.contract.facts import WORKER, duration, listed, printable
from distrun_runtime.contract.folder import ON, PARTIAL
from distrun_runtime.coordinator.failures import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun_runtime.contract.plan import Host, Plan
    from distrun_runtime.coordinator.jobfolder import JobFolder

WINDOW = 8
"""Hosts that send files at a time."""
FIND_S = 60.0
"""How long an agent may look for files; it gives up a little earlier."""
STALL_S = 60.0
"""A host that sends nothing for so long has failed."""
REPORT_S = 5.0
"""Between two lines of progress."""
SHOWN = 3
"""Files that one message names."""
LATEST_NS = 2**62
"""The latest time that a file can get, in ns since 1970."""
FRESH = ".distrun-fetch-"
"""Begins the name of a file until it is whole."""

Say = Callable[[str, str], None]
"""Takes a message and its level, "info" or "warning"."""


def fetch(job: JobFolder, patterns: Sequence[str], to: str, source: str, say: Say) -> Sequence[HostFetch]:
    """Copy files to the folder `to`: as `to/HOST/PATH`, or as `to/PATH` if all hosts have one folder. Blocks.

    Args:
        job: the folder of the job.
        patterns: as `options.parse_fetched` returns them.
        to: a folder here, which is made; empty: one that is called as the job, which later jobs are not sent.
        source: the folder on each host; empty: the one in which tasks start.
        say: takes messages.

    Returns:
        What came from each host.

    Raises:
        SyncError: files of a host did not come, those of the other hosts have; or no host has such files.
        UsageError: the hosts of this job cannot be asked.
    """
    if job.is_unplanned:
        raise UsageError(f"job {job.id} has no hosts yet", f"distrun status {job.id} says what it waits for")
    backend, hosts, folders = _places(job.plan(), source, say)
    found = _find(backend, hosts, folders, patterns, say)
    owners = [each for each in found if not each.shared and not each.problem]
    is_one_folder = len(found) == len([each for each in found if each.shared]) + 1
    for each in owners:
        each.aim((to or job.id) if is_one_folder else os.path.join(to or job.id, each.name))
    for pattern in patterns:
        if owners and not any(_fits(name, pattern) for each in owners for name in each.listed):
            say(f"{pattern!r}: there are no such files in {', '.join(sorted(set(folders.values())))}", "warning")
    if not to and any(each.wanted for each in owners):
        with contextlib.suppress(OSError):  # the copy says what is wrong with the folder
            os.makedirs(job.id, exist_ok=True)
            Path(job.id, FETCHED).touch()
    _run(job.id, [each for each in owners if each.wanted], say)
    failed = [each for each in found if each.problem]
    for each in found:
        if each.shared or (each.listed and not each.problem):
            say(each.line(), "info")
    if failed:
        lines = [f"files of {len(failed)} of {number_of(len(found), 'host')} did not come"]
        for each in failed:
            lines += [each.line(), *(f"    fix: {printable(line)}" for line in each.fix.splitlines())]
        raise SyncError("\n".join(lines))
    if not any(each.listed for each in owners):
        raise SyncError("there was nothing to fetch", "PATH is seen from the folder of the tasks; --from names another")
    return found


def _places(plan: Plan, source: str, say: Say) -> tuple[Backend, Sequence[Host], Mapping[str, str]]:
    """Return how the hosts that have the job's files are reached, these hosts, and the folder on each, by host.

    The hosts of an engine cannot be asked. If their folder is on this machine too, it is taken to be shared with them.
    """
    folders: dict[str, str] = {}
    for task in sorted(plan.tasks, key=lambda task: task.role != WORKER):
        folders.setdefault(task.host, source or task.cwd)
    backend = backends.load(plan.backend)
    if not backend.is_engine:
        return backend, [host for host in plan.hosts if host.name in folders], folders
    path = os.path.join(os.path.expanduser("~"), os.path.expanduser(next(iter(folders.values()))))
    if not os.path.isdir(path):
        raise UsageError(
            f"the hosts of a {plan.backend} job cannot be asked for files, and there is no {path} on this machine",
            "let the job write to a file system that this machine shares, and name it with --from DIR",
        )
    say(f"taken from {path} on this machine, because the hosts of a {plan.backend} job cannot be asked", "info")
    here = backends.load("local")
    name = next(iter(here.inventory(None).names))
    return here, [plan.hosts[0]._replace(name=name)], {name: path}


def _find(
    backend: Backend, hosts: Sequence[Host], folders: Mapping[str, str], patterns: Sequence[str], say: Say
) -> Sequence[HostFetch]:
    """Ask all hosts for the files that they have, and which of them share a folder."""
    mark = PARTIAL + secrets.token_hex(8) + ON

    def args(host: str) -> Mapping[str, object]:
        return {"folder": folders[host], "patterns": list(patterns), "mark": mark, "host": host}

    with Fleet(backend, hosts) as fleet:
        answers = fleet.ask("find", args, FIND_S)
    found = [HostFetch(backend, host) for host in hosts]
    for each in found:
        left_out = each.hear(answers[each.name], folders, patterns)
        if left_out:
            say(f"{each.name}: not fetched: {_some(left_out)}", "warning")
    return found


def _run(job: str, hosts: Sequence[HostFetch], say: Say) -> None:
    """Have the hosts send their files, and say how far they are. At Ctrl-C, end them and wait for their ends."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(WINDOW, "fetch") as pool:
        for each in hosts:
            stack.callback(each.close)
        try:
            futures = [pool.submit(each.copy, job) for each in hosts]
            while wait(futures, REPORT_S).not_done:
                arrived, size = sum(each.arrived for each in hosts), sum(each.size for each in hosts)
                say(f"fetch: {size_text(arrived)} of {size_text(size)} have come", "info")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for each in hosts:
                each.cut()
            raise
    for future in futures:
        future.result()


class _FileRow(NamedTuple):
    """A file on a host."""

    size: int
    time_ns: int
    is_executable: bool


class HostFetch:
    """The files of one host: what it lists, and what came."""

    def __init__(self, backend: Backend, host: Host) -> None:
        self.name = host.name
        """The host."""
        self.target = ""
        """The folder here."""
        self.listed: Mapping[str, _FileRow] = {}
        """The files that patterns name, by path."""
        self.wanted: set[str] = set()
        """Those that have not come."""
        self.size = 0
        """Bytes of the files that are to come."""
        self.shared = ""
        """The host that has the same folder, from which the files come; empty: this one."""
        self.problem = ""
        """Why files did not come; empty: all have."""
        self.fix = ""
        self.files = 0
        """Files that came."""
        self.arrived = 0
        """Bytes that came."""
        self.seconds = 0.0
        self._backend = backend
        self._host = host
        self._path = ""
        self._fleet: Fleet | None = None
        self._is_cut = False

    def line(self) -> str:
        """Return how it went, as one line."""
        if self.problem:
            return f"{self.name}: {printable(self.problem)}"
        if self.shared:
            return f"{self.name}: the same folder as on {self.shared}"
        present = len(self.listed) - self.files
        here = f", {present} were here already" if present else ""
        files = f"{number_of(self.files, 'file')}{here}"
        return f"{self.name}: {files}, {size_text(self.arrived)} in {self.seconds:.1f} s, in {self.target}"

    def hear(self, answer: HostAnswer | Problem, hosts: Mapping[str, object], patterns: Sequence[str]) -> Sequence[str]:
        """Take in what its agent says of its folder; return the files that it leaves out, and why."""
        if isinstance(answer, Problem):
            self.problem, self.fix = answer.text, answer.fix
            return ()
        try:
            holder = str(answer.value["holder"])
            self.shared = holder if holder != self.name and holder in hosts else ""
            self._path = str(answer.value["folder"])
            self.listed = {
                _checked(name, patterns): _FileRow(int(size), min(max(int(time_ns), 0), LATEST_NS), bool(executable))
                for name, size, time_ns, executable in answer.value["files"]
            }
            return [f"{name} ({why})" for name, why in answer.value["left_out"]]
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            self.problem = f"what it says of its files is not understood: {err}"
            return ()

    def aim(self, target: str) -> None:
        """Set the folder here, and look which files are there already."""
        self.target = target
        for name, row in self.listed.items():
            with contextlib.suppress(OSError):
                info = os.lstat(os.path.join(target, name))
                if stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (row.size, row.time_ns):
                    continue
            self.wanted.add(name)
            self.size += row.size

    def cut(self) -> None:
        """End the copy soon; any thread."""
        self._is_cut = True
        if self._fleet is not None:
            self._fleet.cut()

    def close(self) -> None:
        """Wait for the end of the connection. May end what connections to other hosts need."""
        if self._fleet is not None:
            self._fleet.close()

    def copy(self, job: str) -> None:
        """Copy what is not here yet; any thread. Blocks."""
        begun = time.monotonic()
        try:
            os.makedirs(self.target, exist_ok=True)
            top = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as err:
            self.problem = f"{self.target} cannot be made: {err.strerror}"
            return
        try:
            self._fleet = Fleet(self._backend, [self._host])
            files = [[glob.escape(name), 0] for name in sorted(self.wanted)]
            self._fleet.begin("jobs", {"jobs": [[job, self._path, ""]], "files": files, "asked": ""})
            self._take(self._fleet, top)
            self._fleet.cut()
        finally:
            os.close(top)
        self.seconds = time.monotonic() - begun

    def _take(self, fleet: Fleet, top: int) -> None:
        """Write what comes below the folder with the descriptor `top`, until all has come."""
        failed: dict[str, str] = {}
        name: str | None = None
        arriving: _ArrivingFile | None = None
        with contextlib.ExitStack() as stack:
            found = fleet.next(STALL_S)
            while isinstance(found, AnswerPiece) and not self._is_cut:
                if found.name != name:
                    stack.close()  # a file that is not whole is removed
                    name, arriving = found.name, None
                if name not in self.wanted:
                    self.problem = f"it sent {name!r}, which was not asked for"
                    return
                try:
                    if name not in failed:
                        arriving = arriving or stack.enter_context(_ArrivingFile(top, name, self.listed[name]))
                        arriving.file.write(found.data)
                        self.arrived += len(found.data)
                        if found.left <= 0:
                            arriving.finish()
                            self.wanted.remove(name)
                            self.files += 1
                except OSError as err:
                    failed[name] = f"{name} cannot be written: {err.strerror or err}"
                found = fleet.next(STALL_S)
        if isinstance(found, Problem):
            self.problem, self.fix = found.text, found.fix
        elif found is None:
            self.problem = f"nothing has come for {duration(STALL_S)}"
        elif self.wanted:
            self.problem = _some([failed.get(name, f"{name} did not come whole") for name in sorted(self.wanted)])


class _ArrivingFile(contextlib.AbstractContextManager["_ArrivingFile"]):
    """A file while it arrives, below the folder with the descriptor `top`. It is removed if it is not finished."""

    def __init__(self, top: int, name: str, row: _FileRow) -> None:
        *parents, self._name = name.split("/")
        self._row = row
        self._fresh = FRESH + secrets.token_hex(8)
        self._folder = os.dup(top)
        try:
            for part in parents:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=self._folder)
                # A link is refused: it may lead out of `top`.
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder)
                os.close(self._folder)
                self._folder = below
            mode, flags = 0o777 if row.is_executable else 0o666, os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self.file = os.fdopen(os.open(self._fresh, flags, mode, dir_fd=self._folder), "wb")
        except BaseException:
            os.close(self._folder)
            raise

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._fresh, dir_fd=self._folder)
        os.close(self._folder)

    def finish(self) -> None:
        """Give it its time, and its name."""
        self.file.close()
        os.utime(self._fresh, ns=(self._row.time_ns,) * 2, dir_fd=self._folder, follow_symlinks=False)
        os.replace(self._fresh, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _checked(name: str, patterns: Sequence[str]) -> str:
    """Return the name of a file that a host lists. No side effects.

    Raises:
        AttributeError, TypeError, ValueError: it is no name that a pattern can name.
    """
    os.fsencode(name)
    unsafe = not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name
    if unsafe or not any(_fits(name, pattern) for pattern in patterns):
        raise ValueError(f"{name!r} was not asked for")
    return name


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern names a file, or a folder that it is in. No side effects."""

    def fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
        if not wanted or not parts:
            return not wanted
        if wanted[0] == "**":
            return fits(parts, wanted[1:]) or fits(parts[1:], wanted)
        return fnmatchcase(parts[0], wanted[0]) and fits(parts[1:], wanted[1:])

    return fits(name.split("/"), [part for part in pattern.split("/") if part not in ("", ".")])


def _some(words: Sequence[str]) -> str:
    return listed(list(map(printable, words)), SHOWN)
