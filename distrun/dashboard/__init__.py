"""`distrun status -w` and `distrun top`: a live view of jobs on a terminal.

`watch` shows one job. `watch_jobs` shows a table of jobs, from which the user can open one. `follow` prints a line for
each change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrun.dashboard.loop import Ended
    from distrun.dashboard.model import Model
    from distrun.dashboard.terminal import Appearance
    from distrun_runtime.coordinator.jobfolder import JobFolder


def watch(folder: JobFolder, look: Appearance) -> Ended:
    """Show a job on the terminal until the user leaves. The exit code is that of `distrun status JOB`.

    Raises:
        DistrunError: the host of the job's coordinator cannot be reached, and nothing is known of the job.
    """
    from distrun.dashboard import watching

    return watching.watch(folder, look)


def watch_jobs(read: Callable[[], Sequence[Model]], find: Callable[[str], JobFolder], look: Appearance) -> Ended:
    """Show a table of jobs on the terminal, of which the user can open one, until the user leaves.

    Args:
        read: returns the jobs that are shown.
        find: returns the folder of the job with an id.
        look: how it is drawn.
    """
    from distrun.dashboard import watching

    return watching.watch_jobs(read, find, look)


def follow(folder: JobFolder, write: Callable[[str], bool]) -> Ended:
    """Print a line for each change of a job, until it is over.

    Args:
        folder: the job's.
        write: prints a text; returns False if stdout is closed.
    """
    from distrun.dashboard import watching

    return watching.follow(folder, write)
