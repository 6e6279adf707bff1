"""Runs `distrun` commands in forks of one process that has imported it: `Forker` asks it, `serve` is that process.

Each command is a process of its own, which starts and ends as one started by `python -m distrun` does. Only Python's
start and the imports, more than half of the processor time of a short command, are not paid again each time.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slowness import scaled

REQUEST = 1 << 20
"""Bytes, at most, of a request: words and environment."""
AT_START = ("PYTHON", "LANG", "LC_", "LD_", "COVERAGE_")
"""How the variables begin that Python reads when it starts: a command to which others are given is not forked."""

USED_LATER = (
    "distrun.backends.local",
    "distrun.cli.screen",
    "distrun.launching",
    "distrun.report",
    "distrun_runtime.coordinator.service",
    "distrun_runtime.coordinator.service",
)
"""What a launch imports besides the modules of the commands."""


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START)}


class Forker:
    """Starts commands as `subprocess.run` does. Any thread may call it."""

    def __init__(self) -> None:
        self._env = _at_start(os.environ)
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._child = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Return whether a command with this environment can be forked."""
        return _at_start(env) == self._env

    def close(self) -> None:
        """End the process; commands that run are not waited for."""
        self._socket.close()
        self._child.terminate()
        self._child.wait(scaled(60))

    def run(
        self, argv: Sequence[str], words: Sequence[str], env: Mapping[str, str], folder: Path, limit_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `distrun WORDS` to its end, with nothing on stdin, and return what it wrote.

        Arguments:
            argv: what the answer, or the error, calls the command.

        Raises:
            subprocess.TimeoutExpired: it had not ended after `limit_s`, and was killed.
        """
        pipes = [os.pipe() for _ in range(3)]
        try:
            request = json.dumps([list(words), dict(env), str(folder)]).encode()
            ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write for _, write in pipes]))
            self._socket.sendmsg([request], [ancillary])
        finally:
            for _, write in pipes:
                os.close(write)
        out, err, ends = (b"".join(pieces) for pieces in _read([read for read, _ in pipes], argv, limit_s))
        return subprocess.CompletedProcess(list(argv), int(ends.split()[1]), out, err)


def _read(files: Sequence[int], argv: Sequence[str], limit_s: float) -> list[list[bytes]]:
    """Read all files to their ends. The last one begins with the process id that is killed after the time limit."""
    end = time.monotonic() + limit_s
    found: list[list[bytes]] = [[] for _ in files]
    try:
        with selectors.DefaultSelector() as selector:
            for file, pieces in zip(files, found, strict=True):
                selector.register(file, selectors.EVENT_READ, pieces)
            while selector.get_map():
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    os.kill(int(found[-1][0].split()[0]), signal.SIGKILL)
                    raise subprocess.TimeoutExpired(list(argv), limit_s, b"".join(found[0]), b"".join(found[1]))
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    key.data.append(piece)
                    if not piece:
                        selector.unregister(key.fd)
    finally:
        for file in files:
            os.close(file)
    return found


def serve(asked: socket.socket) -> None:
    """Fork for each request. Returns in the forked process, as that of the command, and when no request can come."""
    while True:
        request, ancillary, _, _ = asked.recvmsg(REQUEST, socket.CMSG_SPACE(3 * 4))
        if not request:
            os._exit(0)
        files = array.array("i", ancillary[0][2])
        if os.fork():
            for file in files:
                os.close(file)
            while _has_ended():
                pass
            continue
        asked.close()
        out, err, ends = files
        pid = os.fork()
        if pid:
            for file in (out, err):
                os.close(file)
            os.write(ends, b"%d " % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # after the time limit nobody reads
                os.write(ends, b"%d" % code)
            os._exit(0)
        os.close(ends)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for file in (out, err):
            os.close(file)
        words, env, folder = json.loads(request)
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        os.chdir(folder)
        sys.path[0] = folder
        sys.argv[1:] = words
        return


def _has_ended() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    from distrun import cli

    for module, _ in cli.COMMANDS.values():
        importlib.import_module(module.partition(":")[0])
    for module in USED_LATER:
        importlib.import_module(module)
    serve(socket.socket(fileno=int(sys.argv[1])))
    cli.main()
