"""Programs compiled for GPUs, kept on disk: compiling one takes a second or two, and every process of a job needs it.

Each is a file `KEY-ARCHITECTURE-COMPILER.cubin` (`contract.private`) in the user's cache. Where
that cannot be written, as in many containers, they are in `distrun-cubins-UID` in the system's temporary folder, and
where that cannot be, nowhere. Nothing here needs a GPU, and nothing fails because a file cannot be read or written:
then the program is compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping

from distrun_runtime.contract import private

__all__ = ["find_folder", "kept"]

KIND = "cubins"
SUFFIX = ".cubin"
UNUSED_S = 30 * 86400.0
"""A file that was not used for so long is removed when another is added."""


def find_folder(env: Mapping[str, str] | None = None, temporary: str | None = None) -> str:
    """Return a folder that this process can write to, and only this user; empty if there is none.

    Arguments:
        env: instead of this process's environment.
        temporary: instead of the system's temporary folder.
    """
    with contextlib.suppress(OSError):
        found = private.make_cache(KIND, env)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    path = os.path.join(temporary or tempfile.gettempdir(), f"distrun-{KIND}-{os.geteuid()}")
    with contextlib.suppress(OSError):
        path = private.own(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if private.is_ours(os.lstat(path), rights=0o077) and os.access(path, os.W_OK | os.X_OK):
            return path
    return ""


def kept(folder: str, key: str, architecture: str, compiler: str, compile: Callable[[], bytes]) -> bytes:
    """Return a program's machine code: from the folder, else compiled, and then kept there.

    Arguments:
        folder: of `find_folder`; empty: nothing is kept.
        key: of the source and the options, `Program.key`.
        architecture, compiler: for what and by which version it is compiled: `sm_90`, `12.9`.
        compile: does it; its errors are raised here.
    """
    if not folder:
        return compile()
    name = "-".join(re.sub(r"[^\w.]", "_", part) for part in (key, architecture, compiler)) + SUFFIX
    path = os.path.join(folder, name)
    with contextlib.suppress(OSError):
        code = private.read_cached(path)
        if code:
            with contextlib.suppress(OSError):
                os.utime(path)
            return code
    code = compile()
    with contextlib.suppress(OSError):
        private.write_cached(path, code)
        _thin_out(folder)
    return code


def _thin_out(folder: str) -> None:
    """Remove what was not used for long, or was left half written. Raises OSError."""
    before = time.time() - UNUSED_S
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another process removed it
            if (name.endswith(SUFFIX) or name.startswith(private.FRESH)) and os.lstat(path).st_mtime < before:
                os.unlink(path)
