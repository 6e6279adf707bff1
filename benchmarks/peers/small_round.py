"""The least that a small round through a server costs in Python: FORM WORK=ROUNDS...

Two workers and a server: three processes that send a head of 64 bytes, without names, rounds, deaths or credentials.
FORM is one of:

    unix       heads over Unix sockets; values above 64 KB are in memory that worker and server share
    threads    the same, and each call is handed to a second thread of the worker and back, as a node's thread does it
    tcp        heads and values over TCP connections. Ranks 0 and 1 of a job of three are the workers, rank 2 the server
    ping-pong  a message there and back between ranks 0 and 1, by pyzmq over TCP: no server and no sum

WORK is the bytes of one key, or `SHAPES:each` with SHAPES of `shapes.named`: all keys, one after the other (not with
ping-pong). Each worker prints a JSON line for each work: its seconds of each round. These are limits, not peers.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import selectors
import socket
import struct
import sys
import threading
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from latency_round import ITEM, parsed
from report import sent, summed

HEAD = struct.Struct("<4sIIIQQ32x")
"""Magic, kind, round, bytes, offset, length."""
MAGIC, PUSH, SUM = b"DKV1", 1, 2
INLINE = 65536
"""Bytes up to which a value goes with its head where there is shared memory."""
WARM_UP = 10
WORKERS = 2
DEADLINE_S = 60.0
"""Of everything that is received."""

Works = List[Tuple[str, List[int], int]]
"""Name of each work, bytes of its keys, and rounds."""
Call = Callable[[np.ndarray, np.ndarray, int], None]
"""Sends a gradient in a round, and receives the sum."""


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive until the view is full."""
    while view:
        count = connection.recv_into(view)
        if not count:
            sys.exit("small_round.py: the other process has ended")
        view = view[count:]


def send(connection: socket.socket, head: bytes, value: np.ndarray) -> None:
    """Send a head and a value."""
    view = value.data.cast("B")
    count = connection.sendmsg([head, view]) - len(head)
    if count < len(view):
        connection.sendall(view[count:])


def worker_call(connection: socket.socket, shared: Optional[np.ndarray]) -> Call:
    """Return the call of a worker whose large values are in `shared` (uint8), if there is such memory."""
    answer = memoryview(bytearray(HEAD.size))

    def call(gradient: np.ndarray, result: np.ndarray, number: int) -> None:
        size = gradient.nbytes
        head = HEAD.pack(MAGIC, PUSH, number, size, 0, size)
        if shared is None or size <= INLINE:
            send(connection, head, gradient)
            fill(connection, answer)
            fill(connection, result.data.cast("B"))
        else:
            shared[:size] = gradient.view(np.uint8)
            connection.sendall(head)
            fill(connection, answer)
            result.view(np.uint8)[:] = shared[:size]

    return call


def handed_over(call: Call) -> Call:
    """Return the call made by a second thread."""
    arguments: List[Tuple[np.ndarray, np.ndarray, int]] = []
    begun, done = threading.Event(), threading.Event()

    def serve() -> None:
        while True:
            begun.wait()
            begun.clear()
            call(*arguments.pop())
            done.set()

    def handed(gradient: np.ndarray, result: np.ndarray, number: int) -> None:
        arguments.append((gradient, result, number))
        begun.set()
        if not done.wait(DEADLINE_S):
            sys.exit("small_round.py: the second thread has not answered in %g s" % DEADLINE_S)
        done.clear()

    threading.Thread(target=serve, daemon=True).start()
    return handed


