"""Measures a host and its tasks: metrics, reports and stacks. A fault in any of them does not affect the job.

`HostMeasurement` drives `Metrics`, `Reports` and `stacks.StackReader` for the agent's loop. If one of them raises an
exception, the agent stops measuring for AGAIN_S and then starts again. After TRIES faults it stops for good. The first
fault is reported as a warning.

Samples come from /proc (`procfs.py`), reports from the datagrams of tasks (`contract/metrics.py`), disks and GPUs from
the helper process (`helper.py`). They are sent as frames `metrics`. Sampling starts when the coordinator sends
`sample`. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import socket
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
    cast,
)

from distrun_runtime.agent import procfs
from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.helper import Helper
from distrun_runtime.agent.procfs import Usage
from distrun_runtime.agent.share import Share, exact
from distrun_runtime.contract import facts, metrics, process
from distrun_runtime.contract.agent_messages import Warned
from distrun_runtime.contract.process import Identity

if TYPE_CHECKING:
    from distrun_runtime.agent.stacks import Give, StackReader
    from distrun_runtime.agent.tasks import RunningTask

AGAIN_S = 60.0
"""After a fault nothing is measured for so long."""
TRIES = 5
"""After so many faults nothing is measured any more."""

_Method = TypeVar("_Method", bound=Callable[..., None])


def _shielded(act: _Method) -> _Method:
    """Make a method of `HostMeasurement` that raises nothing."""

    @functools.wraps(act)
    def shielded(self: HostMeasurement, *args: Any) -> None:
        try:
            act(self, *args)
        except Exception as err:
            self.failed(err)

    return cast("_Method", shielded)


class Hooks(NamedTuple):
    """What measuring needs of the agent."""

    channel: Channel
    """To the coordinator."""
    task_of: Callable[[int], str]
    """Returns the task that a process belongs to by its environment; empty: none."""
    may_help: Callable[[], bool]
    """Returns whether a helper may be started."""


class HostMeasurement:
    """The numbers of one host.

    Arguments:
        share: of the job that has begun.
        tasks: those that were started here, by name.
        selector: the agent's.
        agent: the rest of it.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        share: Share,
        tasks: Mapping[str, RunningTask],
        selector: selectors.BaseSelector,
        agent: Hooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._tasks = tasks
        self._selector = selector
        self._agent = agent
        self._clock = clock
        self._reports = Reports(share.folder, selector)
        self._reports.on_stacks = self._heard_of_stacks
        self._stacks: Optional[StackReader] = None
        """None as long as no task has said anything of its stacks, and no client has asked for them."""
        self._metrics: Optional[Metrics] = None
        """None until the coordinator asks for samples."""
        self._interval_s = 0.0
        """The interval that the coordinator asked for; 0: no samples."""
        self._again_at: Optional[float] = None
        """After a fault: when it is tried again; infinite: never. None: nothing has failed."""
        self._faults = 0

    @property
    def next_at(self) -> float:
        """When `tick` has something to do (monotonic clock); infinite: never."""
        if self._again_at is not None:
            return self._again_at
        parts = (self._metrics, self._reports, self._stacks)
        return min(each.next_at for each in parts if each is not None)

    def open_socket(self, task: str) -> str:
        """Listen to a task that is about to start; return what it calls its socket by, empty if there is none."""
        with contextlib.suppress(OSError):  # there is no way to name a socket: the task reports nothing
            return self._reports.open(task)
        return ""

    @_shielded
    def set_interval(self, interval_s: float, now: float) -> None:
        """Sample each `interval_s` seconds from now on; 0: no more."""
        self._interval_s = interval_s
        if self._again_at is None:
            self._begin_sampling(now)

    @_shielded
    def ask_stack(self, task: str, give: Give) -> None:
        """Have the stacks of a task given, now or later."""
        if self._again_at is not None:
            from distrun_runtime.agent.stacks import StackAnswer

            fix = f"py-spy dump --pid PID, on the host of {task}"
            give(StackAnswer(task, error="the agent itself has failed to measure", fix=fix))
            return
        self._reports.drain()  # what a task has said before
        self._made_stacks().ask(task, give)

    @_shielded
    def reaped(self, pid: int, status: int) -> None:
        """Take note that a child of the agent that is no task has ended."""
        if self._metrics is not None:
            self._metrics.reaped(pid)
        if self._stacks is not None:
            self._stacks.reaped(pid, status)

    @_shielded
    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._again_at is not None:
            if now < self._again_at:
                return
            self._again_at = None
            self._begin_sampling(now)
        if self._metrics is not None and now >= self._metrics.next_at:
            if self._agent.channel.takes_metrics():
                self._reports.fetch(now)
                self._metrics.sample(self._tasks, self._reports.last, self._reports.sizes, now)
            else:  # the next sample says how things are
                self._metrics.skip(now)
        if now >= self._reports.next_at:
            self._reports.tick(now)
        if self._stacks is not None and now >= self._stacks.next_at:
            self._stacks.tick(now)

    @_shielded
    def tell_last(self, tasks: Sequence[str]) -> None:
        """Tell what tasks that have ended reported last: they come in no further sample."""
        ended = self._reports.last_of(tasks)
        is_on = self._metrics is not None and self._metrics.next_at < math.inf
        if ended and is_on and self._agent.channel.takes_metrics():
            times = {"clock": round(self._clock(), 3), "time": round(time.time(), 3)}
            self._agent.channel.send({"type": "metrics", **times, "ended": ended})

    def stop(self) -> None:
        """Sample no more and end what was started for it: the job ends here. What tasks report is still taken."""
        for each in (self._metrics, self._stacks):
            if each is not None:
                each.close()

    def close(self) -> None:
        """Remove the tasks' sockets."""
        self._reports.close()

    def failed(self, err: Exception) -> None:
        """Begin anew after a pause, because of a fault; the job goes on."""
        self._faults += 1
        self._again_at = self._clock() + AGAIN_S if self._faults < TRIES else math.inf
        for each in (self._metrics, self._stacks):
            with contextlib.suppress(Exception):
                if each is not None:
                    each.close()
        self._metrics = None  # stacks know what tasks have offered
        if self._faults == 1:
            again = f"it tries again after {facts.duration(AGAIN_S)}, {TRIES - 1} times at most"
            text = f"the agent itself failed to measure: {type(err).__name__}: {err}; {again}"
            self._agent.channel.say(Warned, text=text)

    @_shielded
    def _heard_of_stacks(self, task: str, told: Mapping[str, object]) -> None:
        self._made_stacks().heard(task, told)

    def _made_stacks(self) -> StackReader:
        from distrun_runtime.agent.stacks import StackReader  # only once a task has said something of them

        if self._stacks is None:
            self._stacks = StackReader(self._share.folder, self._tasks, self._selector)
        return self._stacks

    def _begin_sampling(self, now: float) -> None:
        if self._metrics is None and self._interval_s > 0:
            self._metrics = Metrics(self._share, self._selector, self._agent)
        if self._metrics is not None:
            self._metrics.set_interval(self._interval_s, now)


