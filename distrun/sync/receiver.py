"""The program that runs on a host in place of rsync: makes and checks the folder, then runs the host's rsync in it.

This file is sent to the host with `contract/folder.py` (see `rsync.rsync_path`) and keeps to Python 3.8 and the
standard library. It reports what it finds in lines `distrun-sync: WORD DETAIL` on stderr. rsync is told to write to
`./`, so that no shell ever parses a path of the user's. Standard input and output are rsync's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import sys
import time
from typing import Any, Dict, List, Sequence

from distrun_runtime.contract.folder import ON, STALE_S, FolderUnfit, copied_to, holder, note_copy, prepare

SAYS = "distrun-sync: "
SAME = "same"
SHARED = "shared"
"""Another host has the same folder, and has got the files or is getting them; the detail is its name."""
UNFIT = "unfit"
NOTE = "note"
NO_RSYNC = "norsync"
SHELL = "shell"
"""The user's login shell."""

NOT_FOUND = 127
IO_ERROR = 11
"""rsync's code for a file that cannot be read or written."""
MORE_FOLDERS = ("/usr/local/bin", "/opt/homebrew/bin")
"""Where rsync may be, besides the PATH of a login without a terminal."""


def main(argv: Sequence[str]) -> int:
    """Run with options as JSON, then rsync's own arguments; return the exit code."""
    options = json.loads(argv[0])
    with contextlib.suppress(KeyError):
        _say(SHELL, pwd.getpwuid(os.geteuid()).pw_shell)
    try:
        place = prepare(
            os.fsdecode(bytes.fromhex(options["folder"])),
            size=options["size"],
            files=options["files"],
            delete=options["delete"],
            source=options["source"],
            mark=options["partial"] + ON,
            marks=options["marks"],
        )
        os.chdir(place.path)
        if place.notes:
            _say(NOTE, "; ".join(place.notes))
        if place.is_source:
            _say(SAME)
            return 0
        return _copy(options, argv[1:])
    except FolderUnfit as err:
        _say(UNFIT, json.dumps([str(err), err.fix]))
    except OSError as err:
        _say(UNFIT, json.dumps([f"the folder cannot be used: {err}", ""]))
    return IO_ERROR


def _copy(options: Dict[str, Any], argv: Sequence[str]) -> int:
    """Run rsync, unless another host does so in this folder. What has arrived of a copy that failed is removed.

    Meanwhile there is a link `PARTIAL.on`. Of hosts that share the folder, one makes it, and the others find it, or
    what the marker says of the copy.
    """
    partial, host = options["partial"], options["host"]
    _forget(options["beginning"])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # rsync gets it too; its end is waited for
    with contextlib.suppress(OSError):  # a file system without links: several copies into one folder do no harm
        os.symlink(host, partial + ON)
    at_work = holder(".", partial + ON)
    try:
        # The marker decides if both are there: then the link is that of a host that came late, too, and only asks.
        other = copied_to(".", partial) or at_work
        if other not in ("", host):
            _say(SHARED, other)
            return 0
        code = _run(["rsync", *argv])
        if code:
            _remove(partial)
        elif options["marks"]:
            note_copy(".", partial, host)
        return code
    finally:
        if at_work == host:
            with contextlib.suppress(OSError):
                os.unlink(partial + ON)


def _run(argv: List[str]) -> int:
    places = [os.path.join(each, argv[0]) for each in (*os.get_exec_path(), *MORE_FOLDERS)]
    found = [path for path in places if os.path.isfile(path) and os.access(path, os.X_OK)]
    if not found:
        _say(NO_RSYNC)
        return NOT_FOUND
    child = os.fork()
    if not child:
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and rsync would inherit that
                signal.signal(number, signal.SIG_DFL)
            os.execv(found[0], argv)
        finally:
            os._exit(NOT_FOUND)
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _forget(beginning: str) -> None:
    """Remove what copies have left here that were killed a day ago or earlier."""
    for name in os.listdir("."):
        if name.startswith(beginning) and name.endswith(ON):
            with contextlib.suppress(OSError):
                if os.lstat(name).st_mtime < time.time() - STALE_S:
                    _remove(name[: -len(ON)])
                    os.unlink(name)


def _remove(name: str) -> None:
    """Remove all folders of that name, here and below."""
    import shutil

    for at, folders, _ in os.walk("."):
        if name in folders:
            folders.remove(name)
            shutil.rmtree(os.path.join(at, name), ignore_errors=True)


def _say(word: str, detail: str = "") -> None:
    line = f"{SAYS}{word} {detail}"
    os.write(2, line.rstrip().replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
