"""The folder that files are copied to, as both the launching side and the agent know it."""

from __future__ import annotations

import os

MARKER = ".distrun-sync"
"""File that says: this folder was made, or was empty, when distrun first copied into it. Only there it may delete."""


def identity(path: str) -> str:
    """Return what makes a folder of this machine the same one as seen from another login; empty if unknown.

    A path will not do: another machine may have a folder by the same name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        found = os.stat(path)
    except OSError:
        return ""
    return "%d:%d %s" % (found.st_dev, found.st_ino, boot)
