"""How a child ended, from its wait status."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from agentkit import poll

from distrun_runtime.agent import reaper


def status_of(script: str) -> int:
    pid = os.posix_spawnp("sh", ["sh", "-c", script], os.environ)
    return os.waitpid(pid, 0)[1]


def test_exit_code_and_signal_are_told_apart() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    exited, killed = status_of("exit 7"), status_of("kill -KILL $$")
    assert (reaper.exit_facts(exited, usage)["code"], reaper.exit_facts(exited, usage)["signal"]) == (7, None)
    assert (reaper.exit_facts(killed, usage)["code"], reaper.exit_facts(killed, usage)["signal"]) == (None, "KILL")
    assert (reaper.exit_code(exited), reaper.exit_code(killed)) == (7, 128 + signal.SIGKILL)


def test_real_time_signal_goes_by_number() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert str(reaper.exit_facts(signal.SIGRTMIN + 3, usage)["signal"]) in ("37", "RTMIN+3", "38")


def test_signals_are_inherited_as_defaults_by_what_is_executed() -> None:
    code = (
        "import signal, subprocess, sys\n"
        "from distrun_runtime.agent import reaper\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "reaper.set_signals()\n"
        "child = 'import signal as s; three = s.SIGUSR1, s.SIGHUP, s.SIGTSTP;"
        " print(*(int(s.getsignal(n) == s.SIG_DFL) for n in three),"
        " s.getsignal(s.SIGINT) is s.default_int_handler, s.pthread_sigmask(s.SIG_BLOCK, []))'\n"
        "subprocess.run([sys.executable, '-S', '-c', child], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1 1 1 True set()\n"


def test_wakeup_carries_signal_numbers() -> None:
    code = (
        "import os, signal\n"
        "from distrun_runtime.agent import reaper\n"
        "reaper.set_signals([signal.SIGTERM])\n"
        "wakeup = reaper.Wakeup()\n"
        "assert wakeup.read() == b''\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert wakeup.read() == bytes([signal.SIGTERM])\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_children_are_reaped_without_waiting() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from distrun_runtime.agent import reaper\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "assert list(reaper.reaped()) == []\n"
        "child.kill()\n"
        "found = []\n"
        "while not found: found = [(pid, reaper.exit_code(status)) for pid, status, usage in reaper.reaped()]\n"
        "assert found == [(child.pid, 137)]\n"
        "child.returncode = 0\n"
        "assert list(reaper.reaped()) == []\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    poll(lambda: child.poll() is not None, "the child is done")
    assert child.returncode == 0
