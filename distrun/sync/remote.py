"""The command that rsync runs on a host in place of `rsync`: it finds a python3 and hands it `receiver.py`.

The program and its options travel as words of the command, compressed and in base64: the connection's input is
rsync's, and no login shell finds anything in them to change.
"""

from __future__ import annotations

import binascii
import functools
import json
import os
import re
import zlib
from pathlib import Path

from distrun.errors import UsageError
from distrun.ssh import remote
from distrun.sync import receiver
from distrun.sync.receiver import NO_RSYNC, NOTE, SAME, SAYS, UNFIT
from distrun.sync.rules import PARTIAL
from distrun_runtime.contract import folder as contract

__all__ = ["BEGIN", "NOTE", "NO_PYTHON", "NO_RSYNC", "SAME", "SAYS", "UNFIT", "check_folder", "rsync_path"]

BEGIN = "begin"
NO_PYTHON = "nopython"

# No quote of either kind and nothing that a shell would touch within single quotes.
_BOOT = "import binascii,sys,zlib;exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))"
# Nothing newer than Python 2.7 before the version is known.
_PROGRAM = """\
if sys.version_info < (3, 8):
    sys.stderr.write("%(says)s%(nopython)s %%s is Python %%s\\n" %% (sys.executable, sys.version.split()[0]))
    sys.exit(127)
def module(name, text):
    made = sys.modules[name] = type(sys)(name)
    exec(compile(text, "<distrun>/" + name, "exec", dont_inherit=True), made.__dict__)
    return made
module("distrun_runtime.contract.folder", %(folder)r)
options = binascii.a2b_base64(sys.argv[2]).decode()
sys.exit(module("distrun.sync.receiver", %(receiver)r).main([options] + sys.argv[3:]))
"""


def rsync_path(
    folder: str,
    *,
    size: int = 0,
    files: int = 0,
    source: str = "",
    delete: bool = False,
    extra: bool = False,
    partial: str = "-",
    python: str = "",
) -> str:
    """Return the value of --rsync-path for a copy into `folder`.

    An empty folder needs room for `files` files and `size` bytes; `source` is what makes the source's folder the same
    as one on the host, `partial` the name of folders for what has not arrived whole. With `delete` the folder must have
    our marker, or be empty. With `extra` something is added below a folder that was copied to: it gets no marker.
    `python` is an interpreter there to try first.
    """
    options = {
        "folder": os.fsencode(folder).hex(),
        "size": size,
        "files": files,
        "source": source,
        "delete": delete,
        "marks": not extra,
        "partial": partial,
        "beginning": PARTIAL,
    }
    words = (_program(), _base64(json.dumps(options).encode("ascii")))
    return remote.command(_BOOT, python, words, begin=SAYS + BEGIN, missing=SAYS + NO_PYTHON)


@functools.lru_cache(maxsize=1)
def _program() -> str:
    """Return the program as one word."""
    sources = {name: Path(str(each.__file__)).read_text("utf-8") for name, each in _MODULES.items()}
    text = _PROGRAM % {"says": SAYS, "nopython": NO_PYTHON, **sources}
    return _base64(zlib.compress(text.encode("utf-8"), 9))


_MODULES = {"folder": contract, "receiver": receiver}


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def check_folder(folder: str, option: str = "--sync-dst-dir") -> None:
    """Check a destination. Pure.

    Raises:
        UsageError: it is empty, the root of the file system, or names a user or variable as only a shell would read it.
    """
    if not folder or "\0" in folder:
        raise UsageError("%s: expected a directory on the hosts, found %r" % (option, folder))
    if folder.startswith("~") and not re.fullmatch(r"~[A-Za-z0-9._+-]*(/.*)?", folder, re.DOTALL):
        raise UsageError("%s: expected ~/DIR or ~USER/DIR, found %r" % (option, folder), "./%s is a name" % folder)
    if folder.startswith("$"):
        home = re.sub(r"\A\$(HOME|\{HOME\})(?=/|\Z)", "~", folder)
        fix = "write %s" % home if home != folder else "./%s is a name" % folder
        raise UsageError("%s: variables are not expanded on the hosts: %r" % (option, folder), fix)
    if not folder.strip("/."):
        raise UsageError("%s: %r cannot take copies" % (option, folder), "name one of its own, like ~/job")
