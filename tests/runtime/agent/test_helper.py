"""The process that looks at what may block, with `nvidia-smi` programs that the test writes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nvidia
import pytest
from slowness import scaled

from distrun_runtime.agent import hardware
from distrun_runtime.agent.helper import HUNG_S, Helper
from distrun_runtime.contract import process

GPUS = """\
GPU-aaaa, 0, 37, 81559, 1024, NVIDIA H100 80GB HBM3
GPU-bbbb, 1, [N/A], [Not Supported], 5, Odd, with a comma
GPU-cccc, 2, 0, 16384, [Insufficient Permissions], [N/A]
"""
APPS = """\
GPU-aaaa, 4711, 1000
GPU-aaaa, 4712, [N/A]
GPU-zzzz, 1, 5
No running processes found
"""
MIB = 1 << 20


def test_gpus_are_told_apart_by_uuid_and_what_is_not_known_is_left_out() -> None:
    assert hardware.of_csv(GPUS, APPS) == [
        {
            "uuid": "GPU-aaaa",
            "index": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "util": 0.37,
            "mem_total": 81559 * MIB,
            "mem_used": 1024 * MIB,
            "pids": {"4711": 1000 * MIB, "4712": None},
        },
        {"uuid": "GPU-bbbb", "index": 1, "name": "Odd, with a comma", "mem_used": 5 * MIB, "pids": {}},
        {"uuid": "GPU-cccc", "index": 2, "util": 0.0, "mem_total": 16384 * MIB, "pids": {}},
    ]


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "Failed to initialize NVML: Driver/library\n", ",,,,,\n"]
)
def test_what_is_no_list_of_gpus_has_none(text: str) -> None:
    assert hardware.of_csv(text, text) == []


class Driver:
    """A helper, and what an agent's loop does for it; time is what the test says."""

    def __init__(self, folder: Path, *pythons: str) -> None:
        self.selector = selectors.PollSelector()
        self.folder = folder
        env = {b"PATH": os.fsencode(f"{folder}:/usr/bin:/bin"), b"DISTRUN_TEST": b"1"}
        self.helper = Helper(self.selector, [os.fsencode(each) for each in pythons], env, str(folder))
        self.now = 0.0

    def want(self, what: str, every_s: float = 5.0) -> None:
        self.helper.want(what, every_s, self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.helper.tick(self.now)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + scaled(30)
        while not condition():
            assert time.monotonic() < deadline, what
            for key, _ in self.selector.select(0.02):
                key.data()
            with contextlib.suppress(ChildProcessError):
                pid = os.waitpid(-1, os.WNOHANG)[0]
                if pid:
                    self.helper.reaped(pid)

    def answered(self, what: str) -> Any:
        self.wait(lambda: what in self.helper.answers, f"no answer of {what}")
        return self.helper.answers[what]

    def pid(self) -> int:
        return self.helper._unreaped

    def smi(self, script: str) -> None:
        path = self.folder / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o700)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(*pythons: str) -> Driver:
        drivers.append(Driver(tmp_path, *pythons))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.helper.close()
        driver.wait(lambda driver=driver: driver.pid() < 0, "it has not ended")  # type: ignore[misc]
        driver.selector.close()


