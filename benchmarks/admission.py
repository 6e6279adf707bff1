"""What it costs that a node asks for a password before ZeroMQ hears a peer (`distrun_runtime.transport.admission`).

Two processes on this machine, one socket each, three ways: `null` asks for nothing, `plain` is what distrun does,
`curve` would encrypt everything as well. They take turns; each figure is the median of the runs.

    python benchmarks/admission.py --write
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distrun_runtime.transport.base import Arrived, Heartbeat
from distrun_runtime.transport.zeromq import ZmqTransport

TOKEN = b"2b7e151628aed2a6abf7158809cf4f3c"
CONNECTIONS = 100
SMALL, SMALL_BYTES = 5000, 1024
LARGE, LARGE_BYTES = 100, 1 << 20
WAYS = ("null", "plain", "curve")

Keys = tuple[bytes, bytes]


def acceptor(way: str, keys: Keys, pipe: multiprocessing.connection.Connection) -> None:
    """Listen, and answer each message by its number of bytes, until the other side has had enough."""
    if way == "plain":
        node = ZmqTransport(Heartbeat(), TOKEN)
        pipe.send(node.bind("127.0.0.1"))
        proven: set[str] = set()
        while not pipe.poll(0):
            for event in node.poll(0.05):
                if isinstance(event, Arrived):
                    if event.link not in proven:
                        node.admitted(event.link)
                        proven.add(event.link)
                    with contextlib.suppress(ConnectionError):  # it is gone
                        node.send(event.link, [b"%d" % len(memoryview(event.frames[1])), b""])
        node.close()
        return
    context = zmq.Context()
    guard = ThreadAuthenticator(context) if way == "curve" else None
    if guard is not None:
        guard.start()
        guard.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.sndhwm = router.rcvhwm = 0
    if way == "curve":
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    while not pipe.poll(0):
        while router.poll(50):
            link, _, payload = router.recv_multipart(copy=False)
            router.send_multipart([link, b"%d" % len(payload.buffer), b""])
            if pipe.poll(0):
                break
    router.close()
    if guard is not None:
        guard.stop()
    context.term()


def dealer(way: str, keys: Keys, context: zmq.Context[Any], port: int) -> zmq.Socket[Any]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.sndhwm = made.rcvhwm = 0
    if way == "plain":
        from distrun_runtime.transport.admission import credentials

        made.plain_username, made.plain_password = credentials(TOKEN)
    elif way == "curve":
        made.curve_serverkey = keys[0]
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    made.connect("tcp://127.0.0.1:%d" % port)
    return made


def stream(socket: zmq.Socket[Any], count: int, payload: bytes) -> float:
    """Send messages and read their answers; return the seconds that it took."""
    begin = time.perf_counter()
    sender = threading.Thread(target=lambda: [socket.send_multipart([b"m", payload], copy=False) for _ in range(count)])
    sender.start()
    sender.join()
    for _ in range(count):
        socket.recv_multipart()
    return time.perf_counter() - begin


def measure(way: str) -> dict[str, float]:
    """Return seconds: of one connection up to its first answer, of small messages, of large ones."""
    keys = zmq.curve_keypair()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=acceptor, args=(way, keys, there))
    process.start()
    port = here.recv()
    context: zmq.Context[Any] = zmq.Context()
    try:
        begin = time.perf_counter()
        for _ in range(CONNECTIONS):
            with dealer(way, keys, context, port) as once:
                once.send_multipart([b"m", b""])
                once.recv_multipart()
        connect_s = (time.perf_counter() - begin) / CONNECTIONS
        with dealer(way, keys, context, port) as lasting:
            for _ in range(100):  # to warm up; nothing but HELLO may come before a connection is proven
                stream(lasting, 1, bytes(SMALL_BYTES))
            small_s = stream(lasting, SMALL, bytes(SMALL_BYTES))
            large_s = stream(lasting, LARGE, bytes(LARGE_BYTES))
        return {"a connection": connect_s, "small": small_s, "large": large_s}
    finally:
        here.send("stop")
        process.join(30)
        context.term()


ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "a connection": ("a connection, up to its first answer, ms", lambda s: "%.2f" % (s * 1e3)),
    "small": ("%d messages of 1 KB and their answers, ms" % SMALL, lambda s: "%.0f" % (s * 1e3)),
    "large": ("%d messages of 1 MiB and their answers, ms" % LARGE, lambda s: "%.0f" % (s * 1e3)),
}
HEADING = "Asking for a password"
SECTION = """\
Measured by `benchmarks/admission.py`. What it costs that a node turns peers away in ZeroMQ's own handshake
([protocol.md](protocol.md#before-hello)): two processes of this machine and one connection. `null`: asks for nothing.
`plain`: what distrun does. `curve`: ZeroMQ's other way, which also encrypts everything.

In brackets the time divided by that of `null`: median of the runs' ratios, and their range.

%s

%s
* Median of %d runs; the ways take turns.
"""


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="runs of each way (default 7)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.runs):
        for way in WAYS:
            runs[way].append(measure(way))
        print("admission.py: run %d of %d" % (number + 1, options.runs), file=sys.stderr)

    def cell(row: str, way: str) -> str:
        text = ROWS[row][1](statistics.median(run[row] for run in runs[way]))
        ratios = [run[row] / other[row] for run, other in zip(runs[way], runs["null"], strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        return text if way == "null" else text + " (%.2f; %.2f-%.2f)" % spread

    lines = ["| | %s |" % " | ".join(WAYS), "|---" * (len(WAYS) + 1) + "|"]
    lines += ["| %s | %s |" % (ROWS[row][0], " | ".join(cell(row, way) for way in WAYS)) for row in ROWS]
    print("\n".join(lines))
    if options.write:
        import report

        report.write(HEADING, SECTION % ("\n".join(lines), report.circumstances("admission.py"), options.runs))


if __name__ == "__main__":
    main()
