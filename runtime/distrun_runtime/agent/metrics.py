"""Collects the metrics of a host and its tasks, and sends them as frames `metrics`.

Samples come from /proc (`procfs.py`), reports from the datagrams of tasks (`reports.py`), disks and GPUs from the
helper process (`helper.py`). Sampling starts when the coordinator sends `sample`. Nothing here blocks.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Tuple

from distrun_runtime.agent import procfs, sampling
from distrun_runtime.agent.helper import Helper
from distrun_runtime.agent.procfs import Usage
from distrun_runtime.agent.share import Share, exact
from distrun_runtime.contract import facts, process
from distrun_runtime.contract.process import Identity

if TYPE_CHECKING:
    from distrun_runtime.agent.procfs import Running

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
    """Samples, when it is time, and says it by `say`.

    `may_help`: whether a helper may be started; `make_helper` makes it then, when the tasks' environment is known.
    `task_of`: as in `procfs.Tasks`.
    """

    def __init__(
        self,
        make_helper: Callable[[], Helper],
        task_of: Callable[[int], str],
        may_help: Callable[[], bool],
        say: Callable[[Dict[str, Any]], None],
    ) -> None:
        self.next_at = math.inf
        self._make_helper = make_helper
        self._helper: Optional[Helper] = None
        self._may_help = may_help
        self._say = say
        self._interval_s = 0.0
        self._help_at = math.inf
        self._is_portable = process.is_portable()
        self._tasks = procfs.Tasks(task_of)
        self._portable = procfs.PortableTasks()
        self._host = procfs.Host()

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
        running: Mapping[str, Running],
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
        frame: Dict[str, Any] = {"clock": round(now, 3), "time": round(time.time(), 3), "host": host}
        gpus = (self._answers.get("gpus") or {}).get("gpus")
        if gpus:
            frame["gpus"] = gpus
        kept = fitting({name: reports.get(name, {}) for name in leaders}, sizes)
        frame["tasks"] = {
            name: _task(usage, running[name].output_at, _gpu(name, gpus or [], owners), kept[name])
            for name, usage in used.items()
        }
        self._say(frame)
        self.next_at = now + max(self._interval_s, (time.thread_time() - began) * COST)

    def _look(self, leaders: Mapping[str, Identity], now: float) -> Any:
        """Return what is known of the host, what tasks have used, and the task of each of their processes."""
        if self._is_portable:
            rows = sampling.ps(str(self._answers.get("ps") or ""))
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
        if now < self._help_at or not self._may_help():
            return
        helper = self._helper = self._helper or self._make_helper()
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
    reports: Mapping[str, Mapping[str, Mapping[str, Any]]],
    sizes: Mapping[Tuple[str, str], int],
    limit: int = FRAME_BYTES,
) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the reports of tasks without the largest values, if all would make the frame too long. No side effects.

    `sizes`: bytes of each, by task and kind.
    """
    own = {(task, kind): sizes.get((task, kind), 0) for task, kinds in reports.items() for kind in kinds}
    excess = sum(own.values()) + TASK_BYTES * len(reports) - limit
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
