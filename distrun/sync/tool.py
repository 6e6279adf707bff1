"""The rsync of this machine: which one it is, what it can do, and what its codes mean."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass

from distrun.errors import SyncError
from distrun_runtime.contract import environ

PROBE_S = 20.0
INSTALL = "install rsync (apt install rsync, dnf install rsync, brew install rsync)"

MEANINGS = {
    1: "syntax or usage",
    2: "protocol incompatibility",
    3: "errors selecting input or output files",
    4: "the requested action is not supported",
    5: "the protocol could not be started",
    6: "it could not append to its log",
    10: "socket I/O",
    11: "file I/O",
    12: "the connection ended early",
    13: "program diagnostics",
    14: "inter-process communication",
    19: "it was ended by SIGUSR1",
    20: "it was ended by a signal",
    21: "waitpid failed",
    22: "out of memory",
    23: "some files were not copied",
    24: "some files vanished while they were copied",
    25: "--max-delete stopped deletions",
    30: "timeout while sending or receiving data",
    35: "timeout while waiting for a connection",
    124: "the command on the host failed",
    125: "the command on the host was killed",
    126: "the command on the host cannot be run",
    127: "a command was not found on the host",
    255: "ssh failed",
}
"""rsync's exit codes, as its manual has them; 124 and up are those of the remote shell."""


@dataclass(frozen=True)
class Tool:
    """An rsync."""

    program: str
    version: str
    """`3.2.7`, `openrsync`, or empty if it does not say."""
    options: frozenset[str]
    """The long options that its help knows, with their dashes."""

    def has(self, *names: str) -> bool:
        """Return whether it knows all these options."""
        return self.options.issuperset(names)


def find() -> Tool:
    """Return the rsync of this machine. It is asked once.

    Raises:
        SyncError: there is none, or it does not answer.
    """
    path = shutil.which("rsync")
    if path is None:
        raise SyncError("there is no rsync on this machine, and a copy to the hosts needs one", INSTALL)
    return probe(path)


@functools.lru_cache(maxsize=8)
def probe(program: str) -> Tool:
    """Ask a program what it is.

    Raises:
        SyncError: it cannot be run.
    """
    version = _said(program, "--version")
    found = re.search(r"\bversion v?(\d+(?:\.\d+)*)", version)
    name = "openrsync" if "openrsync" in version else found.group(1) if found else ""
    help_text = _said(program, "--help")
    return Tool(program, name, frozenset(re.findall(r"--[a-z0-9][a-z0-9-]+", help_text)))


def meaning(code: int) -> str:
    """Return what an exit code of rsync means, in words with the code. Pure."""
    if code < 0:
        return "ended by signal %d" % -code
    return "%s (code %d)" % (MEANINGS[code], code) if code in MEANINGS else "code %d" % code


def _said(program: str, option: str) -> str:
    env = {**environ.snapshot(), "LC_ALL": "C"}
    try:
        result = subprocess.run(
            [program, option], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise SyncError("%s %s: %s" % (program, option, err), INSTALL) from err
    return (result.stdout + result.stderr).decode("utf-8", "replace")
