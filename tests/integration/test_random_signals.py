"""A launch that gets a signal at any moment of its start, between Enter and its last task, leaves no process.

Each trial is made from a seed, new in each run, and a number; a failure prints both, and what was done.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import Distrun, processes, wait_until
from slowness import scaled
from sshd import running

LIMIT_S = 60.0
"""For what takes a second or two on a machine that has nothing else to do."""
TRIALS = 8
"""Of each place. Every run of the tests makes other ones, so that their number grows with the runs."""
WORKERS = 2
MARK = "TRIAL_OF_SIGNALS"
"""Variable that every process of these trials has, those that an sshd started included."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for leftovers in /proc"),
]


class Site:
    """Where launches are made from, and where their tasks go."""

    def __init__(self, home: Path, *words: str) -> None:
        self.distrun = Distrun(home, **{MARK: str(home)})
        self._words = words

    def left(self, *excepted: int) -> list[tuple[int, str]]:
        """Return every living process of a launch here, but for those that are excepted."""
        mark = ("%s=%s" % (MARK, self.distrun.home)).encode()
        found = ((pid, command) for pid, environ, command in processes() if mark in environ.split(b"\0"))
        return [(pid, command.replace(b"\0", b" ")[:90].decode()) for pid, command in found if pid not in excepted]

    def launch(self, servers: int) -> subprocess.Popen[bytes]:
        """Start a job whose workers say that they are up, in a session of its own."""
        for old in self.distrun.work.glob("up-*"):
            old.unlink()
        words = ["-n", str(WORKERS), "-s", str(servers), "--grace", "1", *self._words]
        task = "touch %s/up-$DMLC_RANK; exec sleep 300" % self.distrun.work
        return self.distrun.start("launch", *words, "sh", "-c", task, start_new_session=True)

    def is_up(self) -> bool:
        """Return whether all workers of the last launch run."""
        return len(list(self.distrun.work.glob("up-*"))) == WORKERS

    def time_to_start_s(self) -> float:
        """Return how long a launch takes until its workers run."""
        began = time.monotonic()
        launcher = self.launch(1)
        try:
            wait_until(self.is_up, LIMIT_S, "the workers are up")
            return time.monotonic() - began
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(scaled(LIMIT_S))

    def victim(self, chance: random.Random, launcher: int) -> int:
        """Return who gets the signal: the launcher, or its coordinator, an agent or a guard."""
        others = [pid for pid, command in self.left(launcher) if " -c exec(" in command or " -m distrun " in command]
        return chance.choice(others) if others and chance.random() < 0.3 else launcher

    def trial(self, seed: int, number: int, longest_s: float) -> str:
        """Make a trial; return what was done, and what it left if it left something."""
        chance = random.Random("%d %d" % (seed, number))
        after_s, which, servers = chance.uniform(0, longest_s), chance.choice(SIGNALS), chance.choice((0, 0, 1))
        launcher = self.launch(servers)
        time.sleep(after_s)  # Not for luck: it comes at a moment that nobody has chosen.
        victim = self.victim(chance, launcher.pid)
        whom = "the launcher" if victim == launcher.pid else "process %d" % victim
        what = "trial %d of seed %d: %s to %s after %.3f s" % (number, seed, which.name, whom, after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, which)
        try:
            if victim != launcher.pid and which != signal.SIGKILL:  # agent and guard are deaf to the terminal's signals
                launcher.send_signal(signal.SIGTERM)
            launcher.wait(scaled(LIMIT_S))
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
            return "%s; it did not end" % what
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.left(), LIMIT_S / 2)
        left = self.left()
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "%s; left: %s" % (what, left) if left else ""


@contextlib.contextmanager
def local(home: Path) -> Iterator[Site]:
    """Launches on this machine."""
    yield Site(home, "--launcher", "local")


@contextlib.contextmanager
def ssh(home: Path) -> Iterator[Site]:
    """Launches on two hosts, which are an sshd on this machine."""
    with running(home / "sshd", SetEnv="%s=%s" % (MARK, home)) as server:
        yield Site(home, "--hosts", "d1,d2", "--ssh-config", server.config(), "--python", sys.executable)


@pytest.mark.parametrize("place", [local, pytest.param(ssh, marks=pytest.mark.ssh)])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(place: Any, tmp_path: Path) -> None:
    with place(tmp_path) as site:
        longest_s = 1.1 * site.time_to_start_s()
        seed = random.SystemRandom().randrange(1_000_000)
        assert not [wrong for number in range(TRIALS) if (wrong := site.trial(seed, number, longest_s))]
