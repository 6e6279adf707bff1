"""A terminal's side of the connection to a job's coordinator: finds it, and shows what it sends.

The coordinator is found by `control.json` in the job's folder. On this machine its control socket is opened, on
another by an agent there (`remote_jobs.RemoteSocket`).

`Follower` shows a job as `distrun launch` does: its output, what distrun itself says of it, and its questions. It is
used by the launching terminal, whose connection is a socket pair, and by `distrun attach`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distrun.errors import DistrunError, UsageError
from distrun_runtime.contract import control, facts, private, process, session
from distrun_runtime.contract.dataclass import dataclass, read
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator import failures, jobfolder
from distrun_runtime.coordinator.clients import OutputPiece
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.errors import JobStoreError, RuntimeFault, WireError

if TYPE_CHECKING:
    from distrun.remote_jobs import RemoteSocket  # only imported where it is used

READ_SIZE = 256 * 1024
ANSWER_S = 10.0
"""How long a coordinator's answer is awaited."""
PROBES = 5
"""How often a silent coordinator is asked for a sign of life before it counts as stopped."""


class CoordinatorLost(DistrunError):
    """A job's coordinator is gone, or does not answer; what is known of the job is in its folder."""

    exit_code = facts.EXIT_HOST_LOST


class CoordinatorUnreachable(CoordinatorLost):
    """Its host cannot be asked, or the connection to it broke: nothing tells of the coordinator's end."""


class CoordinatorError(DistrunError):
    """A job has no outcome: its coordinator failed. `exit_code` is what the coordinator gave."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Make an error of what goes wrong where a coordinator's frames are read: they are not what they should be.

    Raises:
        CoordinatorLost: an exception that malformed members cause.
    """
    try:
        yield
    except (DistrunError, RuntimeFault):
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as err:
        raise CoordinatorLost(
            f"the coordinator has sent what this distrun does not understand: {type(err).__name__}: {err}",
            "is it of the version that launched the job? distrun status and distrun logs do without it",
        ) from err


class ControlConnection(contextlib.AbstractContextManager["ControlConnection"]):
    """Frames in both directions over a stream socket. One thread reads; any may send."""

    def __init__(self, stream: socket.socket | RemoteSocket) -> None:
        self._socket = stream
        self._sending = threading.Lock()
        self._decoder = session.Decoder()
        self._frames: deque[session.Frame] = deque()
        self.hello: Mapping[str, Any] = {}
        """What the coordinator said of itself: job, pid, host, version."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, kind: str, body: bytes = b"", /, **members: Any) -> None:
        """Send a frame; if the coordinator has gone, reading tells."""
        self.send_bytes(session.encode({"type": kind, **members}, body))

    def send_bytes(self, data: bytes) -> None:
        """Send a frame that is encoded."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def receive(self, limit_s: float | None = None) -> session.Frame | None:
        """Return the next frame; None: the connection has ended.

        Raises:
            TimeoutError: none came within `limit_s`.
            CoordinatorUnreachable: the connection broke, once it was greeted.
        """
        while not self._frames:
            self._socket.settimeout(limit_s)
            try:
                data = self._socket.recv(READ_SIZE)
                problem = None if data else getattr(self._socket, "problem", None)
                if problem is not None and self.hello:
                    job = self.hello["job"]
                    raise CoordinatorUnreachable(
                        f"job {job}: the connection to its coordinator on {problem.host} broke: {problem.text}",
                        f"whether it goes on: distrun status {job}; to follow it again: distrun attach {job}",
                    )
                if not data:
                    return None
                self._frames += self._decoder.feed(data)
            except (ConnectionError, WireError):
                return None
            finally:
                self._socket.settimeout(None)
        return self._frames.popleft()

    def frames(
        self, limit_s: float | None = None, is_watched: Callable[[], bool] = lambda: True
    ) -> Iterator[session.Frame]:
        """Give all frames until the end of the connection.

        With `limit_s`, a coordinator that sends nothing is asked for the job's state from time to time, while
        `is_watched()` holds. That is so until it is first found not to hold.

        Raises:
            TimeoutError: it has not answered for `limit_s`.
        """
        silences = 0
        while True:
            try:
                frame = self.receive(None if limit_s is None else limit_s / PROBES)
            except TimeoutError:
                silences += 1
                if not is_watched():
                    limit_s = None
                elif silences >= PROBES:  # not the clock: this process may have been stopped
                    raise
                self.send("state")
                continue
            if frame is None:
                return
            silences = 0
            yield frame

    def ask(self, kind: str, /, **members: Any) -> session.Frame:
        """Send a frame and return its `answer`."""
        self.send(kind, **members)
        return self.answer(kind)

    def answer(self, kind: str, limit_s: float = ANSWER_S) -> session.Frame:
        """Return the next frame of a type, or `refused`.

        Raises:
            CoordinatorLost: there is none.
        """
        while True:
            try:
                frame = self.receive(limit_s)
            except TimeoutError:
                raise CoordinatorLost(f"no answer to {kind!r} within {duration(limit_s)}") from None
            if frame is None:
                raise CoordinatorLost(f"the coordinator ended the connection and did not answer {kind!r}")
            if frame.type in (kind, "refused"):
                return frame

    def ends(self, limit_s: float) -> bool:
        """Wait, at most so long, for the end of the connection; return whether it has ended."""
        until = time.monotonic() + limit_s
        try:
            while self.receive(max(0.001, until - time.monotonic())) is not None:
                pass
        except TimeoutError:
            return False
        return True

    def end(self) -> None:
        """End the connection from another thread: `receive` returns None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and what carries it."""
        self.end()
        self._socket.close()


