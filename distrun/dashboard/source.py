"""The source of the dashboard's data: frames of the coordinator or, without one, the job's folder.

A thread connects, reads and reconnects; it never uses the terminal. It wakes the dashboard by writing to a pipe, and
the dashboard then calls `take`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Union

from distrun.errors import DistrunError
from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import seconds
from distrun_runtime.contract.session import Frame
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.client import ControlConnection
    from distrun_runtime.coordinator.jobfolder import JobFolder

RETRY_S = 2.0
"""Between two looks for a coordinator that is gone."""
FOLDER_S = 0.5
"""Between two looks into the folder of a job without a control socket."""
EVENTS_SIZE = 64 * 1024
"""Bytes from the end of events.jsonl that are read at the start."""
WAITING = 10_000
"""Frames that may wait for the dashboard; older ones are dropped."""
WAITING_OUTPUT = 16 * 1024 * 1024
"""Bytes of output that may wait for it."""
END_S = 2.0


class FrameSource:
    """The frames of one job, and one that no coordinator sends: `link` says why nothing comes, empty if it does.

    `folder`: the job's folder on this machine.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._frames: deque[Frame] = deque(maxlen=WAITING)
        self._output_size = 0
        self._connection: ControlConnection | None = None
        self._wanted: Mapping[str, object] = {"events": True, "metrics": True}
        self._is_ending = threading.Event()
        self.wakeup, self._waking = os.pipe()
        """Readable when there is something to take."""
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._waking, False)
        self._users = 1
        """Of the pipe: who made this, and the thread while it runs."""
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)

    def start(self, connection: ControlConnection | None, has_events: bool = True) -> None:
        """Start the thread.

        Args:
            connection: one that was made already; None: there is none yet.
            has_events: the folder has the job's events; otherwise only those of what was checked before its start.
        """
        self._connection = connection
        for event in self._folder.last_events(EVENTS_SIZE) if has_events else ():
            self._tell("event", event=event)
        self._put_state()
        if connection is not None:
            self._greet(connection)
        self._users = 2
        self._thread.start()

    def take(self) -> list[Frame]:
        """Return the frames that have come."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        with self._lock:
            found = list(self._frames)
            self._frames.clear()
            self._output_size = 0
        return found

    def send(self, kind: str, **members: object) -> bool:
        """Send a frame to the coordinator; return False if there is no connection."""
        connection = self._connection
        if connection is None:
            return False
        connection.send(kind, **members)
        return True

    def subscribe(self, **members: object) -> None:
        """Say what is wanted, now and after the next connect: members of the frame `subscribe`."""
        if members != self._wanted:
            self._wanted = members
            self.send("subscribe", **members)

    def close(self, limit_s: float = END_S) -> None:
        """End the connection, and wait `limit_s` at most for the thread. It ends later if it is just connecting."""
        self._is_ending.set()
        connection = self._connection
        if connection is not None:
            connection.end()
        self._thread.join(limit_s)
        self._leave()

    def _leave(self) -> None:
        """Close the pipe if no one else uses it."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self.wakeup)
                os.close(self._waking)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_ending.is_set():
                if self._connection is not None:
                    self._read(self._connection)
                if self._is_ending.is_set() or self._has_ended():
                    break
                self._reconnect()
        except Exception as err:  # a fault of ours must not leave a dashboard that looks alive
            self._tell("failed_here", error=f"{type(err).__name__}: {err}")
            raise
        finally:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            self._leave()

    def _read(self, connection: ControlConnection) -> None:
        from distrun import client

        with contextlib.suppress(client.CoordinatorUnreachable):  # whether it can be reached again, `_reconnect` tells
            for frame in connection.frames():
                self._put(frame)
        self._connection = None
        connection.close()

    def _has_ended(self) -> bool:
        """Look into the folder; return whether the job is over."""
        from distrun import remote_jobs  # not for the readers of members

        remote_jobs.refreshed(self._folder, may_ask=False)  # what it warns of, `link` says
        return self._put_state() not in facts.GOING

    def _reconnect(self) -> None:
        """Look again and again for the coordinator, or in the folder, until there is one or the job is over."""
        from distrun import client

        while not self._is_ending.is_set():
            try:
                connection = client.connect(self._folder, may_ask=False)
            except (DistrunError, JobStoreError) as err:
                where = self._control()
                if where is not None:
                    self._tell("link", why=f"{err}; what is shown is the last that is known")
                if self._is_ending.wait(FOLDER_S if where is None else RETRY_S) or self._has_ended():
                    return
                continue
            self._connection = connection
            self._greet(connection)
            return

    def _control(self) -> Mapping[str, object] | None:
        try:
            found = self._folder.control()
        except JobStoreError:
            return None
        return found if found is not None and found["path"] else None

    def _greet(self, connection: ControlConnection) -> None:
        self._tell("link", why="")
        connection.send("state")
        connection.send("subscribe", **self._wanted)

    def _put_state(self) -> str:
        """Put the folder's state; return the job's, as far as it is known."""
        try:
            state = self._folder.state()
        except JobStoreError as err:
            self._tell("link", why=str(err))
            return facts.RUNNING
        self._tell("state", state=state)
        kept = self._folder.reports() if state["state"] not in facts.GOING else {}
        if kept:  # else what came from the coordinator stays, as for a job of another host
            self._tell("reports", reports=kept)
        if state["state"] in facts.OVER:
            with contextlib.suppress(JobStoreError):
                outcome = self._folder.outcome()
                if outcome is not None:
                    self._tell("outcome", outcome=outcome)
        if state["state"] == facts.LOST:
            self._tell("link", why=f"its coordinator is gone; distrun kill {self._folder.id} ends what is left")
        return str(state["state"])

    def _tell(self, kind: str, **members: object) -> None:
        """Put a frame of our own: what a coordinator would send, or why nothing comes from it."""
        self._put(Frame({"type": kind, **members}))

    def _put(self, frame: Frame) -> None:
        with self._lock:
            if frame.type == "metrics":
                # Only the newest counts.
                for at, waiting in enumerate(self._frames):
                    if waiting.type == "metrics":
                        del self._frames[at]
                        break
            elif frame.type == "output":
                self._output_size += len(frame.body)
                while self._output_size > WAITING_OUTPUT and (old := self._first_output()) is not None:
                    self._output_size -= len(old.body)
                    self._frames.remove(old)
            self._frames.append(frame)
        with contextlib.suppress(BlockingIOError):
            os.write(self._waking, b"w")

    def _first_output(self) -> Frame | None:
        return next((each for each in self._frames if each.type == "output"), None)


