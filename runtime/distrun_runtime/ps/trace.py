"""What PS_VERBOSE asks for: addresses and ids at 1, every message at 2. One line each, `key=value`, on stderr.

`time` is the local time of day.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.contract.duration import time_of_day
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import DTYPES, Message, rows_of

_ALWAYS = ("WARNING", "ERROR")

STRANGER_LINES = 10
STRANGER_PERIOD_S = 60.0
"""So many different lines in so much time are written about peers that have proven nothing."""
_LINE_LIMIT = 8000
"""Characters of a line."""


class Trace:
    """Writes a node's lines, each with its role and rank."""

    def __init__(self, verbose: int, me: Callable[[], NodeIdentity], out: TextIO | None = None) -> None:
        self._verbose = verbose
        self._me = me
        self._out = out
        self._stranger_lines: set[str] = set()
        self._left_out = 0
        self._period_from = 0.0

    def log(self, level: str, text: str) -> None:
        """Write a line; INFO and DEBUG only from PS_VERBOSE=1 on."""
        if self._verbose or level in _ALWAYS:
            prefix = "" if level == "INFO" else level.lower() + ": "
            self._write(prefix + text)

    def stranger(self, text: str) -> None:
        """Write a warning about a peer that has proven nothing, unless there were too many lately, or the same one."""
        now = time.monotonic()
        more = ""
        if now - self._period_from >= STRANGER_PERIOD_S:
            if self._left_out:
                more = " (%d lines like this one were left out before it)" % self._left_out
            self._period_from, self._left_out = now, 0
            self._stranger_lines.clear()
        if text in self._stranger_lines or len(self._stranger_lines) == STRANGER_LINES:
            self._left_out += 1
            return
        self._stranger_lines.add(text)
        self.log("WARNING", text + more)

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
        text = printable(text, _LINE_LIMIT)  # a stranger's words are in some of them
        # One write a line: several threads and processes share the stream.
        out = self._out or sys.stderr
        out.write("distrun role=%s%s time=%s %s\n" % (me.role, rank, time_of_day(time.time()), text))
        out.flush()


def printable(text: str, limit: int) -> str:
    """Return a text in one line of at most about `limit` characters, without any that a terminal would obey; pure."""
    if len(text) > limit:
        text = "%s... (%d characters left out)" % (text[:limit], len(text) - limit)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text
    )


def describe(message: Message) -> str:
    """Return the fields of a message as `key=value` pairs, without any value of an array or secret."""
    fields = ["kind=%s" % message.kind.name.lower(), "store=%d" % message.store, "request=%d" % message.request]
    if message.is_reply:
        fields.append("reply=%s" % ("error" if message.is_error else "ok"))
    if message.priority:
        fields.append("priority=%d" % message.priority)
    if message.bucket:
        fields.append("bucket=%d step=%d" % (message.bucket, message.step))
    if len(message.entries):
        size = sum(memoryview(payload).nbytes for payload in message.payloads)
        first = rows_of(message.entries[:1])[0]
        fields.append(
            "entries=%d key=%d offset=%d round=%d" % (len(message.entries), first.key, first.offset, first.round)
        )
        codec = "codec=%d " % first.codec if first.codec else ""
        fields.append("%sdtype=%s bytes=%d" % (codec, name_of(DTYPES[first.dtype]), size))
    if message.is_error:
        fields.append("reason=%r" % str(message.body.get("reason", "")))
    return " ".join(fields)
