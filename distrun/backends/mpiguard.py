"""Runs mpirun, and ends it with the process that wanted it: a program, `python mpiguard.py MARKER FOLDER SCRIPT`.

mpirun must not survive its job: one that cannot reach a host may wait for ever. This process starts FOLDER/SCRIPT,
which executes mpirun, and waits for its end, for SIGTERM, or for the end of its own stdin, which is a pipe from the
coordinator. It then ends mpirun and what is left of it here; mpirun's daemons on the hosts end the agents there. If
this process is killed, the kernel kills mpirun (Linux).

In FOLDER: `output`, what mpirun and the agents said; `ended`, mpirun's exit code, or minus the number of the signal
that ended it, written last. Mode 0600.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

OUTPUT = "output"
ENDED = "ended"
ORPHAN_S = 1.0
"""How long mpirun may go on after the coordinator's end: agents cannot come back to it."""
TERM_S = 5.0
"""How long it may take to end when it was asked to."""
REST_S = 5.0
"""How long what mpirun leaves behind here (ssh, an agent on this machine) may take."""
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def main(marker: str, folder: str, script: str) -> int:
    """Run mpirun to its end; return 0. `marker` is only there to be seen in the process table."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: None)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    code = _run(Path(folder), script, woken, asked)
    _end_rest()
    temporary = Path(folder, ENDED + ".new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{code}\n")
    os.replace(temporary, Path(folder, ENDED))
    return 0


def _run(folder: Path, script: str, woken: int, asked: list[int]) -> int:
    """Run the script until it ends or has to; return its exit code, minus the signal's number if one ended it."""
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            [str(folder / script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - there are no threads
        )
    except OSError as err:
        os.write(output, f"distrun: {folder / script} cannot be executed: {err.strerror}\n".encode())
        return 126
    os.close(output)
    inputs = [woken, 0]
    term_at = kill_at = float("inf")
    while child.poll() is None:
        now = time.monotonic()
        if asked and kill_at == float("inf"):
            term_at = min(term_at, now)
        if now >= kill_at:
            _signal_group(child.pid, signal.SIGKILL)
            kill_at = now + 1.0
        elif now >= term_at:
            child.terminate()
            term_at, kill_at = float("inf"), now + TERM_S
        wait = min(term_at, kill_at) - now
        ready, _, _ = select.select(inputs, [], [], None if wait == float("inf") else max(0.0, wait))
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            inputs.remove(0)
            term_at = min(term_at, time.monotonic() + ORPHAN_S)
    _signal_group(child.pid, signal.SIGKILL)
    return child.returncode


def _end_rest() -> None:
    """Wait for what mpirun has left behind on this machine, all children of ours now; then kill it."""
    until = time.monotonic() + REST_S
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() >= until:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= until + REST_S:
            return
        time.sleep(0.05)


def _children() -> list[int]:
    """Return the process ids of our children; none where there is no /proc."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _die_with_parent() -> None:
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Ask the kernel (Linux); elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
