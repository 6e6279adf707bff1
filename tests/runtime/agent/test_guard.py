"""Signals and the exit code of the guard and the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from distrun_runtime.contract import facts


def test_signals_are_inherited_as_defaults_by_what_is_executed() -> None:
    code = (
        "import signal, subprocess, sys\n"
        "from distrun_runtime.agent import guard\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "guard.set_signals()\n"
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
        "from distrun_runtime.agent import guard\n"
        "guard.set_signals([signal.SIGTERM])\n"
        "wakeup = guard.Wakeup()\n"
        "assert wakeup.read() == b''\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert wakeup.read() == bytes([signal.SIGTERM])\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)])
def test_a_signal_becomes_the_exit_code_of_a_shell(script: str, code: int) -> None:
    pid = os.posix_spawnp("sh", ["sh", "-c", script], os.environ)
    assert facts.exit_code_of(os.waitpid(pid, 0)[1]) == code