def work(call: Call, rank: int, works: Works) -> None:
    """Run the rounds of each work, check every sum, and print the report."""
    for name, sizes, rounds in works:
        gradients = [np.empty(size // ITEM, np.float32) for size in sizes]
        results = [np.empty(size // ITEM, np.float32) for size in sizes]
        times: List[float] = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, rank, number))
            begin = time.perf_counter()
            for gradient, result in zip(gradients, results, strict=True):
                call(gradient, result, number)
            times.append(time.perf_counter() - begin)
            for key, result in enumerate(results):
                if not result[0] == result[-1] == summed(key, WORKERS, number):
                    sys.exit("small_round.py: %s, key %d, round %d: %r" % (name, key, number, result))
        print_report(rank, name, times)


def print_report(rank: int, name: str, times: List[float]) -> None:
    """Print the line of a work."""
    print(json.dumps({"rank": rank, "work": name, "times_s": times[WARM_UP:]}), flush=True)


def serve(connections: Sequence[socket.socket], shared: Optional[Sequence[np.ndarray]]) -> None:
    """Add the values of all workers and send them the sum, until one closes its connection."""
    selector = selectors.DefaultSelector()
    for number, connection in enumerate(connections):
        selector.register(connection, selectors.EVENT_READ, number)
    heads = [memoryview(bytearray(HEAD.size)) for _ in connections]
    values: Dict[int, np.ndarray] = {}
    rooms: List[np.ndarray] = [np.empty(0, np.float32) for _ in connections]
    while True:
        for key, _ in selector.select(DEADLINE_S):
            number = key.data
            first = connections[number].recv_into(heads[number])
            if not first:
                return
            fill(connections[number], heads[number][first:])
            _, _, round_number, size, _, _ = HEAD.unpack(heads[number])
            is_shared = shared is not None and size > INLINE
            if is_shared and shared is not None:
                values[number] = shared[number][:size].view(np.float32)
            else:
                if rooms[number].nbytes != size:
                    rooms[number] = np.empty(size // 4, np.float32)
                fill(connections[number], rooms[number].data.cast("B"))
                values[number] = rooms[number]
            if len(values) < len(connections):
                continue
            total = values[0]
            np.add(total, values[1], out=total)
            answer = HEAD.pack(MAGIC, SUM, round_number, size, 0, size)
            if is_shared:
                values[1][:] = total
            for connection in connections:
                send(connection, answer, total[:0] if is_shared else total)
            values.clear()


def on_one_host(works: Works, with_threads: bool) -> None:
    """Fork the workers and the server, which have memory and Unix sockets in common."""
    most = max(size for _, sizes, _ in works for size in sizes)
    shared = [np.frombuffer(mmap.mmap(-1, most), np.uint8) for _ in range(WORKERS)]
    pairs = [socket.socketpair() for _ in range(WORKERS)]
    for pair in pairs:
        for end in pair:
            end.settimeout(DEADLINE_S)

    def be_worker(rank: int) -> None:
        call = worker_call(pairs[rank][0], shared[rank])
        work(handed_over(call) if with_threads else call, rank, works)

    children = [forked(pairs, [rank], lambda rank=rank: be_worker(rank)) for rank in range(WORKERS)]  # type: ignore[misc]
    children.append(forked(pairs, [], lambda: serve([theirs for _, theirs in pairs], shared)))
    for pair in pairs:
        for end in pair:
            end.close()
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


def forked(pairs: List[Tuple[socket.socket, socket.socket]], ranks: List[int], act: Callable[[], None]) -> int:
    """Return the id of a child that acts and ends; it has the workers' sockets of these ranks, or the server's."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for rank, (own, theirs) in enumerate(pairs):
            if rank not in ranks:
                own.close()
            if ranks:
                theirs.close()
        act()
        code = 0
    finally:
        os._exit(code)


def over_tcp(works: Works) -> None:
    """Be one of the three ranks of a job."""
    import tcp_round

    links = tcp_round.connected()
    for link in links.values():
        link.settimeout(DEADLINE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tcp_round.RANK == WORKERS:
        serve([links[rank] for rank in range(WORKERS)], None)
    else:
        work(worker_call(links[WORKERS], None), tcp_round.RANK, works)


def ping_pong(works: Works) -> None:
    """Be rank 0, which binds and asks, or rank 1, which sends everything back."""
    import zmq

    rank = int(os.environ["RANK"])
    endpoint = "tcp://%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    with zmq.Context() as context, context.socket(zmq.PAIR) as connection:
        connection.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1e3))
        connection.setsockopt(zmq.LINGER, int(DEADLINE_S * 1e3))
        if rank == 0:
            connection.bind(endpoint)
        else:
            connection.connect(endpoint)
        for name, [size], rounds in works:
            value = np.zeros(size, np.uint8)
            times: List[float] = []
            for _ in range(rounds + WARM_UP):
                begin = time.perf_counter()
                if rank == 0:
                    connection.send(value.data, copy=False)
                    connection.recv(copy=False)
                else:
                    connection.send(connection.recv(copy=False), copy=False)
                times.append(time.perf_counter() - begin)
            if rank == 0:
                print_report(rank, name, times)


def sizes_of(code: str) -> List[int]:
    """Return the bytes of the keys of a work."""
    return [ITEM * math.prod(shape) for shape in parsed(code)[0]]


def main() -> None:
    """Run the rounds in one of the forms."""
    form = sys.argv[1]
    works = [(code, sizes_of(code), int(rounds)) for code, rounds in (each.split("=") for each in sys.argv[2:])]
    if form == "tcp":
        over_tcp(works)
    elif form == "ping-pong":
        ping_pong(works)
    else:
        on_one_host(works, with_threads=form == "threads")


if __name__ == "__main__":
    main()
