"""Control groups of a lab's hosts: made when first needed, removed by the lab's warden.

Control groups belong to the machine, not to a namespace; a lab's have its random name. Freezing needs version 2; the
limits take version 2 where it has the controller, else version 1, which many machines have beside it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from hostlab.errors import LabError, Unavailable

MACHINE = Path("/sys/fs/cgroup")
FILES2 = {"memory": "memory.max", "cpu": "cpu.max", "pids": "pids.max"}
FILES1 = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}
NO_LIMIT = {"memory": ("max", "-1"), "cpu": ("max", "-1"), "pids": ("max", "max")}

Pids = Callable[[], Iterable[int]]


def unified(root: Path) -> Path | None:
    """Return the folder of version 2 below `root`, if it is mounted."""
    for path in (root, root / "unified"):
        if (path / "cgroup.controllers").exists():
            return path
    return None


def mount(root: Path) -> None:
    """Mount all control groups below `root`, where the machine has not (in a chroot); failures are no errors."""
    wanted = {"unified": ["cgroup2"]}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cgroups").read_text().splitlines()[1:]:
            name, hierarchy = line.split()[:2]
            if name in FILES1 and hierarchy != "0":
                wanted[name] = ["cgroup", "-o", name]
    for name, words in wanted.items():
        (root / name).mkdir(parents=True)
        subprocess.run(["mount", "-t", words[0], *words[1:], "lab", str(root / name)], capture_output=True, check=False)


class Groups:
    """The control groups of one lab, below `root`."""

    def __init__(self, root: Path, group: str) -> None:
        self._root = root
        self._unified = unified(root)
        self.group = group

    def freeze(self, host: str, pids: Pids) -> None:
        """Freeze every process of a host; `pids()` gives them."""
        folder = self._version2(host)
        if not (folder / "cgroup.freeze").exists():
            raise Unavailable("this kernel cannot freeze a control group (5.2 or newer can)")
        enlist(folder, pids)
        (folder / "cgroup.freeze").write_text("1")

    def thaw(self, host: str) -> None:
        """Thaw a host if it was ever frozen."""
        if self._unified and (file := self._unified / self.group / host / "cgroup.freeze").exists():
            file.write_text("0")

    def limit(self, host: str, controller: str, values: tuple[str, str], pids: Pids) -> None:
        """Limit a host's `memory`, `cpu` or `pids`; `values` are the words for version 2 and 1."""
        root = self._unified
        if root and controller in (root / "cgroup.controllers").read_text().split():
            folder = self._version2(host)
            for parent in (root, folder.parent):
                (parent / "cgroup.subtree_control").write_text("+" + controller)
            (folder / FILES2[controller]).write_text(values[0])
            if controller == "memory" and (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
        elif (self._root / controller / "cgroup.procs").exists():
            folder = _make(self._root / controller / ("%s-%s" % (self.group, host)))
            (folder / FILES1[controller]).write_text(values[1])
        else:
            raise Unavailable("no %s controller among the control groups of this machine" % controller)
        enlist(folder, pids)

    def unlimit(self, host: str) -> None:
        """Take all limits of a host away."""
        for controller, values in NO_LIMIT.items():
            if self._unified and (file := self._unified / self.group / host / FILES2[controller]).exists():
                file.write_text(values[0])
            if (file := self._root / controller / ("%s-%s" % (self.group, host)) / FILES1[controller]).exists():
                file.write_text(values[1])

    def _version2(self, host: str) -> Path:
        if self._unified is None:
            raise Unavailable("no control groups of version 2 here")
        return _make(_make(self._unified / self.group) / host)


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Unavailable("cannot make a control group: %s" % error) from error
    return folder


def enlist(folder: Path, pids: Pids) -> None:
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
