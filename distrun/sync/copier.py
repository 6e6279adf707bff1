"""The copy of one folder to all hosts: in parallel, each distinct host once, with progress, until all have it.

A host that fails ends the copy: no other host is begun, those in work get a moment (their failures are then named
too), and what they had before stays usable, because rsync puts files into place when all have arrived.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from distrun.errors import DistrunError
from distrun.ssh.abort import Abort
from distrun.sync import askpass, distinct, remote, result
from distrun.sync.order import Order, make_order
from distrun.sync.result import Result
from distrun.sync.rules import Rules
from distrun.sync.scan import Tree
from distrun.sync.transfer import Ended, Progress, Rate, Transfer
from distrun.sync.units import count, size_text
from distrun.sync.ways import SshWays, Way, Ways, one
from distrun_runtime.contract import environ
from distrun_runtime.coordinator.events import Prepared, PrepareFailed

if TYPE_CHECKING:
    from distrun.ssh.ask import Asker
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.target import Target
    from distrun_runtime.coordinator.channel import Put

WINDOW = 8
"""Hosts that are copied to at a time."""
STALL_S = 60.0
"""rsync ends when nothing moves for so long."""
ANSWER_S = 60.0
"""How long a host may take from ssh's start to the first word of ours there."""
MOMENT_S = 5.0
"""How long the other hosts go on after one has failed."""
CANCEL_S = 5.0
AGAIN_S = (0.5, 1.0, 2.0, 4.0)
"""Waits, about, before ssh is tried again where a host (or the one on the way to it) has too many connections."""
RACES = 5
"""How often rsync is run again because another copy into the same folder came between."""
REPORT_S = 5.0
"""Between two lines of progress."""


class Says(Protocol):
    """Where messages go: a `coordinator.output.Sink`, of which only `say` is used, from a thread of the copier's."""

    def say(self, text: str, level: str) -> None:
        """Take one message."""