# ---------------------------------------------------------------------- finding the coordinator


def connect(folder: JobFolder, may_ask: bool = True, any_version: bool = False) -> ControlConnection:
    """Return a connection to the coordinator of a job, greeted.

    Args:
        folder: the job's folder.
        may_ask: the user may be asked for a password, if it is on another host.
        any_version: nothing but state, stop and kill will be asked for, which no version changes.

    Raises:
        CoordinatorLost: it is gone, or does not answer.
        UsageError: the job has no control socket, or its coordinator is of another version.
        JobStoreError: control.json is damaged.
    """
    where = folder.control()
    if where is None or not where["path"]:
        raise UsageError(
            f"job {folder.id} has no control socket: it is just being started",
            f"distrun status {folder.id} shows it, distrun logs -f {folder.id} what it prints",
        )
    if jobfolder.is_here(where):
        return _greeted(ControlConnection(_here(folder, where)), folder, any_version, ANSWER_S)
    from distrun import remote_jobs

    stream = remote_jobs.RemoteSocket(folder, where, may_ask)
    return _greeted(ControlConnection(stream), folder, any_version, remote_jobs.ANSWER_S)


def _greeted(connection: ControlConnection, folder: JobFolder, any_version: bool, limit_s: float) -> ControlConnection:
    """Exchange hellos, and return the connection.

    Raises:
        CoordinatorLost: there is no answer, or it is another job's coordinator.
    """
    try:
        with reading():
            connection.send_bytes(control.client_hello())
            try:
                frame = connection.receive(limit_s)
            except TimeoutError:
                raise unanswering(folder, limit_s) from None
            if frame is None:
                raise _unanswered(connection, folder)
            if frame.type == "refused":
                raise UsageError(f"job {folder.id}: {frame.header['message']}", frame.header["hint"])
            if frame.type != "hello" or frame.header.get("job") != folder.id:
                raise gone(folder, "is gone, and another job has its socket")
            connection.hello = frame.header
            if not any_version:
                check_version(frame.header["version"], folder)
    except BaseException:
        connection.close()
        raise
    return connection


def forget(folder: JobFolder) -> None:
    """Remove the control socket of a job whose coordinator is dead, if it left one on this machine."""
    with contextlib.suppress(JobStoreError):
        where = folder.control()
        if where is not None and jobfolder.is_here(where):
            private.remove_dead(where["path"])


