"""What the text of `launch --dry-run` shows once, and what it shows of each task."""

from __future__ import annotations

import pytest

from distrun.backends.base import Rendered
from distrun.cli.dryrun import RANK_LIKE, as_text, series
from distrun.hosts.parse import parse
from distrun.placement import place
from distrun.planning import Allocation, Setup, make_plan
from distrun.request import JobRequest, Setting
from distrun_runtime.contract import environ
from distrun_runtime.contract.plan import WORKER, Plan, Runtime


def plan(text: str = "d[1-4]", workers: int = 10, servers: int = 9, **more: object) -> Plan:
    request = JobRequest(("python", "t.py"), workers, servers, "/w", launcher="ssh", **more)  # type: ignore[arg-type]
    hosts = parse(text, "hosts")
    slots = place(request, hosts)
    return make_plan(request, Allocation(hosts, slots), Setup("dry-run", "/jobs/dry-run", Runtime(digest="0")))[0]


def shown(made: Plan, whole: bool = False) -> str:
    commands = {host.name: ("ssh", host.name, "DISTRUN_HOST=%s agent" % host.name) for host in made.hosts}
    return as_text(made, Rendered(commands, "frames"), whole)


def block(text: str, head: str) -> list[str]:
    """The lines about the tasks whose first line begins so."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return found.splitlines()


def test_twenty_tasks_that_are_alike_are_shown_in_three_parts() -> None:
    text = shown(plan())
    assert len(text.splitlines()) < 130
    assert len(shown(plan(), whole=True).splitlines()) > 700
    lines = block(text, "worker-")
    assert lines[0] == "worker-[0-9]@d[1-4]: 10 tasks; HOST is the name of the task's host"
    assert lines[1:3] == ["  run: python t.py", "  in:  /w"]
    assert "  env: DISTRUN_ADDR={host:HOST.address}" in lines
    assert "  env: MASTER_ADDR={host:d2.address}" in lines
    at = lines.index("  env, by task in their order:")
    differing = dict(line.strip().split(": ", 1) for line in lines[at + 1 :])
    assert differing == {
        "DISTRUN_RANK DMLC_RANK DMLC_TASK_ID DMLC_WORKER_ID JAX_PROCESS_ID RANK ROLE_RANK": "0-9",
        "DISTRUN_LOCAL_RANK LOCAL_RANK": "0 (4 times), 1 (4 times), 2, 2",
        "DISTRUN_LOCAL_SIZE LOCAL_WORLD_SIZE": "3, 3, 2, 2, repeated",
        "DISTRUN_NODE_RANK": "1-3, 0, repeated",
        "GROUP_RANK NODE_RANK": "0-3, repeated",
    }
    assert "DMLC_TASK_ID: 10-18" in text
    assert "-v shows each of them" in text


def test_nothing_of_a_task_is_lost_when_it_is_shown_with_others() -> None:
    made = plan(settings=(Setting("A", "b c"), Setting("TOKEN", "s3cret", hidden=True)))
    lines = block(shown(made), "worker-")
    names = {line.split()[1].partition("=")[0] for line in lines if line.startswith("  env: ")}
    names |= {name for line in lines if line.startswith("    ") for name in line.partition(":")[0].split()}
    task = made.task("worker-3")
    assert names == {*task.env, *task.refs, *task.secret_env}
    assert "  env: A='b c'" in lines
    assert "  env: TOKEN=***" in lines


def test_what_differs_between_alike_tasks_is_rank_like() -> None:
    """If a variable is added that follows from rank or host, it belongs into RANK_LIKE: else nothing is folded."""
    made = plan()
    assert set(environ.BY_NAME) >= RANK_LIKE
    for role in ("server", WORKER):
        values = [{**task.env, **task.refs} for task in made.of_role(role)]
        assert {name for name in values[0] if len({each[name] for each in values}) > 1} <= RANK_LIKE


@pytest.mark.parametrize(
    ("hosts", "heads"),
    [
        ("d1 gpus=2\nd2 gpus=4", ["worker-[0,2]@d1: 2 tasks", "worker-[1,3]@d2: 2 tasks"]),
        ("d1 workdir=/a\nd2", ["worker-[0,2]@d1: 2 tasks", "worker-[1,3]@d2: 2 tasks"]),
        ("d1\nd2", ["worker-[0-3]@d[1-2]: 4 tasks; HOST is the name of the task's host"]),
    ],
)
def test_tasks_that_differ_in_more_than_rank_and_host_are_not_shown_as_one(hosts: str, heads: list[str]) -> None:
    text = shown(plan(hosts, 4, 0))
    assert [line for line in text.splitlines() if line.startswith("worker-")] == heads


def test_gpus_that_only_the_agent_will_know_are_shown_as_a_reference() -> None:
    made = plan("d1\nd2", 4, 0)
    ranges = {"worker-0": (0, 2), "worker-1": (0, 2), "worker-2": (2, 2), "worker-3": (2, 2)}
    made = made._replace(gpus_per_worker=2, tasks=tuple(task._replace(gpus=ranges[task.name]) for task in made.tasks))
    text = shown(made)
    assert "{d1/gpus:0-1}" in text
    assert "{d2/gpus:2-3}" in text
    heads = [line for line in text.splitlines() if line.startswith("worker-")]
    assert heads == ["worker-[0-3]@d[1-2]: 4 tasks; HOST is the name of the task's host"]


def test_a_single_task_is_shown_as_it_is() -> None:
    text = shown(plan("d1", 1, 1))
    assert text == shown(plan("d1", 1, 1), whole=True)
    assert "  env: RANK=0" in block(text, "worker-0@d1")


def test_hosts_that_are_reached_alike_are_shown_once() -> None:
    made = plan("d[1-3]\nd4 addr=10.0.0.4\nd5 addr=10.0.0.5\nd6", 20, 0)
    made = made._replace(hosts=(*made.hosts[:5], made.hosts[5]._replace(ports=("x",))))
    heads = [line for line in shown(made).splitlines() if line.startswith("host")]
    assert heads == [
        "host d1 (data address: found by its agent)",
        "hosts d[2-3] (data addresses: found by their agents)",
        "hosts d[4-5] (data addresses: 10.0.0.4, 10.0.0.5)",
        "host d6 (data address: found by its agent)",
    ]
    assert "  agent: as on d1, with its own name in its place" in shown(made)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("0 1 2 3", "0-3"),
        ("0 1", "0, 1"),
        ("7 7 7", "7 (3 times)"),
        ("0 0 1 1", "0, 0, 1, 1"),
        ("0 0 1 1 2 2 3 3", "0-3, each 2 times"),
        ("0 0 1 1 2 2 3", "0, 0, 1, 1, 2, 2, 3"),
        ("0 1 0 1 0", "0, 1, repeated"),
        ("3 4 5 9 a b", "3-5, 9, a, b"),
        ("0 1 1 1", "0, 1, 1, 1"),
        ("5 4 3", "5, 4, 3"),
        ("x", "x"),
    ],
)
def test_lists_of_values_are_short(values: str, text: str) -> None:
    assert series(values.split()) == text