class Copier:
    """A copy that can be started once, and cancelled.

    `targets` is how each host is reached. `source` is a folder here, `dst` the folder there: `~` is the host's home,
    where other relative paths begin too. `tree` is what `scan` found. With `keep_going` a failed host does not end the
    copy to others. `on_progress` gets a line every `report_s` seconds; without it the sink does. `asker` knows what the
    user typed to get into the hosts; with `may_ask` it is asked for more. `shell` gives the argv of another remote
    shell for rsync, `identity` what is equal for two names of one host.
    """

    def __init__(  # noqa: PLR0917
        self,
        targets: Mapping[str, Target],
        source: str,
        dst: str,
        rules: Rules,
        delete: bool,
        sink: Says,
        *,
        tree: Tree | None = None,
        keep_going: bool = False,
        window: int = WINDOW,
        stall_s: float = STALL_S,
        answer_s: float = ANSWER_S,
        report_s: float = REPORT_S,
        on_progress: Callable[[str], None] | None = None,
        asker: Asker | None = None,
        may_ask: bool = False,
        shell: Callable[[Target], Sequence[str]] | None = None,
        identity: distinct.Identity | None = None,
    ) -> None:
        remote.check_folder(dst)
        self._targets = dict(targets)
        self._source = os.path.abspath(source)
        self._dst = dst
        self._rules = rules
        self._delete = delete
        self._sink = sink
        self._tree = tree or Tree()
        self._keep_going = keep_going
        self._window = window
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._report_s = report_s
        self._on_progress = on_progress or (lambda text: sink.say(text, "info"))
        self._helpers = askpass.Helpers()
        self._abort = Abort()
        self._ways: Ways = SshWays(asker, self._helpers, self._abort, may_ask)
        if shell is not None:
            self._ways = lambda target: one(shell(target))
        self._identity = identity or distinct.ssh_identity
        self._lock = threading.Lock()
        self._making_links = threading.Lock()
        self._cancelled = threading.Event()
        self._waiting: deque[tuple[str, ...]] = deque()
        self._running: dict[str, Transfer] = {}
        self._past = Progress()
        """What the runs that have ended have sent."""
        self._done: dict[str, int] = {}
        """Of the tree's bytes, those of the runs that a host is done with."""
        self._hosts = 0
        """Distinct hosts that have not failed."""
        self._tells = True
        """Whether rsync says how far it is."""
        self._rate = Rate()
        self._results: list[Result] = []
        self._notes: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self, put: Put) -> None:
        """Begin, in a thread; at the end put `Prepared` or `PrepareFailed`. Returns at once."""
        self._thread = threading.Thread(target=self._work, args=(put,), name="sync", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End all runs of rsync soon; hosts that have everything keep it, the others have what they had before.

        Waits for the end of what `start` began, a few seconds at most.
        """
        with self._lock:
            self._cancelled.set()
            self._waiting.clear()
            for transfer in self._running.values():
                transfer.cancel()
        self._abort.now()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CANCEL_S)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def summary(self) -> str:
        """Return what was copied: `sync 5/5 (60 files, 22.5 MiB)`."""
        sent = self._sent()
        return "%s (%s, %s)" % (self._ready(), count(sent.files, "file"), size_text(sent.size))

    def line(self) -> str:
        """Return how far it is: `sync 3/5: 64%, 38 files, 14.4 MiB sent, 1.2 MiB/s, 0:00:07 left`."""
        if not self._tells:
            return "%s; this rsync does not say how far it is" % self._ready()
        sent = self._sent()
        if not sent.size and not sent.files:
            return "%s; nothing was sent so far" % self._ready()
        total = self._tree.size * self._hosts
        done = min(total, sent.done)
        parts = ["%d%%" % min(99, 100 * done // total)] if total else []
        parts += [count(sent.files, "file"), "%s sent" % size_text(sent.size)]
        rate = self._rate.value()
        if total and done == total:
            parts.append("waiting for the hosts to finish")
        elif rate is not None:
            parts.append("%s/s" % size_text(rate))
            if rate and total:
                parts.append("%s left" % timedelta(seconds=round((total - done) / rate)))
        return "%s: %s" % (self._ready(), ", ".join(parts))

    def copy(self) -> list[Result]:
        """Copy to all hosts; return one result for each distinct host, in the order of `targets`. Blocks.

        Raises:
            SyncError: there is no rsync here.
            UsageError: the rules cannot be read.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._helpers)
            # Not made without need: a process that is killed leaves it behind.
            needed = self._rules.gitignore or self._rules.extra
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="distrun-sync-")) if needed else ""
            order = make_order(
                self._source,
                self._dst,
                self._rules,
                scratch,
                delete=self._delete,
                size=self._tree.size,
                files=self._tree.files,
                stall_s=self._stall_s,
            )
            if not self._dst.startswith(("/", "~")):
                self._sink.say("%s is below the home directory of each host" % self._dst, "info")
            groups = distinct.groups(self._targets, self._identity, is_cancelled=self._cancelled.is_set)
            self._hosts = len(groups)
            self._tells = order.program.has("--info")
            with self._lock:
                self._waiting.extend(() if self._cancelled.is_set() else groups)
            threads = [
                threading.Thread(target=self._drain, args=(order,), name="sync", daemon=True)
                for _ in range(min(self._window, len(groups)))
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
        finished = {each.host: each for each in self._results}
        return [finished.get(names[0], Result(names[0], names, cancelled=True)) for names in groups]

    def _work(self, put: Put) -> None:
        try:
            host, reason, text = result.told(self.copy())
        except Exception as err:  # whatever it is, the loop must hear of it
            host, reason, text = "", _text(err), getattr(err, "hint", "")
        put(PrepareFailed(host, reason, time.time(), text) if reason else Prepared())

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads; say how far it is; after a failure give the others a moment."""
        begun = shown = time.monotonic()
        failed_at: float | None = None
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.05 / len(threads))
            now = time.monotonic()
            if failed_at is None and not self._keep_going and any(not each.ok for each in list(self._results)):
                failed_at = now
                with self._lock:
                    self._waiting.clear()
            if failed_at is not None and now > failed_at + MOMENT_S:
                self.cancel()
            self._rate.add(now, self._sent().size)
            if now > shown + self._report_s:
                self._on_progress(self.line())
                shown = now
        if all(each.ok for each in self._results) and not self._cancelled.is_set():
            self._sink.say("%s in %.1f s" % (self.summary(), time.monotonic() - begun), "info")

    def _ready(self) -> str:
        done = sum(len(each.names) for each in list(self._results) if each.ok)
        return "sync %d/%d" % (done, len(self._targets))

    def _sent(self) -> Progress:
        with self._lock:
            running = [each.progress for each in self._running.values()]
            files = self._past.files + sum(each.files for each in running)
            size = self._past.size + sum(each.size for each in running)
            return Progress(files, size, sum(self._done.values()) + sum(each.done for each in running))

    def _drain(self, order: Order) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._cancelled.is_set():
                    return
                names = self._waiting.popleft()
            try:
                ended = self._copy_to(names, order)
            except Exception as err:  # a thread that dies of one would have its host waited for
                ended = Result(names[0], names, code=-1, reason=_text(err), fix=getattr(err, "hint", ""))
            with self._lock:
                self._results.append(ended)
                self._done[names[0]] = self._tree.size if ended.ok else 0
                self._hosts -= not ended.ok
            if not ended.ok and not ended.cancelled:
                self._sink.say("sync to %s" % ended.line(), "warning")

    def _copy_to(self, names: tuple[str, ...], order: Order) -> Result:
        host = names[0]
        begun = time.monotonic()
        files = size = 0
        same = False
        self._sink.say("rsync %s -> %s:%s" % (os.path.join(order.source, ""), host, order.dst), "info")
        ways = self._ways(self._targets[host])
        way = next(ways)
        runs = self._runs(order, host, way)
        made = Result(host, names)
        races = RACES
        while runs:
            sums = self._tree.sums[-len(runs)] if self._tree.sums else ()
            ended, unreached = self._reach(host, runs[0], way, sums)
            if unreached is not None and unreached.kind == distinct.AUTH and not self._cancelled.is_set():
                with contextlib.suppress(StopIteration):
                    way = ways.send(unreached)
                    runs = self._runs(order, host, way)[-len(runs) :]
                    continue
            if unreached is None and races and result.met_another(ended) and not self._cancelled.wait(random.random()):
                races -= 1
                continue
            runs.pop(0)
            self._tell_note(host, ended.says.get(remote.NOTE, ""))
            if remote.SAME in ended.says:
                ended.code, same = 0, True
            files, size = files + ended.files, size + ended.size
            reason, fix = result.failure(ended, host, answer_s=self._answer_s, stall_s=order.stall_s)
            made = Result(host, names, files, size, time.monotonic() - begun, same and not files)
            if ended.cancelled and ended.code:
                return replace(made, cancelled=True)
            # What rsync says of a host that refused the folder would only mislead.
            words = () if remote.UNFIT in ended.says else tuple(ended.words)
            if unreached is not None:
                reason, fix = unreached.text, unreached.fix
            if reason:
                return replace(made, code=ended.code, reason=reason, fix=fix, words=words)
        return made

    def _tell_note(self, host: str, note: str) -> None:
        """Tell what a host says of its folder; what others have said before is not repeated."""
        with self._lock:
            is_new = note not in self._notes
            self._notes.add(note)
        if note and is_new:
            self._sink.say("%s: %s" % (host, note), "warning")

    def _runs(self, order: Order, host: str, way: Way) -> list[list[str]]:
        with self._making_links:
            target = self._targets[host]
            return order.runs(target.host, way.shell, target.python)

    def _reach(self, host: str, argv: list[str], way: Way, sums: Sequence[int]) -> tuple[Ended, SshFailure | None]:
        """Run rsync, again if the host takes no more connections just now; return why ssh did not get there, if so."""
        for wait_s in (*AGAIN_S, None):
            ended = self._run(host, argv, way, sums)
            words = [word for word in ended.words if not word.startswith("rsync")]
            if ended.says or ended.overdue or ended.cancelled or not ended.code or not words:
                break
            failure = distinct.ssh_failure(self._targets[host], words)
            if wait_s is None or not failure.is_passing:
                return ended, failure
            if self._cancelled.wait(wait_s * random.uniform(0.5, 1.5)):
                return ended, failure
        return ended, None

    def _run(self, host: str, argv: list[str], way: Way, sums: Sequence[int]) -> Ended:
        # What the user's environment tells rsync (another shell, a partial folder) is not ours to guess about.
        env = {name: value for name, value in environ.snapshot().items() if not name.startswith("RSYNC_")}
        transfer = Transfer(argv, {**env, **way.env, "LC_ALL": "C"}, answer_s=self._answer_s, sums=sums)
        with self._lock:
            if self._cancelled.is_set():
                transfer.cancel()
            self._running[host] = transfer
        ended = Ended(-1)
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


def _text(err: Exception) -> str:
    return str(err) if isinstance(err, (DistrunError, OSError)) else "%s: %s" % (type(err).__name__, err)
