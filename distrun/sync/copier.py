"""The copy of one folder to all hosts: in parallel, each distinct host once, with progress.

Hosts that share the folder are noticed (`receiver`): one of them gets the files.

A host that fails ends the copy: no other host is begun, and those in work get a few seconds, so that their failures
are reported too. What the hosts had before stays usable, because rsync puts files into place when all have arrived.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from distrun.errors import DistrunError, SyncError
from distrun.formats import number_of
from distrun.formats import size as size_text
from distrun.ssh.ask import Abort
from distrun.ssh.failure import BUSY, SshFailure
from distrun.sync import remote_shell, rsync
from distrun.sync.receiver import NOTE, SAME, SHARED, UNFIT
from distrun.sync.remote_shell import RemoteShell, Shells
from distrun.sync.rsync import Rate, RsyncProgress, RsyncResult, Transfer
from distrun.sync.rules import CopyRules, Extra, check_folder, extra_filters, filters
from distrun.sync.tree import Tree, chosen
from distrun_runtime.contract import environ
from distrun_runtime.contract.control import CopyProgress
from distrun_runtime.contract.folder import ON, PARTIAL, SOURCE, STALE_S
from distrun_runtime.contract.folder import identity as folder_identity
from distrun_runtime.coordinator.messages import AllPrepared, PrepareFailed

if TYPE_CHECKING:
    from distrun.ssh.ask import Asker
    from distrun.ssh.resolve import Target
    from distrun_runtime.coordinator.channel import Put

WINDOW = 8
"""Hosts that are copied to at a time."""
STALL_S = 60.0
"""rsync ends when nothing moves for so long."""
ANSWER_S = 60.0
"""How long a host may take from ssh's start to the first message of `receiver.py`."""
OTHERS_S = 5.0
"""How long the other hosts go on after one has failed."""
CANCEL_S = 5.0
AGAIN_S = (0.5, 1.0, 2.0, 4.0)
"""Waits, about, before ssh is tried again if a host (or its jump host) has too many connections."""
RACES = 5
"""How often rsync is run again because another copy into the same folder ran at the same time."""
REPORT_S = 5.0
"""Between two lines of progress."""
CHANCE = random.SystemRandom()
"""As of `ssh.connector`."""
INTERRUPTED = "the copy was interrupted; the hosts that were not done have what they had before"


class Says(Protocol):
    """Where messages go: `say` of a `coordinator.service.Service`, called from a thread of the copier's."""

    def say(self, text: str, level: str, progress: CopyProgress | None = None, /) -> None:
        """Take one message. `progress`: it tells how far the copy is."""


@dataclass(frozen=True)
class CopyRequest:
    """A copy that is wanted: what, where to, and how it is told."""

    source: str
    """A folder here."""
    dst: str
    """The folder there: `~` is the host's home, and other relative paths are below it too."""
    rules: CopyRules
    delete: bool = False
    """Whether files that only a host has are deleted there."""
    tree: Tree | None = None
    """What `scan` found."""
    keep_going: bool = False
    """A host that fails does not end the copy to others."""
    may_ask: bool = False
    """The user is asked for a password where nothing else lets us in."""
    on_progress: Callable[[CopyProgress], None] | None = None
    """Called every `report_s` seconds; None: the sink is told."""
    report_s: float = REPORT_S


