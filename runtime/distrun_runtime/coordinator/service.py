"""The coordinator's connection to its client: the terminal from which an attached job was launched.

The coordinator is a process of its own. It sends the client what is to be shown and what is to be asked; the client
sends signals and answers. Both use the frames of `contract.wire` over a stream socket (docs/protocol.md, "Client and
coordinator"):

    to the client:    output, said, prompt, withdrawn, outcome, failed
    to us:            signal, answer

Signals take effect as if this process had received them. The end of the connection counts as the end of the
terminal: an attached job is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any, Callable, Dict, Optional

from distrun_runtime.contract import wire
from distrun_runtime.coordinator.output import Backlog, OutputPiece
from distrun_runtime.errors import WireError

SIGNALS = ("INT", "TERM", "HUP")
"""What a client may send."""
READ_SIZE = 256 * 1024
GLANCE_S = 0.2
"""Between two looks whether a question is still wanted."""
END_S = 30.0
"""At the end, a client that takes nothing for so long is given up."""


class ClientConnection:
    """One client. It is an `output.Sink` for the loop's thread; `ask` is for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._backlog = Backlog()
        self._answers: Dict[int, Optional[str]] = {}
        self._asked = 0
        self._is_closing = False
        self._is_gone = False
        self._progress = time.monotonic()
        self._writer = threading.Thread(target=self._write, name="write client", daemon=True)
        self._reader = threading.Thread(target=self._read, name="read client", daemon=True)

    def start(self) -> None:
        """Start the two threads."""
        self._writer.start()
        self._reader.start()

    # ------------------------------------------------------------------ to the client

    def output(self, task: str, host: str, stream: str, data: bytes, at: Optional[int]) -> None:
        """Send bytes of a task; a client that is slow is told later where they are in the log file."""
        self._put(OutputPiece(data, task, host, stream, at, len(data)))

    def say(self, text: str, level: str) -> None:
        """Send one message of distrun's own."""
        self._send({"type": "said", "text": text, "level": level})

    def toggle_pause(self) -> None:
        """Do nothing: the client itself stops printing, or goes on."""

    def finish(self, outcome: Dict[str, Any]) -> None:
        """Send the job's outcome, as JSON-able values."""
        self._send({"type": "outcome", "outcome": outcome})

    def fail(self, error: Dict[str, Any]) -> None:
        """Send why there is no outcome: kind, message, hint, exit_code, trace."""
        self._send({"type": "failed", **error})

    def ask(self, prompt: str, limit_s: float, check: Callable[[], None]) -> Optional[str]:
        """Return what the user types at the client's terminal, which does not show it.

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
        self._send({"type": "prompt", "id": number, "text": prompt, "limit_s": limit_s})
        until = time.monotonic() + limit_s + 1.0
        try:
            while True:
                with self._changed:
                    if number in self._answers:
                        return self._answers.pop(number)
                    if self._is_gone or time.monotonic() >= until:
                        return None
                    self._changed.wait(GLANCE_S)
                check()
        except BaseException:
            self._send({"type": "withdrawn", "id": number})
            raise

    def close(self) -> None:
        """Send what waits, then end the connection. A client that takes nothing for END_S is given up."""
        with self._changed:
            self._is_closing = True
            self._progress = time.monotonic()
            self._changed.notify_all()
        while self._writer.is_alive() and time.monotonic() - self._progress < END_S:
            self._writer.join(GLANCE_S)
        with contextlib.suppress(OSError):  # its end came first
            self._connection.shutdown(socket.SHUT_RDWR)  # also ends the threads' calls
        self._reader.join()
        self._writer.join()
        self._connection.close()

    def _send(self, header: Dict[str, Any]) -> None:
        self._put(OutputPiece(wire.encode(header)))

    def _put(self, piece: OutputPiece) -> None:
        with self._changed:
            if not self._is_gone:
                self._backlog.put(piece)
                self._changed.notify_all()

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._backlog and not self._is_closing:
                        self._changed.wait()
                    piece = self._backlog.take()
                if piece is None:
                    return
                rest = memoryview(piece.data if not piece.task else _output(piece))
                while rest:
                    rest = rest[self._connection.send(rest[:READ_SIZE]) :]
                    self._progress = time.monotonic()
        except OSError:
            self._end()

    # ------------------------------------------------------------------ from the client

    def _read(self) -> None:
        decoder = wire.Decoder()
        try:
            while True:
                data = self._connection.recv(READ_SIZE)
                if not data:
                    break
                for frame in decoder.feed(data):
                    self._take(frame)
        except (OSError, WireError, KeyError, ValueError):
            pass  # its end, or no client of ours
        self._end()
        if not self._is_closing:
            _raise_signal("HUP")

    def _take(self, frame: wire.Frame) -> None:
        if frame.type == "signal":
            _raise_signal(str(frame.header["name"]))
        elif frame.type == "answer":
            with self._changed:
                text = frame.body.decode("utf-8", "replace") if frame.header.get("given") else None
                self._answers[int(frame.header["id"])] = text
                self._changed.notify_all()
        else:
            raise WireError(f"a client sent {frame.type!r}")

    def _end(self) -> None:
        with self._changed:
            self._is_gone = True
            self._backlog = Backlog()
            self._changed.notify_all()


def _output(piece: OutputPiece) -> bytes:
    header: Dict[str, Any] = {"type": "output", "task": piece.task, "host": piece.host, "stream": piece.stream}
    return wire.encode({**header, "at": piece.at, "length": piece.length}, piece.data)


def _raise_signal(name: str) -> None:
    """Have this process act as if it had received a signal. One that it ignores (nohup) becomes SIGTERM."""
    if name not in SIGNALS:
        raise WireError(f"a client sent the signal {name!r}")
    number = signal.Signals["SIG" + name]
    if name == "HUP" and signal.getsignal(number) == signal.SIG_IGN:
        number = signal.SIGTERM
    os.kill(os.getpid(), number)
