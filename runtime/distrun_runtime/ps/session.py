"""A worker process's node: its thread, and what happens when the process ends.

One node a process, shared by its stores; `current` opens it with the first dist store. A clean end of
the script flushes and says BYE, an exception says ABORT and waits for nothing. In a forked child every call raises
and the exit handlers do nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays.cores import usable_cores
from distrun_runtime.arrays.dtypes import Array, Buffer, DType
from distrun_runtime.arrays.shared_memory import BLOCKS, Pool, address_of
from distrun_runtime.contract import environ
from distrun_runtime.contract.metrics import Sender
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import KVError, RuntimeFault, StoreClosed
from distrun_runtime.protocol.message import (
    DTYPES,
    FLAGS_AT,
    GROUP_STORES,
    LAST_STORE,
    NUMBER,
    NUMBER_AT,
    REPLY,
    Membership,
    Message,
)
from distrun_runtime.ps.counters import NodeMetrics, Stages
from distrun_runtime.ps.loop import ROLE_CODES, Loop
from distrun_runtime.ps.node import bind, connected
from distrun_runtime.ps.role import Config, NodeRequest, Waits, when_done, worker_rank
from distrun_runtime.ps.routing import DIRECT_BYTES, MESSAGE_BYTES, ROUNDS_AT_ONCE
from distrun_runtime.ps.trace import Recorder, Trace
from distrun_runtime.ps.worker import BYE_S, Adopted, Ask, EntriesOf, Goodbye, Worker
from distrun_runtime.reporting import catch_up, meaning, publish, watch
from distrun_runtime.transport.base import Form, Transport
from distrun_runtime.transport.direct import Looking
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.host_segments import SharedLease

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_sharing import ReadExports

GOODBYE_S = BYE_S + 1.0
"""How long a process that ends waits for its node's thread."""


ANSWER_S = 0.1
"""How long a thread of the script waits for answers by itself. Then the node's thread, which hears of all else as well,
goes on with it."""
_FLAGS_END, _NUMBER = FLAGS_AT + 1, slice(NUMBER_AT, NUMBER_AT + NUMBER.size)
_PLAIN = bytes([REPLY])
_NOTHING: Sequence[Buffer] = [b""]
_LIMIT = "the limit is --op-timeout or DISTRUN_OP_TIMEOUT"


class ExportedMemory(NamedTuple):
    """What other processes on this host may read of this one. The session that has it closes it at its end."""

    staging: Pool
    """Values on their way, copied there by the store. Children that are forked do not see it."""
    arrays: Pool
    """Arrays of the script's (`KVStore.empty`)."""


class PlannedSend(NamedTuple):
    """One message of an `exchange`."""

    link: str
    frames: list[Buffer]
    """As `message.encode` makes them with `NodeSession.sender`; the first is a bytearray, and gets its number."""
    form: Form | None = None
    """What `form_of` says of the frames, if none of them goes by another path than the direct connection."""
    into: memoryview | None = None
    """Where the payload of the answer is received, if it has one frame of this size that travels as bytes. It may as
    well arrive elsewhere."""
    is_read: bool = False
    """Once it is answered, its frames are read no more."""


class Commitment:
    """Tells its caller whether a call goes on after an exception, such as that of a signal handler."""

    is_begun = False
    """What it sends is sent, whatever happens; before, an exception ends the call without a trace."""


class PlannedSends(Commitment, list[PlannedSend]):
    """The messages of an `exchange`."""

    looks = True
    """The answers may come so soon that the thread looks for them before it sleeps."""


class Asked(NamedTuple):
    """The arguments of `NodeSession.ask`, for what an `exchange` sends."""

    what: str
    messages: Sequence[tuple[str, Message]]
    after: Sequence[NodeRequest] = ()
    entries_of: EntriesOf | None = None
    members: Membership | None = None


class CallUnderWay:
    """Messages that a thread of the script sends by itself. The node's thread goes on with them if they are left."""

    begun = 0
    """How many were sent, or are being sent."""
    ask: Ask | None = None
    is_done = False
    """All answers were taken."""

    def __init__(
        self,
        sends: PlannedSends,
        links: tuple[str, ...],
        first: int,
        as_request: Callable[[], Asked],
        tell: Callable[[NodeRequest], object],
    ) -> None:
        self.sends = sends
        self.links = links
        """Each once."""
        self.leases: list[SharedLease] = []
        """Of shared memory that was read when the answers are here."""
        self.first = first
        """Number of the first message."""
        self.as_request = as_request
        """What is asked if they are left."""
        self.tell = tell
        """Is told of the request then."""


