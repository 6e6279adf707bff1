"""`distrun attach`, `detach` and `wait`: show a running job, let it go on alone, wait for its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import job_and_tasks, my_jobs, placed, report, takes
from distrun.cli.console import LAST_BYTES, Console, print_err, print_json, print_out
from distrun.client import ControlConnection, Follower
from distrun.errors import UsageError
from distrun.options import BY_KEY, count, seconds
from distrun_runtime.contract import daemon, environ, facts, process
from distrun_runtime.contract.facts import duration
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.jobs import Job


LINES = 20
"""How much of what was printed before is shown where there is no terminal to fill."""
QUESTION = "distrun: [d]etach, [s]top the job, or [g]o on? (Ctrl-C again: stop) "


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("--since-start", is_flag=True, help="Show all that was printed since the job's start.")
@takes(
    count(
        "--tail",
        "Show the last N lines before what comes. [default: from where this terminal stood, else what fits]",
        low=0,
    ),
    BY_KEY["no_prefix"],
    BY_KEY["quiet"],
)
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME", help="Only what this task (worker-0) or role prints; repeatable."
)
def attach(
    job: str | None, *, since_start: bool, tail: int | None, tasks: tuple[str, ...], no_prefix: bool, quiet: bool
) -> int:
    """Show what JOB prints (an id, the beginning of one, or a name), as `launch` does, until it is over.

    Without JOB: what the latest job that runs prints.

    Ctrl-C asks whether to detach, to stop the job, or to go on; a second Ctrl-C stops it. Without a terminal to ask on,
    Ctrl-C detaches. Several terminals may be attached at once.

    The exit code is the job's if its end was seen, 0 after a chosen detach, 130 after Ctrl-C without a question, and 7
    if the job's coordinator is lost.
    """
    from distrun.jobs import JobOver

    if since_start and tail is not None:
        raise UsageError("--since-start and --tail contradict each other")
    jobs = my_jobs()
    found, tasks = job_and_tasks(jobs, job, tasks, prefers_living=True)
    found.refresh()
    console = Console(environ.snapshot(), prefix=not no_prefix, level="error" if quiet else "info")
    if found.is_over:
        return _over(found, console)
    names = [str(row["name"]) for row in found.choose(tasks)] if tasks else None
    places = OutputPlace(jobs.store.root, found.id)
    console.attach(found.folder.log_path, found.id, lambda: placed(found.folder))
    try:
        with found.attach() as connection:
            attached = _Attached(connection, found, console, names)
            return attached.run(_start(places, since_start, tail), places)
    except JobOver:
        return _over(found, console)
    finally:
        console.close()


def _over(job: Job, console: Console) -> int:
    console.say(f"job {job.id} is over: {job.folder.state()['message']}")
    console.say(f"what it printed: distrun logs {job.id}")
    return int(job.outcome["exit_code"]) if job.outcome is not None else facts.EXIT_HOST_LOST


def _start(places: OutputPlace, since_start: bool, tail: int | None) -> dict[str, int]:
    """Return where the output begins, as `subscribe` takes it."""
    if since_start:
        return {"cursor": 0}
    if tail is None:
        stood = places.read()
        if stood is not None:
            return {"cursor": stood}
        tail = max(1, shutil.get_terminal_size().lines - 2) if os.isatty(1) else LINES
    return {"tail": tail}


class _Attached:
    """One `distrun attach`: follows the job, and asks what a Ctrl-C means."""

    def __init__(self, connection: ControlConnection, job: Job, console: Console, names: Sequence[str] | None) -> None:
        self._connection = connection
        self._job = job
        self._folder = job.folder
        self._console = console
        self._names = names
        """Of the tasks whose output is shown; None: of all."""
        self._follower = Follower(connection, console)
        self._is_stopping = False
        self._left: int | None = None
        """The exit code of a user who left."""
        self._asking: _Key | None = None
        self._lock = threading.Lock()

    def run(self, start: dict[str, int], places: OutputPlace) -> int:

        where = self._connection.hello
        self._console.say(f"attached to job {self._folder.id} (its coordinator: pid {where['pid']} on {where['host']})")
        if self._folder.is_unplanned:
            waits = self._folder.state()
            self._console.say(str(waits["message"] or waits["state"]))
        elif "tail" in start:
            self._console.say(f"all that it printed before: distrun logs --merge {self._folder.id}")
        self._console.when_unread(lambda: self._leave(facts.exit_code(None, "PIPE")))
        self._console.start()
        with daemon.Interrupts(self._on_signal):
            draws = self._console.draws
            self._connection.send("subscribe", events=draws, metrics=draws, output={**start, "tasks": self._names})
            if draws:
                self._connection.send("state")
            try:
                self._follower.run()
            finally:
                self._withdraw()
                if self._follower.cursor is not None and self._names is None:
                    places.write(self._follower.cursor)
        return self._end(start, places)

    def _end(self, start: dict[str, int], places: OutputPlace) -> int:
        from distrun import client

        found = self._follower
        if self._left is not None and found.outcome is None:
            self._console.say(f"detached; the job goes on; to come back: distrun attach {self._folder.id}")
            return self._left
        if found.failure is not None:
            raise client.raised(found.failure, self._console.say)
        self._job.refresh()  # its end, if it was elsewhere
        outcome = found.outcome or self._folder.ended()
        if outcome is None:
            raise client.gone(self._folder)
        try:
            self._show_rest(start)
        except JobStoreError as err:
            self._console.say(f"{err}; what is missing here: distrun logs {self._folder.id}", "warning")
        places.forget()
        self._console.end_output()
        report(outcome, self._folder, False, self._console)
        return outcome.exit_code

    def _show_rest(self, start: dict[str, int]) -> None:
        """Show, from the job's logs, what the coordinator did not send: it waits for no terminal that is slow."""
        from distrun.jobs import RecordedOutput
        from distrun_runtime.coordinator.clients import OutputPiece
        from distrun_runtime.coordinator.logreader import LogReader

        if self._folder.is_unplanned:
            return
        hosts = {task.name: task.host for task in self._folder.plan().tasks}
        with contextlib.closing(LogReader(self._folder.logs)) as reader:
            rest = RecordedOutput(self._job, reader, self._names)
            rest.begin_at(self._follower.cursor, start)
            if self._is_stopping:
                last = max(rest.cursor, reader.end() - LAST_BYTES)
                self._console.leave_out(last - rest.cursor)
                rest.cursor = last
            for each in rest.pieces():
                stream = each.stream if each.stream in ("out", "err") else "out"
                self._console.show(
                    OutputPiece(each.data, each.task, hosts.get(each.task, ""), stream, each.at, len(each.data))
                )

    # ------------------------------------------------------------------ signals; called in the thread that reads them

    def _on_signal(self, name: str) -> None:
        if name == "TSTP":
            self._console.toggle_pause()
        elif name == "INT":
            self._on_ctrl_c()
        elif name not in process.TASKS_SIGNALS:
            self._leave(facts.exit_code(None, name))

    def _on_ctrl_c(self) -> None:
        with self._lock:
            asking = self._asking
        if self._is_stopping or asking is not None:
            self._withdraw()
            self._stop()
        elif os.isatty(0) and os.isatty(2):
            with self._lock:
                self._asking = _Key(self._on_key)
            self._console.hold(QUESTION)
            self._asking.start()
        else:
            self._leave(facts.EXIT_INTERRUPTED)

    def _on_key(self, key: str) -> None:
        """Do what the user chose; called in the thread that waits for a key."""
        with self._lock:
            if self._asking is None:
                return
            self._asking = None
        words = {"d": "detach", "s": "stop", "g": "go on"}
        self._console.release(words.get(key, "go on") + "\n")
        if key == "d":
            self._leave(0)
        elif key == "s":
            self._stop()

    def _withdraw(self) -> None:
        with self._lock:
            asking, self._asking = self._asking, None
        if asking is not None:
            asking.withdraw()
            self._console.release("\n")

    def _stop(self) -> None:
        self._is_stopping = True
        self._connection.send("stop", signal="INT")
        self._console.leave_out()

    def _leave(self, code: int) -> None:
        self._left = code
        self._connection.end()
        self._console.leave_out()


