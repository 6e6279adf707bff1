"""Samples the host and its tasks from /proc.

Each sample reads only `stat` and `statm` of the known processes. Every LOOK_S, /proc is listed to find new processes
of tasks. Then `stat` of the new processes and `io` of the known ones are read, too. So a host with a thousand processes
costs little more than an empty one. Standard library only, Python 3.8.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from distrun_runtime.contract.process import Identity

# Parsers of the system's data about processes and the host: files of /proc and the output of `ps`. No side effects.
#
# Kernels and containers differ. A parser returns None for missing data, or leaves it out. Standard library only, Python
# 3.8.


class Stat(NamedTuple):
    """What is wanted of /proc/PID/stat."""

    ppid: int
    sid: int
    ticks: int
    """CPU time of the process, and of the children that it has waited for, in clock ticks."""
    start: int
    """Clock ticks from boot to its start."""


class PsRow(NamedTuple):
    """One process, as `ps` tells."""

    pid: int
    ppid: int
    pgid: int
    rss: int
    """Bytes."""
    cpu_s: float


class Rising:
    """A counter that never goes back, made of a sum that does.

    The CPU time of a child that ended goes to its parent, unless that does not wait for it: then the sum falls.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._sum = 0.0

    def note(self, total: float) -> float:
        """Take the sum as it is now; return the counter."""
        self.value += max(0.0, total - self._sum)
        self._sum = total
        return self.value


def parse_stat(data: bytes) -> Optional[Stat]:
    """Parse /proc/PID/stat. The command may hold blanks and brackets; the last bracket ends it (proc(5))."""
    fields = data[data.rfind(b")") + 2 :].split(None, 20)
    try:
        ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        return Stat(int(fields[1]), int(fields[3]), ticks, int(fields[19]))
    except (IndexError, ValueError):
        return None


def parse_statm(data: bytes) -> Optional[Tuple[int, int]]:
    """Parse /proc/PID/statm: pages that are resident, and how many of those are shared."""
    fields = data.split(None, 3)
    try:
        return int(fields[1]), int(fields[2])
    except (IndexError, ValueError):
        return None


def parse_io(data: bytes) -> Optional[Tuple[int, int]]:
    """Parse /proc/PID/io: bytes that were read from disks, and written."""
    found = _named(data)
    try:
        return found[b"read_bytes"], found[b"write_bytes"]
    except KeyError:
        return None


def busy_ticks(data: bytes) -> Optional[int]:
    """Parse /proc/stat: clock ticks in which a core was busy. The time of guests is in that of users."""
    fields = data[: data.find(b"\n")].split()
    try:
        user, nice, system, _, _, irq, softirq = (int(field) for field in fields[1:8])
        steal = int(fields[8]) if len(fields) > 8 else 0
    except ValueError:
        return None
    return user + nice + system + irq + softirq + steal if fields[0] == b"cpu" else None


def parse_load(data: bytes) -> Optional[float]:
    """Parse /proc/loadavg: the load of the last minute."""
    try:
        return float(data.split(None, 1)[0])
    except (IndexError, ValueError):
        return None


def parse_memory(data: bytes) -> Optional[Tuple[int, int]]:
    """Parse /proc/meminfo: bytes in all, and how many of those cannot be given to programs."""
    found = _named(data)
    total, free = found.get(b"MemTotal"), found.get(b"MemAvailable", found.get(b"MemFree"))
    return None if total is None or free is None else (total * 1024, max(0, total - free) * 1024)


def parse_network(data: bytes) -> Dict[str, Tuple[int, int]]:
    """Parse /proc/net/dev: for each interface the bytes that were received, and sent."""
    found = {}
    for line in data.split(b"\n"):
        name, colon, rest = line.rpartition(b":")  # a name may hold colons
        fields = rest.split()
        if colon and len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
            found[name.strip().decode("utf-8", "surrogateescape")] = (int(fields[0]), int(fields[8]))
    return found


def memory_group(data: bytes) -> Tuple[str, str]:
    """Parse /proc/PID/cgroup: the path of the memory controller's group, of version 1 and of version 2; empty: none."""
    one = two = ""
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            one = path
        elif number == "0" and not controllers:
            two = path
    return one, two


def limit(data: bytes) -> Optional[int]:
    """Parse a group's limit of memory: bytes. A huge one means none, as the word `max` does."""
    text = data.strip()
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def ps(text: str) -> List[PsRow]:
    """Parse lines of `ps -A -o pid=,ppid=,pgid=,rss=,time=`; what is no such line is left out."""
    rows = []
    for line in text.splitlines():
        fields = line.split()
        try:
            pid, ppid, pgid, rss = (int(field) for field in fields[:4])
            rows.append(PsRow(pid, ppid, pgid, rss * 1024, _seconds(fields[4])))
        except (IndexError, ValueError):
            continue
    return rows


