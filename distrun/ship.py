"""The folder that is put on tasks' PYTHONPATH: the bundled runtime, and nothing else that can be imported.

That is for tasks on this machine. Other hosts are sent `archive.build()` and keep it unpacked under its digest; a copy
that has to be made here is the same archive, unpacked under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distrun import archive
from distrun.errors import PreflightError
from distrun_runtime.agent import cache


def runtime_root(env: Mapping[str, str], copy: bool = True) -> Path:
    """Return the folder that holds the package distrun_runtime alone.

    In a checkout that is `runtime/`. Installed in site-packages the runtime has neighbours, which must not come
    before the user's own packages: then it is a copy under `$XDG_CACHE_HOME/distrun/runtime`, named by the archive's
    digest and made once (`copy` False: only its name is found out).

    Raises:
        PreflightError: the copy cannot be written.
    """
    source = archive.location()
    if not has_neighbours(source):
        return source.parent
    digest, data = archive.build(source)
    found = cache.find(digest, env)
    if not found and copy:
        try:
            found = cache.install(digest, data, env)
        except OSError as err:
            raise PreflightError(
                "cannot keep a copy of the runtime for the tasks in %s: %s" % (cache.base(env), err.strerror or err),
                "set XDG_CACHE_HOME to a place that can be written",
            ) from err
    return Path(found or cache.base(env), *(() if found else (cache.RUNTIME, digest)))


def has_neighbours(package: Path) -> bool:
    """Return whether something else beside `package` could be imported from its parent."""
    return any(
        other != package
        and not other.name.startswith((".", "__"))
        and (other.is_dir() or other.suffix in (".py", ".so", ".pth", ".egg-link"))
        for other in package.parent.iterdir()
    )
