"""Answers what an agent is asked before, or instead of, a job: a JSON-able value for each question, or a stream.

An answer may block the agent, up to a deadline of its own. A stream (`JobStream`) does not: the agent's loop goes on.

`find` lists the files of a folder; of hosts that share it, the first one does. `jobs` then sends them.

`listen`, `connect` and `close` tell whether a host can be reached on its data ports: one host listens, others send a
nonce, and the first says which came. Nothing has to run meanwhile: the system completes connections and keeps what was
sent until `close` reads it.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import fnmatch
import os
import selectors
import socket
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

from distrun_runtime.agent import stopping
from distrun_runtime.agent.channel import READ_BYTES, Channel
from distrun_runtime.contract import facts
from distrun_runtime.contract.agent_messages import Answered, AnswerPiece
from distrun_runtime.contract.folder import expand, holder
from distrun_runtime.errors import ContractError

BACKLOG = 256
NONCE_LIMIT = 64
"""Bytes."""
READ_S = 1.0
"""How long `close` waits for the nonce of an accepted connection, and a stream for a control socket to let it in."""
WINDOW = 4 * 1024 * 1024
"""Bytes of a stream that may be sent before the first ones are taken."""

MOST = 50_000
"""Files that one answer may have; a frame has room for so many."""
FIND_S = 45.0
"""How long may be looked for them."""
OURS = ".distrun-"
"""Begins the names of distrun's own files, which are left out."""

_listening: List[socket.socket] = []
_left: List[str] = []
"""Links that are removed when this agent ends."""


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


def end() -> None:
    """Remove the links that answers left for as long as this agent lives."""
    while _left:
        with contextlib.suppress(OSError):
            os.unlink(_left.pop())


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
    "find": lambda args: _Finder(args["folder"], args["mark"], args["host"]).answer(args["patterns"]),
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


class _Finder:
    """A search in one folder.

    Args:
        folder: `~` is expanded, other relative paths begin at the home directory.
        mark: name of a link that leads to the host that has the folder. The first host that shares it makes it.
        host: what this host is called.
    """

    def __init__(self, folder: str, mark: str, host: str) -> None:
        self.root = os.path.realpath(expand(folder))
        os.stat(self.root)
        path = os.path.join(self.root, mark)
        with contextlib.suppress(OSError):  # it is there, or the folder cannot be written to: then it is taken for ours
            os.symlink(host, path)
            _left.append(path)
        self._holder = holder(self.root, mark) or host
        self._host = host
        self._until = time.monotonic() + FIND_S
        self._found: Dict[str, List[Any]] = {}
        """By name below the folder: that name, bytes, time of change in ns, whether it is executable."""
        self._left_out: List[List[str]] = []
        """Names that patterns fit, and why they are not in the answer."""

    def answer(self, patterns: Sequence[str]) -> Dict[str, Any]:
        """Return the tool's answer (docs/protocol.md): no files where another host has the folder.

        Raises:
            ContractError: there are too many files, or it took too long.
        """
        for pattern in patterns if self._holder == self._host else ():
            for name in self._below("", [part for part in pattern.split("/") if part not in ("", ".")] or ["**"]):
                try:
                    info = os.stat(self._path(name))
                    if not stat.S_ISREG(info.st_mode):
                        raise OSError("no file")
                except OSError as err:
                    self._left_out.append([name, err.strerror or str(err)])
                else:
                    self._found[name] = [name, info.st_size, info.st_mtime_ns, bool(info.st_mode & stat.S_IXUSR)]
        found = [*self._found.values()]
        return {"folder": self.root, "holder": self._holder, "files": found, "left_out": self._left_out}

    def _below(self, name: str, parts: Sequence[str]) -> Iterator[str]:
        """Yield what the parts of a pattern name, seen from the folder `name`; of a folder all that is in it.

        Links to folders are followed where a part of the pattern names them, and not where `**` or a folder does.
        """
        first, *rest = parts
        is_deep = first == "**"
        if is_deep and rest:
            yield from self._below(name, rest)
        try:
            entries = [*os.scandir(self._path(name))]
        except OSError as err:
            self._left_out.append([name, err.strerror or str(err)])
            return
        for entry in entries:
            if len(self._found) + len(self._left_out) > MOST or time.monotonic() > self._until:
                raise ContractError(f"{self.root}: more than {MOST} files, or too slow")
            if entry.name.startswith(OURS) or not (is_deep or fnmatch.fnmatchcase(entry.name, first)):
                continue
            child = os.path.join(name, entry.name)
            if entry.is_dir(follow_symlinks=not is_deep):
                yield from self._below(child, parts if is_deep else rest or ["**"])
            elif not rest:
                yield child

    def _path(self, name: str) -> str:
        """Return the path of what is in the folder, without links. Raises OSError: it is outside."""
        path = os.path.realpath(os.path.join(self.root, name))
        if not (path + "/").startswith(os.path.join(self.root, "")):
            raise OSError("leads out")
        return path