# Samples


SHORTEST_S = 0.1
COST = 100
"""Sampling uses at most 1/COST of a core: after an expensive sample there is a longer pause."""
HELPER_AFTER_S = 5.0
"""Time from the first sample to the start of the helper. Short jobs do without one."""
DISK_S = 30.0
GPU_S = 1.0
"""Interval of looks at GPUs by the driver's library."""
SMI_S = 5.0
"""The same by `nvidia-smi`, and that of `ps`. Both are programs to be started."""
FRAME_BYTES = 200_000
"""If the frame may be longer, the largest reports are left out."""
TASK_BYTES = 400
"""What a task takes without its reports, at most."""
NO_GPU_S = 60.0
"""Time until the driver is asked again if it is present and reports no GPU."""


class Metrics:
    """Samples, when it is time, and sends that. Arguments: as of `HostMeasurement`."""

    def __init__(self, share: Share, selector: selectors.BaseSelector, agent: Hooks) -> None:
        self.next_at = math.inf
        self._share = share
        self._selector = selector
        self._agent = agent
        self._helper: Optional[Helper] = None
        """Made when the tasks' environment is known."""
        self._interval_s = 0.0
        self._help_at = math.inf
        self._is_portable = process.is_portable()
        self._tasks = procfs.Tasks(agent.task_of)
        self._portable = procfs.PortableTasks()
        self._host = procfs.HostSampler()

    def set_interval(self, interval_s: float, now: float) -> None:
        """Sample each `interval_s` seconds from now on; 0: no more."""
        if not interval_s > 0:
            self.close()
            return
        self._interval_s = max(SMI_S if self._is_portable else SHORTEST_S, interval_s)
        self.next_at = min(self.next_at, now + self._interval_s)
        if self._help_at == math.inf:
            self._help_at = now + HELPER_AFTER_S

    def skip(self, now: float) -> None:
        """Sample at the next time only."""
        self.next_at = now + self._interval_s

    def reaped(self, pid: int) -> None:
        """Note a child's end."""
        if self._helper is not None:
            self._helper.reaped(pid)

    def close(self) -> None:
        """Sample no more, and end the helper."""
        self._interval_s, self.next_at = 0.0, math.inf
        if self._helper is not None:
            self._helper.close()

    def sample(
        self,
        running: Mapping[str, RunningTask],
        reports: Mapping[str, Mapping[str, Mapping[str, Any]]],
        sizes: Mapping[Tuple[str, str], int],
        now: float,
    ) -> None:
        """Say how things are, and when the next time is."""
        began = time.thread_time()
        leaders = {name: each.leader for name, each in running.items() if not each.is_reaped}
        self._ask(now)
        host, used, owners = self._look(leaders, now)
        disk = self._answers.get("disk")
        if disk:
            host["disk_total"], host["disk_free"] = disk["total"], disk["free"]
        times = {"clock": round(now, 3), "time": round(time.time(), 3)}
        frame: Dict[str, Any] = {"type": "metrics", **times, "host": host}
        gpus = (self._answers.get("gpus") or {}).get("gpus")
        if gpus:
            frame["gpus"] = gpus
        kept = fitting({name: reports.get(name, {}) for name in leaders}, sizes)
        frame["tasks"] = {
            name: _task(usage, running[name].output_at, _gpu(name, gpus or [], owners), kept[name])
            for name, usage in used.items()
        }
        self._agent.channel.send(frame)
        self.next_at = now + max(self._interval_s, (time.thread_time() - began) * COST)

    def _look(self, leaders: Mapping[str, Identity], now: float) -> Any:
        """Return what is known of the host, what tasks have used, and the task of each of their processes."""
        if self._is_portable:
            rows = procfs.ps(str(self._answers.get("ps") or ""))
            host = procfs.portable_host()
            used = self._portable.sample(leaders, rows)
            if rows:
                host["processes"] = len(rows)
            return host, used, self._portable.members
        host = self._host.sample()
        used = self._tasks.sample(leaders, now)
        host["processes"] = self._tasks.processes
        return host, used, {pid: member.task for pid, member in self._tasks.members.items()}

    @property
    def _answers(self) -> Mapping[str, Any]:
        """What the helper has found out."""
        return self._helper.answers if self._helper is not None else {}

    def _ask(self, now: float) -> None:
        """Tell the helper what is wanted, and have it go on."""
        if now < self._help_at or not self._agent.may_help():
            return
        helper = self._helper = self._helper or helper_of(self._share, self._selector)
        helper.want("gpus", _gpu_interval_s(helper.answers.get("gpus")), now)
        if self._is_portable:
            helper.want("ps", SMI_S, now)
        helper.want("disk", DISK_S, now)
        helper.tick(now)


