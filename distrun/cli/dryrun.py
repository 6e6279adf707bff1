"""What `--dry-run` shows of a plan, as text and as JSON. Pure; secrets are masked because a plan holds none.

The text shows tasks that differ only by rank and host once, unless it is to show everything (-v).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import formats
from distrun.backends.base import Rendered
from distrun.formats import grouped
from distrun.formats import size as size_text
from distrun.hosts.ranges import fold, generic
from distrun.planning import SET_ELSEWHERE, QueuedJob
from distrun_runtime.contract import gpus
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.plan import WORKER, Host, Plan, Task

if TYPE_CHECKING:
    from distrun.backends.engine import Script, Submission

SCHEMA = "distrun.dry-run/1"
RANK_LIKE = frozenset(
    (
        *("DISTRUN_ADDR", "DISTRUN_HOST", "DISTRUN_LOCAL_RANK", "DISTRUN_LOCAL_SIZE", "DISTRUN_NODE_RANK"),
        *("DISTRUN_RANK", "DMLC_NODE_HOST", "DMLC_RANK", "DMLC_SERVER_ID", "DMLC_TASK_ID", "DMLC_WORKER_ID"),
        *("GROUP_RANK", "JAX_PROCESS_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK", "ROLE_RANK"),
    )
)
"""Variables that follow from a task's rank and host: tasks that differ in nothing else are shown once."""
AS_PLANNED = (
    *("job", "name", "backend", "command", "cwd", "interface", "subnet"),
    *("limits", "unset", "activate", "sync"),
)
"""Members of the JSON that are those of plan.json."""
MASK = "***"
PROGRAM_SHOWN = 60
"""Characters of an agent's program that the text shows; the JSON has all."""


def as_json(plan: Plan, rendered: Rendered) -> dict[str, Any]:
    """Return the whole plan as JSON-able values: hosts with what is executed there, and every task."""
    told = plans.to_json(plan)
    return {
        "schema": SCHEMA,
        **{name: told[name] for name in AS_PLANNED},
        "agent_env": agent_env(),
        "hosts": [
            {
                "name": host.name,
                "address": host.address,
                "held_ports": list(host.ports),
                "interface": host.interface,
                "reach": dict(host.reach),
                "argv": list(rendered.commands[host.name]),
                "stdin": rendered.stdin,
            }
            for host in plan.hosts
        ],
        "tasks": [
            {**{name: task[name] for name in ("name", "role", "rank", "host", "argv", "cwd")}, "env": env}
            for task, env in zip(told["tasks"], map(added, plan.tasks), strict=True)
        ],
    }


def as_text(plan: Plan, rendered: Rendered, whole: bool = False) -> str:
    """Return the plan for a reader; commands and values are quoted so that bash reads them back.

    `whole`: every host and task by itself, whatever they have in common.
    """
    lines = [f"job {plan.job} on {formats.number_of(len(plan.hosts), 'host')}, backend {plan.backend}"]
    lines.append("nothing is started; {...} is filled in when it is known")
    if plan.sync is not None:
        what = f"{plan.sync.files} files, {plan.sync.size} bytes"
        lines += [f"copied before: {plan.sync.source.rstrip('/')}/ -> {plan.cwd} on each host ({what})"]
    if plan.activate:
        lines += ["run once on each host, for the environment that it leaves:"]
        lines += ["  " + line for line in plan.activate.splitlines()]
    if len(plan.hosts) > 1:
        names = grouped((task.host, task.name) for task in plan.tasks)
        lines += ["", "placement:"]
        lines += [f"  {host.name}: {' '.join(names.get(host.name, ()))}" for host in plan.hosts]
    lines += _hosts(plan, rendered, whole)
    has_own_gpus = plan.gpus_per_worker > 0
    groups = grouped((task.name if whole else _kind(task, has_own_gpus), task) for task in plan.tasks)
    for tasks in groups.values():
        lines += ["", *_tasks(tasks)]
    if any(len(tasks) > 1 for tasks in groups.values()):
        lines += ["", "tasks that differ only by rank and host are shown once; -v shows each of them"]
    lines += ["", "and every task gets besides:"]
    lines += [f"  {name}: set by {source}" for name, source in agent_env().items()]
    lines.append(f"  everything else in its agent's environment{', but for the names below' if plan.unset else ''}")
    if plan.unset:
        lines.append("removed from that environment first: " + " ".join(plan.unset))
    return "\n".join(lines) + "\n"


