"""Runs the command `distrun` as a user would, and looks for what a job left behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from forked import Forker
from slowness import scaled

from distrun import cli

PYTHON = sys.executable
TIMEOUT_S = 100.0
LEFT_S = 60.0
"""For what a job leaves to end, on a machine that has something else to do."""
AGENT = b"\0-I\0-c\0exec("
"""Part of the command line of agents and guards."""


@functools.cache
def _forker() -> Forker:
    made = Forker()
    atexit.register(made.close)
    return made


class Distrun:
    """The command, with a job store of its own below `home`.

    The cache is that of all tests of this process (`cache_of_session`). Compiling the agent again would cost more than
    half of a short job's processor time.
    """

    def __init__(self, home: Path, **env: str) -> None:
        self.home = home
        self.work = home / "work"
        self.work.mkdir()
        ours = {"DMLC_", "DISTRUN_", "PS_", "MXNET_", "SLURM_", "OMPI_"}
        outer = {k: v for k, v in os.environ.items() if not any(k.startswith(prefix) for prefix in ours)}
        outer.pop("DEEPLEARNING_WORKERS_PATH", None)
        outer.pop("CI", None)  # with it nothing is drawn in place
        self.env = {
            **outer,
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_RUNTIME_DIR": str(home / "run"),
            **env,
        }
        (home / "run").mkdir(mode=0o700)

    def argv(self, *words: str) -> list[str]:
        """Return the argument list that runs `distrun WORDS`."""
        return [PYTHON, "-m", "distrun", *words]

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end; stdout and stderr are bytes. See `forked` for how it is started."""
        env, folder = {**self.env, **(env or {})}, more.pop("cwd", self.work)
        if not more and _forker().can_run(env):
            return _forker().run(self.argv(*words), words, env, folder, scaled(timeout_s))
        return subprocess.run(
            self.argv(*words),
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=scaled(timeout_s),
            check=False,
            **more,
        )

    def answer(
        self, *words: str, env: Mapping[str, str] | None = None, stdout: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Do as `run` does, but in this process: for what starts nothing, as an error or a help text.

        Python's start and the imports take nearly all of the time that such a command needs.

        Arguments:
            stdout: the file to which it prints; the answer has none of it then.
        """
        before, folder = dict(os.environ), os.getcwd()
        outer = os.dup(1), os.dup(2)
        with (stdout or self.home / "said").open("wb") as out, (self.home / "complained").open("w+b") as err:
            try:
                os.environ.clear()
                os.environ.update({**self.env, **(env or {})})
                os.chdir(self.work)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                with (
                    open(1, "w", closefd=False) as said,
                    open(2, "w", closefd=False) as complained,
                    contextlib.redirect_stdout(said),
                    contextlib.redirect_stderr(complained),
                ):
                    code = cli.run(words)
            finally:
                for number, file in zip((1, 2), outer, strict=True):
                    os.dup2(file, number)
                    os.close(file)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(before)
            printed = b"" if stdout else (self.home / "said").read_bytes()
        return subprocess.CompletedProcess(self.argv(*words), code, printed, (self.home / "complained").read_bytes())

    def start(self, *words: str, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        """Start it; stdout and stderr are files `out` and `err` in `home` unless given."""
        with (self.home / "out").open("ab") as out, (self.home / "err").open("ab") as err:
            streams = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL, **more}
            return subprocess.Popen(self.argv(*words), env={**self.env, **(env or {})}, cwd=self.work, **streams)

    def launch(self, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """Run `distrun launch --launcher local WORDS`."""
        return self.run("launch", "--launcher", "local", *words, **more)

    def begin(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start `distrun launch --launcher local WORDS`."""
        return self.start("launch", "--launcher", "local", *words, **more)

    def job_host(self) -> str:
        """Return what the newest job calls this machine."""
        plan = json.loads((self.jobs[-1] / "plan.json").read_text())
        return str(plan["hosts"][0]["name"])

    @property
    def jobs(self) -> list[Path]:
        """Folders of the jobs that are whole, the oldest first."""
        folders = (self.home / "state" / "distrun" / "jobs").glob("*")
        return sorted(
            (path for path in folders if (path / "state.json").exists()), key=lambda path: path.stat().st_ctime
        )

    @property
    def job(self) -> Path:
        """The folder of the one job."""
        (path,) = self.jobs
        return path

    def coordinator(self) -> int:
        """Return the pid of the process that runs the newest job, a child of the one that was started."""
        return int(json.loads((self.jobs[-1] / "launcher.json").read_text())["pid"])

    def state(self) -> dict[str, Any]:
        """state.json of the one job."""
        return json.loads((self.job / "state.json").read_text())

    def log(self, task: str) -> bytes:
        """What a task of the one job wrote."""
        return (self.job / "logs" / (task + ".log")).read_bytes()

    def left(self) -> list[str]:
        """Return the living processes that any job of this store left: by the mark in their environment, or agents."""
        ids = {path.name.encode() for path in self.jobs}
        runtime = os.fsencode(self.home / "run")
        found = []
        for pid, environ, command in processes():
            values = dict(part.split(b"=", 1) for part in environ.split(b"\0") if b"=" in part)
            is_agent = values.get(b"XDG_RUNTIME_DIR") == runtime and AGENT in command
            if values.get(b"DISTRUN_JOB_ID") in ids or is_agent:
                found.append("%d %s" % (pid, command.replace(b"\0", b" ")[:80].decode("utf-8", "replace")))
        return found


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Give pid, environment and command line of every living process of this user (Linux).

    What has ended has neither; the kernel's own threads have neither.
    """
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with (
                    open("/proc/%s/environ" % entry, "rb", buffering=0) as environ,
                    open("/proc/%s/cmdline" % entry, "rb", buffering=0) as command,
                ):
                    found = environ.read(), command.read()
            except OSError:
                continue
            if any(found):
                yield int(entry), *found


def wait_until(is_true: Callable[[], Any], limit_s: float, what: str = "") -> Any:
    """Wait until `is_true()` gives something true, and return it; fail after `limit_s`, scaled (`slowness`).

    To ask takes at most half of the time: some questions start a program, or look at all processes.
    """
    limit_s = scaled(limit_s)
    end = time.monotonic() + limit_s
    while True:
        asked = time.monotonic()
        value = is_true()
        if value:
            return value
        now = time.monotonic()
        assert now < end, "after %g s still not: %s" % (limit_s, what or is_true)
        time.sleep(max(0.02, now - asked))


@contextlib.contextmanager
def leaving_nothing(home: Path) -> Iterator[Distrun]:
    """The command; at the end nothing that it started may be left."""
    made = Distrun(home)
    yield made
    left: list[str] = []

    def has_ended() -> bool:
        left[:] = made.left()
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(has_ended, LEFT_S)
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    assert not left


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    """The command, with a job store of its own; at the end nothing that it started may be left."""
    with leaving_nothing(tmp_path) as made:
        yield made