def test_one_helper_answers_one_question_after_the_other(made: Callable[..., Driver], tmp_path: Path) -> None:
    driver = made()
    driver.smi(f"case $1 in --query-gpu=*) cat {tmp_path}/gpus;; *) cat {tmp_path}/apps;; esac\n")
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "apps").write_text(APPS)
    driver.want("gpus")
    driver.want("disk")
    driver.want("ps")
    driver.tick()
    answer = driver.answered("gpus")
    assert (answer["how"], [gpu["uuid"] for gpu in answer["gpus"]]) == ("smi", ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"])
    pid = driver.pid()
    driver.tick()
    assert driver.answered("disk")["total"] >= driver.answered("disk")["free"] > 0
    driver.tick()
    assert f" {os.getpid()} " in driver.answered("ps").replace("\n", " ")
    (tmp_path / "gpus").write_text("")
    driver.tick(5.0)
    driver.wait(lambda: not driver.helper.answers["gpus"]["gpus"], "it is asked again")
    assert driver.pid() == pid


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_is_for_tasks_does_not_end_it(number: int, made: Callable[..., Driver]) -> None:
    driver = made()
    driver.want("disk")
    driver.tick()
    driver.answered("disk")
    pid = driver.pid()
    os.kill(pid, number)
    driver.want("ps")
    driver.tick()
    assert driver.answered("ps")
    assert driver.pid() == pid


def test_a_host_without_gpus_says_so(made: Callable[..., Driver]) -> None:
    driver = made()
    driver.helper._env = {b"PATH": os.fsencode(driver.folder)}
    driver.want("gpus")
    driver.tick()
    assert driver.answered("gpus") is None


def test_a_helper_that_hangs_is_killed_and_another_goes_on_without_that_question(
    made: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = made()
    driver.smi(f"echo $$ >{tmp_path}/started; exec sleep 600\n")
    driver.want("gpus")
    driver.want("disk")
    driver.tick()
    driver.wait(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text().strip(), "it hangs")
    hanging, smi = process.identity(driver.pid()), process.identity(int((tmp_path / "started").read_text()))
    driver.tick(9.0)
    assert process.is_alive(hanging)
    driver.tick(1.0)
    driver.wait(lambda: not process.is_alive(hanging) and not process.is_alive(smi), "it is killed, and what it ran")
    driver.wait(lambda: driver.pid() < 0, "it is reaped")
    driver.tick(49.0)
    assert driver.pid() < 0, "only once a minute"
    driver.tick(1.0)
    assert driver.answered("disk")
    driver.helper.answers.clear()
    driver.tick(30.0)
    assert driver.answered("disk"), "that is what it was asked"
    driver.helper.answers.clear()
    driver.tick(HUNG_S - 80.0)
    assert driver.answered("disk")
    driver.tick()
    assert driver.helper._asked == "gpus", "ten minutes later"


def test_a_helper_that_cannot_die_is_not_joined_by_another(made: Callable[..., Driver], tmp_path: Path) -> None:
    driver = made()
    driver.smi("exec sleep 600\n")
    driver.want("gpus")
    driver.tick()
    pid = driver.pid()
    driver.tick(10.0)  # it is killed; but nobody has reaped it
    for _ in range(20):
        driver.tick(100.0)
        assert driver.pid() == pid


@pytest.mark.parametrize("broken", ["/no/such/python", "false"])
def test_without_the_tasks_interpreter_the_agents_does_it(
    broken: str, made: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = made(broken)
    driver.want("disk")
    driver.tick()
    driver.wait(lambda: driver.helper._child is None and driver.pid() < 0, "it does not work")
    driver.tick(60.0)
    assert driver.answered("disk")


def test_the_drivers_library_tells_how_busy_gpus_are(made: Callable[..., Driver], tmp_path: Path) -> None:
    nvidia.library(tmp_path)
    driver = made()
    driver.helper._env = {b"LD_LIBRARY_PATH": os.fsencode(tmp_path), b"NVML_GPUS": b"1"}
    driver.want("gpus")
    driver.tick()
    sizes = {"mem_total": 40 << 30, "mem_used": 1 << 30}
    pids = {"7": 123, "4000000000": None}
    gpu = {"uuid": "GPU-0000", "index": 0, "name": "NVIDIA A100", "util": 0.37, **sizes, "pids": pids}
    assert driver.answered("gpus") == {"how": "nvml", "gpus": [gpu]}


def test_a_helper_ends_with_its_input(made: Callable[..., Driver], tmp_path: Path) -> None:
    """So it does not outlive an agent that is killed."""
    driver = made(sys.executable)
    driver.want("disk")
    driver.tick()
    driver.answered("disk")
    child = driver.helper._child
    child.stdin.close()
    driver.wait(lambda: driver.pid() < 0, "it has ended by itself")
