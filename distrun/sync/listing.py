"""What rsync would copy, asked of rsync itself by a dry run into an empty folder, so that its rules are the copy's."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from array import array
from collections.abc import Sequence

from distrun.errors import SyncError
from distrun.sync import gitfiles, options, rules, tool
from distrun.sync.rules import Rules
from distrun_runtime.contract import environ

LIST_S = 600.0
"""How long rsync may take to look at everything."""
VANISHED = 24
"""The code for files that went away meanwhile, which is no harm to a list."""

_LINE = re.compile(rb"(\d+) [<>c.h*]([fLd])\S* (.*)")
_ESCAPED = re.compile(rb"\\#(\d{3})")


def entries(output: bytes) -> list[tuple[bytes, int]]:
    """Return path and bytes of each file and link (0 bytes) of a dry run. Pure."""
    found = []
    for match in map(_LINE.fullmatch, output.split(b"\n")):
        if match is not None and match.group(2) != b"d":
            found.append((_unescape(match.group(3)), int(match.group(1)) if match.group(2) == b"f" else 0))
    return found


def sums(output: bytes) -> array[int]:
    """Return for each n the bytes of the first n entries of a dry run, in rsync's order, the folder itself first. Pure.

    rsync says while it copies how many entries it has passed, and not how large those were that it did not send.
    """
    found = array("Q", [0, 0])
    for match in map(_LINE.fullmatch, output.split(b"\n")):
        if match is not None and match.group(3) != b"./":
            found.append(found[-1] + (int(match.group(1)) if match.group(2) == b"f" else 0))
    return found


def run(program: tool.Tool, filters: Sequence[str], source: str, names: Sequence[bytes] | None = None) -> bytes:
    """Return what rsync says about a copy of the folder `source` (or of `names` in it) to an empty place.

    Raises:
        SyncError: it fails.
    """
    env = {**environ.snapshot(), "LC_ALL": "C"}
    with tempfile.TemporaryDirectory(prefix="distrun-scan-") as empty:
        files_from = "" if names is None else "-"
        command = options.listing(program, filters, os.path.join(source, ""), empty + "/", files_from)
        data = b"" if names is None else b"\0".join(names)
        try:
            result = subprocess.run(command, env=env, input=data, capture_output=True, timeout=LIST_S, check=False)
        except subprocess.TimeoutExpired as err:
            text = "rsync has not listed the files of %s after %g s" % (source, LIST_S)
            hint = "leave out large folders with --sync-exclude PATTERN, or %s" % rules.IGNORE_FILE
            raise SyncError(text, hint) from err
    if result.returncode not in (0, VANISHED):
        words = " ".join(os.fsdecode(result.stderr).split())
        raise SyncError("rsync cannot list %s: %s: %s" % (source, tool.meaning(result.returncode), words))
    return result.stdout


def chosen(program: tool.Tool, wanted: Rules, filters: Sequence[str], source: str) -> list[bytes] | None:
    """Return the files of --sync-gitignore that no pattern leaves out; None: rsync chooses by itself.

    rsync does not match patterns against the folders above the names of a list, so here they are matched by a run
    without one.

    Raises:
        UsageError: `source` is in no git repository.
        SyncError: rsync fails, or is too old to list names.
    """
    if not wanted.gitignore:
        return None
    names = gitfiles.listed(source)
    if not program.has("--out-format"):
        raise SyncError("--sync-gitignore needs a newer rsync than %s %s" % (program.program, program.version))
    kept = {name for name, _ in entries(run(program, filters, source))}
    return [name for name in names if name in kept]


def _unescape(name: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found.group(1), 8)]), name)
