"""The metrics of a running job: turns the samples of agents into rates, totals and snapshots. No side effects.

Agents send cumulative counters with their own monotonic clock (frame `metrics`, docs/protocol.md). Rates are computed
here, so a lost frame costs only precision. If a counter or a clock goes back, there is no rate until the next frame, so
a rate is never negative. Data from agents and tasks is not trusted: a value of the wrong type is treated as missing.

The last values of every host and task are kept. So are means over 10 s of the job's totals and of each task's usage.
All together take at most MEMORY bytes, whatever the size of the job.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import field
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from distrun_runtime.contract import metrics as contract
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.facts import printable
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Plan

MEMORY = 64 * 1024 * 1024
"""Bytes that all numbers of a job may take."""
TASK_BYTES, VALUE_BYTES, HOST_BYTES = 950, 100, 2000
"""What the last values of a task take, about, with one value in its report; each further one; and those of a host."""
POINTS = 60
"""Means that are kept of each series at most."""
MEAN_S = 10.0
SHORTEST_S, LONGEST_S = 0.2, 600.0
"""A rate is made of two measurements that are so far apart."""
STALE_S = 30.0
"""A host that was silent for this time, and for several intervals, is left out of totals."""
LARGEST = 1e18
"""A larger number is no number of ours."""
NAME_LENGTH, KEY_LENGTH = 48, 80
GPUS = 64
"""Of one host."""
LAGS = 64
"""Ranks whose lags are kept of one server."""
SHOWN_LAGS = 16
WHY_LENGTH = 300
"""Characters of the reason why a server's arrays are where they are."""

_HOST = ("cores", "load", "mem_used", "mem_total", "disk_free", "disk_total", "processes")
_HOST_COUNTED = ("cpu_s", "net_rx", "net_tx")
_COUNTED = ("bytes_in", "bytes_out", "rounds", "pushes", "pulls", "updates", "barriers")
"""Members of `counters` that only grow."""
_GAUGES = ("keys", "bytes", "queue", "waiting", "staleness_max", "staleness_mean", "members", "barrier_waiting")
_SHOWN = ("cpu", "rss", "limit", "processes", "read", "write", "gpu", "gpu_mem")
"""Members of `TaskNumbers` that a snapshot has as they are."""
_SERVER_RATES = (("push_s", "pushes"), ("pull_s", "pulls"), ("in_s", "bytes_in"), ("out_s", "bytes_out"))
"""Rates of a server that a snapshot has, and what it counts for them."""
_SERIES = ("cpu", "net", "push_s", "pull_s")
"""Totals of the job whose means are kept."""

Numbers = Dict[str, Optional[float]]


def number(value: object) -> Optional[float]:
    """Return a number from 0 to LARGEST; None: it is none."""
    # Comparisons are false for nan, and exact for integers of any length.
    return value if type(value) in (int, float) and 0 <= value < LARGEST else None  # type: ignore[operator,return-value]


def any_number(value: object) -> Optional[float]:
    """Return any number that a float can hold, nan and infinities included; None: it is none."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    if type(value) is float:
        return value
    return float(value) if type(value) is int and -1e300 < value < 1e300 else None


def plain(value: Optional[float], digits: int = 4) -> Any:
    """Return a number as a snapshot has it: rounded, and as text if it is not finite."""
    if value is None:
        return None
    if type(value) is int:
        return value
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if abs(value) >= 1000:
        return round(value)
    return round(value, digits) if abs(value) >= 0.01 or not value else float(f"{value:.3g}")


def text(value: object, limit: int = NAME_LENGTH) -> str:
    """Return a short text that can be shown on a terminal; empty: it is none."""
    if not isinstance(value, str):
        return str(value) if type(value) is int and abs(value) < 2**63 else ""
    return printable(value[:limit])


class Report(NamedTuple):
    """What a task last reported of its progress."""

    step: Optional[float]
    total: Optional[float]
    values: Mapping[str, float]
    time: float
    """When, by its host's clock."""


class Wait(NamedTuple):
    """What a worker waits for in the store."""

    whom: Tuple[str, ...]
    key: str
    call: str
    since: float
    """By its host's clock."""