def queued_as_json(job: QueuedJob, submission: Submission, script: Script) -> dict[str, Any]:
    """Return what would be submitted to an engine as JSON-able values."""
    return {
        "schema": SCHEMA,
        "launcher": job.backend.name,
        "marker": submission.marker,
        "files": dict(script.files),
        "commands": [list(argv) for argv in script.commands],
        "found": dataclasses.asdict(submission.found),
        "tasks": [
            {"role": each.role, "count": each.count, "needs": each.needs._asdict()} for each in submission.groups
        ],
        "command": list(job.request.command),
        "cwd": submission.cwd,
    }


def queued_as_text(job: QueuedJob, submission: Submission, script: Script) -> str:
    """Return what would be submitted to an engine, for a reader. Values that depend on its answers are in braces."""
    lines = [f"job {submission.job} for {job.backend.name}, which calls it {submission.marker}"]
    lines.append("nothing is submitted; {...} is filled in when it is known")
    for name, text in script.files.items():
        lines += ["", f"{submission.folder}/{name}:", *("  " + line for line in text.splitlines())]
    if script.commands:
        lines += ["", "executed:", *(f"  {formats.join(map(_short, argv))}" for argv in script.commands)]
    lines += ["", "tasks, placed when the engine has given the job its places:"]
    for group in submission.groups:
        values = {**group.needs._asdict(), "memory": group.needs.memory and size_text(group.needs.memory)}
        needs = ", ".join(f"{name} {value}" for name, value in values.items() if value)
        lines.append(f"  {formats.number_of(group.count, group.role)}" + (f", each with {needs}" if needs else ""))
    lines.append(f"  workers run: {formats.join(job.request.command)}")
    lines.append(f"  in:          {formats.quote(submission.cwd)}")
    return "\n".join(lines) + "\n"


def _hosts(plan: Plan, rendered: Rendered, whole: bool) -> list[str]:
    """Return the lines about hosts; those that are reached alike are shown once, unless `whole`."""
    lines: list[str] = []
    first: dict[tuple[str, ...], str] = {}
    groups: dict[object, list[Host]] = {}
    for host in plan.hosts:
        like = first.setdefault(_generic(host.name, rendered), host.name)
        is_alone = whole or like == host.name
        groups.setdefault(host.name if is_alone else (like, host.ports, not host.address), []).append(host)
    for hosts in groups.values():
        names = [host.name for host in hosts]
        argv = rendered.commands[names[0]]
        like = first[_generic(names[0], rendered)]
        if len(hosts) == 1:
            lines += ["", f"host {names[0]} (data address: {hosts[0].address or 'found by its agent'})"]
        else:
            where = ", ".join(host.address for host in hosts) if hosts[0].address else "found by their agents"
            lines += ["", f"hosts {fold(names)} (data addresses: {where})"]
        if like == names[0]:
            lines.append(f"  agent: {formats.join(map(_short, argv))}")
            lines.append(f"  stdin: {rendered.stdin}")
        else:
            lines.append(f"  agent: as on {like}, with {'its own name' if names[1:] else names[0]} in its place")
        if hosts[0].ports:
            lines.append(f"  ports held: {', '.join(hosts[0].ports)}")
    return lines


def _generic(host: str, rendered: Rendered) -> tuple[str, ...]:
    """Return the command that starts a host's agent, with HOST for its name."""
    return tuple(generic(host, word) for word in rendered.commands[host])


def _kind(task: Task, has_own_gpus: bool) -> object:
    """Return what tasks have in common that are shown as one. `has_own_gpus`: which follow from its rank, too."""
    alike = {*RANK_LIKE, gpus.VISIBLE} if has_own_gpus and task.role == WORKER else RANK_LIKE
    env, refs = (
        tuple(sorted((name, "" if name in alike else value) for name, value in pairs.items()))
        for pairs in (task.env, {**task.refs, **_devices(task)})
    )
    return task.role, task.argv, task.cwd, task.secret_env, env, refs


