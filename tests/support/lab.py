"""Real hosts for tests: the fixture `lab`, and what a test does with it as the launcher.

    def test_that_two_hosts_answer(lab: Site) -> None:
        done = lab.distrun("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "hostname")
        assert done.code == 0

One lab serves all tests of a session; it is made when the first test asks. After each test all faults are mended, and
nothing of a job may live. DISTRUN_LAB_HOSTS says how many hosts (4; tests may rely on 4). A machine or user without
what a lab needs skips these tests and says why; with DISTRUN_LAB=required it fails them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from distrun_cli import wait_until
from hostlab import Lab, Process, Unavailable
from slowness import scaled
from terminal import Session

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100.0
OURS = ("DMLC_", "DISTRUN_", "PS_", "MXNET_", "SLURM_", "OMPI_", "PE_", "DEEPLEARNING_")


@dataclass(frozen=True)
class Done:
    """How a command of the launcher ended: code (negative: the signal) and what it wrote."""

    code: int
    out: str
    err: str


class Running:
    """A running command of the launcher. What it writes goes to files `out` and `err`."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path) -> None:
        self._child = child
        self._folder = folder
        self.pid = wait_until(self._find, 30, "the command is started")

    def _find(self) -> int | None:
        """The command itself, below nsenter, by the machine's number; nsenter's own if it has ended."""
        below = child_of(self._child.pid)
        return self._child.pid if below is None and self._child.poll() is not None else below

    def coordinator(self) -> int:
        """Return the machine's number of the process that runs the job of this `distrun launch`, its only child."""
        pid = child_of(self.pid)
        assert pid is not None, self.err
        return pid

    @property
    def out(self) -> str:
        """What it wrote to stdout so far."""
        return (self._folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it wrote to stderr so far."""
        return (self._folder / "err").read_text(errors="replace")

    def write(self, data: bytes) -> None:
        """Write to its stdin, which was given as a pipe, and end it."""
        self._child.stdin.write(data)
        self._child.stdin.close()

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        return self._child.poll()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)
        if number == signal.SIGCONT:
            self._child.send_signal(number)  # nsenter stopped itself with its child

    def kill(self) -> None:
        """Kill it and wait."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._child.wait(scaled(30))

    def wait(self, limit_s: float = TIMEOUT_S) -> int:
        """Wait for its end; return its exit code (negative: the signal)."""
        limit_s = scaled(limit_s)
        try:
            return self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError("still running after %g s; it says:\n%s%s" % (limit_s, self.out, self.err)) from None


class Site(Lab):
    """A lab, with a working folder and files of one test."""

    home_folder: Path
    work: Path
    _running: list[Running]
    _terminals: list[Session]
    _files: int

    @property
    def cache(self) -> str:
        """The launcher's cache, shared by all tests of this process: compiling the agent takes long."""
        return os.environ["XDG_CACHE_HOME"]

    def begin(self, folder: Path) -> None:
        """Start a test: its folder is the launcher's; on the hosts it does not exist, and no task is told to go on."""
        self.home_folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        (folder / "run").mkdir(mode=0o700)
        self._running = []
        self._terminals = []
        self._files = 0
        for process in self.processes():
            if process.host in self.hosts and process.inner == 1:
                # A test that failed, or whose tasks were ended, may have left what the tasks of this one wait for.
                for told in Path("/proc/%d/root/tmp" % process.pid).glob("go*"):
                    told.unlink()

    def end(self) -> None:
        """End a test: nothing it started is left, no host is broken; fail if something of a job lives."""
        for terminal in self._terminals:
            terminal.kill()
        for running in self._running:
            running.kill()
        self.restore()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.leftovers(), 30, "nothing is left")
        left = self.leftovers()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert not left, "left behind:\n" + "\n".join(map(str, left))

    def leftovers(self) -> list[Process]:
        """What a job may not leave: anything on a host, anything with its mark on the launcher."""
        return self.strangers() + [process for process in self.marked() if process.host == "launcher"]

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The launcher's variables, with a job store of this test's own and the cache of all tests (`cache`)."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        outer.pop("CI", None)  # with it nothing is drawn in place
        here = {
            "XDG_STATE_HOME": str(self.home_folder / "state"),
            "XDG_CACHE_HOME": self.cache,
            "XDG_RUNTIME_DIR": str(self.home_folder / "run"),
        }
        return {**self.launcher_env(outer), **here, **(more or {})}

    def run(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        text: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Done:
        """Run a command as the launcher, to its end; `text` is its stdin."""
        done = subprocess.run(
            self.enter_argv(*argv, cwd=str(cwd or self.work)),
            env=self.env(env),
            input=text.encode(),
            capture_output=True,
            timeout=scaled(timeout_s),
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def spawn(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, **popen: Any) -> Running:
        """Start a command as the launcher; it is killed at the end of the test at the latest."""
        folder = self.home_folder / ("command-%d" % len(self._running))
        folder.mkdir()
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **popen}
            argv_ = self.enter_argv(*argv, cwd=str(cwd or self.work))
            child = subprocess.Popen(argv_, env=self.env(env), **streams)
        try:
            running = Running(child, folder)
        except BaseException:
            child.kill()
            child.wait()
            raise
        self._running.append(running)
        return running

    def distrun(self, *words: str, **more: Any) -> Done:
        """Run `distrun WORDS` as the launcher, to its end."""
        return self.run(sys.executable, "-m", "distrun", *words, **more)

    def start(self, *words: str, **more: Any) -> Running:
        """Start `distrun WORDS` as the launcher."""
        return self.spawn(sys.executable, "-m", "distrun", *words, **more)

    def in_terminal(self, *words: str, cwd: Path | None = None) -> Session:
        """Start `distrun WORDS` as the launcher in a terminal of its own; it is killed at the end of the test."""
        argv = ("setsid", "--ctty", "--wait", sys.executable, "-m", "distrun", *words)
        env = self.env({"TERM": "xterm"})  # there may be none around the tests
        session = Session(self.enter_argv(*argv, cwd=str(cwd or self.work)), env, self.home_folder, leads=False)
        self._terminals.append(session)
        return session

    def hosts_file(self, *lines: str) -> str:
        """Write a hosts file with these lines (all hosts, if none is given); return its path."""
        self._files += 1
        path = self.home_folder / ("hosts-%d" % self._files)
        path.write_text("".join(line + "\n" for line in lines or self.hosts))
        return str(path)


def child_of(pid: int) -> int | None:
    """Return a child process of `pid`, if there is one."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                return int(entry)
    return None


def shared_folders() -> list[Path]:
    """The folders that hosts need to run the interpreter of these tests, and the peers' where they are installed."""
    found = [Path(sys.prefix), *(path.resolve() for path in [ROOT / ".peers"] if path.is_dir())]
    if sys.base_prefix not in ("/usr", "/usr/local", sys.prefix):
        found.append(Path(sys.base_prefix))
    return found


@pytest.fixture(scope="session")
def lab_of_session() -> Iterator[Site]:
    """The one lab; made when first asked for."""
    count = int(os.environ.get("DISTRUN_LAB_HOSTS", "4"))
    try:
        site = Site.up(count, hide=[ROOT], share=shared_folders())
    except Unavailable as why:
        skip(why)
    yield site
    site.down()


def skip(why: Unavailable) -> NoReturn:
    """Skip a test that this machine cannot run, unless it must."""
    if os.environ.get("DISTRUN_LAB") == "required":
        raise why
    pytest.skip(str(why))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A fault that cannot be made here skips its test."""
    try:
        return (yield)
    except Unavailable as why:
        skip(why)


@pytest.fixture
def lab(lab_of_session: Site, tmp_path: Path) -> Iterator[Site]:
    """The lab, all of it well."""
    lab_of_session.begin(tmp_path)
    yield lab_of_session
    lab_of_session.end()
