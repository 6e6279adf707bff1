"""One rank of rounds that move what a round has to move over plain TCP, and add nothing: MODEL ROUNDS.

The least traffic of a sum over n hosts: each rank has 1/n of the values, gets that part from every other rank, and
sends the result to every other: 2 (n - 1) / n times the values, out and in. What is received is not looked at: this is
the limit that the network sets, not a peer.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from typing import Dict, List

import shapes
from report import WARM_UP, link_bytes, moved_since, report

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONNECT_S = 60.0


def connected() -> Dict[int, socket.socket]:
    """Return a connection to every other rank. Rank 0 listens at MASTER_PORT and tells where the others listen."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.settimeout(CONNECT_S)
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    listener.bind(master if RANK == 0 else (os.environ["DMLC_NODE_HOST"], 0))
    listener.listen(WORLD)
    if RANK == 0:
        return answered(listener, range(1, WORLD))
    links = {0: opened(master, listener.getsockname())}
    for rank in range(1, RANK):
        host, port = line_of(links[0]).split()
        links[rank] = opened((host, int(port)), listener.getsockname())
    links.update(answered(listener, range(RANK + 1, WORLD)))
    return links


def line_of(link: socket.socket) -> str:
    """Receive a line, and nothing that comes behind it."""
    return link.makefile("rb", 0).readline().decode()


def opened(address: tuple[str, int], own: tuple[str, int]) -> socket.socket:
    """Connect, and say who we are and where we listen."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            link = socket.create_connection(address, CONNECT_S)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    link.sendall(("%d %s %d\n" % (RANK, *own)).encode())
    return link


def answered(listener: socket.socket, ranks: range) -> Dict[int, socket.socket]:
    """Wait for these ranks; as rank 0 tell each where those below it listen."""
    links: Dict[int, socket.socket] = {}
    where: Dict[int, str] = {}
    while len(links) < len(ranks):
        link, _ = listener.accept()
        rank, _, address = line_of(link).partition(" ")
        links[int(rank)], where[int(rank)] = link, address
    if RANK == 0:
        for rank, link in links.items():
            link.sendall("".join(where[below] for below in range(1, rank)).encode())
    return links


def exchange(links: Dict[int, socket.socket], part: memoryview, rooms: Dict[int, memoryview]) -> None:
    """Send a part to every other rank, and receive one from each."""
    senders = [threading.Thread(target=link.sendall, args=(part,)) for link in links.values()]
    readers = [threading.Thread(target=fill, args=(link, rooms[rank])) for rank, link in links.items()]
    for thread in senders + readers:
        thread.start()
    for thread in senders + readers:
        thread.join()


def fill(link: socket.socket, room: memoryview) -> None:
    """Receive until the room is full."""
    while room:
        count = link.recv_into(room)
        if not count:
            sys.exit("tcp_round.py: another rank has ended")
        room = room[count:]


def main() -> None:
    """Run the rounds and print the report."""
    model, rounds = sys.argv[1], int(sys.argv[2])
    links = connected()
    for link in links.values():
        link.settimeout(CONNECT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    elements = sum(_size(shape) for shape in shapes.MODELS[model]())
    part = memoryview(bytearray(4 * (elements // WORLD)))
    rooms = {rank: memoryview(bytearray(len(part))) for rank in links}
    ready = {rank: memoryview(bytearray(4)) for rank in links}
    times: List[float] = []
    begun = (0, 0)
    for number in range(rounds + WARM_UP):
        exchange(links, memoryview(struct.pack("i", number)), ready)  # All begin together.
        if number == WARM_UP:
            begun = link_bytes()
        begin = time.perf_counter()
        exchange(links, part, rooms)
        exchange(links, part, rooms)
        times.append(time.perf_counter() - begin)
    exchange(links, memoryview(struct.pack("i", rounds)), ready)
    report("tcp", model, RANK, times, moved_since(begun, rounds))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


if __name__ == "__main__":
    main()
