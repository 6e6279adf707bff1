"""What `--dry-run` shows of a plan, as text and as JSON. Pure; secrets are masked because a plan holds none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distrun import shell
from distrun.backends.base import Rendered
from distrun.plan import SET_ELSEWHERE
from distrun_runtime.contract.plan import Plan, Task

SCHEMA = "distrun.dry-run/1"
MASK = "***"
PROGRAM_SHOWN = 60
"""Characters of an agent's program that the text shows; the JSON has all."""


def as_json(plan: Plan, rendered: Rendered) -> dict[str, Any]:
    """Return the whole plan as JSON-able values: hosts with what is executed there, and every task."""
    return {
        "schema": SCHEMA,
        "job": plan.job,
        "name": plan.name,
        "backend": plan.backend,
        "command": list(plan.command),
        "cwd": plan.cwd,
        "interface": plan.interface,
        "subnet": plan.subnet,
        "limits": dict(vars(plan.limits)),
        "unset": list(plan.unset),
        "activate": plan.activate,
        "sync": None if plan.sync is None else dict(vars(plan.sync)),
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
            {
                "name": task.name,
                "role": task.role,
                "rank": task.rank,
                "host": task.host,
                "argv": list(task.argv),
                "cwd": task.cwd,
                "env": added(task),
            }
            for task in plan.tasks
        ],
    }


def as_text(plan: Plan, rendered: Rendered) -> str:
    """Return the plan for a reader; commands and values are quoted so that bash reads them back."""
    lines = ["job %s on %d host%s, backend %s" % (plan.job, len(plan.hosts), _s(len(plan.hosts)), plan.backend)]
    lines.append("nothing is started; {...} is filled in when it is known")
    if plan.sync is not None:
        what = "%d files, %d bytes" % (plan.sync.files, plan.sync.size)
        lines += ["copied before: %s/ -> %s on each host (%s)" % (plan.sync.source.rstrip("/"), plan.cwd, what)]
    if plan.activate:
        lines += ["run once on each host, for the environment that it leaves:"]
        lines += ["  " + line for line in plan.activate.splitlines()]
    if len(plan.hosts) > 1:
        names: dict[str, list[str]] = {}
        for task in plan.tasks:
            names.setdefault(task.host, []).append(task.name)
        lines += ["", "placement:"]
        lines += ["  %s: %s" % (host.name, " ".join(names.get(host.name, ()))) for host in plan.hosts]
    shown: dict[tuple[str, ...], str] = {}
    for host in plan.hosts:
        lines += ["", "host %s (data address: %s)" % (host.name, host.address or "found by its agent")]
        argv = rendered.commands[host.name]
        like = shown.setdefault(tuple("HOST" if word == host.name else word for word in argv), host.name)
        if like == host.name:
            lines.append("  agent: %s" % shell.join(map(_short, argv)))
            lines.append("  stdin: %s" % rendered.stdin)
        else:
            lines.append("  agent: as on %s, with %s in its place" % (like, host.name))
        if host.ports:
            lines.append("  ports held: %s" % ", ".join(host.ports))
    for task in plan.tasks:
        lines += ["", "%s@%s" % (task.name, task.host)]
        lines.append("  run: %s" % shell.join(task.argv))
        lines.append("  in:  %s" % shell.quote(task.cwd))
        lines += ["  env: " + text for text in _assignments(task)]
    lines += ["", "and every task gets besides:"]
    lines += ["  %s: set by %s" % pair for pair in agent_env().items()]
    lines.append("  everything else in its agent's environment%s" % (", but for the names below" if plan.unset else ""))
    if plan.unset:
        lines.append("removed from that environment first: " + " ".join(plan.unset))
    return "\n".join(lines) + "\n"


def added(task: Task) -> Mapping[str, str]:
    """Return the variables added to a task: literal ones, references as they stand, hidden ones masked."""
    env = {**task.env, **task.refs, **dict.fromkeys(task.secret_env, MASK)}
    return {name: env[name] for name in sorted(env)}


def agent_env() -> dict[str, str]:
    """Return the variables that the agent sets in every task, each with where its value comes from."""
    return {name: text for name, text in SET_ELSEWHERE.items() if text.startswith("the agent")}


def _assignments(task: Task) -> list[str]:
    plain = shell.assignments(task.env)
    unknown = ["%s=%s" % pair for pair in task.refs.items()]
    return sorted(plain + unknown + ["%s=%s" % (name, MASK) for name in task.secret_env])


def _short(word: str) -> str:
    return word if len(word) <= PROGRAM_SHOWN else word[:PROGRAM_SHOWN] + "..."


def _s(count: int) -> str:
    return "" if count == 1 else "s"