def gone(folder: JobFolder, how: str = "is gone") -> CoordinatorLost:
    """Return the error of a coordinator, which control.json names, that is not there."""
    where = folder.control()
    assert where is not None  # we were, or wanted to be, connected to it
    return CoordinatorLost(
        f"job {folder.id}: its coordinator (pid {where['pid']} on {where['host']}) {how}",
        f"what is known: distrun status {folder.id}; what it printed: distrun logs {folder.id}; "
        f"to end what may be left of it: distrun kill {folder.id}",
    )


def unanswering(folder: JobFolder, limit_s: float) -> CoordinatorLost:
    """Return the error of a coordinator that is silent."""
    pid = (folder.control() or {}).get("pid")
    return gone(folder, f"does not answer within {duration(limit_s)}; is it stopped (ps -o stat= -p {pid})?")


def _here(folder: JobFolder, where: Mapping[str, Any]) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(ANSWER_S)
    try:
        stream.connect(where["path"])
    except OSError as err:
        stream.close()
        if isinstance(err, TimeoutError):
            raise gone(folder, f"does not answer within {duration(ANSWER_S)}") from None
        if process.is_alive(process.Identity(where["pid"], where["start"])):
            raise gone(folder, f"cannot be reached: {where['path']}: {err.strerror}") from None
        raise gone(folder) from None
    return stream


def _unanswered(connection: ControlConnection, folder: JobFolder) -> CoordinatorLost:
    problem = getattr(connection._socket, "problem", None)
    if problem is None:
        return gone(folder)
    where = folder.control() or {}
    host, login = where.get("host"), where.get("login") or f"ssh {where.get('host')}"
    return CoordinatorUnreachable(
        f"job {folder.id}: its coordinator is on {host}, which cannot be asked: {problem.text}",
        f"{problem.fix or f'try: {login} true'}; or type this command on {host}",
    )


def check_version(version: Sequence[int], folder: JobFolder) -> None:
    """Check that more can be asked for than state, stop and kill.

    Raises:
        UsageError: the coordinator is of another version.
    """
    if version[0] != control.VERSION[0]:
        theirs, ours = (".".join(map(str, each)) for each in (version, control.VERSION))
        raise UsageError(
            f"job {folder.id}: its coordinator speaks control protocol {theirs}, and this distrun {ours}",
            f"use the distrun that launched it; distrun status, logs and kill {folder.id} work with any",
        )


# ---------------------------------------------------------------------- following a job


class FollowerOutput(Protocol):
    """What a follower needs of the terminal printer."""

    def start(self) -> None:
        """Take note that this process forks no more: what is said from now on may be printed by threads."""

    def show(self, piece: OutputPiece) -> None:
        """Take a piece of a task's output."""

    def say(self, text: str, level: str) -> None:
        """Take one message of distrun's own."""

    def toggle_pause(self) -> None:
        """Stop printing, or go on."""

    def leave_out(self) -> None:
        """Print no more of the output that waits: the user has interrupted the job."""

    def when_unread(self, on_unread: Callable[[], None]) -> None:
        """Have `on_unread` called, by any thread, when the reader of stdout turns out to have gone."""

    @property
    def draws(self) -> bool:
        """Whether it shows the job's progress in place, and so wants events and metrics."""

    def follow(self, kind: str, value: Mapping[str, Any]) -> None:
        """Take an "event", the "state", "metrics", or what is said of the copy ("sync")."""

    def hold(self, text: str = "") -> None:
        """Stop printing for a question, until `release`; for any thread."""

    def release(self, text: str = "") -> None:
        """Go on printing after a question; for any thread."""


@dataclass(frozen=True)
class Detached:
    """The job goes on without the terminal that launched it."""

    cursor: int | None
    """Where the terminal stood in the job's output; None: not known."""


