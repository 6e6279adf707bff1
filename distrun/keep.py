"""Keeps in the user's cache what takes long to make and is the same until a source changes. Nothing needs the cache.

Files are named by what they were made from (`contract.keptfiles`), and are read only from a folder that nobody else can
write to (`contract.caches`). What is damaged is removed and made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from distrun_runtime.contract import caches, keptfiles

KIND = "launcher"
COPIES = 4
"""So many files of a kind stay: a user may have several versions of distrun."""


def kept(name: str, suffix: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned when it was last called for this `name`, or call it.

    Args:
        name: a digest of everything that `make` depends on.
        suffix: of which kind it is; COPIES files of a kind stay.
        make: never returns nothing.
    """
    file = name + suffix
    with contextlib.suppress(OSError):
        data = keptfiles.read(str(Path(caches.folder(KIND), file)))
        if data:
            return data
    data = make()
    with contextlib.suppress(OSError):  # a full or read-only disk: it is made again next time
        folder = Path(caches.make(KIND))
        keptfiles.write(str(folder / file), data)
        _thin_out(folder, suffix)
    return data


def _thin_out(place: Path, suffix: str) -> None:
    found = sorted(place.glob("*" + suffix), key=lambda path: path.stat().st_mtime)
    for path in found[:-COPIES]:
        path.unlink()
