"""Samples of tasks and hosts, from a /proc that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distrun_runtime.agent import procfs
from distrun_runtime.agent.procfs import LOOK_S, PsRow, Tasks
from distrun_runtime.contract.process import Identity

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ME = os.getpid()


class Proc:
    """A folder like /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: list[str] = []

    def process(
        self,
        pid: int,
        ppid: int = 1,
        sid: int = 0,
        own: int = 0,
        waited: int = 0,
        pages: tuple[int, int] = (0, 0),
        **more: int,
    ) -> None:
        """Write a process. `own`, `waited`: seconds of CPU time, the latter of children that have ended."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        times = f"{own * TICK} 0 {waited * TICK} 0"
        start = more.get("start", pid * 10)
        (folder / "stat").write_text(f"{pid} (a) b) S {ppid} 1 {sid} 0 -1 0 0 0 0 0 {times} 20 0 1 0 {start} 9 9 9\n")
        (folder / "statm").write_text(f"9 {pages[0]} {pages[1]} 0 0 0 0\n")
        if "read" in more:
            (folder / "io").write_text(f"rchar: 1\nread_bytes: {more['read']}\nwrite_bytes: {more['write']}\n")

    def end(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            file.write_text("")  # for those who have it open
            file.unlink()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path)
    opened, again = procfs._open, procfs._again
    paths: dict[int, str] = {}

    def noted(path: str) -> int:
        descriptor = opened(path)
        paths[descriptor] = path
        return descriptor

    def counted(descriptor: int) -> bytes:
        if descriptor >= 0:
            made.reads.append(paths[descriptor])
        return again(descriptor)

    monkeypatch.setattr(procfs, "_PROC", str(tmp_path))
    monkeypatch.setattr(procfs, "_open", noted)
    monkeypatch.setattr(procfs, "_again", counted)
    return made


def leader(pid: int) -> Identity:
    return Identity(pid, f"proc:boot:{pid * 10}")


def tasks(marked: dict[int, str] | None = None) -> Tasks:
    return Tasks(lambda pid: (marked or {}).get(pid, ""))


def test_memory_of_a_task_counts_what_its_processes_share_once(proc: Proc) -> None:
    proc.process(100, ME, 100, pages=(1000, 400))
    proc.process(101, 100, 100, pages=(700, 600))
    [usage] = tasks().sample({"worker-0": leader(100)}, 0.0).values()
    assert usage.rss == (1000 + 100) * PAGE
    assert usage.processes == 2


def test_cpu_time_of_children_that_ended_stays_whether_or_not_they_were_waited_for(proc: Proc) -> None:
    sampler, leaders = tasks(), {"worker-0": leader(100)}
    proc.process(100, ME, 100, own=1)
    proc.process(101, 100, 100, own=5)
    proc.process(102, 100, 100, own=7)
    assert sampler.sample(leaders, 0.0)["worker-0"].cpu_s == 13
    proc.end(101)
    proc.process(100, ME, 100, own=1, waited=5)
    assert sampler.sample(leaders, 1.0)["worker-0"].cpu_s == 13
    proc.end(102)  # nobody waited for it
    assert sampler.sample(leaders, 2.0)["worker-0"].cpu_s == 13
    proc.process(100, ME, 100, own=3, waited=5)
    assert sampler.sample(leaders, 3.0)["worker-0"].cpu_s == 15


def test_between_two_looks_only_known_processes_are_read(proc: Proc) -> None:
    for pid in range(1, 60):
        proc.process(pid)
    proc.process(100, ME, 100, read=0, write=0)
    sampler, leaders = tasks(), {"worker-0": leader(100)}
    assert sampler.sample(leaders, 0.0)["worker-0"].processes == 1
    assert sampler.processes == 60
    proc.reads.clear()
    sampler.sample(leaders, 1.0)
    assert set(proc.reads) == {f"{proc.root}/100/{name}" for name in ("stat", "statm")}
    proc.reads.clear()
    proc.process(200, 100, 100)
    sampler.sample(leaders, LOOK_S)
    others = {path for path in proc.reads if "/100/" not in path and "/200/" not in path}
    assert len(others) <= 60 // procfs.AGAIN + 1, "of the others only a few, in turn"
    assert sampler.sample(leaders, LOOK_S)["worker-0"].processes == 2


def test_processes_that_left_the_session_belong_to_the_task_above_them(proc: Proc) -> None:
    proc.process(100, ME, 100)
    proc.process(110, ME, 110)
    proc.process(101, 100, 101)
    proc.process(102, 101, 102)
    proc.process(111, ME, 55)  # lost its parent: its environment tells
    proc.process(112, ME, 56)  # no task's: the helper
    proc.process(113, 112, 56)
    proc.process(ME, 1, 1)
    found = tasks({111: "worker-1"})
    used = found.sample({"worker-0": leader(100), "worker-1": leader(110)}, 0.0)
    assert {name: usage.processes for name, usage in used.items()} == {"worker-0": 3, "worker-1": 2}
    assert {pid: member.task for pid, member in found.members.items()} == {
        100: "worker-0",
        101: "worker-0",
        102: "worker-0",
        110: "worker-1",
        111: "worker-1",
    }


def test_a_process_id_that_is_given_again_is_another_process(proc: Proc) -> None:
    sampler, leaders = tasks(), {"worker-0": leader(100)}
    proc.process(100, ME, 100)
    proc.process(101, 100, 100, own=5)
    assert sampler.sample(leaders, 0.0)["worker-0"].cpu_s == 5
    proc.process(101, 1, 1, own=50, start=5)
    used = sampler.sample(leaders, 1.0)["worker-0"]
    assert (used.cpu_s, used.processes) == (5, 1)


def test_a_task_that_is_started_again_goes_on_counting(proc: Proc) -> None:
    sampler = tasks()
    proc.process(100, ME, 100, own=5)
    assert sampler.sample({"worker-0": leader(100)}, 0.0)["worker-0"].cpu_s == 5
    proc.end(100)
    assert sampler.sample({}, 1.0) == {}
    assert sampler.members == {}
    proc.process(200, ME, 200, own=1)
    assert sampler.sample({"worker-0": leader(200)}, 2.0)["worker-0"].cpu_s == 6


def test_disks_are_counted_where_the_system_tells(proc: Proc) -> None:
    sampler, leaders = tasks(), {"worker-0": leader(100), "worker-1": leader(110)}
    proc.process(100, ME, 100, read=10, write=20)
    proc.process(101, 100, 100, read=1, write=2)
    proc.process(110, ME, 110)
    used = sampler.sample(leaders, 0.0)
    assert (used["worker-0"].read, used["worker-0"].write) == (11, 22)
    assert (used["worker-1"].read, used["worker-1"].write) == (None, None)
    proc.process(100, ME, 100, read=110, write=220)
    used = sampler.sample(leaders, 0.5)
    assert (used["worker-0"].read, used["worker-0"].write) == (None, None), "not between two looks"
    used = sampler.sample(leaders, LOOK_S)
    assert (used["worker-0"].read, used["worker-0"].write) == (111, 222)


def test_a_large_host_is_looked_at_in_parts(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "LOOKS", 10)
    monkeypatch.setattr(procfs, "SAMPLES", 5)
    proc.process(100, ME, 100)
    for pid in range(101, 131):
        proc.process(pid, 100, 100, own=1)
    sampler, leaders = tasks(), {"worker-0": leader(100)}
    now = 0.0
    while sampler.sample(leaders, now)["worker-0"].cpu_s < 30:
        assert len(proc.reads) <= 10 + 3 * 5 + 1
        proc.reads.clear()
        now += 1.0
        assert now < 20


def test_the_least_limit_of_memory_counts(tmp_path: Path, proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tmp_path / "groups"
    (groups / "memory" / "a" / "b").mkdir(parents=True)
    (groups / "memory" / "a" / "memory.limit_in_bytes").write_text("5000000\n")
    (groups / "memory" / "a" / "b" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (groups / "c").mkdir()
    (groups / "c" / "memory.max").write_text("max\n")
    monkeypatch.setattr(procfs, "_GROUPS", str(groups))
    pid = os.getpid()
    (tmp_path / str(pid)).mkdir()
    (tmp_path / str(pid) / "cgroup").write_text("3:memory:/a/b\n0::/c\n")
    assert procfs.limit_of(pid) == 5000000
    (groups / "c" / "memory.max").write_text("4000000\n")
    assert procfs.limit_of(pid) == 4000000


def test_a_host_has_what_its_system_tells(proc: Proc) -> None:
    assert set(procfs.HostSampler().sample()) == {"cores"}
    (proc.root / "net").mkdir()
    rows = "".join(
        f"{name}: {n} 1 0 0 0 0 0 0 {n} 1 0 0 0 0 0 0\n" for name, n in (("lo", 1), ("xy0", 20), ("veth7", 3))
    )
    (proc.root / "net" / "dev").write_text(rows)
    (proc.root / "stat").write_text(f"cpu  {TICK} 0 {TICK} 9 9 0 0 0\n")
    (proc.root / "loadavg").write_text("0.50 0 0 1/2 3\n")
    found = procfs.HostSampler().sample()
    assert (found["cpu_s"], found["load"], found["net_rx"], found["net_tx"]) == (2, 0.5, 20, 20)


def test_ps_tells_of_tasks_where_there_is_no_proc() -> None:
    sampler, leaders = procfs.PortableTasks(), {"worker-0": leader(100), "worker-1": leader(110)}
    rows = [
        PsRow(100, 5, 100, 10, 1.0),
        PsRow(101, 1, 100, 20, 2.0),
        PsRow(102, 101, 102, 30, 3.0),
        PsRow(7, 8, 7, 9, 9.0),
    ]
    rows += [PsRow(8, 7, 8, 9, 9.0)]  # a circle
    used = sampler.sample(leaders, rows)
    assert used["worker-0"][:3] == (6.0, 60, 3)
    assert used["worker-1"][:3] == (0.0, None, 0)
    assert sampler.sample(leaders, rows[:1])["worker-0"][:3] == (6.0, 10, 1)
    assert sampler.members == {100: "worker-0"}