def _named(data: bytes) -> Dict[bytes, int]:
    """Parse lines of `name: number`, a unit behind it or not."""
    found = {}
    for line in data.split(b"\n"):
        name, _, rest = line.partition(b":")
        fields = rest.split(None, 1)
        if fields and fields[0].isdigit():
            found[name] = int(fields[0])
    return found


def _seconds(text: str) -> float:
    """Parse a time of `ps`: [DAYS-][HOURS:]MINUTES:SECONDS, on some systems with a fraction."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        if not part.replace(".", "", 1).isdigit():
            raise ValueError(text)
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)


LOOK_S = 5.0
"""Interval of looks at which processes belong to which task."""
CHANGING_S = 1.0
"""The same after a look that found new ones."""
AGAIN = 60
"""After this many looks, a process that belongs to no task is read again: its id may have been reused."""
LOOKS = 2000
"""Processes that are read at most in one look; the rest waits for the next. The agent's loop must go on."""
SAMPLES = 500
"""Processes of tasks that are read at most in one sample; the others keep their last numbers until it is their turn."""
KEPT = 64
"""So many processes of tasks have their files kept open: that halves the time to read them."""
_FILES = ("stat", "statm", "io")
_READ_BYTES = 65536
_PROC = "/proc"
_GROUPS = "/sys/fs/cgroup"

NOT_OURS = ""
"""Owner of a process that belongs to no task."""


class Usage(NamedTuple):
    """What a task has used. CPU time and bytes of disks count from its start, and never go back."""

    cpu_s: float
    rss: Optional[int]
    """Bytes of memory; None: not known."""
    processes: int
    read: Optional[int] = None
    write: Optional[int] = None
    """Told after each look only (LOOK_S): then their files are read."""
    limit: Optional[int] = None
    """Bytes of memory that it may have at most."""


class _TaskProcess:
    """A process of a task, with its last numbers."""

    __slots__ = ("cpu", "files", "io", "is_leader", "memory", "pid", "start", "task")

    def __init__(self, pid: int, start: int, task: str, is_leader: bool) -> None:
        self.pid, self.start, self.task, self.is_leader = pid, start, task, is_leader
        self.cpu = 0
        self.memory = 0
        self.io: Optional[Tuple[int, int]] = None
        self.files: List[int] = []
        """Descriptors of _FILES, -1 of what may not be read; empty: none is kept open."""


