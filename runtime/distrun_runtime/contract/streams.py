"""Standard streams that are closed when a program starts. Every program of ours imports this first, so it is small."""

from __future__ import annotations

import os
import sys


def open_streams() -> None:
    """Open the null device on descriptors 0, 1 and 2 where they are closed, as by `program >&-`.

    Otherwise a file or socket that the process opens later gets such a number: what is printed is written to it, and it
    is lost when the process points its standard streams elsewhere.
    """
    fd = 0
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(fd, fd <= 2)
    os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
