"""The coordinator's service: it has clients, tells them what happens to the job, and does what they ask for.

The first client is the terminal that launched the job, connected by a socket pair. Others come by the control socket
(`ControlSocket`). All are served by one thread, which never waits for a client. The frames are in
`contract.control`.

What may wait for a client is bounded:

* output for the launching client, as bytes or as places in the log files (`clients.Backlog`);
* events and messages for another client, up to MAIL_LIMIT bytes: what comes then is counted, and the client gets the
  job's state instead once it has taken the rest;
* output for another client does not wait at all. It is read from the job's logs when the client takes it;
* of the snapshots of the job's numbers only the newest waits, once for all clients.

A signal from the launching client takes effect as if this process had received it. The end of its connection counts as
the end of the terminal: an attached job is stopped. After `detach` it means nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import selectors
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, List, Mapping, Optional, Tuple, Union

from distrun_runtime.contract import control, facts, private, process, session
from distrun_runtime.contract.agent_messages import TasksSignal
from distrun_runtime.coordinator.clients import Client, OutputPiece
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.messages import Event, Interrupt, MetricsWanted, StackWanted
from distrun_runtime.errors import WireError

if TYPE_CHECKING:
    from distrun_runtime.contract.control import OutputWanted
    from distrun_runtime.coordinator.logreader import LoggedOutput


READ_SIZE = 256 * 1024
INPUT_SIZE = 64 * 1024
CLIENTS = 64
"""Clients by the control socket at a time."""
TURN_S = 0.02
"""How long one client is served before the others."""
CHUNK = 128 * 1024
"""Bytes of output that are read from the logs at once, for one client."""
QUESTIONS = 64
"""For stacks, of one client at a time."""
HELLO_S = 10.0
"""A client that has not said hello for so long is dropped."""
CHECK_S = 0.2
"""Between two looks whether a question is still wanted."""
PACE_S = 0.05
"""New output is read from the logs so often, at most."""
END_S = 30.0
"""At the end, a launching client that takes nothing for so long is given up."""
OTHERS_END_S = 2.0
"""The same for others, which can read the rest in the job's logs."""
OTHERS_LIMIT_S = 10.0
"""At the end, others are given up after so long whatever they take: the end of `launch` waits for it."""


