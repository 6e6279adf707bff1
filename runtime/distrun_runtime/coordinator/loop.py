"""The coordinator's event loop, for jobs and for questions to hosts.

Channels, signals and other threads put events on a queue. One thread hands them to a decision class, which returns
actions, and sends agents what the actions say. The loop also acknowledges output, pings agents so that their leases
do not end, and tells the decision class that time has passed. It waits for nothing but its queue.
"""

from __future__ import annotations

import queue
import time
from types import MappingProxyType
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Protocol, Sequence, Set, Tuple, Union

from distrun_runtime.contract import agent_messages, process
from distrun_runtime.contract.agent_messages import TasksSignal
from distrun_runtime.contract.daemon import ALL, Interrupts
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import AgentChannel
from distrun_runtime.coordinator.messages import Interrupt

PING_S = 2.0
FILES, FILES_A_CHANNEL = 256, 4
"""Files that may have to be open at once: of the process, and for each channel."""
BATCH = 256
"""Events that are taken from the queue before acks, pings and ticks have their turn."""

Encoder = Callable[[Any], Union[Frame, messages.Large]]
"""Returns the message of an action."""


class Decisions(Protocol):
    """What the loop drives. It is called by the loop's thread only, and never waits."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do: `HostLoop.run` returns."""

    def handle(self, event: messages.Event, now: float) -> Sequence[messages.AgentAction]:
        """Return what is to be done about `event`. `now`: monotonic clock, seconds."""

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""


class HostLoop:
    """Drives `decisions` over one channel a host.

    Arguments:
        decisions: gets a Tick first, then events as they come, and a Tick each `wake_s`.
        channels: one for each host that an action may name.
        encoders: by type of action, for those that are no frames by themselves (`Begin`: it takes the plan).
        ping_s: how often agents are pinged; default: PING_S.
        after_turn: called when the events at hand were handled, before they are acknowledged.
        signals: names of the signals that are events while `run` runs, if it is called in the main thread.
    """

    def __init__(
        self,
        decisions: Decisions,
        channels: Sequence[AgentChannel],
        *,
        encoders: Mapping[type, Encoder] = MappingProxyType({}),
        ping_s: Optional[float] = None,
        after_turn: Callable[[], None] = lambda: None,
        signals: Sequence[str] = ALL,
    ) -> None:
        self._decisions = decisions
        self._channels = {channel.host: channel for channel in channels}
        self._encoders = encoders
        self._ping_s = PING_S if ping_s is None else ping_s
        self._after_turn = after_turn
        self._signals = signals
        self._queue: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
        self._has_started = False
        self._listening: Set[str] = set()
        """Hosts whose agents are there."""
        self._said_bye: Set[str] = set()
        self._acks: Dict[Tuple[str, str, str], messages.Ack] = {}
        self._ticked = 0.0
        self._pinged = 0.0
        self._pings = 0

    def put(self, event: messages.Event) -> None:
        """Have an event handled; for any thread."""
        self._queue.put(event)

    def run(self) -> None:
        """Drive the decisions until they are over. The first call starts the channels; none closes them."""
        with Interrupts(self._take_signal, self._signals):
            self.drive()

    def drive(self) -> None:
        """Do what `run` does, and leave signals to the caller."""
        self._tick()
        if not self._has_started:
            self._has_started = True
            process.allow_open_files(FILES + FILES_A_CHANNEL * len(self._channels))
            self._pinged = time.monotonic()
            for channel in self._channels.values():
                channel.start(self.put)
        while not self._decisions.is_over:
            self._turn()

    def unheard(self) -> List[messages.Event]:
        """Return what was put and not handled, when the decisions are over."""
        return self._wait(0.0)

    def _take_signal(self, name: str) -> None:
        if name in process.TASKS_SIGNALS:
            self.put(TasksSignal("", name))
        elif name != "TSTP":  # Ctrl-Z stops the client's printing, and nothing here
            self.put(Interrupt(name, time.time()))

    def let_go(self, limit_s: float) -> Set[str]:
        """Close all channels, and wait at most so long until their agents have gone; return the hosts of the others."""
        for channel in self._channels.values():
            channel.close()
        left = set(self._listening)
        until = time.monotonic() + limit_s
        while left and time.monotonic() < until:
            for event in self._wait(until - time.monotonic()):
                if isinstance(event, (messages.AgentLost, agent_messages.Bye)):
                    left.discard(event.host)
        return left

    def close(self) -> None:
        """Close all channels, and cut those whose agents did not say `bye`."""
        for host, channel in self._channels.items():
            channel.close()
            self._drop(messages.Drop(host))

    def _turn(self) -> None:
        """Wait for one event, take what else is there, then do what time asks for."""
        now = time.monotonic()
        due = min(self._ticked + self._decisions.wake_s(), self._pinged + self._ping_s)
        for event in self._wait(max(0.0, due - now)):
            self._handle(event)
        self._after_turn()
        for ack in self._acks.values():
            self._send(ack)
        self._acks.clear()
        now = time.monotonic()
        if now >= self._ticked + self._decisions.wake_s():
            self._tick()
        if now >= self._pinged + self._ping_s:
            self._ping(now)

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._handle(messages.Tick(time.time()))

    def _wait(self, limit_s: float) -> List[messages.Event]:
        batch: List[messages.Event] = []
        try:
            batch.append(self._queue.get(timeout=limit_s))  # a signal puts an event, which ends this wait
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _handle(self, event: messages.Event) -> None:
        now = time.monotonic()
        if isinstance(event, agent_messages.AgentHello):
            self._listening.add(event.host)
        elif isinstance(event, (agent_messages.Bye, messages.AgentLost)):
            self._listening.discard(event.host)
            self._said_bye.update([event.host] if isinstance(event, agent_messages.Bye) else [])
        for action in self._decisions.handle(event, now):
            self._ACTS.get(type(action), HostLoop._send)(self, action)

    def _ack(self, action: messages.Ack) -> None:
        self._acks[action.host, action.task, action.stream] = action

    def _close(self, action: messages.Close) -> None:
        self._listening.discard(action.host)
        self._channels[action.host].close()

    def _drop(self, action: messages.Drop) -> None:
        """Cut a host's channel, unless its agent said `bye`: then it ends by itself, and its end tells something."""
        self._listening.discard(action.host)
        if action.host not in self._said_bye:
            self._channels[action.host].kill()

    def _send(self, action: messages.AgentAction) -> None:
        encode: Encoder = self._encoders.get(type(action), messages.to_frame)
        message = encode(action)
        if isinstance(message, messages.Large):
            self._channels[action.host].send_large(*message)
        else:
            self._channels[action.host].send(message)

    def _ping(self, now: float) -> None:
        self._pinged = now
        self._pings += 1
        for host in sorted(self._listening):
            self._send(messages.Ping(host, self._pings))

    _ACTS: ClassVar[Mapping[type, Callable[[HostLoop, Any], None]]] = {
        messages.Ack: _ack,
        messages.Close: _close,
        messages.Drop: _drop,
    }
