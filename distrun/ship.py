"""The folder that is put on tasks' PYTHONPATH: the bundled runtime, and nothing else that can be imported.

That is for tasks on this machine. Other hosts are sent `archive.build()` and keep it unpacked under its digest; a copy
that has to be made here is the same archive, unpacked under the same name.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from distrun import archive
from distrun.errors import PreflightError


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
    home = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest, data = archive.build(source)
    root = Path(home) / "distrun" / "runtime" / digest
    if copy and not (root / archive.PACKAGE).is_dir():
        try:
            _unpack(data, root)
        except OSError as err:
            raise PreflightError(
                "cannot keep a copy of the runtime for the tasks at %s: %s" % (root, err.strerror or err),
                "set XDG_CACHE_HOME to a place that can be written",
            ) from err
    return root


def has_neighbours(package: Path) -> bool:
    """Return whether something else beside `package` could be imported from its parent."""
    return any(
        other != package
        and not other.name.startswith((".", "__"))
        and (other.is_dir() or other.suffix in (".py", ".so", ".pth", ".egg-link"))
        for other in package.parent.iterdir()
    )


def _unpack(data: bytes, root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=root.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            packed.extractall(made)
        made.chmod(0o755)
        try:
            made.rename(root)
        except OSError:
            # Another launch may have made the same copy meanwhile; then that one stands.
            if not (root / archive.PACKAGE).is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
