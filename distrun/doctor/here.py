"""What the machine where the user types must have."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from distrun import __version__
from distrun.doctor.row import HERE, OK, WARN, Row

PROGRAM_S = 5.0


def rows(uses_ssh: bool) -> list[Row]:
    """Return the rows of this machine. Runs `ssh -V` and `rsync --version`."""
    text = "distrun %s, python %s %s" % (__version__, platform.python_version(), sys.executable)
    found = [Row(HERE, "this machine", OK, text)]
    if uses_ssh:
        sudo = "" if os.geteuid() == 0 else "sudo "
        install = "%sapt-get update && %sapt-get install -y %%s" % (sudo, sudo)
        for name, argv, need in (
            ("ssh", ["ssh", "-V"], "rsync, --transport openssh and parts of the ssh configuration need it"),
            ("rsync", ["rsync", "--version"], "--sync-dst-dir needs it"),
        ):
            version = first_line(argv)
            package = "openssh-client" if name == "ssh" else name
            if not version:
                found.append(Row(HERE, "this machine", WARN, "no %s: %s" % (name, need), install % package))
            elif version.startswith("openrsync"):
                fix = "brew install rsync"
                found.append(Row(HERE, "this machine", WARN, version + " lacks what --sync-dst-dir needs", fix))
            else:
                found.append(Row(HERE, "this machine", OK, version))
    return found


def first_line(argv: Sequence[str]) -> str:
    """Return the first line that a program prints, empty if there is none, or no such program."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return " ".join(lines[0].split()) if lines and done.returncode == 0 else ""
