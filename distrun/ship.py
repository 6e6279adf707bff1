"""The bundled runtime for tasks: a folder that is put on their PYTHONPATH, and an archive for other hosts.

The folder has the runtime and nothing else that can be imported. Other hosts are sent the archive: the sources of the
package distrun_runtime, named by the archive's digest, and keep it unpacked under that name; a copy that has to be made
here is the same archive, unpacked under the same name.

The same sources give the same bytes: names are sorted, times and modes fixed. The archive is small (compressed, about a
quarter of a megabyte), so that it goes to an agent in one frame.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import distrun_runtime
from distrun import keep
from distrun.errors import PreflightError
from distrun_runtime.agent import cache
from distrun_runtime.contract import caches

PACKAGE = "distrun_runtime"
SUFFIXES = (".py", ".c", ".typed")
FORMAT = 1
"""Another one where the same sources are to give another archive."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold."""
_MODE = 0o100644 << 16


def runtime_root(env: Mapping[str, str], copy: bool = True) -> Path:
    """Return the folder that holds the package distrun_runtime alone.

    In a checkout that is `runtime/`. Installed in site-packages the runtime lies beside other packages, which must not
    come before the user's own packages: then it is a copy under `$XDG_CACHE_HOME/distrun/runtime`, named by the
    archive's digest and made once (`copy` False: only its name is found out).

    Raises:
        PreflightError: the copy cannot be written.
    """
    source = location()
    if not has_siblings(source):
        return source.parent
    digest, data = archive(source)
    found = cache.find(digest, env)
    if not found and copy:
        try:
            found = cache.install(digest, data, env)
        except OSError as err:
            raise PreflightError(
                f"cannot keep a copy of the runtime for the tasks in {caches.base(env)}: {err.strerror or err}",
                "set XDG_CACHE_HOME to a place that can be written",
            ) from err
    return Path(found or caches.base(env), *(() if found else (cache.RUNTIME, digest)))


def has_siblings(package: Path) -> bool:
    """Return whether something else beside `package` could be imported from its parent."""
    return any(
        other != package
        and not other.name.startswith((".", "__"))
        and (other.is_dir() or other.suffix in (".py", ".so", ".pth", ".egg-link"))
        for other in package.parent.iterdir()
    )


def archive(package: Path | None = None) -> tuple[str, bytes]:
    """Return the archive's digest (SHA-256, 64 hex digits) and its bytes, a zip.

    Unpacked into a folder that is put on PYTHONPATH, `distrun_runtime` can be imported from it. `package` is the
    package's folder; None: the one that this process uses.
    """
    import hashlib  # local jobs need no archive

    sources = _sources(location() if package is None else package)
    # Compressing takes longer than all else that a small launch does itself.
    data = keep.kept(_name(sources), ".runtime.zip", lambda: _zip(sources))
    return hashlib.sha256(data).hexdigest(), data


def location() -> Path:
    """Return the folder of the package distrun_runtime that this process uses."""
    return Path(distrun_runtime.__file__).resolve().parent


def _sources(package: Path) -> dict[str, bytes]:
    found = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.suffix in SUFFIXES}
    return {name: found[name].read_bytes() for name in sorted(found, key=os.fsencode) if found[name].is_file()}


def _name(sources: Mapping[str, bytes]) -> str:
    """Return a digest of all that the archive is made from: the sources, and what compresses them."""
    import hashlib
    import zlib

    digest = hashlib.sha256((f"{FORMAT} {zlib.ZLIB_RUNTIME_VERSION}").encode())
    for name, source in sources.items():
        digest.update(b"%d %s\0%d " % (len(os.fsencode(name)), os.fsencode(name), len(source)) + source)
    return digest.hexdigest()


def _zip(sources: Mapping[str, bytes]) -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name, source in sources.items():
            entry = zipfile.ZipInfo(f"{PACKAGE}/{name}", _EPOCH)
            entry.create_system = 3  # unix: the mode below means something
            entry.external_attr = _MODE
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, source, compresslevel=9)
    return buffer.getvalue()
