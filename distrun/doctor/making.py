"""Makes the environment for servers; runs on a host, whose Python is given the text of this file (`environments`).

    python3 -I -c TEXT RUN PLACE REQUIREMENT...

PLACE becomes a link to a virtual environment that is whole: one that is half made has another name, and goes when this
ends, or the next time. Of hosts that share the folder, one makes it, and the others wait for it: they find a link with
RUN in its name, a text that is the same on all hosts of one `distrun doctor --fix`, and of no other one. What was done
is told as one line of JSON on stdout; stderr says what goes on. Standard library only, Python 3.10.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

STALE_S = 86400.0
"""What was begun so long ago and is no environment's was given up."""
KEPT_LINES = 12
POLL_S = 0.2
_CHECK = "import json, sys, numpy, zmq; print(json.dumps([sys.version.split()[0], numpy.__version__, zmq.__version__]))"


class Failed(Exception):
    """A step failed: its name (folder, venv, pip, check or shared), and the last lines that it wrote."""

    def __init__(self, step: str, words: str) -> None:
        super().__init__(words)
        self.step = step
        self.words = words


def main(argv: list[str]) -> int:
    """Make the environment and tell what came of it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _programs.end)
    try:
        told = make(argv[1], argv[2:], argv[0])
    except Failed as err:
        told = {"step": err.step, "words": err.words}
    except OSError as err:
        told = {"step": "folder", "words": f"{err.filename or argv[1]}: {err.strerror or err}"}
    print(json.dumps(told), flush=True)
    return 0 if "path" in told else 1


def make(place: str, requirements: list[str], run: str) -> dict[str, str]:
    """Make the environment, unless there is one that works; return its path and versions.

    Raises:
        Failed: a step failed; nothing of it is left.
        OSError: the folder cannot be written.
    """
    home = os.path.dirname(place)
    os.makedirs(home, mode=0o700, exist_ok=True)
    info = os.lstat(home)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise Failed("folder", f"{home} does not belong to this user")
    os.chmod(home, stat.S_IMODE(info.st_mode) & ~0o022)
    _remove_stale(home)
    if os.path.islink(place):
        with contextlib.suppress(Failed):
            return _told(place, place)
    mark = f"{place}.{run}"
    try:
        os.symlink(socket.gethostname(), mark)
    except FileExistsError:
        return _made_by_another(place, mark)
    try:
        return _make(place, requirements)
    finally:
        os.unlink(mark)


def _made_by_another(place: str, mark: str) -> dict[str, str]:
    """Wait for the host that makes the environment; return its path and versions. Raises Failed."""
    host = "another host"
    with contextlib.suppress(OSError):
        host = os.readlink(mark)
    say(f"waiting for {host}, which has the same folder and makes it there")
    while os.path.islink(mark):
        _programs.check()
        time.sleep(POLL_S)
    if not os.path.islink(place):
        raise Failed("shared", f"{host}, which has the same folder, could not make it")
    return _told(place, place)


def _make(place: str, requirements: list[str]) -> dict[str, str]:
    fresh = f"{place}.{secrets.token_hex(4)}"
    try:
        os.mkdir(fresh, 0o700)
        say(f"making a virtual environment in {fresh}")
        _programs.run("venv", sys.executable, "-I", "-m", "venv", fresh)
        say(f"installing {', '.join(requirements)}")
        pip = [os.path.join(fresh, "bin", "python"), "-I", "-m", "pip"]
        _programs.run("pip", *pip, "install", "--disable-pip-version-check", "--no-input", *requirements)
        told = _told(fresh, place)
        _link(fresh, place)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return told


class Programs:
    """Runs one program after another. After `end`, the one that runs is killed, and `run` exits this process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._ended_by = 0

    def end(self, number: int, frame: object) -> None:
        """Handle a signal. It does not raise: that could be before `run` knows the child."""
        del frame
        self._ended_by = self._ended_by or number
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)  # with its own children, which would write on

    def run(self, step: str, *argv: str) -> str:
        """Run a program and return its stdout.

        Raises:
            Failed: it could not be started, or did not end with 0.
            SystemExit: a signal came.
        """
        self.check()
        try:
            self._child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as err:
            raise Failed(step, f"{argv[0]}: {err.strerror}") from None
        with self._child as child:
            if self._ended_by:
                self.end(self._ended_by, None)
            text = child.communicate()[0].decode("utf-8", "replace")
        self.check()
        if child.returncode:
            lines = [line.rstrip() for line in text.splitlines() if line.strip()]
            raise Failed(step, "\n".join(lines[-KEPT_LINES:]) or f"{argv[0]} ended with code {child.returncode}")
        return text

    def check(self) -> None:
        """Exit this process if a signal came. Raises SystemExit."""
        if self._ended_by:
            sys.exit(128 + self._ended_by)


_programs = Programs()


def say(text: str) -> None:
    """Say what goes on."""
    print(text, file=sys.stderr, flush=True)


def _told(folder: str, place: str) -> dict[str, str]:
    """Return what is known of an environment, if it works."""
    line = _programs.run("check", os.path.join(folder, "bin", "python"), "-I", "-c", _CHECK)
    version, numpy, zmq = json.loads(line.strip().splitlines()[-1])
    return {"path": place, "version": version, "numpy": numpy, "zmq": zmq}


def _link(fresh: str, place: str) -> None:
    """Make `place` mean the new environment, in one step; the one before goes."""
    before = os.readlink(place) if os.path.islink(place) else ""
    link = fresh + ".link"
    os.symlink(os.path.basename(fresh), link)
    try:
        os.replace(link, place)
    except OSError:
        os.unlink(link)
        raise
    if before and before == os.path.basename(before) and before != os.path.basename(fresh):
        shutil.rmtree(os.path.join(os.path.dirname(place), before), ignore_errors=True)


def _remove_stale(home: str) -> None:
    """Remove what was begun long ago and no link means: its maker was killed."""
    names = os.listdir(home)
    used = {os.readlink(os.path.join(home, name)) for name in names if os.path.islink(os.path.join(home, name))}
    for name in names:
        path = os.path.join(home, name)
        with contextlib.suppress(OSError):
            if "." in name.partition("-")[2] and name not in used and os.lstat(path).st_mtime < time.time() - STALE_S:
                if os.path.islink(path):
                    os.unlink(path)
                else:
                    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
