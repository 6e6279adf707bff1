"""Find the job that a command's word means, and say so where the word could mean several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrun.cli.console import print_err

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobstore import JobFolder, JobStore


def find(store: JobStore, wanted: str) -> JobFolder:
    """Return the job, as `JobStore.find` does; of several with exactly that name the newest, which is said.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    folder = store.find(wanted)
    count = len(store.named(wanted)) if folder.id != wanted else 0
    if count > 1:
        print_err("distrun: %s: the newest of %d jobs of that name, %s\n" % (wanted, count, folder.id))
    return folder