class NodeSession:
    """The connection of this process to the job.

    Threads: any may call. The node's own thread does all input and output, but what `exchange` does in its caller's.
    """

    def __init__(
        self, config: Config, transport: Transport | None = None, memory: ExportedMemory | None = None
    ) -> None:
        self.config = config
        self._pid = own_pid()
        self._memory = memory or ExportedMemory(Pool(is_inherited=False), Pool())
        self.has_arrays = False
        """Whether `empty` was called."""
        self._transport = transport or connected(config, self._memory)
        self.recorder = Recorder()
        """What the stores of this process do, while one is profiled."""
        self.stages = Stages(config.stages)
        """Where the time of their calls goes."""
        self._waits = Waits()
        self._calls = 0
        """Requests that were begun."""
        self._ready = NodeRequest("registration", waits=self._waits)
        self.worker = Worker(config, bind(self._transport, config), self._ready)
        self._trace = Trace(config.verbose, lambda: self.worker.me)
        BLOCKS.log_to(lambda text: self._trace.log("INFO", text))
        # Faults are injected, and messages sent again, by what is around this one.
        self._paths = self._transport if isinstance(self._transport, BulkTransport) else None
        self._direct = None if self._paths is None else self._paths.direct
        # If the job was started by hand, all its workers may be here.
        looking = Looking(usable_cores(), environ.read("DISTRUN_LOCAL_SIZE") or config.workers)
        self._turn = None if self._direct is None else self._direct.turn(looking)
        self._exchange: CallUnderWay | None = None
        """What a thread of the script does, or has left to the node's thread."""
        self._loop = Loop(
            *(self._transport, self.worker, config.token, self._trace),
            publish=publish,
            turn=None if self._turn is None else self._turn.lock,
            take_over=self._take_over,
        )
        if environ.text("DISTRUN_METRICS_SOCKET"):
            told = NodeMetrics("worker", Sender(), lambda: {"store_calls": self._calls}, waits=self._waits)
            self._loop.metrics = told.tick
        self._thread = threading.Thread(target=self._run, name="distrun-node", daemon=True)
        self._thread_id = 0
        self.value_servers = [f"server-{rank}" for rank in range(config.servers)]
        """Names of the servers that keep values; their ranks come first."""
        self._last_stores: dict[str, int] = {}
        """By group: how many stores were created there; of all workers under no name."""
        self.stores: object = None
        """What the store layer keeps of this process's stores (`store.link`)."""
        self._flushers: list[Callable[[], None]] = []
        self._crash: BaseException | None = None
        self.is_open = False
        """Whether `open` has returned: this process is in the job."""
        self._is_over = False
        self._is_closed = False
        """The node's thread takes no more requests."""

    def open(self) -> None:
        """Register and wait until all nodes are here and all servers are connected.

        One that was interrupted may be called again: it goes on waiting.

        Raises:
            Refused, TimedOut, PeerLost: why it did not come about.
        """
        if self._thread.ident is None:
            if not self.config.token:
                self._trace.log("WARNING", "this job runs open: DISTRUN_TOKEN_FILE is not set")
            self._thread.start()
        # The deadlines are the scheduler's and the worker's own; this one only guards against a dead thread.
        self._ready.wait(self.config.start_timeout_s * 2 + 60)
        self.is_open = True

    @property
    def has_failed(self) -> bool:
        """Whether registration has ended with an error."""
        return not self.is_open and self._ready.error is not None

    def staging(self, link: str) -> Pool | None:
        """Return memory that the other side of a link reads where it is; None: it does not."""
        return self._memory.staging if self._transport.shares(link) else None

    def exports(self, gpu: GpuDevice) -> ReadExports | None:
        """Return memory of a GPU that all servers which keep values read where it is; None: not all do."""
        return None if self._paths is None else self._paths.exports_to(self.value_servers, gpu)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array of undefined content; in memory that servers on this host can read where it is."""
        self.has_arrays = True
        found = self._memory.arrays.empty(shape, dtype) if self.config.paths != "none" else None
        return np.empty(shape, dtype) if found is None else found

    def reserve(self, store: int, sizes: Sequence[int], encoded: int = 0) -> None:
        """Have shared memory for values that GPUs push to a store, page-locked before a round needs it.

        It is enough for `ROUNDS_AT_ONCE` rounds. Servers of this host map it at once. Where memory is short, it comes
        with the rounds, as they need it.

        Arguments:
            store: its number.
            sizes: bytes of each value that is pushed as it is.
            encoded: bytes of all others together, as they are sent.
        """
        if self.config.paths == "none":
            return
        staged = sum(size for size in sizes if size < DIRECT_BYTES) + encoded  # Small values are joined there.
        # Those of a dtype lie end to end.
        self._memory.arrays.reserve(sum(sizes), min(len(sizes), len(DTYPES)), ROUNDS_AT_ONCE, store=store)
        self._memory.staging.reserve(staged, self.config.servers + staged // MESSAGE_BYTES, ROUNDS_AT_ONCE, store=store)
        self._transport.wake()  # It tells the servers.

    def unreserve(self, store: int) -> None:
        """A store is closed: its memory is room for the next one, or given back."""
        for pool in self._memory:
            pool.unreserve(store)
            pool.trim()

    def is_shared(self, array: Array) -> bool:
        """Whether a C-contiguous array has its memory from `empty`."""
        return self._memory.arrays.find(address_of(array), array.nbytes) is not None

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.worker.me.rank

    def num_dead(self, roles: Sequence[str], members: Membership) -> int:
        """Return how many nodes of these roles are known to be lost; of workers, those among `members`."""
        lost = [name for name in list(self.worker.dead) if name.partition("-")[0] in roles]
        return sum((rank := worker_rank(name)) is None or rank in members.ranks for name in lost)

    def next_store(self, group: str = "") -> int:
        """Return the number of a new store of a group, or of all workers.

        They are numbered in order of creation, from 1, alike on all workers that share them.

        Raises:
            KVError: there were as many as messages can number.
        """
        last, highest = self._last_stores.get(group, 0), LAST_STORE if group else GROUP_STORES - 1
        if last == highest:
            whose = f"group {group!r}" if group else "all workers"
            fix = "fix: use stores again, or create further ones in a group of another name (group=..., members=[...])"
            raise KVError(f"{last} stores of {whose} were created, and there are numbers for no more; {fix}")
        self._last_stores[group] = last + 1
        return self._last_stores[group]

    def take_back_store(self, number: int, group: str = "") -> None:
        """Take back the number of a store that was not made, if it is the last one."""
        if number == self._last_stores.get(group):
            self._last_stores[group] -= 1

    def ask(
        self,
        what: str,
        messages: Sequence[tuple[str, Message]],
        after: Sequence[NodeRequest] = (),
        entries_of: EntriesOf | None = None,
        members: Membership | None = None,
        *,
        commitment: Commitment | None = None,
        begun: Callable[[NodeRequest], object] = lambda request: None,
    ) -> NodeRequest:
        """Send messages, once `after` are done, and return what will hold their replies, in the order of `messages`.

        Arguments:
            entries_of, members: as in `worker.Ask`.
            commitment: is told when the call has begun.
            begun: called with the request when the call has begun, before this returns, or raises; once more if it is
                interrupted.
        """
        self.check()
        self._give_away_turn()
        self._calls += 1
        request = NodeRequest(what, _LIMIT, self._waits)

        def send() -> None:
            self._loop.ask(Ask(request, messages, entries_of, members))
            if self._is_closed or not self._thread.is_alive():
                request.resolve((), self._dead())

        commitment = Commitment() if commitment is None else commitment  # A list of sends may be empty.
        try:
            commitment.is_begun = True
            begun(request)
            when_done(after, send)
        except BaseException:
            if commitment.is_begun:  # It may be handed in twice then. The node's thread takes it in once.
                begun(request)
                when_done(after, send)
            raise
        return request

    @property
    def sender(self) -> tuple[int, int, int]:
        """Role, rank and incarnation of this worker, as messages have them."""
        return ROLE_CODES["worker"], self.worker.me.rank, self.worker.me.incarnation

    def exchange(
        self,
        sends: PlannedSends,
        as_request: Callable[[], Asked],
        begun: Callable[[NodeRequest], object],
        sent: Callable[[], object] | None = None,
        *,
        waits: bool = True,
    ) -> list[Sequence[Buffer]] | NodeRequest | CallUnderWay:
        """Send messages and receive their answers, in the calling thread if nothing else is in flight.

        Returns the frames of the answers, in the order of `sends`: each says that its request succeeded, and nothing
        else of it was looked at. Or a request as from `ask`: it was not the time for the former, or something else came
        than these answers, or nothing for `ANSWER_S`. The frames of `sends` are in use until the answers are here or
        the request is done.

        Arguments:
            as_request: returns what is asked then. Called at most once.
            begun: called with the request before this returns, or raises.
            sent: called once when the messages are on their way, or handed to the node's thread, so that others may
                send. Not always if this raises. The caller may hold a lock until then for which no callback in the
                node's thread (`NodeRequest.then`) waits.
            waits: False: return what `finish` takes once the messages were sent. It becomes a request, too, if anything
                else is asked before, when the node's thread next looks, or if the messages were too long to be sent at
                once.

        Raises:
            StoreClosed: as `ask`.
            KeyboardInterrupt: or what else a signal handler raises. What was sent goes on as a request.
        """
        if self._is_over or own_pid() != self._pid:
            self.check()
        turn, is_measured = self._turn, self.stages.is_on or self.recorder.is_on or self._trace.has_messages
        me = threading.get_ident()
        if turn is not None and not is_measured and me != self._thread_id and not turn.is_wanted:
            if turn.owner == me:
                self._give_away_turn()
            if turn.owner:
                turn.want()  # Another thread may wait for answers. This one would only make it longer.
            with turn.lock:
                turn.owner, turn.is_waiting = me, False
                try:
                    if turn.is_asked_for:
                        turn.begin()
                    exchange = self._reserve(sends, as_request, begun)
                    if exchange is not None:
                        self._calls += 1
                        return self._carry_out(exchange, sent, waits)
                finally:
                    turn.owner = 0
        request = self.ask(*as_request(), commitment=sends, begun=begun)
        if sent is not None:
            sent()
        return request

    def _reserve(
        self, sends: PlannedSends, as_request: Callable[[], Asked], tell: Callable[[NodeRequest], object]
    ) -> CallUnderWay | None:
        """Return what the calling thread may do by itself; None: it is the node's thread's to do."""
        assert self._direct is not None
        links = (sends[0].link,) if len(sends) == 1 else tuple(dict.fromkeys(send.link for send in sends))
        is_taken = self._is_closed or self._exchange is not None or self._loop.asked
        if is_taken or not all(map(self._direct.is_open, links)):
            return None
        first = self.worker.reserve(len(sends))
        return CallUnderWay(sends, links, first, as_request, tell) if first else None

    def finish(self, exchange: CallUnderWay, *, waits: bool = True) -> list[Sequence[Buffer]] | NodeRequest:
        """Receive the answers of an `exchange` that did not wait; with waits=False, only make it a request.

        Raises:
            StoreClosed: as `ask`.
            KeyboardInterrupt: as `exchange`.
        """
        if self._is_over or own_pid() != self._pid:
            self.check()
        turn, me = self._turn, threading.get_ident()
        assert turn is not None
        if turn.owner == me:
            self._give_away_turn()
        if turn.owner:
            turn.want()
        with turn.lock:
            turn.owner, turn.is_waiting = me, False
            try:
                if turn.is_asked_for:
                    turn.begin()
                if self._exchange is exchange:
                    return self._receive(exchange) if waits and not self._loop.asked else self._hand_over(exchange)
            except BaseException:
                self._leave(exchange)
                raise
            finally:
                turn.owner = 0
        assert exchange.ask is not None
        return exchange.ask.request

    def _give_away_turn(self) -> None:
        """Where a signal handler uses a store while its own thread waits for answers: let the node's thread go on.

        Raises:
            KVError: that thread did not wait: it was in the middle of sending or receiving.
        """
        turn = self._turn
        if turn is None or turn.owner != threading.get_ident() or not turn.lock.locked():
            return
        if not turn.is_waiting or self._exchange is None:
            raise KVError(
                "a signal handler used a store while its thread was sending or receiving for one;"
                " fix: set a flag in the handler, and look at it in the script between two calls"
            )
        self._hand_over(self._exchange)
        turn.give_away()

    def _carry_out(
        self, exchange: CallUnderWay, sent: Callable[[], object] | None, waits: bool
    ) -> list[Sequence[Buffer]] | NodeRequest | CallUnderWay:
        # A signal handler may raise anywhere here. What `_exchange` has is enough for the node's thread to go on.
        assert self._paths is not None
        assert self._direct is not None
        self._exchange, exchange.sends.is_begun = exchange, True
        try:
            self._direct.take(exchange.links)
            for number, send in enumerate(exchange.sends):
                head: Any = send.frames[0]
                NUMBER.pack_into(head, NUMBER_AT, exchange.first + number)
                if send.into is not None:
                    self._direct.expect(send.link, send.into)
                exchange.begun = number + 1
                if send.form is not None:
                    self._direct.send(send.link, send.frames, send.form)
                    continue
                lease = self._paths.send(send.link, send.frames)
                if send.is_read and isinstance(lease, SharedLease):
                    exchange.leases.append(lease)
            if sent is not None:
                sent()
            if waits:
                return self._receive(exchange)
            return exchange if self._direct.has_sent(exchange.links) else self._hand_over(exchange)
        except BaseException:
            self._leave(exchange)
            raise

    def _receive(self, exchange: CallUnderWay) -> list[Sequence[Buffer]] | NodeRequest:
        """Wait for the answers and return them. If something else comes, or is to be done, hand over."""
        assert self._paths is not None
        assert self._direct is not None
        links, until = exchange.links, time.monotonic() + ANSWER_S
        while self._direct.wait(max(until - time.monotonic(), 0.0), looks=exchange.sends.looks):
            came = self._paths.inbox(links[0])
            for link in links[1:]:
                more = self._paths.inbox(link)
                came = None if came is None or more is None else [*came, *more]
            if came is None:
                break
            if len(came) >= len(exchange.sends):
                answers = answers_to(exchange.sends, came)
                if answers is None:
                    break
                exchange.is_done = True
                for lease in exchange.leases:
                    lease.let_go()
                self._direct.give_back(links, drops=True)
                self._exchange = None
                return answers
        return self._hand_over(exchange)

    def _leave(self, exchange: CallUnderWay) -> None:
        """Have the node's thread go on with what was interrupted, unless it does already or nothing is left to do."""
        if self._exchange is exchange and not exchange.is_done:
            self._hand_over(exchange)

    def _hand_over(self, exchange: CallUnderWay) -> NodeRequest:
        if exchange.ask is not None:  # A signal handler did, or this is what follows an interruption.
            return exchange.ask.request
        asked = exchange.as_request()
        request = NodeRequest(asked.what, _LIMIT, self._waits)
        exchange.ask = Ask(request, asked.messages, asked.entries_of, asked.members)
        exchange.tell(request)
        self._transport.wake()
        if self._is_closed or not self._thread.is_alive():
            request.resolve((), self._dead())
        return request

    def _take_over(self) -> Adopted | None:
        """Return what a thread of the script has begun and left. For the node's thread, when it has the turn."""
        left, self._exchange = self._exchange, None
        if left is None:
            return None
        assert self._direct is not None
        if left.is_done:
            self._direct.give_back(left.links, drops=True)
            return None
        self._hand_over(left)  # `finish` was not called yet, or a call was interrupted twice.
        sent, ask = left.begun, left.ask
        assert ask is not None
        if sent and not self._direct.was_sent(left.sends[sent - 1].link, left.sends[sent - 1].frames[0]):
            sent -= 1
        self._direct.give_back(left.links)
        return Adopted(ask, left.first, sent)

    def check(self) -> None:
        """Raise StoreClosed where nothing can be asked any more.

        Raises:
            StoreClosed: in a forked child, or after the end.
        """
        if own_pid() != self._pid:
            raise StoreClosed(
                f"this process was forked from pid {self._pid} after the store was created, and a store"
                " cannot be shared with a child: create the store in the child, or start it with the 'spawn'"
                " method"
            )
        if self._is_over:
            raise StoreClosed("this worker has left the job")

    def before_end(self, flush: Callable[[], None]) -> None:
        """Call `flush` before BYE."""
        self._flushers.append(flush)

    def not_before_end(self, flush: Callable[[], None]) -> None:
        """Take back a `before_end`, if there is one: its store is closed."""
        if flush in self._flushers:
            self._flushers.remove(flush)

    def note_crash(self, error: BaseException) -> None:
        """The script failed: the end will be an ABORT that names `error`."""
        if self._crash is None:
            # Now, not at the end: the others hear of our ABORT and may be gone before we are.
            publish(meaning(error))
        self._crash = self._crash or error

    def end(self) -> BaseException | None:
        """Flush and say BYE, or say ABORT; then close. Does nothing the second time, or in a forked child.

        Returns what went wrong while flushing: a push whose error was not waited for.
        """
        if self._is_over or own_pid() != self._pid:
            return None
        flushed = None if self._crash else self._flush()
        error = self._crash or flushed
        self._is_over = True
        goodbye = NodeRequest("goodbye")
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        self._loop.ask(Goodbye(goodbye, reason[:2000]))
        self._thread.join(GOODBYE_S)
        for pool in self._memory:
            pool.close()
        said = self.stages.text(self.worker.me.name)
        if said:
            print(f"distrun: {said}", file=sys.stderr)
        return flushed

    def _flush(self) -> BaseException | None:
        errors: list[BaseException] = []
        for flush in list(self._flushers):
            try:
                flush()
            except Exception as err:
                # Whatever it is, the other stores are flushed too, and the job hears of our end.
                errors.append(err)
                for text in (err, *getattr(err, "__notes__", ())):
                    print(f"distrun: error: at exit: {text}", file=sys.stderr)
        return errors[0] if errors else None

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            self._loop.run()
        except BaseException as err:
            # A caller must not wait for a thread that died.
            self._crash = err
            raise
        finally:
            # First: who asks from now on sees it, or is found here.
            self._is_closed = True
            for action in self.worker.fail(self._dead()):
                action.request.resolve((), action.error)
            for asked in self._loop.unheard():
                cast("Ask | Goodbye", asked).request.resolve((), self._dead())
            if self._exchange is not None and self._exchange.ask is not None:
                self._exchange.ask.request.resolve((), self._dead())

    def _dead(self) -> RuntimeFault:
        what = "this worker has left the job" if self._is_over else "the node's thread has ended"
        return StoreClosed(f"{what}: {self._crash!r}" if self._crash else what)


