"""The plan: JSON both ways, references, shares, and secrets that stay out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.contract import plan
from distrun_runtime.contract.plan import Host, Limits, Plan, Reach, Runtime, Secrets, Sync, Task
from distrun_runtime.errors import ContractError

T = TypeVar("T")
words = st.text(max_size=12)
names = st.dictionaries(words, words, max_size=3)


def values(kind: Callable[..., T], **members: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Values of a class; members that are not given have their defaults."""
    return st.fixed_dictionaries(members).map(lambda found: kind(**found))


tasks = values(
    Task,
    name=words,
    role=st.sampled_from(plan.ROLES),
    rank=st.integers(0, 9),
    host=words,
    argv=st.lists(words, max_size=4).map(tuple),
    cwd=words,
    env=names,
    refs=names,
    secret_env=st.lists(words, max_size=2).map(tuple),
    needs=st.lists(words, max_size=2).map(tuple),
)
hosts = values(
    Host,
    name=words,
    address=words,
    ports=st.lists(words, max_size=2).map(tuple),
    reach=names.map(Reach),
    interface=words,
)
plans = values(
    Plan,
    job=words,
    name=words,
    backend=words,
    command=st.lists(words, max_size=3).map(tuple),
    cwd=words,
    hosts=st.lists(hosts, max_size=3).map(tuple),
    tasks=st.lists(tasks, max_size=3).map(tuple),
    limits=values(Limits, grace_s=st.floats(0, 100), timeout_s=st.none() | st.floats(0, 1e6)),
    on_eof=st.sampled_from([plan.STOP, plan.HOLD]),
    unset=st.lists(words, max_size=2).map(tuple),
    runtime=values(Runtime, path=words, digest=words),
    activate=words,
    sync=st.none() | values(Sync, source=words, size=st.integers(0), files=st.integers(0), delete=st.booleans()),
)


def example(**refs: str) -> Plan:
    task = Task("worker-0", "worker", 0, "d1", ("python", "t.py"), "/", {"A": "1"}, refs)
    other = Task("worker-1", "worker", 1, "d2", ("python", "t.py"), "/")
    return Plan("j1", "", "local", ("t.py",), "/", (Host("d1"), Host("d2")), (other, task))


@given(plans)
def test_plan_comes_back_from_its_json(value: Plan) -> None:
    assert plan.from_json(json.loads(json.dumps(plan.to_json(value)))) == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "plan version 1"),
        ({"tasks": [{"name": "x"}]}, "not a plan of distrun"),
        ({"surprise": 1}, "not a plan of distrun"),
        ({"limits": {"grace_h": 1}}, "not a plan of distrun"),
        ({"hosts": 5}, "not a plan of distrun"),
    ],
)
def test_json_that_is_no_plan_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        plan.from_json(dict(plan.to_json(example()), **change))


def test_references_are_filled_from_facts() -> None:
    task = example(DMLC_PS_ROOT_PORT="{scheduler.port}", JAX="{host:d1.address}:{d1/port:jax}").task("worker-0")
    facts = {"scheduler.port": "9", "host:d1.address": "10.0.0.1", "d1/port:jax": "77"}
    assert plan.references(task) == set(facts)
    assert plan.resolve(task, facts) == {"A": "1", "DMLC_PS_ROOT_PORT": "9", "JAX": "10.0.0.1:77"}


def test_missing_fact_is_named() -> None:
    task = example(P="{scheduler.port}").task("worker-0")
    with pytest.raises(ContractError, match=r"worker-0 needs 'scheduler.port'"):
        plan.resolve(task, {})


def test_share_holds_the_hosts_own_tasks_and_one_other_host_and_not_how_they_are_reached() -> None:
    hosts = tuple(Host("d%d" % number, reach=Reach({"identity": "~/.ssh/key"})) for number in (1, 2, 3))
    whole = example()._replace(hosts=hosts)
    for name, kept, tasks in (("d1", ["d1", "d2"], ["worker-0"]), ("d3", ["d1", "d3"], [])):
        share = plan.shares(whole)(name)
        assert [task.name for task in share.tasks] == tasks
        assert [host.name for host in share.hosts] == kept
        assert [host.reach for host in share.hosts] == [{}, {}]
    alone = example()._replace(hosts=hosts[:1])
    assert [host.name for host in plan.shares(alone)("d1").hosts] == ["d1"]


def test_tasks_of_a_role_come_in_plan_order_and_unknown_names_are_key_errors() -> None:
    assert [task.name for task in example().of_role("worker")] == ["worker-1", "worker-0"]
    with pytest.raises(KeyError):
        example().task("worker-9")


def test_secrets_never_show_their_values() -> None:
    secrets = Secrets("feedface", {"API_TOKEN": "s3cret"})
    assert "feedface" not in repr(secrets)
    assert "s3cret" not in repr(secrets)
    assert "API_TOKEN" in repr(secrets)
