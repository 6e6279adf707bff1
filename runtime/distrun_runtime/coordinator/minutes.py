"""Formats the lines of metrics.jsonl, one sample of a job's metrics a minute. No side effects.

A line has at most LINE bytes, the file at most LIMIT. If a line would be too long, tasks and then hosts are left out,
and the line says how many. When the file is full, a last line says so.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, Mapping, Tuple

SCHEMA = "distrun.sample/1"
LINE = 4096
"""Bytes of a line, its newline included."""
LIMIT = 16 * 1024 * 1024
"""Bytes of the file."""
_ROOM_OF_NOTE = 200
_ROOM_OF_COUNTS = 64

Rows = Iterable[Tuple[str, Mapping[str, Any]]]


class MinuteLines:
    """The lines of one job's file, and how much of it is full."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._left = limit - _ROOM_OF_NOTE
        self._is_full = False

    def line(self, time: str, job: Mapping[str, Any], hosts: Rows, tasks: Rows) -> str:
        """Return the next line; empty: nothing is written any more.

        Args:
            time: RFC 3339.
            job: numbers of the whole job.
            hosts, tasks: name and numbers of each; the first ones are kept.
        """
        if self._is_full:
            return ""
        made = _line({"schema": SCHEMA, "time": time, **job}, hosts, tasks)
        if len(made) + 1 > self._left:
            self._is_full = True
            return json.dumps({"schema": SCHEMA, "time": time, "note": "the file is full: no more samples are kept"})
        self._left -= len(made) + 1
        return made


def _line(found: Dict[str, Any], hosts: Rows, tasks: Rows) -> str:
    head = _text(found)
    room = LINE - 1 - len(head) - _ROOM_OF_COUNTS
    if room < 0:
        return _text({name: found[name] for name in ("schema", "time")})
    pieces = [head[:-1]]
    for kind, rows in (("tasks", tasks), ("hosts", hosts)):
        texts, left = [], 0
        for name, each in rows:
            text = f"{json.dumps(name)}:{_text(each)}"
            if left or len(text) + 1 > room - len(kind) - 8:
                left += 1
            else:
                texts.append(text)
                room -= len(text) + 1
        room -= len(kind) + 8
        pieces.append(f',"{kind}":{{{",".join(texts)}}}')
        if left:
            pieces.append(f',"{kind}_left_out":{left}')
    return "".join(pieces) + "}"


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