class _Key(threading.Thread):
    """Waits for one of the keys d, s and g on the terminal, in a thread of its own."""

    def __init__(self, on_key: Any) -> None:
        super().__init__(name="key", daemon=True)
        self._on_key = on_key
        self._reading, self._waking = os.pipe()

    def run(self) -> None:
        """Read keys until one fits, the end of the terminal, or `withdraw`."""
        import select
        import termios
        import tty

        fd = sys.stdin.fileno()
        try:
            before = termios.tcgetattr(fd)
        except termios.error:
            before = None
        key = ""
        try:
            if before is not None:
                tty.setcbreak(fd, termios.TCSANOW)  # Ctrl-C stays a signal
            while key not in ("d", "s", "g"):
                ready, _, _ = select.select([fd, self._reading], [], [])
                if self._reading in ready:
                    return
                data = os.read(fd, 1)
                if not data:
                    return
                key = data.decode("latin-1").lower()
        except (OSError, termios.error):
            return
        finally:
            if before is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(fd, termios.TCSANOW, before)
        self._on_key(key)

    def withdraw(self) -> None:
        """Wait no more, and give the terminal its settings back."""
        os.write(self._waking, b"w")
        if threading.current_thread() is not self:
            self.join()


# `distrun detach`: lets a job go on without the terminal that launched it.


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
def detach(job: str) -> int:
    """Let JOB (an id, the beginning of one, or a name) go on without the terminal that launched it.

    Its `distrun launch` ends with exit code 0. From then on the end of that terminal, or of that process, means nothing
    to the job. It stays where it is: the machine that launched it has to stay up.
    """
    found = my_jobs().get(job, prefers_living=True).refresh()
    told = "goes on without its terminal" if found.detach() else "had been detached before"
    print_out(f"{found.id}: {told}; to come back: distrun attach {found.id}\n")
    return 0


