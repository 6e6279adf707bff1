"""Parsers of the system's data about processes and the host: files of /proc and the output of `ps`. No side effects.

Kernels and containers differ. A parser returns None for missing data, or leaves it out. Standard library only, Python
3.8.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple


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


def stat(data: bytes) -> Optional[Stat]:
    """Parse /proc/PID/stat. The command may hold blanks and brackets; the last bracket ends it (proc(5))."""
    fields = data[data.rfind(b")") + 2 :].split(None, 20)
    try:
        ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        return Stat(int(fields[1]), int(fields[3]), ticks, int(fields[19]))
    except (IndexError, ValueError):
        return None


def statm(data: bytes) -> Optional[Tuple[int, int]]:
    """Parse /proc/PID/statm: pages that are resident, and how many of those are shared."""
    fields = data.split(None, 3)
    try:
        return int(fields[1]), int(fields[2])
    except (IndexError, ValueError):
        return None


def io(data: bytes) -> Optional[Tuple[int, int]]:
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


def load(data: bytes) -> Optional[float]:
    """Parse /proc/loadavg: the load of the last minute."""
    try:
        return float(data.split(None, 1)[0])
    except (IndexError, ValueError):
        return None


def memory(data: bytes) -> Optional[Tuple[int, int]]:
    """Parse /proc/meminfo: bytes in all, and how many of those cannot be given to programs."""
    found = _named(data)
    total, free = found.get(b"MemTotal"), found.get(b"MemAvailable", found.get(b"MemFree"))
    return None if total is None or free is None else (total * 1024, max(0, total - free) * 1024)


def network(data: bytes) -> Dict[str, Tuple[int, int]]:
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