class Tasks:
    """Samples tasks. `task_of` names the task in the environment of a process that has lost its parent."""

    def __init__(self, task_of: Callable[[int], str]) -> None:
        self.processes = 0
        """On the whole host, at the last look."""
        self.members: Dict[int, _TaskProcess] = {}
        """Processes of tasks, by their id. Those that were read longest ago come first."""
        self._task_of = task_of
        self._me = os.getpid()
        self._leaders: Dict[str, Identity] = {}
        self._owners: Dict[int, str] = {}
        """The task of each process that was there at the last look, or NOT_OURS."""
        self._kept = 0
        self._looks = 0
        self._look_at = 0.0
        self._counters: Dict[str, Tuple[Rising, Rising, Rising]] = {}
        self._limits: Dict[str, Optional[int]] = {}
        self._ticks_s = 1 / os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def sample(self, leaders: Mapping[str, Identity], now: float) -> Dict[str, Usage]:
        """Return what tasks have used, by name. `leaders`: the first process of each that runs."""
        if self._leaders != leaders:
            self._admit(leaders)
        is_look = now >= self._look_at
        if is_look:
            self._look_at = now + (CHANGING_S if self._look() else LOOK_S)
        for pid in list(self.members)[:SAMPLES]:
            member = self.members.pop(pid)
            if self._read(member, is_look):
                self.members[pid] = member  # behind the others
            else:
                self._forget(member)
        by_task: Dict[str, List[_TaskProcess]] = {name: [] for name in leaders}
        for member in self.members.values():
            by_task[member.task].append(member)
        return {name: self._usage(name, mine, is_look) for name, mine in by_task.items()}

    def _admit(self, leaders: Mapping[str, Identity]) -> None:
        """Take in tasks that have started, and forget those that have ended."""
        was, self._leaders = self._leaders, dict(leaders)
        ended = {name for name, who in was.items() if leaders.get(name) != who}
        for pid in [pid for pid, member in self.members.items() if member.task in ended]:
            self._forget(self.members.pop(pid))
        for name in ended:
            self._limits.pop(name, None)
            for counter in self._counters.get(name, ()):
                counter.note(0.0)
        for name, who in leaders.items():
            if was.get(name) != who:
                start = who.start.rpartition(":")[2]
                self._owners[who.pid] = name
                self.members[who.pid] = _TaskProcess(who.pid, int(start) if start.isdigit() else -1, name, True)
                self._look_at = 0.0

    def _look(self) -> bool:
        """Find out which processes belong to which task; return whether any new one does, or some were not read."""
        found = {int(name) for name in os.listdir(_PROC) if name.isdigit()}
        self.processes = len(found)
        self._looks += 1
        for pid in [pid for pid in self._owners if pid not in found]:
            del self._owners[pid]
        turn = self._looks % AGAIN
        fresh = [
            pid for pid in found if pid not in self._owners or (pid % AGAIN == turn and self._owners[pid] == NOT_OURS)
        ]
        rows: Dict[int, Stat] = {}
        for pid in sorted(fresh)[:LOOKS]:
            row = parse_stat(_read(f"{_PROC}/{pid}/stat"))
            if row is not None:
                rows[pid] = row
        sessions = {who.pid: name for name, who in self._leaders.items()}
        is_changed = len(fresh) > LOOKS
        known = {pid: owner for pid, owner in self._owners.items() if pid not in rows}
        for pid, row in rows.items():
            owner = self._owner(pid, rows, known, sessions)
            self._owners[pid] = owner
            if owner != NOT_OURS:
                self.members[pid] = _TaskProcess(pid, row.start, owner, False)
                is_changed = True
        return is_changed

    def _owner(self, pid: int, rows: Mapping[int, Stat], known: Dict[int, str], sessions: Mapping[int, str]) -> str:
        """Return the task of a process: that of its session, or of the nearest process above it that has one."""
        path: List[int] = []
        owner = NOT_OURS
        while pid not in known:
            row = rows.get(pid)
            if row is None or pid in path or pid == self._me:
                break
            path.append(pid)
            owner = sessions.get(row.sid, NOT_OURS)
            if owner == NOT_OURS and row.ppid == self._me:
                owner = self._task_of(pid)
            if owner != NOT_OURS or row.ppid in (0, self._me):
                break
            pid = row.ppid
        if owner == NOT_OURS:
            owner = known.get(pid, NOT_OURS)
        owner = owner if owner in self._leaders else NOT_OURS
        known.update((each, owner) for each in path)
        return owner

    def _read(self, member: _TaskProcess, with_disks: bool) -> bool:
        """Read a process's numbers; return whether it is there."""
        if not member.files and self._kept < KEPT:
            self._kept += 1
            member.files = [_open(f"{_PROC}/{member.pid}/{name}") for name in _FILES]
        wanted = len(_FILES) if with_disks else _FILES.index("io")
        if member.files:
            stat, statm, *io = map(_again, member.files[:wanted])
        else:
            stat, statm, *io = (_read(f"{_PROC}/{member.pid}/{name}") for name in _FILES[:wanted])
        row = parse_stat(stat)
        if row is None or (row.start != member.start and member.start >= 0):
            return False
        member.cpu = row.ticks
        pages = parse_statm(statm)
        if pages is not None:
            # What children share with their parent is counted once.
            member.memory = pages[0] if member.is_leader else max(0, pages[0] - pages[1])
        if io:
            member.io = parse_io(io[0]) or member.io
        return True

    def _forget(self, member: _TaskProcess) -> None:
        """Let go of a process that has ended, or belongs to no task any more."""
        self._owners.pop(member.pid, None)
        self._kept -= bool(member.files)
        for descriptor in member.files:
            if descriptor >= 0:
                os.close(descriptor)
        member.files = []

    def _usage(self, name: str, mine: List[_TaskProcess], with_disks: bool) -> Usage:
        cpu, read, write = self._counters.setdefault(name, (Rising(), Rising(), Rising()))
        disks = [each.io for each in mine if each.io is not None] if with_disks else []
        if disks:
            read.note(sum(each[0] for each in disks))
            write.note(sum(each[1] for each in disks))
        if name not in self._limits and mine:
            self._limits[name] = limit_of(self._leaders[name].pid)
        return Usage(
            round(cpu.note(sum(each.cpu for each in mine) * self._ticks_s), 3),
            sum(each.memory for each in mine) * self._page if mine else None,
            len(mine),
            int(read.value) if disks else None,
            int(write.value) if disks else None,
            self._limits.get(name),
        )