# `distrun wait`: waits for the end of a job, and takes its exit code.


SCHEMA = "distrun.wait/1"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@takes(seconds("--timeout", "Wait at most so long (exit code 124)."))
@click.option("--json", "as_json", is_flag=True, help="At the end one JSON object, with the job's outcome.")
def wait(job: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until JOB (an id, the beginning of one, or a name) is over; the exit code is the job's.

    Without JOB: the latest job that runs. A job that is over gives its code at once. The exit code is 124 if --timeout
    ends the wait, and 7 if the job's coordinator is lost. Ctrl-C ends the wait only.
    """
    found = my_jobs().get(job, prefers_living=True).refresh()
    is_late = False
    try:
        code = found.wait(timeout)
    except TimeoutError:
        code, is_late = facts.EXIT_TIMEOUT, True
        print_err(f"distrun: job {found.id} is not over after {duration(timeout or 0.0)}\n")
    if as_json:
        from distrun_runtime.contract.dataclass import rfc3339

        told = {"exit_code": code, "timed_out": is_late, "outcome": found.outcome}
        print_json(SCHEMA, time=rfc3339(time.time()), job=found.id, **told)
    return code


# Where a terminal stood in a job's output, so that `distrun attach` goes on there.
#
# It is kept in the user's state folder, not in the job's: `terminals/JOB.KEY`, a number, where KEY stands for the
# terminal and the session that runs in it.


_KEPT_S = 7 * 24 * 3600.0
"""What is older is removed: its terminal is hardly there any more."""


class OutputPlace:
    """The place of this terminal in a job's output. Without a terminal there is none. Errors are ignored."""

    def __init__(self, root: Path, job: str) -> None:
        """`root`: the user's state folder."""
        self._folder = root / "terminals"
        key = _terminal()
        self._path = self._folder / f"{job}.{key}" if key else None

    def read(self) -> int | None:
        """Return the cursor at which this terminal left the job; None: it was not here."""
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                return int(self._path.read_text("ascii"))
        return None

    def write(self, cursor: int) -> None:
        """Remember a cursor, and forget what is old."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.write_text(str(cursor), "ascii")
            for path in self._folder.iterdir():
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink()

    def forget(self) -> None:
        """Forget it: the job is over."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _terminal() -> str:
    """Return what tells this terminal, as it is used now, from others; empty: there is none."""
    import hashlib  # not for every launch: OpenSSL takes a while

    for fd in (0, 2, 1):
        with contextlib.suppress(OSError):
            name = os.ttyname(fd)
            session = os.getsid(0)
            start = ""
            with contextlib.suppress(OSError):
                start = process.identity(session).start
            return hashlib.sha256(f"{name} {session} {start}".encode()).hexdigest()[:16]
    return ""
