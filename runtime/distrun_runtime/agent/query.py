"""Answers what an agent is asked before, or instead of, a job: one JSON-able value for each question.

An answer may block the agent, up to a deadline of its own.

`listen`, `connect` and `close` tell whether a host can be reached on its data ports: one host listens, others send a
nonce, and the first says which came. Nothing has to run meanwhile: the system completes connections and keeps what was
sent until `close` reads it.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import os
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Mapping

from distrun_runtime.agent import stopping
from distrun_runtime.contract import facts
from distrun_runtime.errors import ContractError

BACKLOG = 256
NONCE_LIMIT = 64
"""Bytes."""
READ_S = 1.0
"""How long `close` waits for the nonce of an accepted connection."""

_listening: List[socket.socket] = []


def answer(what: str, args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the answer to the question `what`.

    Raises:
        ContractError: there is no such question, or it cannot be answered.
        LookupError, TypeError, ValueError: an argument is missing or malformed.
        OSError: the system refused something.
    """
    if what not in _ANSWERS:
        raise ContractError(f"this agent has no tool {what!r}")
    return _ANSWERS[what](args)


def _ended(name: str, args: Mapping[str, Any]) -> Dict[str, Any]:
    """End the job `ID/NONCE` here; one of an older version is named by its id."""
    job, _, nonce = name.partition("/")
    grace_s = args.get("grace_s")
    return stopping.sweep(job, None if grace_s is None else float(grace_s), nonce)._asdict()


def _probe(args: Mapping[str, Any]) -> Dict[str, Any]:
    from distrun_runtime.agent import probe  # imports much that no other answer needs

    return probe.probe(args)


def _remove(job: str, path: str) -> Dict[str, Any]:
    """Remove a job's folder, at once for all readers; should we be ended meanwhile, `distrun gc` here goes on."""
    import shutil  # imports much that no other answer needs

    parent, name = os.path.split(path)
    if os.path.lexists(path):
        if name != job or os.path.islink(path) or not os.path.isfile(os.path.join(path, "plan.json")):
            raise ContractError(f"{path} is no folder of job {job}")
        doomed = os.path.join(parent, facts.REMOVED + name)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    return {}


def _daemon(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Start a process that goes on when this agent has ended."""
    from distrun_runtime.agent.share import private_root
    from distrun_runtime.contract import daemon

    data = binascii.a2b_base64(str(args["input"]))
    env = {str(name): str(value) for name, value in dict(args["env"]).items()}
    argv = [str(word) for word in args["argv"]]
    return {"line": daemon.start(argv, data, env, float(args["limit_s"]), private_root())}


_ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Dict[str, Any]]] = {
    "survey": lambda args: stopping.survey(),
    "sweep": lambda args: _ended(f"{args['job']}/{args.get('nonce') or ''}", args),
    "sweeps": lambda args: {str(each): _ended(str(each), args) for each in args["jobs"]},
    "match": stopping.match,
    "probe": _probe,
    "listen": lambda args: {"port": listen(str(args["address"]), str(args.get("port_range") or ""))},
    "connect": lambda args: {"results": connect(list(args["targets"]), float(args["limit_s"]))},
    "close": lambda args: {"nonces": close()},
    "daemon": _daemon,
    "remove": lambda args: _remove(str(args["job"]), str(args["folder"])),
}


def listen(address: str, port_range: str = "") -> int:
    """Listen on a port of `address`, within A-B if a range is given; return the port. Raises ContractError."""
    from distrun_runtime.contract.address import ports_to_try  # ctypes: only when it is needed

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reason = "none was tried"
    for port in ports_to_try(port_range):
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
    span = f", ports {port_range}" if port_range else ""
    raise ContractError(f"cannot listen on {address}{span}: {reason}")


def connect(targets: List[Mapping[str, Any]], limit_s: float) -> Dict[str, str]:
    """Send each target (host, address, port, nonce) its nonce, all at once; return by host why it failed, or ""."""
    results = {str(each["host"]): f"no answer within {limit_s:g} s" for each in targets}
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
                results[str(key.data["host"])] = _send_nonce(key.fileobj, str(key.data["nonce"]))
            if not ready and time.monotonic() >= deadline:
                for key in list(selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]
                break
    return results


def close() -> List[str]:
    """Return the nonces that arrived, and stop listening."""
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


def _send_nonce(opened: Any, nonce: str) -> str:
    code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not code:
            opened.send(nonce.encode("ascii"))
    except OSError as err:
        code = err.errno
    opened.close()
    return os.strerror(code) if code else ""
