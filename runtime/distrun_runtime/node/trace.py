"""What PS_VERBOSE asks for: addresses and ids at 1, every message at 2. One line each, `key=value`, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from distrun_runtime.device.dtypes import name_of
from distrun_runtime.net.handshake import Identity
from distrun_runtime.net.message import DTYPES, Message

_ALWAYS = ("WARNING", "ERROR")


class Trace:
    """Writes a node's lines, each with its role and rank."""

    def __init__(self, verbose: int, me: Callable[[], Identity], out: TextIO | None = None) -> None:
        self._verbose = verbose
        self._me = me
        self._out = out

    def log(self, level: str, text: str) -> None:
        """Write a line; INFO and DEBUG only from PS_VERBOSE=1 on."""
        if self._verbose or level in _ALWAYS:
            prefix = "" if level == "INFO" else level.lower() + ": "
            self._write(prefix + text)

    def sent(self, link: str, message: Message) -> None:
        """Write a line for a message that goes out, at PS_VERBOSE=2."""
        if self._verbose > 1:
            self._write("event=send to=%s %s" % (link, describe(message)))

    def received(self, link: str, message: Message) -> None:
        """Write a line for a message that came in, at PS_VERBOSE=2."""
        if self._verbose > 1:
            self._write("event=receive from=%s %s" % (link, describe(message)))

    def _write(self, text: str) -> None:
        me = self._me()
        rank = "" if me.rank < 0 else " rank=%d" % me.rank
        text = text.replace("\r", "\\r").replace("\n", "\\n")  # a stranger's words are in some of them
        # One write a line: several threads and processes share the stream.
        out = self._out or sys.stderr
        out.write("distrun role=%s%s time=%.3f %s\n" % (me.role, rank, time.time(), text))
        out.flush()


def describe(message: Message) -> str:
    """Return the fields of a message as `key=value` pairs, without any value of an array or secret."""
    fields = ["kind=%s" % message.kind.name.lower(), "store=%d" % message.store, "request=%d" % message.request]
    if message.is_reply:
        fields.append("reply=%s" % ("error" if message.is_error else "ok"))
    if message.priority:
        fields.append("priority=%d" % message.priority)
    if message.entries:
        size = sum(memoryview(payload).nbytes for payload in message.payloads)
        first = message.entries[0]
        fields.append(
            "entries=%d key=%d offset=%d round=%d" % (len(message.entries), first.key, first.offset, first.round)
        )
        codec = "codec=%d " % first.codec if first.codec else ""
        fields.append("%sdtype=%s bytes=%d" % (codec, name_of(DTYPES[first.dtype]), size))
    if message.is_error:
        fields.append("reason=%r" % str(message.body.get("reason", "")))
    return " ".join(fields)