@dataclass
class StoreNumbers:
    """What a server or scheduler has counted."""

    time: Optional[float] = None
    """When it was said, by its host's clock."""
    totals: Numbers = field(default_factory=dict)
    rates: Numbers = field(default_factory=dict)
    gauges: Numbers = field(default_factory=dict)
    device: str = ""
    device_why: str = ""
    """Where a server's arrays are, such as `gpu:0`, and why not on a GPU."""
    lags: Dict[str, Tuple[float, float, float, float]] = field(default_factory=dict)
    """By rank: last lag, rounds of the last 20 in which it came last, median lag, median round; seconds."""

    def take(self, value: Mapping[str, Any], passed_s: Optional[float]) -> None:
        """Note counters; `passed_s`: by the agent's clock, since the last ones."""
        values, time = _mapping(value.get("values")), number(value.get("time"))
        if time is not None and time == self.time:
            return  # nothing new has come from the task
        by_stamps = None if time is None or self.time is None else time - self.time
        # The stamps are closer to the truth than the frames, unless a clock was set meanwhile.
        if by_stamps is not None and passed_s is not None and abs(by_stamps - passed_s) < max(5.0, passed_s):
            passed_s = by_stamps
        before, self.totals = self.totals, {name: number(values[name]) for name in _COUNTED if name in values}
        self.rates = _rates(before, self.totals, passed_s)
        self.gauges = {name: number(values[name]) for name in _GAUGES if name in values}
        self.time = time
        self.device, self.device_why = text(value.get("device")), text(value.get("device_why"), WHY_LENGTH)
        lags = _mapping(value.get("lags") if "lags" in value else values.get("lags"))
        self.lags = {}
        for rank, each in list(lags.items())[:LAGS]:
            if isinstance(each, list) and len(each) == 4:
                told = [number(one) for one in each]
                if rank.isdigit() and len(rank) < 8 and None not in told:
                    self.lags[rank] = tuple(told)  # type: ignore[assignment]

    def shown_lags(self) -> Dict[str, float]:
        """Return the largest median lags, seconds by rank."""
        largest = sorted(self.lags.items(), key=lambda each: -each[1][2])[:SHOWN_LAGS]
        return {rank: plain(lag[2]) for rank, lag in largest}


@dataclass
class HostNumbers:
    """The last numbers of a host."""

    clock: Optional[float] = None
    """The agent's, at its last frame."""
    heard: float = 0.0
    """`now` of its last frame."""
    values: Numbers = field(default_factory=dict)
    totals: Numbers = field(default_factory=dict)
    rates: Numbers = field(default_factory=dict)
    """Of `cpu_s`: cores that are busy."""
    gpus: List[Dict[str, Any]] = field(default_factory=list)
    offsets: List[float] = field(default_factory=list)
    """By how much its clock was ahead of ours, as its last frames say: each is too small by what the frame took."""

    def take(self, value: Mapping[str, Any], passed_s: Optional[float]) -> None:
        """Note what an agent says of its host."""
        self.values = {name: number(value.get(name)) for name in _HOST if name in value}
        before, self.totals = self.totals, {name: number(value.get(name)) for name in _HOST_COUNTED}
        self.rates = _rates(before, self.totals, passed_s)

    def shown(self, now: float) -> Dict[str, Any]:
        """Return the host's member of a snapshot."""
        cores = self.values.get("cores")
        cpu = self.rates.get("cpu_s")
        share = min(1.0, cpu / cores) if cpu is not None and cores else None
        found = {"heard_s": plain(max(0.0, now - self.heard), 1), "cpu": plain(share)}
        found.update((name, plain(each)) for name, each in self.values.items())
        found.update((name, plain(self.rates.get(name))) for name in ("net_rx", "net_tx"))
        found["gpus"] = self.gpus
        found["clock_offset_s"] = plain(max(self.offsets), 3) if self.offsets else None
        return found


