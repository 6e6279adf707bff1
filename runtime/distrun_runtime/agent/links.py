"""Can this host be reached on its data ports? One side listens, others leave a nonce, the first tells what came.

Nothing has to run meanwhile: the system completes connections and keeps what was sent until `close` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from typing import Any, Dict, List, Mapping

from distrun_runtime.agent import ports
from distrun_runtime.errors import ContractError

BACKLOG = 256
NONCE_LIMIT = 64
"""Bytes."""
READ_S = 1.0
"""How long `close` waits for the nonce of a connection that is there."""

_listening: List[socket.socket] = []


def answer(what: str, args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the answer to `listen`, `connect` or `close`.

    listen: `address`, `port_range` -> {"port"}. connect: `targets`, each {"host", "address", "port", "nonce"}, and
    `limit_s` for all together -> {"results": {host: ""} or a reason}. close: -> {"nonces"}.

    Raises:
        ContractError: nothing to listen on.
    """
    if what == "listen":
        return {"port": listen(str(args["address"]), str(args.get("port_range") or ""))}
    if what == "connect":
        return {"results": connect(list(args["targets"]), float(args["limit_s"]))}
    return {"nonces": close()}


def listen(address: str, port_range: str = "") -> int:
    """Listen on a port of `address`, within A-B if a range is given; return the port. Raises ContractError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reason = "none was tried"
    for port in ports.candidates(port_range):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
        except OSError as err:
            listener.close()
            reason = err.strerror or str(err)
            if err.errno != errno.EADDRINUSE:
                break
            continue
        _listening.append(listener)
        return int(listener.getsockname()[1])
    raise ContractError("cannot listen on %s%s: %s" % (address, ", ports " + port_range if port_range else "", reason))


def connect(targets: List[Mapping[str, Any]], limit_s: float) -> Dict[str, str]:
    """Leave each target its nonce, all at once; return by host why that failed, "" if it did not."""
    results = {str(each["host"]): "no answer within %g s" % limit_s for each in targets}
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for each in targets:
            family = socket.AF_INET6 if ":" in str(each["address"]) else socket.AF_INET
            opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            code = opened.connect_ex((str(each["address"]), int(each["port"])))
            if code in (0, errno.EINPROGRESS):
                selector.register(opened, selectors.EVENT_WRITE, each)
            else:
                results[str(each["host"])] = os.strerror(code)
                opened.close()
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                selector.unregister(key.fileobj)
                results[str(key.data["host"])] = _leave(key.fileobj, str(key.data["nonce"]))
            if not ready and time.monotonic() >= deadline:
                for key in list(selector.get_map().values()):
                    _shut(key.fileobj)
                break
    return results


def close() -> List[str]:
    """Return the nonces that were left with us, and listen no more."""
    found = []
    while _listening:
        listener = _listening.pop()
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                came, _ = listener.accept()
                with came, contextlib.suppress(OSError):
                    came.settimeout(READ_S)
                    found.append(came.recv(NONCE_LIMIT).decode("ascii", "replace"))
        listener.close()
    return found


def _leave(opened: Any, nonce: str) -> str:
    code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not code:
            opened.send(nonce.encode("ascii"))
    except OSError as err:
        code = err.errno
    _shut(opened)
    return os.strerror(code) if code else ""


def _shut(opened: Any) -> None:
    with contextlib.suppress(OSError):
        opened.close()
