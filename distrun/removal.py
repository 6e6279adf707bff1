"""Removes folders of jobs that are over.

Nothing outside the job store is touched: links in a folder are removed, not followed. A job with --run-dir has only a
link in the store; the link goes, and the folder that the user named stays.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import List, NamedTuple

from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

_PREFIX = ".removed-"
"""Begins the name of a folder that is being removed: no list of jobs shows it."""


class Removed(NamedTuple):
    """What became of a job's folder."""

    size: int
    """Bytes that were freed, or would be."""
    kept: str = ""
    """The folder outside the store that was left."""
    problem: str = ""
    """Why something of the job is still there."""


def measure(folder: JobFolder) -> Removed:
    """Return what `remove` would do."""
    if os.path.islink(str(folder.path)):
        return Removed(0, kept=os.path.realpath(str(folder.path)))
    return Removed(_size(str(folder.path)))


def remove(folder: JobFolder) -> Removed:
    """Remove a job's folder. Whether the job is over, and this is wanted, was seen to before."""
    found = measure(folder)
    path = str(folder.path)
    try:
        if found.kept:
            os.unlink(path)
            return found
        # At once for all readers; should this process end meanwhile, the next run goes on.
        doomed = str(folder.path.parent / (_PREFIX + folder.path.name))
        os.rename(path, doomed)
    except FileNotFoundError:  # a host that shares the store has removed it meanwhile
        return Removed(0)
    except OSError as err:
        return found._replace(size=0, problem=f"cannot remove {path}: {err.strerror or err}")
    problem = _delete(doomed)
    return found if not problem else found._replace(size=max(0, found.size - _size(doomed)), problem=problem)


def finish(store: JobStore) -> List[str]:
    """Remove what an earlier run could not remove, or left when it was ended; return what is wrong, a line each."""
    try:
        names = [name for name in os.listdir(str(store.jobs)) if name.startswith(_PREFIX)]
    except OSError:
        return []
    return [problem for problem in (_delete(str(store.jobs / name)) for name in names) if problem]


def _delete(path: str) -> str:
    """Remove a folder of the store; return why something of it is left, "" if nothing is."""
    problems: List[str] = []

    def note(function: object, where: str, error: object) -> None:
        del function
        err = error[1] if isinstance(error, tuple) else error
        problems.append(f"cannot remove {where}: {getattr(err, 'strerror', None) or err}")

    # It holds folders open while it goes down, so that a link that is put in one's place is not followed.
    shutil.rmtree(path, onerror=note)
    return problems[0] if problems and os.path.lexists(path) else ""


def _size(path: str) -> int:
    """Return what a folder takes on the disk, in bytes, without following links; 0 for what cannot be read."""
    total = 0
    todo = [path]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    total += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        todo.append(entry.path)
        except OSError:
            continue
    return total