def _tasks(tasks: Sequence[Task]) -> list[str]:
    """Return the lines about tasks of one kind: what they share, then what differs, in the order of the tasks."""
    first = tasks[0]
    every = [added(task, formats.quote) for task in tasks]
    shared: list[str] = []
    differing: dict[str, list[str]] = {}
    for name, value in every[0].items():
        if all(each[name] == value for each in every):
            shared.append(f"{name}={value}")
            continue
        general = generic(first.host, value)
        if all(generic(task.host, each[name]) == general for task, each in zip(tasks, every, strict=True)):
            shared.append(f"{name}={general}")
        else:
            differing.setdefault(series([each[name] for each in every]), []).append(name)
    hosts = list(dict.fromkeys(task.host for task in tasks))
    if len(tasks) == 1:
        head = f"{first.name}@{first.host}"
    else:
        head = f"{fold([task.name for task in tasks])}@{fold(hosts)}: {len(tasks)} tasks"
        head += "; HOST is the name of the task's host" if len(hosts) > 1 else ""
    lines = [head, f"  run: {formats.join(first.argv)}", f"  in:  {formats.quote(first.cwd)}"]
    lines += ["  env: " + text for text in sorted(shared)]
    if differing:
        lines.append("  env, by task in their order:")
        lines += [f"    {' '.join(sorted(names))}: {text}" for text, names in sorted(differing.items())]
    return lines


def _devices(task: Task) -> dict[str, str]:
    """Return the GPUs of a task, if only its agent will know which they are: `{d1/gpus:2-3}`."""
    first, count = task.gpus or (0, 0)
    if not count or gpus.VISIBLE in task.env:
        return {}
    span = str(first) if count == 1 else f"{first}-{first + count - 1}"
    return {gpus.VISIBLE: f"{{{task.place_name}/gpus:{span}}}"}


def series(values: Sequence[str]) -> str:
    """Return a list of values, shortened. No side effects.

    Such as `0-9`, `0-3, repeated`, `0-9, each 2 times`, `2 (4 times), 1 (3 times)`.
    """
    count = len(values)
    period = _period(values)
    if 1 < period <= count // 2:
        return series(values[:period]) + ", repeated"
    times = len(list(itertools.takewhile(lambda value: value == values[0], values)))
    alone = values[::times] if times else []
    if 1 < times < len(alone) and list(values) == [value for value in alone for _ in range(times)]:
        return f"{series(alone)}, each {times} times"
    runs: list[list[str]] = []
    for value in values:
        last = runs[-1] if runs else []
        step = int(value) - int(last[-1]) if last and value.isdecimal() and last[-1].isdecimal() else None
        is_next = step in (0, 1) and (len(last) == 1 or step == int(last[1]) - int(last[0]))
        if last and (value == last[-1] == last[0] or is_next):
            last.append(value)
        else:
            runs.append([value])
    return ", ".join(_run(run) for run in runs)


def _period(values: Sequence[str]) -> int:
    """Return after how many values they repeat, in time that grows with their number only (Knuth, Morris, Pratt)."""
    # Of each beginning of the list: how long the longest shorter list is that it begins and ends with.
    borders = [0] * len(values)
    for i in range(1, len(values)):
        length = borders[i - 1]
        while length and values[i] != values[length]:
            length = borders[length - 1]
        borders[i] = length + 1 if values[i] == values[length] else 0
    return len(values) - borders[-1] if borders else 0


def _run(run: Sequence[str]) -> str:
    if run[0] != run[-1]:
        return f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run)
    return f"{run[0]} ({len(run)} times)" if len(run) > 2 else ", ".join(run)


def added(task: Task, shown: Callable[[str], str] = str) -> Mapping[str, str]:
    """Return the variables added to a task: literal ones as `shown`, references as they stand, hidden ones masked."""
    env = {name: shown(value) for name, value in task.env.items()}
    env.update({**task.refs, **_devices(task), **dict.fromkeys(task.secret_env, MASK)})
    return {name: env[name] for name in sorted(env)}


def agent_env() -> dict[str, str]:
    """Return the variables that the agent sets in every task, each with where its value comes from."""
    return {name: text for name, text in SET_ELSEWHERE.items() if text.startswith("the agent")}


def _short(word: str) -> str:
    return word if len(word) <= PROGRAM_SHOWN else word[:PROGRAM_SHOWN] + "..."
