"""A coordinator's control socket that answers as a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from distrun_runtime.contract import session

METRICS: dict[str, Any] = {
    "schema": "distrun.metrics/1",
    "time": 1795531203.5,
    "progress": {
        "step": 1200,
        "total": 5000,
        "phase": 0,
        "fraction": 0.24,
        "eta_s": 720.0,
        "rate": 5.25,
        "loss": "nan",
        "values": {"accuracy": 0.91},
        "slowest": "worker-1",
    },
    "hosts": {
        "d1": {
            "heard_s": 0.4,
            "cores": 8,
            "cpu": 0.62,
            "load": 5.1,
            "mem_used": 12 * 2**30,
            "mem_total": 64 * 2**30,
            "disk_free": 100 * 2**30,
            "disk_total": 500 * 2**30,
            "net_rx": 125e6,
            "net_tx": 3e6,
            "gpus": [
                {
                    "uuid": "GPU-1",
                    "index": 0,
                    "name": "NVIDIA H100",
                    "util": 0.87,
                    "mem_used": 40 * 2**30,
                    "mem_total": 80 * 2**30,
                }
            ],
            "clock_offset_s": 0.001,
        }
    },
    "tasks": {
        "worker-0": {
            "cpu": 1.5,
            "rss": 3 * 2**30,
            "limit": None,
            "processes": 5,
            "read": 0.0,
            "write": 1000.0,
            "gpu": 0.87,
            "gpu_mem": 2**30,
            "output_age_s": 2.0,
            "condition": "stalled",
            "why": "no output, report or store call for 6 min",
            "report": {"step": 1200, "total": 5000, "values": {"loss": "nan"}, "age_s": 1.5},
        }
    },
    "store": {
        "servers": {
            "server-0": {
                "keys": 12,
                "bytes": 10 * 2**20,
                "rounds": 1200,
                "push_s": 10.5,
                "pull_s": 10.5,
                "in_s": 4e6,
                "out_s": 4e6,
                "queue": 0,
                "waiting": 1,
                "staleness_max": 0,
                "staleness_mean": 0.0,
                "lags": {"0": 0.0, "1": 0.31},
                "device": "gpu:0, cpu:0",
                "device_why": "key 'e' is row-sparse",
            }
        },
        "scheduler": {"members": 3, "barriers": 4, "barrier_waiting": 2},
        "push_s": 10.5,
        "pull_s": 10.5,
        "round_s": 5.25,
    },
    "history": {"cpu": [0.5], "net": [1e6], "push_s": [10.0], "pull_s": [10.0]},
}
"""A snapshot with every member."""

Answers = Callable[[str], Iterable[bytes]]


class Coordinator:
    """Listens at `path` until it is closed.

    `answers`: returns what is sent on a frame of that type; without it a client that subscribes gets METRICS. None
    among it ends the connection. `is_silent`: nothing is ever sent.
    """

    def __init__(self, path: Path, job: str, answers: Answers | None = None, is_silent: bool = False) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._job = job
        self._answers = answers or self._plainly
        self._is_silent = is_silent
        self.asked: list[dict[str, Any]] = []
        """The header of every frame that clients sent."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _plainly(self, kind: str) -> Iterable[bytes]:
        return [session.encode({"type": "metrics", "metrics": METRICS})] if kind == "subscribe" else []

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = session.Decoder()
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                for frame in decoder.feed(data):
                    self.asked.append(dict(frame.header))
                    if not self._is_silent:
                        self._answer(connection, frame.type)

    def _answer(self, connection: socket.socket, kind: str) -> None:
        if kind == "hello":
            told = {"type": "hello", "version": [1, 0], "job": self._job, "pid": 1, "host": "d1"}
            connection.sendall(session.encode(told))
        for data in self._answers(kind):
            connection.sendall(data)

    def close(self) -> None:
        """Let no more clients in."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
