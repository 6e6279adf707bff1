"""What a task tells its agent: one JSON object a line, on the pipe DISTRUN_PUBLISH_FD."""

from __future__ import annotations

import json
import os
from typing import Dict, List, Optional, Tuple

LINE_LIMIT = 64 * 1024
_READ_BYTES = 64 * 1024


class Publisher:
    """The reading end of one task's publish pipe."""

    def __init__(self, task: str, descriptor: int) -> None:
        self.task = task
        self.descriptor: Optional[int] = descriptor
        """Non-blocking; None once it is closed."""
        self._rest = b""

    def read(self) -> Tuple[List[Dict[str, str]], List[str]]:
        """Return the objects that arrived, and what was wrong with other lines."""
        if self.descriptor is None:
            return [], []
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return [], []
        except OSError:
            data = b""
        if not data:
            self.close()
            data = b"\n" if self._rest else b""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        objects, wrong = [], []
        if len(self._rest) > LINE_LIMIT:
            self._rest = b""
            wrong.append("%s published a line of more than %d bytes; it was dropped" % (self.task, LINE_LIMIT))
        for line in lines:
            value = _object(line)
            if value is not None:
                objects.append(value)
            elif line.strip():
                wrong.append(
                    "%s published a line that is not a JSON object of texts and numbers: %.200r" % (self.task, line)
                )
        return objects, wrong

    def close(self) -> None:
        """Close the pipe."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _object(line: bytes) -> Optional[Dict[str, str]]:
    try:
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):  # the latter: brackets without end
        return None
    if not isinstance(value, dict) or not all(isinstance(fact, (str, int, float)) for fact in value.values()):
        return None
    return {_text(name): _text(fact if isinstance(fact, str) else json.dumps(fact)) for name, fact in value.items()}


def _text(text: str) -> str:
    """Return text that can be written: JSON can name halves of a character, which are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