class HostSampler:
    """Samples the host."""

    def __init__(self) -> None:
        self._ticks_s = 1 / os.sysconf("SC_CLK_TCK")
        self._cores = os.cpu_count() or 1
        self._files = [_open(f"{_PROC}/{name}") for name in ("stat", "loadavg", "meminfo", "net/dev")]
        self._seen: Set[str] = set()
        self._counted: Set[str] = set()
        """Interfaces, and those of them whose bytes count."""

    def sample(self) -> Dict[str, Any]:
        """Return what is known of the host, by the names of the frame `metrics`."""
        found: Dict[str, Any] = {"cores": self._cores}
        stat, load, meminfo, network = map(_again, self._files)
        ticks = busy_ticks(stat)
        if ticks is not None:
            found["cpu_s"] = round(ticks * self._ticks_s, 2)
        found["load"] = parse_load(load)
        memory = parse_memory(meminfo)
        if memory is not None:
            found["mem_total"], found["mem_used"] = memory
        counted = self._network(parse_network(network))
        if counted:
            found["net_rx"], found["net_tx"] = (sum(pair) for pair in zip(*counted))
        return {name: value for name, value in found.items() if value is not None}

    def _network(self, rows: Mapping[str, Tuple[int, int]]) -> List[Tuple[int, int]]:
        """Return the rows that count: those of real devices, so that no byte counts twice; without any, all others."""
        if set(rows) != self._seen:
            self._seen = set(rows)
            real = {name for name in rows if os.path.exists(f"/sys/class/net/{name}/device")}
            self._counted = real or {name for name in rows if name != "lo" and not name.startswith(_TWICE)}
        return [pair for name, pair in rows.items() if name in self._counted]


_TWICE = ("veth", "docker", "br-", "virbr", "ifb", "tun", "tap", "bond", "team", "vlan", "dummy")
"""Begins the names of interfaces whose bytes another one counts, too."""


def portable_host() -> Dict[str, Any]:
    """Return what is known of a host without /proc."""
    found: Dict[str, Any] = {"cores": os.cpu_count() or 1}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found["load"] = round(os.getloadavg()[0], 2)
    with contextlib.suppress(OSError, ValueError):
        found["mem_total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found


class PortableTasks:
    """Samples tasks from what `ps` prints. It knows no shared memory, so that of children counts whole."""

    def __init__(self) -> None:
        self.members: Dict[int, str] = {}
        """The task of each process, by its id."""
        self._counters: Dict[str, Rising] = {}

    def sample(self, leaders: Mapping[str, Identity], rows: List[PsRow]) -> Dict[str, Usage]:
        """Return what tasks have used, by name."""
        tasks = {who.pid: name for name, who in leaders.items()}
        below = {row.pid: row for row in rows}
        by_task: Dict[str, List[PsRow]] = {name: [] for name in leaders}
        self.members = {}
        for row in rows:
            above: Optional[PsRow] = row
            owner = NOT_OURS
            for _ in range(100):  # the table may hold a circle: it was not read in one moment
                if above is None or owner:
                    break
                owner = tasks.get(above.pid) or tasks.get(above.pgid, NOT_OURS)
                above = below.get(above.ppid)
            if owner:
                self.members[row.pid] = owner
                by_task[owner].append(row)
        for name in set(self._counters) - set(leaders):
            self._counters[name].note(0.0)
        found = {}
        for name, mine in by_task.items():
            cpu = self._counters.setdefault(name, Rising()).note(sum(row.cpu_s for row in mine))
            found[name] = Usage(round(cpu, 3), sum(row.rss for row in mine) if mine else None, len(mine))
        return found


def limit_of(pid: int) -> Optional[int]:
    """Return how many bytes of memory a process may have: the least of its control groups, and of its own limit."""
    one, two = memory_group(_read(f"{_PROC}/{pid}/cgroup"))
    found = []
    for root, path, file in ((f"{_GROUPS}/memory", one, "memory.limit_in_bytes"), (_GROUPS, two, "memory.max")):
        while path.startswith("/"):
            found.append(limit(_read(os.path.join(root, path.strip("/"), file))))
            path = os.path.dirname(path) if path != "/" else ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        import resource

        own = resource.prlimit(pid, resource.RLIMIT_AS)[0]
        found.append(own if own != resource.RLIM_INFINITY else None)
    return min((each for each in found if each), default=None)


def _read(path: str) -> bytes:
    """Return what a file of the system holds; empty if it is gone, or may not be read."""
    descriptor = _open(path)
    try:
        return _again(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _open(path: str) -> int:
    """Return a descriptor for `_again`; -1 if the file is gone, or may not be read."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _again(descriptor: int) -> bytes:
    """Return what a file of the system holds now. That of a process which has ended is empty."""
    try:
        return os.pread(descriptor, _READ_BYTES, 0)
    except OSError:
        return b""