def _gpu_interval_s(answer: Any) -> float:
    if not answer:
        return math.inf  # there is no driver
    if not answer["gpus"]:
        return NO_GPU_S
    return GPU_S if answer["how"] == "nvml" else SMI_S


def _task(
    usage: Usage, output_at: float, gpu: Mapping[str, float], said: Mapping[str, Mapping[str, Any]]
) -> Dict[str, Any]:
    found = dict(usage._asdict(), output_at=round(output_at, 3) or None, **gpu, **said)
    return {name: value for name, value in found.items() if value is not None}


def _gpu(name: str, gpus: List[Mapping[str, Any]], owners: Mapping[int, str]) -> Dict[str, float]:
    """Return how busy the GPUs of a task are, and its memory there.

    A GPU that several tasks share tells nothing of one of them: of it only the memory counts.
    """
    busy, memory = [], 0
    for gpu in gpus:
        users = {owners.get(int(pid), "") for pid in gpu.get("pids", {})}
        if name in users:
            memory += sum(size or 0 for pid, size in gpu["pids"].items() if owners.get(int(pid)) == name)
            if users == {name} and "util" in gpu:
                busy.append(gpu["util"])
    found: Dict[str, float] = {"gpu_mem": memory} if memory else {}
    if busy:
        found["gpu"] = round(sum(busy) / len(busy), 4)
    return found