class Service:
    """The clients of a job. Its methods are for the loop's thread and never wait; `say` and `ask` are for any thread.

    Arguments:
        launcher: connection to the client that launched the job.
        job: the job's id.
        open_output: returns a reader of the job's output for a client, which begins at a cursor or about so many lines
            before the end; None: clients cannot have output.
        on_stop: called, in the service's thread, before the signal of a client's `stop` or `kill` takes effect, with
            `control.Stop.by`.
    """

    def __init__(
        self,
        launcher: Optional[socket.socket],
        job: str = "",
        open_output: Optional[Callable[[control.OutputWanted], LoggedOutput]] = None,
        on_stop: Callable[[str], None] = lambda by: None,
    ) -> None:
        self._job = job
        self._open_output = open_output
        self._on_stop = on_stop
        self._changed = threading.Condition()
        """Guards all that follows; notified when an answer has come or a client has gone."""
        self._clients: List[Client] = []
        self._launcher: Optional[Client] = None
        self.has_lost_launcher = False
        """Whether the launching client has ended before the job without telling of a signal."""
        self._listener: Optional[ControlSocket] = None
        self._state: Mapping[str, Any] = {}
        self._last: Optional[bytes] = None
        """The outcome, or why there is none."""
        self._put: Optional[Callable[[Event], None]] = None
        self._cursor = 0
        """Bytes of output so far: the launching client's position in the logs."""
        self._answers: Dict[int, Optional[str]] = {}
        self._asked = 0
        self._stacks_asked = 0
        self._asking: Dict[int, Client] = {}
        """Questions for stacks that are not fully answered, to who asked; they are dropped with their client."""
        self._is_closing = False
        self._closing_since = 0.0
        self._has_output = False
        self._read_at = 0.0
        self._snapshot: Optional[Callable[[], bytes]] = None
        """Encodes the newest snapshot of the job's numbers, once; None: no client wants one."""
        self._metrics_wanted = MetricsWanted(False)
        """What the job's loop was told."""
        self._wakeup, self._waking = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waking, False)
        self._is_woken = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="clients", daemon=True)
        if launcher is not None:
            launcher.setblocking(False)
            self._launcher = Client(launcher, is_launcher=True)
            self._clients.append(self._launcher)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def listen(self, listener: ControlSocket) -> None:
        """Let clients in from now on. The service closes the listener at its end."""
        with self._changed:
            self._listener = listener
            self._wake()

    # ------------------------------------------------------------------ to the clients

    def output(self, task: str, host: str, stream: str, data: bytes, at: Optional[int]) -> None:
        """Send bytes of a task; a client that is slow is told later where they are in the log file."""
        with self._changed:
            launcher = self._launcher
            self._cursor += len(data) if at is not None else 0
            if launcher is not None:
                launcher.backlog.put(OutputPiece(data, task, host, stream, at, len(data)))
                self._wake()
            if not self._has_output:
                self._has_output = True
                if len(self._clients) > (launcher is not None):
                    self._wake()  # to read the logs when it is time

    @property
    def launcher_draws(self) -> bool:
        """Whether the launching client shows progress in place: it wants it more often than a file does."""
        launcher = self._launcher
        return launcher is not None and launcher.wants.metrics

    def say(self, text: str, level: str, sync: Optional[control.CopyProgress] = None) -> None:
        """Send one message of distrun's own. `sync` is as in `control.Said`."""
        told = control.Said(text, level, sync)
        with self._changed:
            self._to_launcher(told)
            if level != "debug":
                self._post(control.encode(told), lambda wants: wants.output is not None)

    def opened(self, put: Callable[[Event], None]) -> None:
        """Have the job's loop end the job, from now on, when a client asks for that."""
        with self._changed:
            self._put = put
            if self._metrics_wanted.is_wanted:
                put(self._metrics_wanted)

    def closed(self) -> None:
        """That loop has ended: until the next is opened, a client that asks for the end has a signal sent here."""
        with self._changed:
            self._put = None

    def event(self, value: Mapping[str, Any]) -> None:
        """Send what is a line of events.jsonl to those who want events."""
        with self._changed:
            if any(client.wants.events for client in self._clients):
                self._post(control.encode(control.JobEvent(value)), lambda wants: wants.events)

    def state(self, value: Mapping[str, Any]) -> None:
        """Keep the job's state for those who ask."""
        with self._changed:
            self._state = value

    def stack(self, number: int, found: control.TaskStack) -> None:
        """Give the client that asked the question `number` (`StackWanted`) what was found of a task's stacks."""
        with self._changed:
            client = self._asking.get(number)
            if not found.left:
                self._asking.pop(number, None)
            if client is not None and not client.is_gone:
                self._reply(client, found)
                self._wake()

    def metrics(self, value: Mapping[str, Any]) -> None:
        """Take a snapshot of the job's numbers for those who want them; it takes the place of the one before."""
        with self._changed:
            if self._metrics_wanted.is_wanted:
                self._snapshot = functools.lru_cache(maxsize=None)(lambda: control.encode(control.JobNumbers(value)))
                self._wake()

    def finish(self, message: Union[control.JobEnded, control.CoordinatorFailed]) -> None:
        """Send the job's outcome, or why there is none; nothing is sent after it."""
        with self._changed:
            self._last = control.encode(message)
            self._has_output = True  # no client gets it before all output
            self._to_launcher(message)
            self._wake()

    def ask(self, prompt: str, limit_s: float, check: Callable[[], None]) -> Optional[str]:
        """Return what the user types at the launching client's terminal, which does not show it.

        Arguments:
            prompt: what the terminal shows.
            limit_s: how long the answer is awaited.
            check: called about every 0.2 s. If it raises, the question is withdrawn.

        Returns:
            None if there is no terminal or no answer.
        """
        with self._changed:
            self._asked += 1
            number = self._asked
            self._to_launcher(control.Prompt(number, prompt, limit_s))
        until = time.monotonic() + limit_s + 1.0
        try:
            while True:
                with self._changed:
                    if number in self._answers:
                        return self._answers.pop(number)
                    if self._launcher is None or time.monotonic() >= until:
                        return None
                    self._changed.wait(CHECK_S)
                check()
        except BaseException:
            with self._changed:
                self._to_launcher(control.PromptWithdrawn(number))
            raise

    def close(self) -> None:
        """Send what waits, then end all connections. A client that takes nothing for END_S is given up."""
        with self._changed:
            self._closing_since = time.monotonic()
            for client in self._clients:
                client.progress = self._closing_since
            self._is_closing = True  # last: the thread looks at it without the lock
            self._wake()
        self._thread.join()
        with self._changed:
            if self._waking >= 0:
                os.close(self._waking)
                self._waking = -1

    def _to_launcher(self, message: Any) -> None:
        if self._launcher is not None:
            self._launcher.post(control.encode(message))
            self._wake()

    def _post(self, data: bytes, is_wanted: Callable[[control.Subscribe], bool]) -> None:
        for client in self._clients:
            if is_wanted(client.wants) and not client.is_last:
                client.post(data)
                self._wake()

    def _wake(self) -> None:
        """Have the thread look; the lock is held."""
        if not self._is_woken and self._waking >= 0:
            self._is_woken = True
            with contextlib.suppress(BrokenPipeError):  # the thread has ended: the launching client was the last one
                os.write(self._waking, b"w")

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        for client in self._clients:
            self._selector.register(client.socket, selectors.EVENT_READ, client)
        is_listening = False
        while True:
            ready = self._selector.select(self._wait_s())
            with self._changed:
                if self._is_woken:  # both at once: a byte that is taken later would not be written again
                    self._is_woken = False
                    os.read(self._wakeup, 1)
                is_closing = self._is_closing
            for key, mask in ready:
                if isinstance(key.data, Client):
                    self._shielded(key.data, functools.partial(self._attend, key.data, mask))
                elif key.data is not None:
                    self._let_in()
            if self._listener is not None and not is_listening:
                is_listening = True
                self._selector.register(self._listener.socket, selectors.EVENT_READ, self._listener)
            if self._listener is not None and is_closing:
                self._selector.unregister(self._listener.socket)
                self._listener.close()
                self._listener = None
            self._send_all()
            self._drop_late(time.monotonic())
            if is_closing and not self._clients:
                break
        self._selector.close()
        os.close(self._wakeup)

    def _shielded(self, client: Client, act: Callable[[], None]) -> None:
        """Do something for a client; a fault of ours costs this client only, and is written to coordinator.log."""
        try:
            act()
        except Exception:
            import traceback

            traceback.print_exc()
            self._lose(client)

    def _wait_s(self) -> Optional[float]:
        """Return how long nothing has to be done unless something happens."""
        now = time.monotonic()
        with self._changed:
            if self._is_closing:
                return CHECK_S
            due: List[float] = []
            for client in self._clients:
                if not client.conversation.has_greeted:
                    due.append(client.since + HELLO_S)
                if client.is_last:
                    due.append(client.progress + _take_limit_s(client))
                if client.reader is not None and self._has_output:
                    due.append(self._read_at + PACE_S)
        return max(0.0, min(due) - now) if due else None

    def _let_in(self) -> None:
        """Accept clients that wait."""
        listener = self._listener
        while listener is not None:
            connection, why = listener.accept()
            if connection is None:
                if not why:
                    return
                with self._changed:
                    self._to_launcher(control.Said(f"control socket: {why}", "warning"))
                continue
            client = Client(connection, is_launcher=False)
            with self._changed:
                self._clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(self._clients) - (self._launcher is not None) > CLIENTS:
                text = f"the job has {CLIENTS} clients already"
                self._refuse(client, control.Refusal(text, "end one of them, such as a distrun attach", is_last=True))

    def _attend(self, client: Client, mask: int) -> None:
        """Take what a client sent, and note that it takes more."""
        if mask & selectors.EVENT_WRITE:
            client.is_waiting = False
        if not mask & selectors.EVENT_READ or client.is_gone:
            return
        try:
            data = client.socket.recv(INPUT_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(client)
            return
        if client.is_last:
            return
        try:
            for frame in client.decoder.feed(data):
                if not client.is_last:
                    self._take(client, frame)
        except WireError as err:
            self._refuse(client, control.Refusal(str(err), is_last=True))
            return
        if client.decoder.pending > control.FRAME_LIMIT:
            self._refuse(client, control.Refusal("the frame is too long", is_last=True))

    def _take(self, client: Client, frame: session.Frame) -> None:
        try:
            request = client.conversation.take(frame)
            self._HANDLERS[type(request)](self, client, request)
        except control.Refusal as refusal:
            self._refuse(client, refusal)

    def _on_hello(self, client: Client, request: control.Hello) -> None:
        self._reply(client, control.CoordinatorHello(self._job, os.getpid(), socket.gethostname()))

    def _on_state(self, client: Client, request: control.State) -> None:
        self._reply(client, control.JobState(self._state))

    def _on_stop_request(self, client: Client, request: control.Stop) -> None:
        self._reply(client, control.Done("stop"))
        self._interrupt(request.signal, by=request.by)

    def _on_kill(self, client: Client, request: control.Kill) -> None:
        self._reply(client, control.Done("kill"))
        self._interrupt("TERM", "INT")  # a Ctrl-C when the job is being stopped: nothing is waited for any more

    def _on_detach(self, client: Client, request: control.Detach) -> None:
        """Let the launching client go, if it is still there."""
        with self._changed:
            launcher = self._launcher
            if launcher is not None:
                launcher.post(control.encode(control.LauncherReleased(self._cursor)))
                launcher.is_last = True
                self._launcher = None
                self._changed.notify_all()  # who asks a question gets no answer
        self._reply(client, control.Done("detach", launcher is not None))

    def _on_signal(self, client: Client, request: control.Signal) -> None:
        if request.name in process.TASKS_SIGNALS:
            if self._put is not None:
                self._put(TasksSignal("", request.name, by="client"))
        elif request.name == "PIPE":
            self._interrupt("PIPE")
        else:
            raise_signal(request.name)

    def _on_answer(self, client: Client, request: control.PromptAnswer) -> None:
        with self._changed:
            self._answers[request.id] = request.text
            self._changed.notify_all()

    def _interrupt(self, *names: str, by: str = "") -> None:
        """Stop the job as if this process had received signals."""
        if "TERM" in names:
            self._on_stop(by)
        with self._changed:  # what is put is put before `closed`
            if self._put is not None:
                for name in names:
                    self._put(Interrupt(name, time.time()))
                return
        raise_signal(names[0])

    def _on_subscribe(self, client: Client, request: control.Subscribe) -> None:
        if client.is_launcher:
            request = dataclasses.replace(request, output=None)  # its output comes anyway
        if client.reader is not None:
            client.reader.close()
            client.reader = None
        if request.output is not None:
            if self._open_output is None:
                raise control.Refusal("this job's output cannot be read by its coordinator")
            try:
                client.reader = self._open_output(request.output)
            except OSError as err:
                raise control.Refusal(f"the job's logs cannot be read: {err}") from err
        client.may_read = True
        with self._changed:
            client.wants, client.has_subscribed = request, True
            client.snapshot = None
            self._want_metrics()

    def _want_metrics(self) -> None:
        """Tell the job's loop what clients want to know of its numbers, if that has changed. The lock is held."""
        wants = [client.wants for client in self._clients if client.wants.metrics]
        wanted = MetricsWanted(bool(wants), tuple(sorted({host for each in wants for host in each.look})))
        if wanted == self._metrics_wanted:
            return
        self._metrics_wanted = wanted
        if not wanted.is_wanted:
            self._snapshot = None
        if self._put is not None:
            self._put(wanted)

    def _on_stack(self, client: Client, request: control.Stack) -> None:
        with self._changed:
            if self._put is None or self._state.get("state") in (facts.SUBMITTING, facts.QUEUED):
                raise control.Refusal("the job has not started a task yet")
            if sum(other is client for other in self._asking.values()) >= QUESTIONS:
                raise control.Refusal(f"{QUESTIONS} questions for stacks are not answered yet", "wait for the answers")
            self._stacks_asked += 1
            number = self._stacks_asked
            self._asking[number] = client
        self._put(StackWanted(number, request.task))

    _HANDLERS: ClassVar[Mapping[type, Callable[[Service, Client, Any], None]]] = {
        control.Hello: _on_hello,
        control.State: _on_state,
        control.Stop: _on_stop_request,
        control.Kill: _on_kill,
        control.Detach: _on_detach,
        control.Subscribe: _on_subscribe,
        control.Stack: _on_stack,
        control.Signal: _on_signal,
        control.PromptAnswer: _on_answer,
    }

    def _reply(self, client: Client, message: Any) -> None:
        with self._changed:
            client.reply(control.encode(message))

    def _refuse(self, client: Client, refusal: control.Refusal) -> None:
        if client.is_launcher and refusal.is_last:
            self._lose(client)  # no client of ours
            return
        self._reply(client, control.RequestRefused(str(refusal), refusal.hint))
        client.is_last = client.is_last or refusal.is_last

    def _lose(self, client: Client) -> None:
        """A client has gone. If it is the launching one, the job ends with it."""
        self._forget(client)
        with self._changed:
            if client is not self._launcher:
                return
            self._launcher = None
            self._changed.notify_all()
            self.has_lost_launcher = not self._is_closing
        if self.has_lost_launcher:
            raise_signal("HUP")

    def _forget(self, client: Client) -> None:
        if client.is_gone:
            return
        client.is_gone = True
        with self._changed:
            self._clients.remove(client)
            for number, other in list(self._asking.items()):
                if other is client:
                    del self._asking[number]
            if client.wants.metrics:
                self._want_metrics()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        if client.reader is not None:
            client.reader.close()
        with contextlib.suppress(OSError):  # its end came first
            client.socket.shutdown(socket.SHUT_RDWR)
        client.socket.close()

    # ------------------------------------------------------------------ sending

    def _send_all(self) -> None:
        """Send every client what it takes."""
        now = time.monotonic()
        with self._changed:
            is_time = self._is_closing or (self._has_output and now >= self._read_at + PACE_S)
            if is_time:
                self._has_output = False
                self._read_at = now
        for client in list(self._clients):
            client.may_read = client.may_read or is_time
            if not client.is_waiting:
                self._shielded(client, functools.partial(self._send, client, time.monotonic() + TURN_S))
            if not client.is_gone:
                self._watch(client)

    def _send(self, client: Client, until: float) -> None:
        """Send until a client takes no more, has all, or has had its turn. Never waits."""
        while not client.is_gone:
            if not client.rest:
                client.rest = memoryview(self._next(client))
            if client.rest:
                try:
                    count = client.socket.send(client.rest[:READ_SIZE])
                except BlockingIOError:
                    client.is_waiting = True
                    return
                except OSError:
                    self._lose(client)
                    return
                client.rest = client.rest[count:]
                client.progress = time.monotonic()
            elif client.is_last:
                self._forget(client)
            elif client.reader is None or not client.may_read:
                return
            if time.monotonic() > until:  # now others
                with self._changed:
                    self._wake()
                return

    def _next(self, client: Client) -> bytes:
        """Return the next bytes for a client: replies, numbers, events and messages, output; at the end the outcome.

        Reads the job's logs without the lock.
        """
        numbers = self._numbers(client) if client.wants.metrics else b""  # this is often, and most want none
        if numbers:
            return numbers
        with self._changed:
            last, is_closing = self._last, self._is_closing
            if client.is_launcher:
                piece = client.backlog.take()
                if piece is None:
                    client.is_last = client.is_last or is_closing
                    return b""
                place = piece.task, piece.host, piece.stream, piece.at, piece.length
                return control.encode(control.Chunk(*place, piece.data)) if piece.task else piece.data
            if client.replies:
                return client.replies.popleft()
            if client.is_last:
                return b""
            if client.mail:
                data = client.mail.popleft()
                client.mail_size -= len(data)
                return data
            missed, client.missed = client.missed, 0
        if missed:
            return control.encode(control.JobState(self._state, missed))
        if client.reader is not None:
            if not client.may_read:
                return b""
            found = self._read(client)
            if found or client.may_read:
                return found
        if is_closing or (last is not None and client.has_subscribed):
            client.is_last = True
            return (last or b"") if client.conversation.is_same_major else b""
        return b""

    def _numbers(self, client: Client) -> bytes:
        """Return the newest snapshot of the job's numbers, if a client that wants them has not got it."""
        with self._changed:
            encode = self._snapshot
            is_late = self._is_closing or client.is_last or bool(client.replies)
            if encode is None or is_late or client.snapshot is encode:
                return b""
            client.snapshot = encode
        try:
            return encode()  # without the lock: it may be large
        except WireError:
            return b""  # it is larger than a frame may be: there are none of this job

    def _read(self, client: Client) -> bytes:
        """Return new output for a client; empty where there is none in the part of the logs that was looked at."""
        assert client.reader is not None
        try:
            found = client.reader.read(CHUNK)
        except OSError as err:
            told = control.encode(control.Said(f"the job's logs cannot be read: {err}", "warning"))
            wanted = client.wants.output
            if wanted is not None and wanted.until:  # the client waits for the end
                told += control.encode(control.OutputEnd(client.reader.cursor))
            client.reader.close()
            client.reader = None
            return told
        client.may_read = client.reader.has_more
        if client.reader.is_over:
            client.reader.close()
            client.reader = None
        elif client.may_read and not found:
            client.progress = time.monotonic()  # it waits for us
        return found

    def _watch(self, client: Client) -> None:
        """Tell the selector what is wanted of a client."""
        with self._changed:
            wanted = selectors.EVENT_WRITE if client.is_waiting else 0
            if not wanted or not client.is_full:
                wanted |= selectors.EVENT_READ
        if self._selector.get_key(client.socket).events != wanted:
            self._selector.modify(client.socket, wanted, client)

    def _drop_late(self, now: float) -> None:
        """Drop clients that have not said hello and, at the end, those that take nothing."""
        for client in list(self._clients):
            if not client.conversation.has_greeted and now >= client.since + HELLO_S:
                self._forget(client)
            elif self._is_closing or client.is_last:
                is_over = not client.is_launcher and now >= self._closing_since + OTHERS_LIMIT_S
                if (self._is_closing and is_over) or now >= client.progress + _take_limit_s(client):
                    self._forget(client)


def _take_limit_s(client: Client) -> float:
    """Return how long a client may take nothing of what it gets last."""
    return END_S if client.is_launcher else OTHERS_END_S


def raise_signal(name: str) -> None:
    """Have this process act as if it had received a signal. One that it ignores (nohup) becomes SIGTERM."""
    number = signal.Signals["SIG" + name]
    if signal.getsignal(number) == signal.SIG_IGN:
        number = signal.SIGTERM
    is_deadly = number in (signal.SIGTERM, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_DFL
    if is_deadly and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        number = signal.SIGINT  # the loop does not run: the other would end this process without a word
    os.kill(os.getpid(), number)


# The control socket, by which clients come.
#
# `contract.private` says where it is. Only this user and root are let in, by what the kernel says of the other end. The
# socket of a coordinator that died is replaced by the next job of that id, and removed by any later coordinator. The
# socket of one that lives never is.


BACKLOG = 64
STALE_LIMIT = 64
"""Sockets of dead coordinators that one coordinator removes."""
PAUSE_S = 0.05
"""Without a descriptor for a client that waits, it is looked so often whether there is one."""


class ControlSocket:
    """The listening socket of one job.

    Raises:
        ContractError: the folder is not this user's alone.
        OSError: it cannot be made.
    """

    def __init__(self, job: str, folder: str = "") -> None:
        self._folder = folder or private.own(private.lasting_root())
        private.make_lasting(self._folder)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with private.locked(self._folder):  # until it listens, it looks like that of a dead one
                _remove_stale(self._folder)
                self.path = self._bind(job)
                os.chmod(self.path, 0o600)
                self.socket.listen(BACKLOG)
            found = os.lstat(self.path)
            self._inode = (found.st_dev, found.st_ino)
            self.socket.setblocking(False)
        except BaseException:
            self.socket.close()
            raise

    def _bind(self, job: str) -> str:
        """Bind to a name of this job; another job of that id, of another store, may live."""
        for name in (job, f"{job}.{os.getpid()}"):
            path = private.socket_path(name, self._folder)
            try:
                self.socket.bind(path)
                return path
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
            if not private.is_live(path):
                os.unlink(path)
                self.socket.bind(path)
                return path
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)

    def accept(self) -> Tuple[Optional[socket.socket], str]:
        """Return the next client that waits, or None and why: empty if none waits, else whom it was refused to."""
        try:
            connection, _ = self.socket.accept()
        except OSError as err:  # none waits, or it has gone
            if err.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE_S)  # it waits until there is a descriptor
            return None, ""
        uid = private.peer_uid(connection)
        if uid not in (0, os.geteuid()):
            connection.close()
            return None, f"a client of user {uid} was refused"
        connection.setblocking(False)
        return connection, ""

    def close(self) -> None:
        """Remove the socket, if it is still this one."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)
        self.socket.close()


def _remove_stale(folder: str) -> None:
    """Remove sockets of dead coordinators, so that they do not pile up."""
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).glob("*" + private.SOCKET_SUFFIX))[:STALE_LIMIT]:
            private.unlink_dead(str(path))


# What the process of a coordinator needs beside the job itself: its streams, and clients by the control socket.


LOG = "coordinator.log"


def service_of(folder: JobFolder, launcher: Optional[socket.socket]) -> Service:
    """Return the service of a job, which has started. `launcher`: the connection to the client that launched it."""
    service = Service(launcher, folder.id, lambda wanted: _logged(folder, wanted), lambda by: _note_stop(folder, by))
    service.state(folder.written)
    service.start()
    return service


def listen(service: Service, folder: JobFolder) -> str:
    """Let clients in by the control socket of a job; return its path.

    Raises:
        ContractError, OSError: there can be no socket.
    """
    listener = ControlSocket(folder.id)
    service.listen(listener)
    return listener.path


def leave_streams(folder: JobFolder) -> None:
    """Read nothing, and write unexpected errors to a file of the job's folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = nothing
    with contextlib.suppress(OSError):  # a full disk
        log = os.open(str(folder.path / LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, to in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(to, fd)
    for fd in {nothing, log}:
        os.close(fd)


def _logged(folder: JobFolder, wanted: OutputWanted) -> LoggedOutput:
    from distrun_runtime.coordinator.logreader import LoggedOutput  # most jobs have one client, which needs it not

    return LoggedOutput(folder, wanted)


def _note_stop(folder: JobFolder, by: str) -> None:
    with contextlib.suppress(OSError):  # it is for a message only
        folder.ask_to_end(by)