class JobStream:
    """What this host knows of jobs: their files, then what their control sockets send until these end.

    No more is read than there is room for, so that coordinators see that a client is slow.

    Args:
        channel: takes the pieces, and the answer at the end.
        number: of the question.
        selector: of the agent's loop, which calls `proceed` before it waits.
        args: docs/protocol.md.
    """

    def __init__(
        self, channel: Channel, number: int, selector: selectors.BaseSelector, args: Mapping[str, Any]
    ) -> None:
        self._channel = channel
        self._number = number
        self._selector = selector
        self._room = WINDOW
        self._peers: Dict[str, socket.socket] = {}
        self._pieces = self._read(**args)

    def proceed(self) -> bool:
        """Say what there is room for; return whether more may come, else the answer was said."""
        while self._room > 0 and next(self._pieces, False):
            self._channel.flush()  # the next socket may take its time
        is_open = self._room > 0
        for job, peer in self._peers.items():
            if is_open != (peer in self._selector.get_map()):
                if is_open:
                    self._selector.register(peer, selectors.EVENT_READ, lambda job=job: self._hear(job))
                else:
                    self._selector.unregister(peer)
        if self._peers or not is_open:
            return True
        self._channel.say(Answered, id=self._number)
        return False

    def take(self, taken: int, job: str, data: bytes) -> None:
        """Note that so many bytes were taken, and pass `data` on to a control socket."""
        self._room += taken
        try:
            self._peers[job].sendall(data)
        except BlockingIOError:  # a part of a frame may be sent: nothing that follows would be understood
            self._end(job)
        except (OSError, KeyError):
            pass  # it reads no more; its last words may still be on their way

    def _read(self, jobs: Sequence[Sequence[str]], files: Sequence[Sequence[Any]], asked: str) -> Iterator[bool]:
        """Say one piece of a file after another, then connect to the control sockets; yield True after each."""
        import glob  # no other answer needs it

        for job, folder, _ in jobs:
            for pattern, most in files if folder else ():
                for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
                    # A file that ends too early, or cannot be read, is cut: its last piece says that more is left.
                    name = os.path.relpath(path, folder)
                    try:
                        with open(path, "rb") as file:
                            about = os.fstat(file.fileno())
                            left = min(about.st_size, most or about.st_size)
                            file.seek(about.st_size - left)
                            while True:
                                data = file.read(min(left, READ_BYTES))
                                left -= len(data)
                                self._tell(job, name, data, left, time.time() - about.st_mtime)
                                yield True
                                if not (data and left):
                                    break
                    except (FileNotFoundError, IsADirectoryError):
                        pass
                    except OSError:
                        self._tell(job, name, b"", 1)
        for job, _, path in jobs:
            if path:
                self._peers[job] = peer = socket.socket(socket.AF_UNIX)
                peer.settimeout(READ_S)
                with contextlib.suppress(OSError):  # `_hear` finds that it is not connected
                    peer.connect(path)
                    peer.sendall(bytes.fromhex(asked))
                peer.setblocking(False)
                self._hear(job)
                yield True

    def _hear(self, job: str) -> None:
        peer = self._peers[job]
        try:
            data = peer.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._tell(job, "frames", data)
        else:
            self._end(job)

    def _end(self, job: str) -> None:
        self._tell(job, "", b"")
        peer = self._peers.pop(job)
        if peer in self._selector.get_map():
            self._selector.unregister(peer)
        peer.close()

    def _tell(self, job: str, name: str, data: bytes, left: int = 0, age_s: float = 0.0) -> None:
        self._channel.say(AnswerPiece, id=self._number, job=job, name=name, data=data, left=left, age_s=age_s)
        self._room -= len(data)