def fitting(
    reports: Mapping[str, Mapping[str, Mapping[str, Any]]], sizes: Mapping[Tuple[str, str], int]
) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the reports of tasks without the largest values, if all would make the frame too long. No side effects.

    `sizes`: bytes of each, by task and kind.
    """
    own = {(task, kind): sizes.get((task, kind), 0) for task, kinds in reports.items() for kind in kinds}
    excess = sum(own.values()) + TASK_BYTES * len(reports) - FRAME_BYTES
    if excess <= 0:
        return reports
    found = {task: dict(kinds) for task, kinds in reports.items()}
    for task, kind in sorted(own, key=lambda each: -own[each]):
        said = found[task][kind]
        if excess > 0 and "values" in said:
            found[task][kind] = {name: value for name, value in said.items() if name not in ("values", "lags")}
            excess -= own[task, kind]
    return found


def helper_of(share: Share, selector: selectors.BaseSelector) -> Helper:
    """Return a helper that runs in the environment of a job's tasks, marked as they are."""
    words = [[exact(word) for word in task.argv] for task in share.plan.tasks]
    env = {**share.base, **{exact(name): exact(value) for name, value in share.marks.items()}, b"LC_ALL": b"C"}
    env[b"DISTRUN_ROLE"] = facts.HELPER.encode()
    return Helper(selector, pythons(share.python, words), env, share.cwd)


def pythons(named: Mapping[str, str], words: List[List[bytes]]) -> List[bytes]:
    """Return the interpreters of a job's tasks, the best first: in their environment the agent's own may not start.

    `named`: `VERSION PATH` of those that were looked at. `words`: argument lists of the tasks.
    """
    found = [os.fsencode(text.partition(" ")[2]) for text in named.values()]
    found += [argv[0] for argv in words if argv and os.path.basename(argv[0]).startswith(b"python")]
    return list(dict.fromkeys(found))[:2]


# Receives the datagrams of tasks (`contract/metrics.py`) and keeps the last one of each kind. Never blocks.
#
# Each task has its own socket, so a busy task takes no room from the others. A turn of the agent's loop costs more than
# a datagram. So after some datagrams have arrived, the agent reads the next ones after a short pause.


TURN = 32
"""Datagrams of a task that are taken in one turn of the loop."""
FULL = 10
"""So many does Linux keep in a socket (net.unix.max_dgram_qlen), about; what comes then is dropped."""
SHORTEST_PAUSE_S, FIRST_S, LONGEST_S = 0.05, 0.5, 1.0
"""How long they are left there: by how many come, FIRST_S before that is known."""
PATH_BYTES = 100
"""A longer path does not fit into a socket's address everywhere."""
NAMES = 32
"""Numbers of one datagram that are kept, at most."""
TEXT = 200
"""Characters that are kept of a text."""
HIGHEST = 1 << 63
"""Whole numbers are smaller than this: readers may make floats of them."""

Number = Union[int, float]


