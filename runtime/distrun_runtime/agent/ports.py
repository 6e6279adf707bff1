"""Ports held for programs that cannot tell us which port they bound (torch, JAX, ps-lite).

A held port is bound with SO_REUSEADDR and never listens: the system gives it to nobody who asks for any port,
while a program that binds it by number with SO_REUSEADDR (they all do) gets it. Tried with ZeroMQ, a plain
listener, torch's TCPStore and JAX's coordinator on Linux. The BSDs refuse a second bind to the very same
address; there a program must bind a specific address, not the wildcard.
"""

from __future__ import annotations

import os
import socket
from typing import List, Tuple

from distrun_runtime.errors import ContractError


def hold(address: str, port_range: str = "") -> socket.socket:
    """Return a socket that holds a free TCP port on all addresses of `address`'s family.

    Args:
        address: an IP address; only its family counts.
        port_range: A-B, inclusive; empty: any free port.

    Raises:
        ContractError: the range is malformed, or nothing in it is free.
    """
    numbers = candidates(port_range)
    family, anywhere = (socket.AF_INET6, "::") if ":" in address else (socket.AF_INET, "0.0.0.0")
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in numbers:
        # Two sockets of ours may both be bound to one port: ask without SO_REUSEADDR first whether it is free.
        if port and not _is_free(family, anywhere, port):
            continue
        try:
            held.bind((anywhere, port))
            return held
        except OSError:
            continue
    held.close()
    raise ContractError(
        "no free port%s on host %s; give a wider --port-range"
        % (" in %s" % port_range if port_range else "", socket.gethostname())
    )


def number(held: socket.socket) -> int:
    """Return the port that is held."""
    return int(held.getsockname()[1])


def candidates(port_range: str) -> List[int]:
    """Return the ports to try, from a random one on; [0] (any) for an empty range.

    Raises:
        ContractError: not A-B with 1 <= A <= B <= 65535.
    """
    if not port_range.strip():
        return [0]
    low, high = _bounds(port_range)
    # Jobs that start together should not all try the same ports first.
    first = int.from_bytes(os.urandom(2), "big") % (high - low + 1)
    return list(range(low + first, high + 1)) + list(range(low, low + first))


def _bounds(port_range: str) -> Tuple[int, int]:
    first, dash, last = port_range.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high <= 65535:
        raise ContractError("port range %r: expected A-B with 1 <= A <= B <= 65535" % port_range)
    return low, high


def _is_free(family: int, anywhere: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((anywhere, port))
            return True
        except OSError:
            return False