@dataclass
class TaskNumbers:
    """The last numbers of a task."""

    name: str
    role: str
    rank: int
    host: str
    row: int
    """Of its means."""
    clock: Optional[float] = None
    """The agent's, at its last frame; None: it does not run, as far as is known."""
    stamp: float = 0.0
    """The wall clock of its host, at its last frame."""
    cpu_s: Optional[float] = None
    cpu: Optional[float] = None
    """Cores that it uses."""
    disk_clock: Optional[float] = None
    """The agent's, when it last told of the disks."""
    read_bytes: Optional[float] = None
    written_bytes: Optional[float] = None
    read: Optional[float] = None
    write: Optional[float] = None
    """Bytes a second."""
    rss: Optional[float] = None
    limit: Optional[float] = None
    processes: Optional[float] = None
    gpu: Optional[float] = None
    gpu_mem: Optional[float] = None
    output_at: Optional[float] = None
    calls: Optional[float] = None
    """Calls of the store that it has begun."""
    report: Optional[Report] = None
    wait: Optional[Wait] = None
    store: Optional[StoreNumbers] = None

    def take(self, value: Mapping[str, Any], clock: float, stamp: float, names: int) -> None:
        """Note what an agent says of its task. `names`: values of a report that are kept."""
        passed_s = None if self.clock is None else clock - self.clock
        self.clock, self.stamp = clock, stamp
        get = value.get
        cpu_s, read, written = number(get("cpu_s")), number(get("read")), number(get("write"))
        self.cpu, self.cpu_s = rate(self.cpu_s, cpu_s, passed_s), cpu_s
        if read is not None or written is not None:  # agents tell them less often than the rest
            disk_s = None if self.disk_clock is None else clock - self.disk_clock
            self.disk_clock = clock
            self.read, self.read_bytes = rate(self.read_bytes, read, disk_s), read
            self.write, self.written_bytes = rate(self.written_bytes, written, disk_s), written
        self.rss, self.limit, self.processes = number(get("rss")), number(get("limit")), number(get("processes"))
        self.gpu, self.gpu_mem, self.output_at = number(get("gpu")), number(get("gpu_mem")), number(get("output_at"))
        if "report" in value:
            self.report = _report(_mapping(value["report"]), names, self.report)
        self.wait = _wait(_mapping(value["waiting"])) if "waiting" in value else None
        if "counters" in value:
            counters = _mapping(value["counters"])
            if self.role == WORKER:
                self.calls = number(_mapping(counters.get("values")).get("store_calls"))
            else:
                self.store = self.store or StoreNumbers()
                self.store.take(counters, passed_s)

    def shown(self, condition: str, why: str) -> Dict[str, Any]:
        """Return the task's member of a snapshot."""
        age = None if self.output_at is None else max(0.0, self.stamp - self.output_at)
        found: Dict[str, Any] = {name: plain(getattr(self, name)) for name in _SHOWN}
        found.update(output_age_s=plain(age, 1), condition=condition, why=why)
        if self.report is not None:
            values = {name: plain(each, 6) for name, each in self.report.values.items()}
            told = {"step": plain(self.report.step), "total": plain(self.report.total), "values": values}
            found["report"] = {**told, "age_s": plain(max(0.0, self.stamp - self.report.time), 1)}
        return found


