"""The copy of a job's files over its agents' channels, for engines whose hosts no ssh reaches.

Every agent is told that files can come (`copy`), looks at the folder and says whether it wants them (`folder`): of all
agents that see the same folder, one does. Then a few at a time are sent the snapshot (`files`), and say `copied`.
`docs/protocol.md` has the frames, `agent/unpack.py` the other end.

A copy has a thread of its own. `Deliveries` decides who is sent the files when, without effects.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Union

from distrun.sync.copier import INTERRUPTED, CopyRequest, FileCopier, Says, marked_source
from distrun.sync.rsync import RsyncProgress
from distrun.sync.rules import filters, keep_rules
from distrun.sync.tree import Snapshot, left_out_text, take_snapshot
from distrun_runtime.contract.agent_messages import Copied, CopyFailed, Copying, FolderFound
from distrun_runtime.contract.control import CopyProgress
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.folder import ON, PARTIAL
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import Event

if TYPE_CHECKING:
    from distrun_runtime.coordinator.channel import SessionChannel

WINDOW = 8
"""Agents that are sent files at a time."""
ANSWER_S = 60.0
"""How long an agent may take to look at its folder."""
STALL_S = 60.0
"""An agent that takes nothing, and puts nothing into place, for so long has failed."""
CANCEL_S = 5.0
TURN_S = 0.2

_KINDS = (FolderFound, Copying, Copied, CopyFailed)
_Told = Union[FolderFound, Copying, Copied, CopyFailed]


class CopyError(Exception):
    """A place cannot get the files. `place` is empty where it is none in particular."""

    def __init__(self, place: str, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.place = place
        self.fix = fix


class Deliveries:
    """Which places want the files, are sent them, have them. No side effects.

    Times are seconds of one clock that the caller reads.
    """

    def __init__(
        self,
        places: Sequence[str],
        now: float,
        window: int = WINDOW,
        answer_s: float = ANSWER_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.wanting = 0
        """Places that want the files or have been sent them."""
        self._unanswered = dict.fromkeys(places)
        self._begun = now
        self._window = window
        self._answer_s = answer_s
        self._stall_s = stall_s
        self._waiting: deque[str] = deque()
        self._running: dict[str, float] = {}
        """When something moved there last."""
        self._others = 0
        """Places that need nothing: another has their folder, or it is the source."""
        self._finished = 0

    @property
    def is_over(self) -> bool:
        """Whether all places have the files."""
        return not (self._unanswered or self._waiting or self._running)

    @property
    def ready(self) -> int:
        """How many places have the files. Those that share a folder have them when all others do."""
        return self._finished + (self._others if self.is_over else 0)

    def handle(self, event: _Told, now: float) -> None:
        """Note what an agent says.

        Raises:
            CopyError: it cannot take the files.
        """
        host = event.host
        match event:
            case CopyFailed():
                raise CopyError(host, event.reason, event.fix)
            case FolderFound() if host in self._unanswered:
                del self._unanswered[host]
                if event.state == "mine":
                    self.wanting += 1
                    self._waiting.append(host)
                else:
                    self._others += 1
            case Copied():
                self._finished += self._running.pop(host, None) is not None
            case Copying() if host in self._running:
                self._running[host] = now

    def next(self, now: float) -> list[str]:
        """Return the places that are to be sent the files now: none before all have answered."""
        found: list[str] = []
        while not self._unanswered and self._waiting and len(self._running) < self._window:
            place = self._waiting.popleft()
            self._running[place] = now
            found.append(place)
        return found

    def check(self, now: float, moved: dict[str, float]) -> None:
        """Look whether a host is late. `moved`: when a place was last sent a piece.

        Raises:
            CopyError: one is.
        """
        if self._unanswered and now >= self._begun + self._answer_s:
            first, *others = self._unanswered
            nor = f" (nor have {', '.join(others)})" if others else ""
            limit = duration(self._answer_s)
            raise CopyError(first, f"it has not said within {limit} whether it can take the files{nor}")
        for place, since in self._running.items():
            if now >= max(since, moved.get(place, 0.0)) + self._stall_s:
                raise CopyError(
                    place,
                    f"nothing has moved for {duration(self._stall_s)}",
                    "look at the network, or at the disk of that host",
                )


class ChannelCopier(FileCopier):
    """A copy to all places of a plan.

    `channels` are those of the plan's places. `snapshot` is what is sent, and closed at the end; without one it is
    taken when the copy begins.
    """

    def __init__(
        self,
        plan: Plan,
        request: CopyRequest,
        sink: Says,
        channels: Sequence[SessionChannel],
        *,
        snapshot: Snapshot | None = None,
    ) -> None:
        super().__init__(request, sink)
        self._plan = plan
        self._channels = {channel.host: channel for channel in channels}
        self._deliveries = Deliveries(list(self._channels), 0.0)
        self._snapshot = snapshot
        self._run = secrets.token_hex(8)
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._sent: dict[str, int] = {}
        """Bytes of the archive that have left, by place."""
        self._moved: dict[str, float] = {}

    def _work(self) -> tuple[str, str, str]:
        try:
            self._copy()
        except CopyError as err:
            return err.place, str(err) or "it did not say why", f"fix: {err.fix}" if err.fix else ""
        finally:
            self._close()
        return "", "", ""

    def cancel(self) -> None:
        """End it soon. See `FileCopier.cancel`."""
        super().cancel()
        self._close()

    def _close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()

    # In the thread

    def _copy(self) -> None:
        self._report_begin()
        snapshot = self._snapshot = self._snapshot or take_snapshot(self._source, self._request.rules)
        text = left_out_text(snapshot)
        if text:
            self._sink.say(text, "warning")
        rules = keep_rules(filters(self._request.rules, self._source)) if self._request.delete else []
        self._deliveries = Deliveries(list(self._channels), time.monotonic())
        with marked_source(self._source, PARTIAL + self._run + ON):
            for channel in self._channels.values():
                channel.divert(_KINDS, self._told.put)
                channel.send(messages.copy(self._run, rules))
            self._deliver(self._deliveries, snapshot)
        wanting = self._deliveries.wanting
        self._report_end(snapshot.files * wanting, snapshot.size * wanting)

    def _deliver(self, deliveries: Deliveries, snapshot: Snapshot) -> None:
        """Send the files to those who want them, until all have them. Raises CopyError."""
        while not deliveries.is_over:
            with contextlib.suppress(queue.Empty):
                self._hear(self._told.get(timeout=TURN_S))
            if self._cancelled.is_set():
                raise CopyError("", INTERRUPTED)
            now = time.monotonic()
            for place in deliveries.next(now):
                begins = f"copy {os.path.join(self._source, '')} -> {self._name(place)}:{self._dst}"
                self._sink.say(begins, "info", self._progress())
                self._channels[place].send_large(*messages.files(self._run, self._pieces(place, snapshot)))
            deliveries.check(now, self._moved)
            self._report(now, self._passed(snapshot), snapshot.total * deliveries.wanting)

    def _hear(self, event: Event) -> None:
        if isinstance(event, FolderFound):
            for note in event.notes:
                self._say_note(self._name(event.host), note)
        if isinstance(event, _KINDS):
            self._deliveries.handle(event, time.monotonic())

    def _pieces(self, place: str, snapshot: Snapshot) -> Iterator[bytes]:
        """Yield the archive for a place; the thread that writes to its channel takes it."""

        def told(offset: int) -> None:
            if self._cancelled.is_set():
                raise CopyError(place, "the copy was cancelled")
            with self._lock:
                self._sent[place] = offset
                self._moved[place] = time.monotonic()

        return snapshot.pieces(told)

    def _name(self, place: str) -> str:
        """Return what a place is called in messages."""
        host = self._plan.host_of(place).name
        return place if host == place else f"{host} (place {place})"

    # Progress

    def _progress(self, detail: str = "") -> CopyProgress:
        return CopyProgress(self._deliveries.ready, len(self._channels), detail)

    def _passed(self, snapshot: Snapshot) -> RsyncProgress:
        with self._lock:
            sent = list(self._sent.values())
        return RsyncProgress(sum(map(snapshot.passed, sent)), sum(sent), sum(sent))
