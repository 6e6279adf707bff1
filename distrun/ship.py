"""The folder that is put on tasks' PYTHONPATH: the bundled runtime, and nothing else that can be imported."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import distrun_runtime
from distrun.errors import PreflightError

PACKAGE = "distrun_runtime"


def runtime_root(env: Mapping[str, str], copy: bool = True) -> Path:
    """Return the folder that holds the package distrun_runtime alone.

    In a checkout that is `runtime/`. Installed in site-packages the runtime has neighbours, which must not come
    before the user's own packages: then it is a copy under `$XDG_CACHE_HOME/distrun/runtime`, named by its content
    and made once (`copy` False: only its name is found out).

    Raises:
        PreflightError: the copy cannot be written.
    """
    source = Path(distrun_runtime.__file__).resolve().parent
    if not has_neighbours(source):
        return source.parent
    home = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(home) / "distrun" / "runtime" / digest(source)
    if copy and not (root / PACKAGE).is_dir():
        try:
            _copy(source, root)
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


def digest(package: Path) -> str:
    """Return 16 hex digits that name the content of a package's Python files."""
    found = hashlib.sha256()
    for path in _sources(package):
        data = path.read_bytes()
        found.update(b"%s\0%d\0" % (os.fsencode(path.relative_to(package)), len(data)))
        found.update(data)
    return found.hexdigest()[:16]


def _sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".typed") and path.is_file())


def _copy(source: Path, root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=root.parent))
    try:
        for path in _sources(source):
            target = made / PACKAGE / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        made.chmod(0o755)
        try:
            made.rename(root)
        except OSError:
            # Another launch may have made the same copy meanwhile; then that one stands.
            if not (root / PACKAGE).is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
