"""Which files git would have: tracked ones, and new ones that it does not ignore."""

from __future__ import annotations

import os
import subprocess

from distrun.errors import UsageError
from distrun_runtime.contract import environ

LIMIT_S = 120.0
"""How long git may take for one repository."""
DEPTH = 16
"""Repositories within repositories."""


def listed(source: str) -> list[bytes]:
    """Return the paths of the files that git knows of in `source` or would take, relative to it, each once.

    Repositories within it (submodules and others) are asked themselves. Files that were deleted are left out.

    Raises:
        UsageError: there is no git, `source` is in no repository, or git fails.
    """
    found: dict[bytes, None] = {}
    _list(os.fsencode(source), b"", found, DEPTH)
    return list(found)


def _list(root: bytes, below: bytes, found: dict[bytes, None], depth: int) -> None:
    for name in _ask(os.path.join(root, below)):
        path = os.path.join(below, name.rstrip(b"/"))
        full = os.path.join(root, path)
        if os.path.isdir(full) and not os.path.islink(full):
            # A submodule, or a repository that this one does not know: listed as one name.
            if depth and os.path.lexists(os.path.join(full, b".git")):
                _list(root, path, found, depth - 1)
        elif os.path.lexists(full):
            found[path] = None


def _ask(folder: bytes) -> list[bytes]:
    command = ["git", "-C", os.fsdecode(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    env = {**environ.snapshot(), "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError as err:
        raise UsageError("--sync-gitignore needs git, which is not on this machine", "install git") from err
    except subprocess.TimeoutExpired as err:
        text = "--sync-gitignore: git has not listed the files of %s after %g s" % (os.fsdecode(folder), LIMIT_S)
        raise UsageError(text) from err
    if result.returncode:
        words = " ".join(os.fsdecode(result.stderr).split())
        raise UsageError(
            "--sync-gitignore: git cannot list the files of %s: %s" % (os.fsdecode(folder), words),
            "without --sync-gitignore everything but the usual caches is copied; %s" % "`.distrunignore` says what not",
        )
    return [name for name in result.stdout.split(b"\0") if name]