class Reports:
    """The sockets of one agent's tasks in its `folder`, and what came there."""

    def __init__(self, folder: str, selector: selectors.BaseSelector) -> None:
        self.last: Dict[str, Dict[str, Dict[str, Any]]] = {}
        """By task and kind, as the frame `metrics` has it: `time` is when it came."""
        self.sizes: Dict[Tuple[str, str], int] = {}
        """Bytes of each, about, by task and kind."""
        self.on_stacks: Callable[[str, Mapping[str, Any]], None] = lambda task, found: None
        """Called with each datagram of that kind: several processes of a task may send them."""
        self.next_at = math.inf
        """When `tick` has something to do (monotonic clock)."""
        self._folder = folder
        self._descriptor = -1
        """Of the folder, if its name is too long for a socket's address."""
        self._selector = selector
        self._sockets: Dict[str, socket.socket] = {}
        self._is_watching = True
        """The selector says when something comes; else it is looked for at `next_at`."""
        self._pause_s = FIRST_S

    def open(self, task: str) -> str:
        """Listen to a task that is about to start, and return what it calls its socket by. Raises OSError."""
        self.last.pop(task, None)
        name = f"{task}.{metrics.SOCKET}"
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, name))  # of an earlier attempt
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.setblocking(False)
            listening.bind(path)
            os.chmod(path, 0o600)  # the folder lets no other user in anyway
        except OSError:
            listening.close()
            raise
        self._watch(False)
        if task in self._sockets:
            self._sockets[task].close()
        self._sockets[task] = listening
        self._watch(True)
        return path

    def tick(self, now: float) -> None:
        """Take what has come meanwhile; if that is nothing, wait for the next one."""
        most = self.drain()
        if most >= FULL:
            self._pause_s = max(SHORTEST_PAUSE_S, self._pause_s / 2)
        elif most < FULL // 2:
            self._pause_s = min(LONGEST_S, self._pause_s * 2)
        self._watch(not most)
        self.next_at = now + self._pause_s if most else math.inf

    def fetch(self, now: float) -> None:
        """Take what has come, before the last values are used."""
        if not self._is_watching:
            self.drain()
            self.next_at = now + self._pause_s

    def drain(self) -> int:
        """Take what has come, a part of it if that is much; return how many came from the task that sent most."""
        return max((self._drain(task, each) for task, each in self._sockets.items()), default=0)

    def last_of(self, tasks: Sequence[str]) -> Dict[str, Mapping[str, Any]]:
        """Take what tasks that have ended have sent, and return the last report of each that has made one."""
        for task in tasks:
            for _ in range(TURN):  # a process that they have left may still send
                if task not in self._sockets or self._drain(task, self._sockets[task]) < TURN:
                    break
        told = {task: self.last.get(task, {}).get(metrics.REPORT) for task in tasks}
        found = fitting({task: {metrics.REPORT: last} for task, last in told.items() if last}, self.sizes)
        return {task: kinds[metrics.REPORT] for task, kinds in found.items()}

    def close(self) -> None:
        """Remove the sockets."""
        self._watch(False)
        self.next_at = math.inf
        for task, each in self._sockets.items():
            each.close()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, f"{task}.{metrics.SOCKET}"))
        self._sockets = {}
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _path(self, name: str) -> str:
        """Return what we and the tasks call a file of the folder by."""
        path = os.path.join(self._folder, name)
        if len(os.fsencode(path)) <= PATH_BYTES:
            return path
        if process.is_portable():
            raise OSError(f"{path} is too long for a socket's address")
        if self._descriptor < 0:
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Tasks reach it by a descriptor of ours, for they are of the same user.
        return f"/proc/{os.getpid()}/fd/{self._descriptor}/{name}"

    def _watch(self, wanted: bool) -> None:
        """Have the selector say when something comes, or not any more."""
        if wanted and not self._is_watching:
            for each in self._sockets.values():
                self._selector.register(each.fileno(), selectors.EVENT_READ, self._on_first)
        elif not wanted and self._is_watching:
            for each in self._sockets.values():
                self._selector.unregister(each.fileno())
        self._is_watching = wanted

    def _on_first(self) -> None:
        self._watch(False)
        self.drain()
        self.next_at = time.monotonic() + self._pause_s

    def _drain(self, task: str, listening: socket.socket) -> int:
        for count in range(TURN):
            try:
                data = listening.recv(metrics.LIMIT + 1)
            except OSError:
                return count
            found = metrics.decode(data) if len(data) <= metrics.LIMIT else None
            if found is None or found["task"] != task:
                continue
            if found["kind"] == metrics.STACKS:
                self.on_stacks(task, found)
            self._keep(task, found["kind"], found)
            self.sizes[task, found["kind"]] = len(data)
        return TURN

    def _keep(self, task: str, kind: str, found: Mapping[str, Any]) -> None:
        kept = checked(kind, found)
        if kept is None:
            return
        if kind == metrics.WAITING and not kept["for"]:
            self.last.get(task, {}).pop(kind, None)
        else:
            self.last.setdefault(task, {})[kind] = dict(kept, time=round(time.time(), 3))


def checked(kind: str, found: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Return the members that a datagram of this kind has; None if one that it needs is not there. No side effects.

    What is of another type is left out: a task may send anything, and all of it goes to the clients of the job.
    """
    if kind == metrics.REPORT:
        whole = {name: number(found.get(name)) for name in ("step", "total")}
        return {**whole, "values": _numbers(found.get("values"))}
    if kind == metrics.COUNTERS:
        kept: Dict[str, Any] = {"role": _text(found.get("role")), "values": _numbers(found.get("values"))}
        lags = found.get("lags")
        if isinstance(lags, dict):
            kept["lags"] = {
                _text(rank): [number(each) for each in row[:4]] for rank, row in lags.items() if isinstance(row, list)
            }
        return kept
    if kind == metrics.WAITING:
        names = found.get("for")
        if not isinstance(names, list):
            return None
        told = {name: _text(found.get(name)) for name in ("key", "call")}
        return {"for": [_text(name) for name in names[:NAMES]], **told, "since": number(found.get("since"))}
    return {"pid": number(found.get("pid")), "how": _text(found.get("how")), "path": _text(found.get("path"), 4096)}


def number(value: object) -> Optional[Number]:
    """Return a number as it is, not a number and the infinities too; None of what is none, or is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, float) or -HIGHEST <= value < HIGHEST else None


def _numbers(values: object) -> Dict[str, Number]:
    rows = list(values.items()) if isinstance(values, dict) else []
    found: List[Any] = [(_text(name), number(value)) for name, value in rows[:NAMES]]
    return {name: value for name, value in found if value is not None}


def _text(value: object, limit: int = TEXT) -> str:
    """Return a text, or a number as one (a key of the store); empty of anything else."""
    return str(value)[:limit] if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