def answers_to(sends: Sequence[PlannedSend], came: Sequence[Sequence[Buffer]]) -> list[Sequence[Buffer]] | None:
    """Return what came in the order of the requests; None: these are not plain answers to just these.

    No side effects.
    """
    if len(came) != len(sends):
        return None
    answers = [*came]
    if len(came) > 1:
        by_number = {bytes(frames[0][_NUMBER]): frames for frames in came}
        answers = [by_number.get(bytes(send.frames[0][_NUMBER]), _NOTHING) for send in sends]
    for send, frames in zip(sends, answers, strict=True):
        asked, said = send.frames[0], frames[0]
        if said[:_FLAGS_END] != bytes(asked[:FLAGS_AT]) + _PLAIN or said[_NUMBER] != asked[_NUMBER]:
            return None
    return answers


class _CurrentSession:
    """The one session of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: NodeSession | None = None
        self.is_watched = False
        """Whether the end of the process, and an exception that ends it, reach the session."""


_current = _CurrentSession()


def current(make_config: Callable[[], Config]) -> NodeSession:
    """Return this process's session, opening it the first time.

    After a failure it may be called again: a registration that was interrupted goes on, one that failed is made anew.

    Raises:
        StoreClosed: this process was forked from one that has a session.
        ContractError, Refused, TimedOut, PeerLost: why it could not be opened.
    """
    with _current.lock:
        session = _current.session
        if session is None or session.has_failed:
            config = make_config()
            if session is not None:
                session.end()
            session = _current.session = NodeSession(config)
            if not _current.is_watched:
                _current.is_watched = True
                atexit.register(_end_process)
                watch(_note_crash)
        session.check()
        if not session.is_open:
            session.open()
        return session


def _note_crash(error: BaseException) -> None:
    if _current.session is not None:
        _current.session.note_crash(error)


def _end_process() -> None:
    """End the session at the end of the process.

    A failed push that was not waited for makes the exit code 1: the script ended as if all were well, and an
    exit handler has no gentler way to say otherwise.
    """
    catch_up()
    if _current.session is not None and _current.session.end() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
