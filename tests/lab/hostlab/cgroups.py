"""Control groups of a lab's hosts: made when first needed, removed by the lab's warden.

Control groups belong to the machine, not to a namespace; a lab's have its random name. Freezing needs version 2; the
limits take version 2 where it has the controller, else version 1, which many machines have beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from hostlab.errors import LabError, Unavailable

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = {"memory": ("max", "-1"), "cpu": ("max", "-1"), "pids": ("max", "max")}


def unified() -> Path | None:
    """Return the root of version 2, if it is mounted."""
    for path in (ROOT, ROOT / "unified"):
        if (path / "cgroup.controllers").exists():
            return path
    return None


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Unavailable("cannot make a control group: %s" % error) from error
    return folder


def enlist(folder: Path, pids: Callable[[], Iterable[int]]) -> None:
    """Move all processes that `pids()` gives into a group, until it gives no other one."""
    for _ in range(20):
        inside = set((folder / "cgroup.procs").read_text().split())
        outside = [pid for pid in pids() if str(pid) not in inside]
        if not outside:
            return
        for pid in outside:
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))
    raise LabError("processes are started faster than they can be moved into %s" % folder)


def _version2(group: str, host: str) -> Path:
    root = unified()
    if root is None:
        raise Unavailable("no control groups version 2 are mounted below %s" % ROOT)
    return _make(_make(root / group) / host)


def freeze(group: str, host: str, frozen: bool, pids: Callable[[], Iterable[int]]) -> None:
    """Freeze or thaw every process of a host."""
    folder = _version2(group, host)
    if not (folder / "cgroup.freeze").exists():
        raise Unavailable("this kernel cannot freeze a control group (5.2 or newer can)")
    enlist(folder, pids)
    (folder / "cgroup.freeze").write_text("1" if frozen else "0")


def thaw(group: str, host: str) -> None:
    """Thaw a host if it was ever frozen."""
    root = unified()
    if root and (file := root / group / host / "cgroup.freeze").exists():
        file.write_text("0")


def limit(group: str, host: str, controller: str, values: tuple[str, str], pids: Callable[[], Iterable[int]]) -> None:
    """Limit a host's `memory`, `cpu` or `pids`; `values` are the words for version 2 and 1."""
    files2 = {"memory": "memory.max", "cpu": "cpu.max", "pids": "pids.max"}
    files1 = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}
    root = unified()
    if root and controller in (root / "cgroup.controllers").read_text().split():
        for folder in (root, _make(root / group)):
            (folder / "cgroup.subtree_control").write_text("+" + controller)
        folder = _version2(group, host)
        (folder / files2[controller]).write_text(values[0])
        if controller == "memory" and (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("max" if values[0] == "max" else "0")
    elif (ROOT / controller / "cgroup.procs").exists():
        folder = _make(ROOT / controller / ("%s-%s" % (group, host)))
        (folder / files1[controller]).write_text(values[1])
    else:
        raise Unavailable("no %s controller among the control groups of this machine" % controller)
    enlist(folder, pids)


def unlimit(group: str, host: str) -> None:
    """Take all limits of a host away."""
    root = unified()
    for controller, values in NO_LIMIT.items():
        if root and (file := root / group / host / (controller + ".max")).exists():
            file.write_text(values[0])
        folder = ROOT / controller / ("%s-%s" % (group, host))
        names = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}
        if (file := folder / names[controller]).exists():
            file.write_text(values[1])
