"""Calls that a signal handler ends: at each place where one may run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Call, and raise at the `at`-th place where a signal handler may run: a function of the package begins, or one in
    C has returned. Return whether there was such a place."""
    left = at

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        code = frame.f_code
        # Python goes on behind what is raised in the callback of a weak reference, or where a generator is closed.
        is_heard = code.co_name not in {"release", "<genexpr>"}
        if is_heard and event in {"call", "c_return"} and "distrun_runtime" in code.co_filename:
            left -= 1
            if not left:
                raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False
