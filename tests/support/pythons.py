"""The Python interpreters of this machine, for what has to run under each of them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from slowness import scaled

VERSIONS = ["3.%d" % minor for minor in range(8, 16)]
TOO_OLD = ["3.5", "3.6", "3.7"]


@functools.cache
def interpreter(version: str) -> str:
    """Return the true path of python3.X, as found on PATH (behind a version manager's shim, too); empty if none."""
    found = shutil.which("python" + version)
    if not found:
        return ""
    siblings = sorted(Path(found).parent.parent.glob("versions/%s.*/bin/python" % version))
    for candidate in [found, *map(str, siblings)]:
        question = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(question, capture_output=True, text=True, timeout=scaled(60), check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return ""


def need(version: str) -> str:
    found = interpreter(version)
    if not found:
        pytest.skip("needs python%s on PATH" % version)
    return found