# Reads members of frames and files. A member that is missing, null or of a wrong type is unknown. No side effects.
#
# Frames may come from a newer distrun, so unknown members are ignored and no member is required.


def number(value: object) -> float | None:
    """Return a number; the texts "nan", "inf" and "-inf" are numbers, too."""
    if type(value) is float:  # first: most are, and a job has thousands
        return value
    if type(value) is int:
        return float(value) if abs(value) < sys.float_info.max else None
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):
        return float(value)
    return None


def finite(value: object) -> float | None:
    """Return a number that is neither infinite nor NaN."""
    found = value if type(value) is float else number(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: object) -> int | None:
    """Return a whole number."""
    found = finite(value)
    return None if found is None else int(found)


def string(value: object) -> str:
    """Return a text; "" in place of anything else."""
    return value if isinstance(value, str) else ""


def moment(value: object) -> float | None:
    """Return a time in seconds since 1970: RFC 3339 in a state or an event, a number in an outcome."""
    return _parsed(value) if isinstance(value, str) else finite(value)


@lru_cache(maxsize=16384)
def _parsed(value: str) -> float | None:
    """Return what a time means; those of a job's tasks come again with every state."""
    try:
        return seconds(value)
    except ValueError:
        return None


def members(value: object) -> Mapping[str, object]:
    """Return an object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> Sequence[Mapping[str, object]]:
    """Return the objects of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []


def texts(value: object) -> list[str]:
    """Return the texts of a list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list | tuple) else []


def numbers(value: object) -> dict[str, float]:
    """Return the numbers of an object by their names."""
    found = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in found.items() if each is not None}


def series(value: object) -> tuple[float | None, ...]:
    """Return a list of numbers; None where one is unknown."""
    return tuple(number(each) for each in value) if isinstance(value, list | tuple) else ()


Point = tuple[Union[int, None], float, float]
"""Where a curve was: step, seconds since the job's start, value."""


def curves(value: object) -> dict[str, tuple[Point, ...]]:
    """Return the curves of what scripts report, the loss first. What is no point is left out, as is an empty curve."""
    found = {}
    for name, told in members(value).items():
        rows = [each for each in told if isinstance(each, list) and len(each) == 3] if isinstance(told, list) else []
        points = [(whole(step), finite(time_s), number(each)) for step, time_s, each in rows]
        found[name] = tuple((step, at, each) for step, at, each in points if at is not None and each is not None)
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "loss", name)) if found[name]}


_BY_TYPE: Mapping[object, Callable[[object], object]] = {
    "str": string,
    "int": lambda value: whole(value) or 0,
    "int | None": whole,
    "float | None": finite,
    "Mapping[str, float]": numbers,
    "tuple[float | None, ...]": series,
    "tuple[str, ...]": lambda value: tuple(texts(value)),
}


@cache
def _readers(kind: type) -> Sequence[tuple[str, Callable[[object], object]]]:
    return [(each.name, _BY_TYPE[each.type]) for each in dataclasses.fields(kind) if each.type in _BY_TYPE]


def known(kind: type, told: Mapping[str, object]) -> dict[str, Any]:
    """Return the members of an object that a dataclass has as fields of the same names, read by the fields' types."""
    return {name: read(told.get(name)) for name, read in _readers(kind)}
