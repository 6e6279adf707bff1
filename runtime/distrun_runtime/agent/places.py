"""Checks the folders that tasks run in, and makes the one that files will be copied to."""

from __future__ import annotations

import os

from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.contract.folder import Unfit, prepare
from distrun_runtime.contract.plan import Plan


def check(plan: Plan, host: str) -> None:
    """See to the folders of the plan's tasks.

    Raises:
        Refusal: one is missing, cannot be made or used, or has too little room.
    """
    sync = plan.sync
    if sync is not None:
        size, files, delete, source = sync.size, sync.files, sync.delete, sync.identity
        try:
            prepare(plan.cwd, " on %s" % host, size=size, files=files, delete=delete, source=source)
        except Unfit as err:
            raise Refusal(err.kind, str(err), err.fix) from None
    for cwd in dict.fromkeys(task.cwd for task in plan.tasks if task.cwd):
        if not is_copied(cwd, plan):
            _must_be(cwd, plan, host)


def check_copied(plan: Plan, host: str) -> None:
    """See to the folders of tasks that come with the files. Raises Refusal."""
    for cwd in dict.fromkeys(task.cwd for task in plan.tasks if task.cwd):
        if is_copied(cwd, plan):
            _must_be(cwd, plan, host)


def is_copied(path: str, plan: Plan) -> bool:
    """Return whether a path is where files are copied to, or below it; a relative one is seen from there."""
    if plan.sync is None:
        return False
    place = os.path.normpath(expand(plan.cwd))
    path = os.path.normpath(os.path.join(place, expand(path)))
    return (path + os.sep).startswith(place.rstrip(os.sep) + os.sep)


def expand(folder: str) -> str:
    """Return the path that a folder of the plan means here: `~` is the home of the user of this host."""
    return os.path.expanduser(folder)


def _expanded(cwd: str, host: str) -> str:
    folder = expand(cwd)
    if folder.startswith("~"):  # as it stands it would be a folder `~NAME` below the home directory
        text = "there is no user %s on %s" % (cwd.partition("/")[0], host)
        raise Refusal("folder", text, "give a directory of a user that all hosts have")
    return folder


def _must_be(cwd: str, plan: Plan, host: str) -> None:
    folder = _expanded(cwd, host)
    fix = "" if plan.backend == "local" else "copy it there with --sync-dst-dir DIR, or mount it"
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise Refusal("folder", "%s %s on %s" % (cwd, what, host), fix)
    if not os.access(folder, os.X_OK):
        raise Refusal("folder", "%s on %s cannot be entered: no permission" % (cwd, host), fix)
