"""Forked children of a test: what they do, and how they end."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def exit_code_of(child: Callable[[], None]) -> int:
    """Run a function in a forked child of this process, and return the child's exit code: 0 if it returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
