"""Cases that one process of another interpreter runs: it tells by JSON on stdout how each ended."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable


def run_cases(cases: Iterable[Callable[[], None]]) -> None:
    """Run each case; print an object of their names and tracebacks, empty where a case ended well."""
    result = {}
    for case in cases:
        try:
            case()
            result[case.__name__] = ""
        except BaseException:
            result[case.__name__] = traceback.format_exc()
    json.dump(result, sys.stdout)
