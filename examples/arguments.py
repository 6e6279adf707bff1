"""What the examples' command lines share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from distrun_runtime.errors import RuntimeFault


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`, and at most `most`, for argparse."""
    expected = "of at least %d" % least if most is None else "from %d to %d" % (least, most)

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError("%r is not a whole number %s" % (text, expected))
        return int(text)

    return read


positive = whole(1)


def gpus(text: str) -> str:
    """Return a list of GPUs such as `0,2`, for argparse."""
    if not all(number.strip().isdecimal() for number in text.split(",")):
        raise argparse.ArgumentTypeError("%r is not a list of GPU numbers such as 0,2" % text)
    return text


def run(main: Callable[[], None]) -> None:
    """Run a program: what its user can mend (a missing folder, a store without a job) is a line, no traceback."""
    name, usual = Path(sys.argv[0]).name, sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, (RuntimeFault, OSError, ValueError)):
            print("%s: %s" % (name, error), file=sys.stderr, flush=True)
        else:
            usual(kind, error, where)

    # Not by sys.exit: a store that is open tells the others what failed, if the error itself ends the program.
    sys.excepthook = tell
    main()