class Follower:
    """Shows what a coordinator sends, and keeps what came of the job.

    Arguments:
        terminal: prints.
        has_output: the tasks' output is shown.
        on_state: called with each state of the job that is told, in the thread that reads.
    """

    def __init__(
        self,
        connection: ControlConnection,
        terminal: FollowerOutput,
        *,
        has_output: bool = True,
        on_state: Callable[[str], object] = lambda state: None,
    ) -> None:
        self.connection = connection
        self.cursor: int | None = None
        """Where the output that was shown ends."""
        self.outcome: Outcome | None = None
        self.failure: control.CoordinatorFailed | None = None
        self.detached: Detached | None = None
        self._terminal = terminal
        self._has_output = has_output
        self._on_state = on_state
        self._questions: dict[int, Callable[[], None]] = {}
        """What withdraws each question, by its number."""

    def run(self, limit_s: float | None = None, is_watched: Callable[[], bool] = lambda: True) -> None:
        """Show what comes until the connection ends. The arguments are those of `ControlConnection.frames`.

        Raises:
            TimeoutError: the coordinator has not answered for `limit_s`.
        """
        try:
            for frame in self.connection.frames(limit_s, is_watched):
                with reading():
                    self._take(frame)
        finally:
            for withdraw in self._questions.values():
                withdraw()

    def _take(self, frame: session.Frame) -> None:
        kind = control.TO_CLIENT.get(frame.type)
        match read(kind, frame.header, frame.body) if kind is not None else None:
            case control.Chunk() as told:
                self.cursor = self.cursor if told.cursor is None else told.cursor
                if self._has_output:
                    stream = told.stream if told.stream in ("out", "err") else "out"
                    self._terminal.show(OutputPiece(told.data, told.task, told.host, stream, told.at, told.length))
            case control.Said(text, level, sync):
                if sync is None:
                    self._terminal.say(text, level)
                else:
                    self._terminal.follow("sync", {"text": text, "level": level, "sync": sync._asdict()})
            case control.JobEvent(event):
                self._terminal.follow("event", event)
                if event["event"] == "state":
                    self._on_state(event["state"])
            case control.JobNumbers(metrics):
                self._terminal.follow("metrics", metrics)
            case control.OutputGap(length, cursor):
                self.cursor = cursor
                self._terminal.say(f"{length} bytes of output are not in the logs any more", "warning")
            case control.JobState(state, missed):
                if missed:
                    self._terminal.say(f"{missed} messages were left out: this terminal was too slow", "warning")
                self._terminal.follow("state", state)
                self._on_state(state["state"])
            case control.Prompt(number, text, limit_s):
                self._questions[number] = self._ask(number, text, limit_s)
            case control.PromptWithdrawn(number):
                self._questions[number]()
            case control.JobEnded(outcome):
                self.outcome = failures.from_json(outcome)
            case control.CoordinatorFailed() as failed:
                self.failure = failed
            case control.LauncherReleased(cursor):
                self.detached = Detached(cursor)
            case control.RequestRefused(message):
                self._terminal.say(message, "warning")

    def _ask(self, number: int, text: str, limit_s: float) -> Callable[[], None]:
        """Ask a question on the terminal in a thread of its own; return what withdraws it."""
        from distrun.ssh.ask import Abort, Aborted

        abort = Abort()

        def run() -> None:
            from distrun.ssh.ask import TERMINAL, read_secret

            self._terminal.hold()
            try:
                with contextlib.suppress(Aborted):
                    typed = read_secret(TERMINAL, text, limit_s, abort.check)
                    body = b"" if typed is None else typed.encode("utf-8", "replace")
                    self.connection.send("answer", body, id=number, given=typed is not None)
            finally:
                self._terminal.release()

        def withdraw() -> None:
            """Ask no more, and give the terminal its settings back."""
            abort.now()
            thread.join()

        thread = threading.Thread(target=run, name="question", daemon=True)
        thread.start()
        return withdraw


def raised(told: control.CoordinatorFailed, say: Callable[[str, str], None], verbosity: int = 0) -> BaseException:
    """Return the error that a coordinator tells of. With verbosity 2 its traceback is said."""
    if verbosity >= 2:
        say(told.trace.rstrip("\n"), "error")
    if told.kind == KeyboardInterrupt.__name__:
        return KeyboardInterrupt()
    return CoordinatorError(told.message, told.hint, told.exit_code)
