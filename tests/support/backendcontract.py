"""What every backend keeps, tried from outside: one suite for all of them.

A test file of a backend derives a class `TestContract` from `BackendContract` and has a fixture `site`, a `TriedSite`.
"""

from __future__ import annotations

import re
import signal
from typing import Protocol

from distrun_cli import wait_until

LIMIT_S = 90.0
SHORT = ("-s", "0", "--grace", "2")
STAY = "trap 'echo bye; exit 0' INT TERM; echo up; while :; do sleep 0.1; done"
MANY = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i + 1)); done; printf end"
SECRET = "hush-5f3a"
WARNED = r"""
import signal, time

wanted = []
signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))
print("up", flush=True)
while not wanted:
    time.sleep(0.05)
print("saved", flush=True)
"""
"""A program of Python that ends well when it gets SIGUSR1."""


class Done(Protocol):
    """How a command ended."""

    @property
    def code(self) -> int: ...
    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...


class Begun(Protocol):
    """A command that runs."""

    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def signal(self, number: int) -> None: ...


class TriedSite(Protocol):
    """Where a backend is tried; its launches name it."""

    def launch(self, *words: str) -> Done:
        """Run `distrun launch --launcher NAME WORDS` to its end."""

    def begin_launch(self, *words: str) -> Begun:
        """Start it."""

    def distrun(self, *words: str) -> Done:
        """Run `distrun WORDS` to its end."""

    def commands(self) -> list[str]:
        """The command lines of all processes of all machines."""

    def nothing_stays(self) -> None:
        """Fail unless nothing of any job is left, here, on any host and in the engine."""


def up(running: Begun, workers: int, limit_s: float = LIMIT_S) -> None:
    """Wait until so many workers that STAY are up."""
    wait_until(lambda: running.poll() is not None or running.out.count("| up\n") == workers, limit_s, "all are up")
    assert running.poll() is None, running.err


class BackendContract:
    def test_output_of_each_task_is_complete_and_in_order(self, site: TriedSite) -> None:
        done = site.launch(*SHORT, "-n", "2", MANY)
        assert done.code == 0, done.err
        for rank in "01":
            told = re.findall(rf"^worker-{rank}@\S+ \| (.*)$", done.out, re.MULTILINE)
            assert told == [*(f"line {i}" for i in range(2000)), "end"]
        site.nothing_stays()

    def test_the_first_failing_tasks_code_is_returned_and_it_is_named(self, site: TriedSite) -> None:
        done = site.launch(*SHORT, "-n", "2", "[ $DISTRUN_RANK = 1 ] && exit 9; exec sleep 100")
        assert done.code == 9, done.err
        assert "worker-1" in done.err.splitlines()[-1]
        site.nothing_stays()

    def test_a_job_is_killed_and_killing_it_again_is_no_error(self, site: TriedSite) -> None:
        running = site.begin_launch(*SHORT, "-n", "2", "--name", "mine", STAY)
        up(running, 2)
        assert site.distrun("kill", "mine").code == 0
        assert running.wait() == 128 + signal.SIGTERM, running.err
        site.nothing_stays()
        again = site.distrun("kill", "mine")
        assert again.code == 0, again.err
        assert "over already" in again.out

    def test_secrets_are_in_no_argument_and_in_nothing_that_is_shown(self, site: TriedSite) -> None:
        words = (*SHORT, "-n", "1", "--env", f"MY_TOKEN={SECRET}")
        shown = site.launch("--dry-run", "-v", *words, STAY)
        assert shown.code == 0, shown.err
        assert SECRET not in shown.out + shown.err
        running = site.begin_launch(*words, f'[ "$MY_TOKEN" != {SECRET[:4]} ] && {STAY}')
        up(running, 1)
        distrun = [each for each in site.commands() if "distrun launch" not in each]
        assert not [each for each in distrun if SECRET in each]
        running.signal(signal.SIGINT)
        assert running.wait() == 130, running.err
        site.nothing_stays()

    def test_a_dry_run_shows_the_same_twice_and_starts_nothing(self, site: TriedSite) -> None:
        words = ("--dry-run", "-s", "1", "-n", "3", "python3", "train.py", "--name", 'it\'s "$HOME"')
        first, second = site.launch(*words), site.launch(*words)
        assert first.code == 0, first.err
        assert first.out == second.out
        assert "train.py" in first.out
        site.nothing_stays()
        assert '"jobs": []' in site.distrun("status", "--json").out