class JobMetrics:
    """All numbers of one job."""

    def __init__(self, plan: Plan) -> None:
        self.tasks: Dict[str, TaskNumbers] = {}
        """Those that run, and those that have ended; `clock` tells."""
        self.hosts: Dict[str, HostNumbers] = {}
        """By the name of the node; one that has not been heard of is absent."""
        self._nodes = {place.name: place.host for place in plan.all_places}
        self._places = {task.name: task.place_name for task in plan.tasks}
        self._running: Dict[str, Tuple[str, ...]] = {}
        """The tasks of each place that its last frame named."""
        for row, task in enumerate(plan.tasks):
            self.tasks[task.name] = TaskNumbers(task.name, task.role, task.rank, task.host, row)
        tasks, hosts = len(plan.tasks), len(plan.hosts)
        free = MEMORY - TASK_BYTES * tasks - HOST_BYTES * hosts
        self._names = max(1, min(contract.VALUES, 1 + free // max(1, 2 * VALUE_BYTES * tasks)))
        free -= VALUE_BYTES * (self._names - 1) * tasks
        self.points = max(1, min(POINTS, free // (4 * 2 * tasks)))
        """Means that are kept of each series."""
        self._means = _Means(len(_SERIES), self.points)
        self._of_tasks = _Means(2 * len(plan.tasks), self.points)

    def take(self, place: str, value: Mapping[str, Any], now: float, arrived: float) -> List[TaskNumbers]:
        """Note what the agent of `place` has measured; return the tasks that it told of.

        Args:
            place: the agent's.
            value: its frame.
            now: monotonic clock, seconds.
            arrived: our wall clock when the frame came; 0: not known.
        """
        clock, stamp = number(value.get("clock")), number(value.get("time"))
        if clock is None or place not in self._nodes:
            return []
        if "ended" in value:
            return self._take_last(place, _mapping(value["ended"]))
        self._take_host(self._nodes[place], value, clock, now)
        if stamp is not None and arrived:
            offsets = self.hosts[self._nodes[place]].offsets
            offsets.append(stamp - arrived)
            del offsets[:-8]
        found = []
        told = _mapping(value.get("tasks"))
        for name, each in told.items():
            task = self.tasks.get(name)
            if task is not None and self._places[name] == place and isinstance(each, dict):
                task.take(each, clock, stamp or arrived, self._names)
                found.append(task)
        for name in self._running.get(place, ()):
            if name not in told:
                self.end(name)
        self._running[place] = tuple(task.name for task in found)
        return found

    def _take_last(self, place: str, ended: Mapping[str, Any]) -> List[TaskNumbers]:
        """Note what tasks that have ended reported last; return those tasks."""
        found = [self.tasks[name] for name in ended if self._places.get(name) == place]
        for task in found:
            task.report = _report(_mapping(ended[task.name]), self._names, task.report)
        return found

    def _take_host(self, name: str, value: Mapping[str, Any], clock: float, now: float) -> None:
        host = self.hosts.setdefault(name, HostNumbers())
        passed_s = None if host.clock is None else clock - host.clock
        host.heard = now
        if passed_s is not None and 0 <= passed_s < SHORTEST_S:
            return  # another agent of that node has just told of it
        host.clock = clock
        host.take(_mapping(value.get("host")), passed_s)
        gpus = value.get("gpus")
        told = gpus[:GPUS] if isinstance(gpus, list) else []
        host.gpus = [_gpu(each) for each in told if isinstance(each, dict)]

    def end(self, task: str) -> None:
        """Note that a task has ended."""
        known = self.tasks.get(task)
        if known is not None:
            self.tasks[task] = TaskNumbers(known.name, known.role, known.rank, known.host, known.row)

    @property
    def running(self) -> Iterable[TaskNumbers]:
        """The tasks that run, as their agents last said."""
        return (task for task in self.tasks.values() if task.clock is not None)

    # ------------------------------------------------------------------ totals and means

    def sample(self, now: float, interval_s: float) -> None:
        """Take the present values into the means; to be called about once an interval.

        Args:
            now: monotonic clock, seconds.
            interval_s: how often agents send, about.
        """
        totals = self.totals(now, interval_s)
        net = _sum(totals["net_rx"], totals["net_tx"])
        self._means.add(0, (totals["cpu"], net, totals["push_s"], totals["pull_s"]))
        for task in self.running:
            self._of_tasks.add(2 * task.row, (task.cpu, task.rss))

    def end_mean(self) -> None:
        """Begin the next means; to be called each MEAN_S."""
        self._means.end()
        self._of_tasks.end()

    def totals(self, now: float, interval_s: float) -> Numbers:
        """Return sums over the job: `cpu` (cores, of tasks), `rss`, `net_rx`, `net_tx` and the store's rates."""
        found: Numbers = dict.fromkeys(("cpu", "rss", "net_rx", "net_tx", "push_s", "pull_s", "round_s"))
        fresh = now - max(STALE_S, 3 * interval_s)
        heard = {name for name, host in self.hosts.items() if host.heard >= fresh}
        for host in heard:
            for name in ("net_rx", "net_tx"):
                found[name] = _sum(found[name], self.hosts[host].rates.get(name))
        for task in self.running:
            if task.host not in heard:
                continue
            found["cpu"] = _sum(found["cpu"], task.cpu)
            found["rss"] = _sum(found["rss"], task.rss)
            if task.store is not None:
                for name, counted in (("push_s", "pushes"), ("pull_s", "pulls"), ("round_s", "rounds")):
                    found[name] = _sum(found[name], task.store.rates.get(counted))
        return found

    def minute(self, name: str, kind: str = "cpu") -> Optional[float]:
        """Return the mean over the last minute of what a task uses: `cpu` (cores) or `rss` (bytes)."""
        row = 2 * self.tasks[name].row + ("cpu", "rss").index(kind)
        known = [each for each in self._of_tasks.last(row, 6) if each is not None]
        return sum(known) / len(known) if known else None

    # ------------------------------------------------------------------ snapshots

    def task_history(self, name: str) -> Dict[str, Any]:
        """Return the means of what a task uses, oldest first."""
        row = 2 * self.tasks[name].row
        return {"cpu": self._of_tasks.all(row), "rss": self._of_tasks.all(row + 1)}

    def history(self) -> Dict[str, Any]:
        """Return `history` of a snapshot: means of the job's totals over MEAN_S each, oldest first."""
        return {name: self._means.all(row) for row, name in enumerate(_SERIES)}

    def store_shown(self, now: float, interval_s: float) -> Optional[Dict[str, Any]]:
        """Return `store` of a snapshot; None: no server or scheduler has told anything."""
        servers: Dict[str, Any] = {}
        scheduler: Optional[Dict[str, Any]] = None
        for task in self.running:
            store = task.store
            if store is None:
                continue
            if task.role == SCHEDULER:
                scheduler = {name: plain(store.gauges.get(name)) for name in ("members", "barrier_waiting")}
                scheduler["barriers"] = plain(store.totals.get("barriers"))
            elif task.role == SERVER:
                names = ("keys", "bytes", "queue", "waiting", "staleness_max", "staleness_mean")
                shown: Dict[str, Any] = {name: plain(store.gauges.get(name)) for name in names}
                shown.update((name, plain(store.rates.get(counted))) for name, counted in _SERVER_RATES)
                shown.update(rounds=plain(store.totals.get("rounds")), lags=store.shown_lags())
                shown.update(device=store.device, device_why=store.device_why)
                servers[task.name] = shown
        if not servers and scheduler is None:
            return None
        totals = self.totals(now, interval_s)
        sums = {name: plain(totals[name]) for name in ("push_s", "pull_s", "round_s")}
        return {"servers": servers, "scheduler": scheduler, **sums}


class _Means:
    """Means of several series, the last `points` of each, in one array; nan where nothing was measured."""

    def __init__(self, series: int, points: int) -> None:
        self._series, self._points = series, points
        self._kept = array("f", [math.nan]) * (series * points)
        self._sums = array("d", [0.0]) * series
        self._counts = array("L", [0]) * series
        self._ended = 0

    def add(self, row: int, values: Iterable[Optional[float]]) -> None:
        """Add a value to each of the series from `row` on; None: there is none."""
        for number, value in enumerate(values, start=row):
            if value is not None:
                self._sums[number] += value
                self._counts[number] += 1

    def end(self) -> None:
        """Keep the means of what was added, and begin the next."""
        column = self._ended % self._points
        self._ended += 1
        for row in range(self._series):
            count = self._counts[row]
            self._kept[row * self._points + column] = self._sums[row] / count if count else math.nan
            self._sums[row], self._counts[row] = 0.0, 0

    def last(self, row: int, count: int) -> List[Optional[float]]:
        """Return the newest means of a series, oldest first; None where nothing was measured."""
        count = min(count, self._ended, self._points)
        columns = ((self._ended - count + number) % self._points for number in range(count))
        kept = (self._kept[row * self._points + column] for column in columns)
        return [None if math.isnan(each) else each for each in kept]

    def all(self, row: int) -> List[Any]:
        """Return all means of a series as a snapshot has them."""
        return [plain(each) for each in self.last(row, self._points)]


def rate(before: Optional[float], after: Optional[float], passed_s: Optional[float]) -> Optional[float]:
    """Return the growth of a counter per second; None: it did not grow, or the time is not known."""
    if before is None or after is None or passed_s is None:
        return None
    if after < before or not SHORTEST_S <= passed_s <= LONGEST_S:
        return None
    return (after - before) / passed_s


def _rates(before: Numbers, after: Numbers, passed_s: Optional[float]) -> Numbers:
    return {name: rate(before.get(name), each, passed_s) for name, each in after.items()}


def _sum(one: Optional[float], other: Optional[float]) -> Optional[float]:
    return other if one is None else one if other is None else one + other


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _gpu(value: Mapping[str, Any]) -> Dict[str, Any]:
    found: Dict[str, Any] = {name: text(value.get(name)) for name in ("uuid", "name")}
    found.update((name, plain(number(value.get(name)))) for name in ("index", "util", "mem_used", "mem_total"))
    return found


def _report(value: Mapping[str, Any], names: int, before: Optional[Report]) -> Report:
    time = number(value.get("time")) or 0.0
    if before is not None and before.time == time and time:
        return before
    values = {}
    for name, each in list(_mapping(value.get("values")).items())[:names]:
        known = any_number(each)
        if known is not None:
            values[text(name)] = known
    return Report(number(value.get("step")), number(value.get("total")), values, time)


def _wait(value: Mapping[str, Any]) -> Optional[Wait]:
    whom = value.get("for")
    since = number(value.get("since"))
    if not isinstance(whom, list) or not whom or since is None:
        return None
    names = tuple(filter(None, (text(each) for each in whom[:8])))
    return Wait(names, text(value.get("key"), KEY_LENGTH), text(value.get("call")), since)


# Curves of what a job's scripts report, over the whole run in little memory.
#
# A curve has at most CURVE_POINTS points, however long the job runs. The first and the last are as they were reported.
# Each of those between is the mean of equally many reports: when there is no room for a further one, pairs become one,
# and from then on a point stands for twice as many.


CURVE_POINTS = 120
"""Of each curve at most."""
CURVE_DIGITS = 6
"""Significant ones of a value."""


class Point(NamedTuple):
    """Where a curve was."""

    step: Optional[int]
    """The job's, as it was last reported; None: it reports none."""
    time_s: float
    """Since the job's start."""
    value: float
    """May be infinite, or nan."""


class Curve:
    """The past of one reported number."""

    def __init__(self) -> None:
        self._kept: List[Point] = []
        """The first, then means of `_size` each."""
        self._size = 1
        self._part: Optional[Point] = None
        """The mean of `_count`, which are fewer."""
        self._count = 0
        self._last: Optional[Point] = None

    def add(self, point: Point, replaces: bool = False) -> None:
        """Take the next point, or one that `replaces` the last."""
        before, self._last = self._last, point
        if before is None or replaces:
            return
        if not self._kept:
            self._kept.append(before)
            return
        self._part = before if self._part is None else _joined(self._part, self._count, before)
        self._count += 1
        if self._count == self._size:
            self._kept.append(self._part)
            self._part, self._count = None, 0
            if len(self._kept) == CURVE_POINTS - 1:
                first, *others = self._kept
                pairs = zip(others[::2], others[1::2])
                self._kept = [first, *(_joined(one, 1, other) for one, other in pairs)]
                self._size *= 2

    def points(self) -> List[Point]:
        """Return what is known, the oldest first."""
        return self._kept + [each for each in (self._part, self._last) if each is not None]


class Curves:
    """The curves of a job: of the first names that its scripts report, as many as a task may report at a time."""

    def __init__(self) -> None:
        self._curves: Dict[str, Curve] = {}
        self._open: Set[str] = set()
        """Those that have a point which may be replaced."""

    def add(self, step: Optional[float], time_s: float, values: Mapping[str, float], replaces: bool = False) -> None:
        """Take means over the ranks. `step`: the job's; `time_s`: since its start; `replaces`: those that came last."""
        whole = None if step is None else int(step)
        before: Set[str] = self._open if replaces else set()
        self._open = before.union(values)
        for name, value in values.items():
            if name and (name in self._curves or len(self._curves) < contract.VALUES):
                self._curves.setdefault(name, Curve()).add(Point(whole, round(time_s, 1), value), name in before)

    def shown(self) -> Dict[str, Any]:
        """Return `reports` of a snapshot."""
        return {
            name: [[each.step, each.time_s, _significant(each.value)] for each in curve.points()]
            for name, curve in self._curves.items()
        }


def _joined(one: Point, count: int, other: Point) -> Point:
    """Return one point for `count` that became `one` and for the next, where that is."""
    share = count / (count + 1)  # not the sum, which may be too large
    return other._replace(value=one.value * share + other.value * (1 - share))


def _significant(value: float) -> Any:
    return float(f"{value:.{CURVE_DIGITS}g}") if math.isfinite(value) else plain(value)
