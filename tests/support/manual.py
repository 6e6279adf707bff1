"""Jobs started by hand: processes with DMLC_* variables and no launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from ports import free_port
from slowness import scaled

DEADLINE_S = scaled(90.0)

OURS = ("DMLC_", "DISTRUN_", "PS_", "MXNET_", "RANK", "WORLD_SIZE", "MASTER_", "JAX_")


class ManualJob:
    """Starts processes of one job and ends them all."""

    def __init__(self, workers: int = 2, servers: int = 2, **env: str) -> None:
        port = free_port()  # the manual start demands one
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self.env = {
            **inherited,
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "PYTHONUNBUFFERED": "1",
            **env,
        }
        self.port = port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._counts: dict[str, int] = {}

    def __enter__(self) -> ManualJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(DEADLINE_S)
        self._folder.cleanup()

    def path(self, name: str) -> Path:
        """Return a file in the job's folder."""
        return Path(self._folder.name) / name

    def script(self, text: str) -> str:
        """Write a training script and return its path."""
        path = self.path("train-%d.py" % len(list(Path(self._folder.name).glob("train-*.py"))))
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, role: str, *command: str, **env: str) -> str:
        """Start one process: `command` under this python, or the bundled role; return its name (`worker-0`)."""
        number = self._counts.get(role, 0)
        self._counts[role] = number + 1
        name = "%s-%d" % (role, number)
        argv = [sys.executable, *(command or ("-m", "distrun_runtime", role))]
        with open(self.path(name + ".out"), "wb") as out, open(self.path(name + ".err"), "wb") as err:
            self.processes[name] = subprocess.Popen(
                argv, env={**self.env, "DMLC_ROLE": role, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        return name

    def start_all(self, script: str, workers: int = 2, servers: int = 2) -> None:
        """Start scheduler, servers and workers."""
        self.start("scheduler")
        for _ in range(servers):
            self.start("server")
        for _ in range(workers):
            self.start("worker", script)

    def wait(self, *names: str) -> list[int]:
        """Wait for processes (all without names); return their exit codes in that order."""
        return [self.processes[name].wait(DEADLINE_S) for name in names or tuple(self.processes)]

    def out(self, name: str) -> str:
        """Return what a process wrote to stdout so far."""
        return self.path(name + ".out").read_text()

    def err(self, name: str) -> str:
        """Return what a process wrote to stderr so far."""
        return self.path(name + ".err").read_text()

    def until(self, name: str, text: str) -> None:
        """Wait until a process has written `text`."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.out(name) + self.err(name):
            assert time.monotonic() < end, "%s never wrote %r:\n%s%s" % (name, text, self.out(name), self.err(name))
            time.sleep(0.02)

    def report(self) -> str:
        """Return what all wrote, for a failing test."""
        return "\n".join("--- %s\n%s%s" % (name, self.out(name), self.err(name)) for name in self.processes)
