"""Delays every packet that comes into this network namespace, on kernels without the netem queue.

    python -m hostlab.netem DELAY-MS JITTER-MS SECONDS

It hangs itself into the INPUT chain through NFQUEUE and lets each packet go when its time has come, in order. INPUT,
because a packet that is held on its way out counts against its sender's socket and would throttle it. When this
process ends the rules go; if it is killed, `--queue-bypass` lets packets through at once.
"""

from __future__ import annotations

import collections
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

QUEUE = 7
NETLINK_NETFILTER = 12
SOL_NETLINK, NO_ENOBUFS = 270, 5
# nfnetlink_queue: the subsystem, its messages, and the attributes that are used here.
SUBSYSTEM = 3 << 8
PACKET, VERDICT, CONFIG = SUBSYSTEM, SUBSYSTEM | 1, SUBSYSTEM | 2
PACKET_HEADER, VERDICT_HEADER = 1, 2
CONFIG_COMMAND, CONFIG_PARAMETERS, CONFIG_LENGTH, CONFIG_MASK, CONFIG_FLAGS = 1, 2, 3, 4, 5
BIND, COPY_META, TAKE_GSO = 1, 1, 4
ACCEPT = 1
RULE = ("INPUT", "!", "-i", "lo", "-j", "NFQUEUE", "--queue-num", str(QUEUE), "--queue-bypass")


def attribute(kind: int, data: bytes) -> bytes:
    """Return a netlink attribute, padded."""
    return struct.pack("HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def message(kind: int, *attributes: bytes) -> bytes:
    """Return a netlink request to the queue."""
    body = struct.pack("!BBH", 0, 0, QUEUE) + b"".join(attributes)
    return struct.pack("IHHII", 16 + len(body), kind, 1, 0, 0) + body


def packets(data: bytes) -> Iterator[int]:
    """Give the numbers of the packets that a datagram announces."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("IH", data, at)
        if length < 16:
            return
        inner = at + 20
        while kind == PACKET and inner + 4 <= at + length:
            size, name = struct.unpack_from("HH", data, inner)
            if name & 0x7FFF == PACKET_HEADER:
                yield struct.unpack_from("!I", data, inner + 4)[0]
                break
            inner += max(4, (size + 3) & ~3)
        at += (length + 3) & ~3


def main() -> None:
    """Delay until the time is over or a signal comes."""
    delay, jitter, seconds = (float(word) for word in sys.argv[1:4])
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    queue.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    queue.setsockopt(SOL_NETLINK, NO_ENOBUFS, 1)
    queue.bind((0, 0))
    queue.send(message(CONFIG, attribute(CONFIG_COMMAND, struct.pack("!BBH", BIND, 0, 0))))
    parameters = (
        attribute(CONFIG_PARAMETERS, struct.pack("!IB", 0, COPY_META)),
        attribute(CONFIG_LENGTH, struct.pack("!I", 100000)),
        attribute(CONFIG_MASK, struct.pack("!I", TAKE_GSO)),
        attribute(CONFIG_FLAGS, struct.pack("!I", TAKE_GSO)),
    )
    queue.send(message(CONFIG, *parameters))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held: collections.deque[tuple[float, int]] = collections.deque()

    def release(now: float) -> None:
        while held and held[0][0] <= now:
            verdict = struct.pack("!II", ACCEPT, held.popleft()[1])
            queue.send(message(VERDICT, attribute(VERDICT_HEADER, verdict)))

    try:
        for program in ("iptables", "ip6tables"):
            subprocess.run([program, "-A", *RULE], check=program == "iptables")
        end = time.monotonic() + seconds
        latest = 0.0
        while (now := time.monotonic()) < end:
            release(now)
            wait = min(0.5, max(0.0, held[0][0] - now)) if held else 0.5
            if not select.select([queue], [], [], wait)[0]:
                continue
            data = queue.recv(1 << 20)
            now = time.monotonic()
            for packet in packets(data):
                latest = max(latest, now + max(0.0, delay + random.uniform(-jitter, jitter)) / 1000)
                held.append((latest, packet))
    finally:
        for program in ("iptables", "ip6tables"):
            subprocess.run([program, "-D", *RULE], check=False)
        release(float("inf"))


if __name__ == "__main__":
    main()