class FileCopier(ABC):
    """Copies a job's files to its hosts before its tasks start: once, in a thread of its own. Made without effects."""

    def __init__(self, request: CopyRequest, sink: Says) -> None:
        check_folder(request.dst)
        self._request = request
        self._source = os.path.abspath(request.source)
        self._dst = request.dst
        self._sink = sink
        self._on_progress = request.on_progress or (lambda progress: sink.say(str(progress), "info", progress))
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: set[str] = set()
        self._rate = Rate()
        self._begun = self._shown = 0.0

    def start(self, put: Put) -> None:
        """Begin, in a thread; at the end put `AllPrepared` or `PrepareFailed`. Returns at once."""

        def work() -> None:
            try:
                host, reason, text = self._work()
            except Exception as err:  # whatever it is, the loop must hear of it
                host, reason, text = "", failure_text(err), getattr(err, "hint", "")
            put(PrepareFailed(host, reason, time.time(), text) if reason else AllPrepared(time.time()))

        self._thread = threading.Thread(target=work, name="sync", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End it soon: hosts that have everything keep it, the others have what they had before.

        Waits for the end, a few seconds at most. May be called although it was not started.
        """
        self._cancelled.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CANCEL_S)

    @abstractmethod
    def _work(self) -> tuple[str, str, str]:
        """Copy; return the host that cannot get the files, why, and more lines; empty texts if all have them."""

    @abstractmethod
    def _progress(self, detail: str = "") -> CopyProgress:
        """Return how many hosts have the files."""

    def _report_begin(self) -> None:
        """Begin to measure."""
        self._begun = self._shown = time.monotonic()
        if not self._dst.startswith(("/", "~")):
            self._sink.say(f"{self._dst} is below the home directory of each host", "info")

    def _say_note(self, host: str, note: str) -> None:
        """Say what a host noted about its folder, unless another host has noted the same."""
        with self._lock:
            is_new = note not in self._notes
            self._notes.add(note)
        if note and is_new:
            self._sink.say(f"{host}: {note}", "warning")

    def _report(self, now: float, sent: RsyncProgress, total: int | None) -> None:
        """Say how far the copy is, from time to time. `total`: bytes; None: it is not known what hosts have."""
        self._rate.add(now, sent.size)
        if now > self._shown + self._request.report_s:
            self._shown = now
            text = "this rsync does not say how far it is"
            self._on_progress(self._progress(text if total is None else progress_text(sent, total, self._rate.value())))

    def _report_end(self, files: int, size: int) -> None:
        """Say that all hosts have the files: `sync 5/5 (60 files, 22.5 MiB) in 2.1 s`."""
        progress = self._progress(f"{number_of(files, 'file')}, {size_text(size)}")
        seconds = time.monotonic() - self._begun
        text = f"sync {progress.ready}/{progress.hosts} ({progress.detail}) in {seconds:.1f} s"
        self._sink.say(text, "info", progress)


@dataclass(frozen=True)
class CopyResult:
    """The copy to one host."""

    host: str
    names: tuple[str, ...] = ()
    """All names that the job has for it, `host` first."""
    files: int = 0
    """Files that were sent."""
    size: int = 0
    """Bytes of these files."""
    seconds: float = 0.0
    same: bool = False
    """The folder there is the source itself, so there was nothing to do."""
    shared: str = ""
    """The host that has got the files, into the same folder; empty: this one has."""
    code: int = 0
    """rsync's exit code, or 0."""
    reason: str = ""
    """Why it failed, in one line; empty: it did not."""
    fix: str = ""
    words: tuple[str, ...] = ()
    """The last messages of rsync and ssh."""
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything has arrived."""
        return not self.reason and not self.cancelled

    def line(self) -> str:
        """Return it as one line."""
        if self.cancelled:
            return f"{self.host}: not finished"
        if self.reason:
            return f"{self.host}: {self.reason}"
        if self.same:
            return f"{self.host}: the same directory"
        if self.shared:
            return f"{self.host}: the same directory as on {self.shared}"
        return f"{self.host}: {number_of(self.files, 'file')}, {size_text(self.size)} in {self.seconds:.1f} s"

    def lines(self) -> list[str]:
        """Return a failure in lines: the reason, the last messages, what to do."""
        words = [word for word in self.words if word not in self.reason]
        return [
            self.line(),
            *("    " + word for word in words),
            *("    fix: " + line for line in self.fix.splitlines()),
        ]


@dataclass(frozen=True)
class _CopySettings:
    """What is the same for all hosts of a copy."""

    tool: rsync.Tool
    filters: tuple[str, ...]
    files_from: str
    """A file with the names of what is copied; empty: the filters say it."""
    scratch: str
    """A temporary folder for that file and for links to extras; empty: there are none."""
    partial: str
    """Name of the folders for files until all have arrived. Distinguishes this copy from others into one folder."""


class Copier(FileCopier):
    """A copy by rsync over ssh.

    `targets` is how each host is reached. `asker` knows what the user typed to log in on the hosts. `shell` returns the
    argv of another remote shell for rsync, `identity` what is equal for two names of one host.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        request: CopyRequest,
        sink: Says,
        *,
        window: int = WINDOW,
        stall_s: float = STALL_S,
        answer_s: float = ANSWER_S,
        asker: Asker | None = None,
        shell: Callable[[Target], Sequence[str]] | None = None,
        identity: remote_shell.Identity | None = None,
    ) -> None:
        super().__init__(request, sink)
        self._targets = dict(targets)
        self._tree = request.tree or Tree()
        self._window = window
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._helpers = remote_shell.Helpers()
        self._abort = Abort()
        self._shells: Shells = remote_shell.SshShells(asker, self._helpers, self._abort, request.may_ask)
        if shell is not None:
            self._shells = lambda target: remote_shell.single(shell(target))
        self._identity = identity or remote_shell.ssh_identity
        self._making_links = threading.Lock()
        self._waiting: deque[tuple[str, ...]] = deque()
        self._running: dict[str, Transfer] = {}
        self._past = RsyncProgress()
        """What the runs that have ended have sent."""
        self._done: dict[str, int] = {}
        """Bytes of the tree that a host has, by the runs that have ended."""
        self._hosts = 0
        """Distinct hosts that have not failed."""
        self._tells = True
        """Whether rsync reports its progress."""
        self._results: list[CopyResult] = []

    def _work(self) -> tuple[str, str, str]:
        return first_failure(self.copy())

    def cancel(self) -> None:
        """End all runs of rsync soon. See `FileCopier.cancel`."""
        with self._lock:
            self._cancelled.set()
            self._waiting.clear()
            for transfer in self._running.values():
                transfer.cancel()
        self._abort.now()
        super().cancel()

    def copy(self) -> list[CopyResult]:
        """Copy to all hosts; return one result for each distinct host, in the order of `targets`. Blocks.

        Raises:
            SyncError: there is no rsync here.
            UsageError: the rules cannot be read.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._helpers)
            # Not made without need: a process that is killed leaves it behind.
            needed = self._request.rules.gitignore or self._request.rules.extra
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="distrun-sync-")) if needed else ""
            common = self._prepare(scratch)
            stack.enter_context(marked_source(self._source, common.partial + ON))
            self._report_begin()
            hosts = remote_shell.distinct_hosts(self._targets, self._identity, is_cancelled=self._cancelled.is_set)
            self._hosts = len(hosts)
            self._tells = common.tool.has("--info")
            with self._lock:
                self._waiting.extend(() if self._cancelled.is_set() else hosts)
            threads = [
                threading.Thread(target=self._copy_to_waiting, args=(common,), name="sync", daemon=True)
                for _ in range(min(self._window, len(hosts)))
            ]
            for thread in threads:
                thread.start()
            try:
                self._wait(threads)
            except BaseException:
                self.cancel()
                until = time.monotonic() + CANCEL_S
                for thread in threads:  # one may be in `ssh -G`; the end of this process ends what it has started
                    thread.join(max(until - time.monotonic(), 0.0))
                raise
        finished = {each.host: each for each in map(self._settled, self._results)}
        return [finished.get(names[0], CopyResult(names[0], names, cancelled=True)) for names in hosts]

    def _settled(self, result: CopyResult) -> CopyResult:
        """Return a host's result where it depends on the host with which it shares the folder."""
        others = [each for each in self._results if each.host == result.shared]
        other = others[0] if others else CopyResult(result.shared, cancelled=True)
        if not result.shared or other.ok:
            return result
        reason = "" if other.cancelled else f"it has the same directory as {other.host}, to which the copy failed"
        return replace(result, cancelled=other.cancelled, code=other.code, reason=reason, fix=other.fix)

    def _prepare(self, scratch: str) -> _CopySettings:
        tool = rsync.find()
        options = filters(self._request.rules, self._source)
        names = chosen(tool, self._request.rules, options, self._source)
        files_from = ""
        if names is not None:
            files_from = os.path.join(scratch, "files")
            with open(files_from, "wb") as file:
                file.write(b"\0".join(names))
        return _CopySettings(tool, tuple(options), files_from, scratch, PARTIAL + secrets.token_hex(8))

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads; report progress; after a failure cancel the others soon."""
        failed_at: float | None = None
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.05 / len(threads))
            now = time.monotonic()
            if failed_at is None and not self._request.keep_going and any(not each.ok for each in list(self._results)):
                failed_at = now
                with self._lock:
                    self._waiting.clear()
            if failed_at is not None and now > failed_at + OTHERS_S:
                self.cancel()
            self._report(now, self._sent(), self._tree.size * self._hosts if self._tells else None)
        if all(each.ok for each in self._results) and not self._cancelled.is_set():
            sent = self._sent()
            self._report_end(sent.files, sent.size)

    # ------------------------------------------------------------------ one host, in one of the threads

    def _copy_to_waiting(self, common: _CopySettings) -> None:
        """Copy to one host after the other until none is waiting."""
        while True:
            with self._lock:
                if not self._waiting or self._cancelled.is_set():
                    return
                names = self._waiting.popleft()
            try:
                result = self._copy_to(names, common)
            except Exception as err:  # a thread that dies of one would have its host waited for
                result = CopyResult(names[0], names, code=-1, reason=failure_text(err), fix=getattr(err, "hint", ""))
            with self._lock:
                self._results.append(result)
                gets_files = result.ok and not result.shared
                self._done[names[0]] = self._tree.size if gets_files else 0
                self._hosts -= not gets_files
            if not result.ok and not result.cancelled:
                self._sink.say(f"sync to {result.line()}", "warning")

    def _copy_to(self, names: tuple[str, ...], common: _CopySettings) -> CopyResult:
        host = names[0]
        begun = time.monotonic()
        files = size = 0
        same = False
        begins = f"rsync {os.path.join(self._source, '')} -> {host}:{self._dst}"
        self._sink.say(begins, "info", self._progress())
        attempts = self._shells(self._targets[host])
        shell = next(attempts)
        commands = self._commands(common, host, shell)
        result = CopyResult(host, names)
        races = RACES
        while commands:
            sums = self._tree.sums[-len(commands)] if self._tree.sums else ()
            ended, unreached = self._run(host, commands[0], shell, sums)
            if unreached is not None and unreached.kind == remote_shell.AUTH and not self._cancelled.is_set():
                with contextlib.suppress(StopIteration):
                    shell = attempts.send(unreached)
                    commands = self._commands(common, host, shell)[-len(commands) :]
                    continue
            if (
                unreached is None
                and races
                and rsync.met_another_copy(ended)
                and not self._cancelled.wait(CHANCE.random())
            ):
                races -= 1
                continue
            commands.pop(0)
            self._say_note(host, ended.says.get(NOTE, ""))
            if SAME in ended.says:
                ended.code, same = 0, True
            if SHARED in ended.says:
                ended.code = 0
                if result == CopyResult(host, names):  # the folder itself; that host gets the extras, too
                    return replace(result, shared=ended.says[SHARED])
            files, size = files + ended.files, size + ended.size
            reason, fix = rsync.explain(ended, host, answer_s=self._answer_s, stall_s=self._stall_s)
            result = CopyResult(host, names, files, size, time.monotonic() - begun, same and not files)
            if ended.cancelled and ended.code:
                return replace(result, cancelled=True)
            # After a host refused the folder, or its shell printed, rsync's messages would only mislead.
            is_told = UNFIT in ended.says or rsync.met_a_loud_shell(ended)
            words = () if is_told else tuple(ended.words)
            if unreached is not None:
                reason, fix = unreached.text, unreached.fix
            if reason:
                return replace(result, code=ended.code, reason=reason, fix=fix, words=words)
        return result

    def _commands(self, common: _CopySettings, name: str, shell: RemoteShell) -> list[list[str]]:
        """Return the rsync commands for a host, in order: the folder, then each extra."""
        target = self._targets[name]
        path = functools.partial(rsync.rsync_path, host=name, python=target.python)
        send = functools.partial(rsync.sending, common.tool, host=target.host, shell=shell.argv, stall_s=self._stall_s)
        remote = path(
            self._dst,
            size=self._tree.size,
            files=self._tree.files,
            source=folder_identity(self._source),
            delete=self._request.delete,
            partial=common.partial,
        )
        commands = [
            send(
                common.filters,
                os.path.join(self._source, ""),
                rsync_path=remote,
                partial=common.partial,
                delete=self._request.delete,
                files_from=common.files_from,
            )
        ]
        for number, extra in enumerate(self._request.rules.extra):
            is_folder = os.path.isdir(extra.source)
            source = os.path.join(extra.source if is_folder else self._link(common, number, extra), "")
            below = extra.name if is_folder else os.path.dirname(extra.name)
            partial = f"{common.partial}-{number}"
            remote = path(os.path.join(self._dst, below), extra=True, partial=partial)
            own = extra_filters() if is_folder else ()
            commands.append(send(own, source, rsync_path=remote, partial=partial, follow=not is_folder))
        return commands

    def _link(self, common: _CopySettings, number: int, extra: Extra) -> str:
        """Return a folder with nothing but a link to an extra that is a file: so rsync gives the file its new name."""
        folder = os.path.join(common.scratch, str(number))
        link = os.path.join(folder, os.path.basename(extra.name))
        with self._making_links:
            os.makedirs(folder, exist_ok=True)
            if not os.path.lexists(link):
                os.symlink(extra.source, link)
        return folder

    def _run(
        self, host: str, argv: list[str], shell: RemoteShell, sums: Sequence[int]
    ) -> tuple[RsyncResult, SshFailure | None]:
        """Run rsync, again if the host accepts no more connections just now; return why ssh failed, if it did."""
        for wait_s in (*AGAIN_S, None):
            ended = self._run_once(host, argv, shell, sums)
            words = [word for word in ended.words if not word.startswith("rsync")]
            if ended.says or ended.overdue or ended.cancelled or not ended.code or not words:
                break
            if rsync.met_a_loud_shell(ended):
                break
            failure = remote_shell.login_failure(self._targets[host], words)
            if wait_s is None or failure.kind != BUSY:
                return ended, failure
            if self._cancelled.wait(wait_s * CHANCE.uniform(0.5, 1.5)):
                return ended, failure
        return ended, None

    def _run_once(self, host: str, argv: list[str], shell: RemoteShell, sums: Sequence[int]) -> RsyncResult:
        # Not what the user's environment tells rsync (another shell, a partial folder).
        env = {name: value for name, value in environ.snapshot().items() if not name.startswith("RSYNC_")}
        transfer = Transfer(argv, {**env, **shell.env, "LC_ALL": "C"}, answer_s=self._answer_s, sums=sums)
        with self._lock:
            if self._cancelled.is_set():
                transfer.cancel()
            self._running[host] = transfer
        ended = RsyncResult(-1)
        try:
            ended = transfer.run()
            return ended
        finally:
            with self._lock:
                del self._running[host]
                if not ended.code and sums:
                    self._done[host] = self._done.get(host, 0) + sums[-1]
                self._past.files += transfer.progress.files
                self._past.size += transfer.progress.size

    # ------------------------------------------------------------------ progress

    def _progress(self, detail: str = "") -> CopyProgress:
        results = list(self._results)
        have = {each.host for each in results if each.ok and not each.shared}
        done = sum(len(each.names) for each in results if each.ok and (each.shared or each.host) in have)
        return CopyProgress(done, len(self._targets), detail)

    def _sent(self) -> RsyncProgress:
        with self._lock:
            running = [each.progress for each in self._running.values()]
            files = self._past.files + sum(each.files for each in running)
            size = self._past.size + sum(each.size for each in running)
            return RsyncProgress(files, size, sum(self._done.values()) + sum(each.done for each in running))


@contextlib.contextmanager
def marked_source(source: str, mark: str) -> Iterator[None]:
    """Put a link into the source by which hosts that share it know it (`folder.ON`), where one can be put.

    One that a killed process has left is removed after a day.
    """
    path = os.path.join(source, mark)
    is_made = False
    with contextlib.suppress(OSError):
        for name in os.listdir(source):
            old = os.path.join(source, name)
            if name.startswith(PARTIAL) and name.endswith(ON) and os.lstat(old).st_mtime < time.time() - STALE_S:
                os.unlink(old)
        os.symlink(SOURCE, path)
        is_made = True
    try:
        yield
    finally:
        if is_made:
            with contextlib.suppress(OSError):
                os.unlink(path)


def progress_text(sent: RsyncProgress, total: int, rate: float | None) -> str:
    """Return how far a copy is: `64%, 38 files, 14.4 MiB sent, 1.2 MiB/s, 0:00:07 left`. Bytes, and bytes a second."""
    if not sent.size and not sent.files:
        return "nothing was sent so far"
    done = min(total, sent.done)
    parts = [f"{min(99, 100 * done // total)}%"] if total else []
    parts += [number_of(sent.files, "file"), f"{size_text(sent.size)} sent"]
    if total and done == total:
        parts.append("waiting for the hosts to finish")
    elif rate is not None:
        parts.append(f"{size_text(rate)}/s")
        if rate and total:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
    return ", ".join(parts)


def failure_text(err: Exception) -> str:
    """Return what to say of an exception, in one line."""
    text = str(err) if isinstance(err, (DistrunError, OSError)) else f"{type(err).__name__}: {err}"
    return text or type(err).__name__


# ---------------------------------------------------------------------- all results in words


def first_failure(results: Sequence[CopyResult]) -> tuple[str, str, str]:
    """Return the first host that failed, why in one line, and more lines; empty texts if none failed."""
    failed = [each for each in results if each.reason]
    if not failed:
        return "", INTERRUPTED if any(each.cancelled for each in results) else "", ""
    first, *others = failed
    if not others:
        return first.host, first.reason, "\n".join(line.strip() for line in first.lines()[1:])
    nor = ", ".join(each.host for each in others)
    return first.host, f"{first.reason} (nor {nor})", "\n".join(line for each in failed for line in each.lines())


def error(results: Sequence[CopyResult]) -> SyncError | None:
    """Return the error that says which hosts failed, and why; None if none failed."""
    failed = [result for result in results if not result.ok and not result.cancelled]
    unfinished = [result for result in results if result.cancelled]
    if not failed:
        return SyncError(INTERRUPTED) if unfinished else None
    total = sum(len(result.names) or 1 for result in results)
    missed = sum(len(result.names) or 1 for result in failed)
    lines = [f"the files did not reach {missed} of {number_of(total, 'host')}"]
    for result in failed:
        lines += result.lines()
    if unfinished:
        lines.append(f"not finished: {', '.join(result.host for result in unfinished)}")
    return SyncError("\n".join(lines))
