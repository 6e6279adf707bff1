"""Ports that are free and stay free until somebody names them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10000


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of the loopback address that nobody has.

    Below those that the system gives to whoever asks for any port, and to every connection for its own end: none of
    them takes it before it is bound. (A connection to such a port, which is not bound yet, may even meet itself.)
    """
    above = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32768
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(100):
        port = random.SystemRandom().randrange(LOWEST, above) if above > 2 * LOWEST else 0
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no port from %d to %d is free" % (LOWEST, above))
