"""The dashboard as a program of its own, of a recorded job: `dashboard_program.py FILE [broken]`.

What it asks the coordinator for is appended to FILE. With `broken` its third picture raises an error.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import snapshots

from distrun.client import ControlConnection
from distrun.dashboard import view
from distrun.dashboard.loop import Dashboard, Signals
from distrun.dashboard.source import FrameSource
from distrun.dashboard.terminal import Terminal
from distrun_runtime.contract import session

TASKS = 40


class Folder:
    """What the dashboard needs of a job's folder."""

    id = "calm-otter-7f3"
    path = Path("/nonexistent")
    is_finished = False

    def state(self) -> dict[str, Any]:
        return snapshots.state(TASKS)

    def tail(self, task: str, lines: int) -> list[str]:
        return list(snapshots.ERROR)

    def last_events(self, size: int) -> list[dict[str, Any]]:
        return []

    def log_path(self, task: str) -> Path:
        return self.path

    def control(self) -> None:
        return None


def play(stream: socket.socket, record: Path) -> None:
    """Be the coordinator: send what was recorded, and note what is asked for."""
    for event in snapshots.events():
        stream.sendall(session.encode({"type": "event", "event": event}))
    stream.sendall(session.encode({"type": "metrics", "metrics": snapshots.metrics(TASKS)}))
    decoder = session.Decoder()
    while data := stream.recv(65536):
        for frame in decoder.feed(data):
            with record.open("a") as file:
                file.write(frame.type + "\n")


def main() -> int:
    ours, its = socket.socketpair()
    threading.Thread(target=play, args=(ours, Path(sys.argv[1])), daemon=True).start()
    if "broken" in sys.argv:
        break_pictures()
    folder: Any = Folder()
    connection = ControlConnection(its)
    with Signals() as signals, Terminal() as terminal:
        source = FrameSource(folder)
        source.start(connection)
        ended = Dashboard(folder, source, terminal, signals).run()
    return ended.exit_code if ended.signal is None else 128 + ended.signal


def break_pictures() -> None:
    left, made = 2, view.picture

    def picture(*values: Any) -> view.Picture:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("broken on purpose")
        return made(*values)

    view.picture = picture


if __name__ == "__main__":
    sys.exit(main())
