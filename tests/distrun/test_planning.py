from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from distrun import planning as plans
from distrun import request as requests
from distrun.backends.engine import Grant
from distrun.errors import UsageError
from distrun.hosts import Inventory, named
from distrun.hosts.parse import parse
from distrun.placement import place, slots_in
from distrun.request import EngineOptions, JobRequest, Needs, Setting
from distrun.sync.rules import CopyRules
from distrun_runtime.contract import environ
from distrun_runtime.contract import plan as contract
from distrun_runtime.contract.plan import Place, Plan, Runtime, Secrets
from distrun_runtime.coordinator.jobstore import JobStore

FIVE = ("h1", "h2", "h3", "h4", "h5")
SETUP = plans.Setup(
    job_id="calm-otter-7f3",
    run_dir="/jobs/calm-otter-7f3",
    runtime=Runtime(path="/runtime"),
    python="/usr/bin/python3",
    token="70cce1",
)


def make(
    workers: int = 2,
    servers: int = 2,
    hosts: tuple[str, ...] | Inventory = ("here",),
    setup: dict[str, Any] | None = None,
    reached: dict[str, Any] | None = None,
    **more: object,
) -> tuple[Plan, Secrets]:
    members: dict[str, object] = {"command": ("python", "t.py"), "workers": workers, "servers": servers, "cwd": "/w"}
    request = JobRequest(**{**members, **more})  # type: ignore[arg-type]
    inventory = hosts if isinstance(hosts, Inventory) else named(hosts)
    slots = place(request, inventory)
    allocation = plans.Allocation(inventory, slots, **(reached or {"addresses": {"here": "127.0.0.1"}}))
    return plans.make_plan(request, allocation, dataclasses.replace(SETUP, **(setup or {})))


def added(plan: Plan, task: str) -> dict[str, str]:
    return {**plan.task(task).env, **plan.task(task).refs}


def test_tasks_are_told_of_servers_that_keep_no_values_apart_from_those_that_were_asked_for() -> None:
    plan, _ = make(4, 1, ("h1", "h2"))
    assert [(task.name, task.host) for task in plan.of_role("server")] == [("server-0", "h1"), ("server-1", "h2")]
    for task in plan.tasks:
        assert (task.env["DMLC_NUM_SERVER"], task.env["DISTRUN_RELAYS"]) == ("1", "1")


@pytest.mark.parametrize("how", [{"settings": (Setting("DISTRUN_HOST_SUMS", "0"),)}, {"ps": requests.COMMAND}])
def test_no_server_is_added_where_workers_of_a_host_do_not_add(how: dict[str, Any]) -> None:
    plan, _ = make(4, 1, ("h1", "h2"), **how)
    assert [task.name for task in plan.of_role("server")] == ["server-0"]
    assert "DISTRUN_RELAYS" not in plan.task("worker-0").env


def test_every_row_of_the_table_is_set_or_named() -> None:
    """The table and the code cannot drift: a row that is given is set on some task, or named as set elsewhere."""
    bundled, _ = make(4, 1, ("h1", "h2"), port_range="5000-5010", op_timeout_s=1.0, start_timeout_s=1.0)
    foreign, _ = make(ps=requests.COMMAND)
    ours = {name for plan in (bundled, foreign) for task in plan.tasks for name in added(plan, task.name)}
    ours |= set(make(hosts=parse("d1 gpus=2", "hosts"))[0].task("worker-0").env)
    rows = {row.name for row in environ.TABLE if row.use in (environ.GIVEN, environ.BOTH)}
    assert rows == (ours & rows) | set(plans.SET_ELSEWHERE)
    assert not ours & set(plans.SET_ELSEWHERE)
    assert ours <= set(environ.BY_NAME)


def test_every_role_gets_its_rows() -> None:
    plan, _ = make()
    worker, server, scheduler = (added(plan, name) for name in ("worker-1", "server-1", "scheduler"))
    assert worker["DMLC_TASK_ID"] == worker["DMLC_WORKER_ID"] == worker["DMLC_RANK"] == "1"
    assert server["DMLC_TASK_ID"] == "3"
    assert server["DMLC_SERVER_ID"] == server["DMLC_RANK"] == "1"
    assert "DMLC_WORKER_ID" not in server
    assert "DMLC_TASK_ID" not in scheduler
    for env, role in ((worker, "worker"), (server, "server"), (scheduler, "scheduler")):
        assert env["DMLC_ROLE"] == env["DISTRUN_ROLE"] == role
        assert env["DMLC_NUM_WORKER"] == env["DMLC_NUM_SERVER"] == "2"
        assert env["DMLC_NODE_HOST"] == "{host:here.address}"
    groups = {row.name: row.group for row in environ.TABLE}
    for env in (server, scheduler):
        assert not [name for name in env if groups[name] in ("torch", "jax")]
    theirs = {n for n, g in groups.items() if g == "torch"} - set(plans.SET_ELSEWHERE)
    assert {n for n in worker if groups[n] == "torch"} == theirs
    assert {n for n in worker if groups[n] == "jax"} == {n for n, g in groups.items() if g == "jax"}


def test_modules_of_users_rules_are_told_to_the_servers_only() -> None:
    plan, _ = make(server_imports=("my_rules", "more.rules"))
    told = {task.name: added(plan, task.name).get("DISTRUN_SERVER_IMPORT") for task in plan.tasks}
    assert {name for name, value in told.items() if value} == {"server-0", "server-1"}
    assert told["server-0"] == "my_rules,more.rules"


def test_values_obey_the_types_and_ranges_of_the_table() -> None:
    facts = {"scheduler.address": "10.0.0.1", "scheduler.port": "4001"}
    for plan, _ in (make(), make(servers=0), make(ps=requests.COMMAND), make(3, 3, FIVE)):
        for host in plan.hosts:
            facts["host:%s.address" % host.name] = "10.0.0.1"
            facts.update(("%s/port:%s" % (host.name, label), "4002") for label in host.ports)
        for task in plan.tasks:
            for name, value in contract.resolve(task, facts).items():
                assert value != ""
                environ.read(name, {name: value})


def test_workers_of_bundled_servers_wait_for_the_scheduler_which_waits_for_nobody() -> None:
    plan, _ = make()
    assert added(plan, "worker-0")["DMLC_PS_ROOT_URI"] == "{scheduler.address}"
    assert added(plan, "server-0")["DMLC_PS_ROOT_PORT"] == "{scheduler.port}"
    assert contract.references(plan.task("scheduler")) == {"host:here.address"}
    assert plan.hosts[0].ports == ("jax", "master")


def test_a_foreign_scheduler_gets_a_held_port() -> None:
    plan, _ = make(ps=requests.COMMAND)
    for task in plan.tasks:
        assert task.refs["DMLC_PS_ROOT_PORT"] == "{here/port:ps}"
        assert task.refs["DMLC_PS_ROOT_URI"] == "{host:here.address}"
        assert task.argv == ("python", "t.py")
    assert "ps" in plan.hosts[0].ports


def test_no_servers_means_no_scheduler_and_no_root() -> None:
    plan, _ = make(servers=0)
    assert [task.name for task in plan.tasks] == ["worker-0", "worker-1"]
    env = added(plan, "worker-0")
    assert env["DMLC_NUM_SERVER"] == "0"
    assert not [name for name in env if name.startswith("DMLC_PS_ROOT")]


def test_torch_and_jax_know_the_host_of_worker_0() -> None:
    plan, _ = make(3, 3, FIVE)
    env = added(plan, "worker-2")
    assert env["MASTER_ADDR"] == "{host:h4.address}"
    assert env["MASTER_PORT"] == "{h4/port:master}"
    assert env["JAX_COORDINATOR_ADDRESS"] == "{host:h4.address}:{h4/port:jax}"
    assert (env["GROUP_RANK"], env["NODE_RANK"], env["GROUP_WORLD_SIZE"]) == ("2", "2", "3")
    assert (env["DISTRUN_NODE_RANK"], env["DISTRUN_NUM_NODES"]) == ("0", "5")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("2", "3", "0", "1")
    assert [host.ports for host in plan.hosts] == [(), (), (), ("jax", "master"), ()]


def test_bundled_tasks_run_the_runtime_by_the_chosen_python() -> None:
    assert make()[0].task("server-0").argv == ("/usr/bin/python3", "-m", "distrun_runtime", "server")
    assert make(python="py")[0].task("scheduler").argv == ("py", "-m", "distrun_runtime", "scheduler")


def test_over_ssh_servers_run_by_the_python_of_the_host_or_the_command() -> None:
    def python(line: str = "d1", **more: Any) -> str:
        plan, _ = make(hosts=parse(line, "hosts"), setup={"python": ""}, **more)
        return plan.task("server-0").argv[0]

    assert python() == "python"
    assert python(command=("/opt/py/bin/python3.12", "t.py")) == "/opt/py/bin/python3.12"
    assert python(command=("python3 t.py && echo done",)) == "python3"
    assert python(command=("./train",)) == "python3"
    assert python("d1 python=/host/python") == "/host/python"
    assert python("d1 python=/host/python", python="/named/python") == "/named/python"


def test_bundled_tasks_need_what_the_runtime_imports_and_workers_nothing() -> None:
    plan, _ = make()
    assert plan.task("server-0").needs == plan.task("scheduler").needs == ("numpy", "zmq")
    assert plan.task("worker-0").needs == ()
    assert all(task.needs == () for task in make(ps=requests.COMMAND)[0].tasks)


def test_the_agent_puts_the_runtime_first_and_the_plan_keeps_the_users_own_path() -> None:
    plan, _ = make(settings=(Setting("PYTHONPATH", "/mine"),))
    assert plan.runtime == Runtime(path="/runtime")
    assert added(plan, "worker-0")["PYTHONPATH"] == "/mine"


def test_what_the_hosts_file_says_reaches_the_plan() -> None:
    hosts = parse("d1 addr=10.0.0.1 workdir=/scratch\nd2 iface=ib0 gpus=0,2\n", "hosts")
    plan, _ = make(2, 2, hosts, reached={"reach": {"d1": {"host": "d1"}}, "addresses": {"d2": "10.9.9.9"}})
    d1, d2 = plan.hosts
    assert (d1.address, d1.interface, d1.reach) == ("10.0.0.1", "", {"host": "d1"})
    assert (d2.address, d2.interface) == ("", "ib0")
    assert [plan.task(name).cwd for name in ("worker-0", "worker-1")] == ["/scratch", "/w"]
    assert (d1.gpus, d2.gpus, d2.named) == ("", "0,2", "hosts:2")
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(added(plan, "worker-0"))
    for task in ("worker-1", "server-1"):
        assert added(plan, task)["CUDA_VISIBLE_DEVICES"] == "0,2", "all tasks of the host see all"
        assert added(plan, task)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def devices(gpus: str, workers: int, **more: object) -> list[tuple[str, str]]:
    plan, _ = make(workers, 0, parse("d1 gpus=%s" % gpus, "hosts"), **more)  # type: ignore[arg-type]
    return [(task.env["LOCAL_RANK"], task.env["CUDA_VISIBLE_DEVICES"]) for task in plan.tasks]


def test_every_worker_of_a_host_sees_all_its_gpus_so_that_its_local_rank_is_one_of_them() -> None:
    assert devices("4", 2) == [("0", "0,1,2,3"), ("1", "0,1,2,3")]
    assert devices("0,2,3", 2) == [("0", "0,2,3"), ("1", "0,2,3")]
    assert devices("2,", 1) == [("0", "2")]
    assert devices("0", 2) == [("0", ""), ("1", "")]
    for gpus, workers in (("4", 4), ("1,3", 2), ("2,", 1)):
        for local_rank, visible in devices(gpus, workers):
            assert int(local_rank) < len(visible.split(","))


def test_a_host_that_says_how_many_gpus_it_has_says_so_of_none_too() -> None:
    for text, seen in (("d1", None), ("d1 gpus=0", (0, 0)), ("d1 gpus=3", (0, 3))):
        plan, _ = make(1, 0, parse(text, "hosts"))
        assert plan.task("worker-0").gpus == seen


def test_visible_gpus_that_the_user_chose_are_left_alone() -> None:
    for role in ("", "worker"):
        setting = Setting("CUDA_VISIBLE_DEVICES", "3", role)
        assert devices("4", 2, settings=(setting,)) == [("0", "3"), ("1", "3")]


def test_an_order_of_gpus_that_the_user_chose_is_left_alone() -> None:
    plan, _ = make(1, 0, parse("d1 gpus=2", "hosts"), settings=(Setting("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),))
    assert plan.task("worker-0").env["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert plan.task("worker-0").env["CUDA_VISIBLE_DEVICES"] == "0,1"


def own(text: str, workers: int, each: int, servers: int = 0, **more: object) -> dict[str, str | None]:
    plan, _ = make(workers, servers, parse(text, "hosts"), gpus_per_worker=each, **more)  # type: ignore[arg-type]
    return {task.name: task.env.get("CUDA_VISIBLE_DEVICES") for task in plan.tasks}


def test_each_worker_has_gpus_of_its_own_and_servers_see_none() -> None:
    assert own("d1 gpus=4\nd2 gpus=1,3,5", 3, 1, servers=1) == {
        **{"scheduler": "", "server-0": "", "server-1": ""},
        **{"worker-0": "1", "worker-1": "0", "worker-2": "3"},
    }
    assert own("d1 gpus=4", 2, 2) == {"worker-0": "0,1", "worker-1": "2,3"}
    assert own("d1 gpus=GPU-a,GPU-b", 2, 1) == {"worker-0": "GPU-a", "worker-1": "GPU-b"}


def test_gpus_that_only_the_agent_knows_are_left_to_it() -> None:
    plan, _ = make(4, 1, ("d1", "d2"), gpus_per_worker=2)
    assert [(task.host, task.gpus) for task in plan.of_role("worker")] == [
        *(("d2", (0, 2)), ("d1", (0, 2)), ("d2", (2, 2)), ("d1", (2, 2)))
    ]
    assert {task.gpus for task in plan.tasks if task.role != "worker"} == {(0, 0)}
    assert plan.gpus_per_worker == 2
    assert "CUDA_VISIBLE_DEVICES" not in plan.task("worker-0").env
    assert plan.task("server-0").env["CUDA_VISIBLE_DEVICES"] == ""


def test_hosts_with_too_few_gpus_for_their_workers_are_refused_when_the_job_is_planned() -> None:
    with pytest.raises(UsageError) as caught:
        own("d1 gpus=4\nd2 gpus=1\nd3 gpus=0,1", 6, 2)
    assert str(caught.value).splitlines() == [
        "2 workers on d2 with --gpus-per-worker 2 need 4 GPUs, but there is 1 GPU (0, gpus=1 in hosts:2)",
        "2 workers on d3 with --gpus-per-worker 2 need 4 GPUs, but there are 2 GPUs (0,1, gpus=0,1 in hosts:3)",
    ]
    assert caught.value.exit_code == 2
    assert "hosts with more GPUs" in caught.value.hint
    with pytest.raises(UsageError, match="there is no GPU"):
        own("d1 gpus=0", 1, 1)


def test_workers_that_are_given_gpus_by_hand_get_no_others_and_that_is_told() -> None:
    given = {"settings": (Setting("CUDA_VISIBLE_DEVICES", "7", "worker"),)}
    assert own("d1 gpus=1", 2, 1, servers=1, **given) == {
        **{"scheduler": "", "server-0": ""},
        **{"worker-0": "7", "worker-1": "7"},
    }
    told = "--gpus-per-worker has no effect: workers are given CUDA_VISIBLE_DEVICES by --env"
    assert warnings("d1 gpus=1", 2, gpus_per_worker=1, **given) == [told]


def test_scripts_for_torchrun_are_told_that_local_rank_is_no_number_of_a_gpu() -> None:
    def notes(workers: int, each: int) -> list[str]:
        return plans.device_notes(make(workers, 0, parse("d1 gpus=8", "hosts"), gpus_per_worker=each)[0])

    assert notes(2, 1) == ["--gpus-per-worker: each worker sees its own GPU as cuda:0, whatever its LOCAL_RANK"]
    assert "its own 2 GPUs as cuda:0 to cuda:1" in notes(4, 2)[0]
    assert notes(1, 1) == notes(2, 2) == notes(2, 0) == [], "there it is one"
    assert warnings("d1 gpus=8", 8, gpus_per_worker=1) == [], "cuda:LOCAL_RANK was told of"


def test_servers_that_are_to_use_gpus_see_all_of_their_host() -> None:
    hosts = "d1 gpus=4\nd2 gpus=1,3,5"
    for device, seen in (("gpu:0", "0,1,2,3"), ("gpu", "0,1,2,3"), ("auto", "0,1,2,3"), ("cpu", ""), ("", "")):
        found = own(hosts, 2, 1, servers=1, server_device=device)
        assert [found["server-0"], found["worker-0"], found["scheduler"]] == [seen, "1", ""]
    plan, _ = make(2, 1, ("d1",), gpus_per_worker=1, server_device="gpu")
    assert plan.task("server-0").gpus is None, "all that its host shows"
    assert plan.task("worker-1").gpus == (1, 1)
    told = {task.name: task.env.get("DISTRUN_SERVER_DEVICE") for task in plan.tasks}
    assert {name for name, value in told.items() if value} == {"server-0"}


def test_a_gpu_that_one_of_the_hosts_does_not_show_its_servers_is_refused_when_the_job_is_planned() -> None:
    hosts = parse("d1 gpus=4\nd2 gpus=1,3", "hosts")
    with pytest.raises(UsageError) as caught:
        make(2, 2, hosts, server_device="gpu:2")
    assert str(caught.value) == (
        "--server-device gpu:2: servers on d2 see 2 GPUs (gpus=1,3 in hosts:2), counted from 0"
    )
    assert caught.value.exit_code == 2
    make(2, 2, hosts, server_device="gpu:1")
    make(2, 1, hosts, server_device="gpu:2")  # d2 has no server
    make(2, 2, hosts, server_device="gpu:2", settings=(Setting("CUDA_VISIBLE_DEVICES", "5,6,7", "server"),))


def test_several_places_of_a_node_need_gpus_of_their_own_from_the_engine() -> None:
    slots = slots_in([("worker", 0, "h1", "0@h1"), ("worker", 1, "h1", "1@h1")])
    places = (Place("0@h1", "h1"), Place("1@h1", "h1"))
    allocation = plans.Allocation(named(("h1",)), slots, places=places)
    members: dict[str, Any] = {"command": ("t",), "workers": 2, "servers": 0, "cwd": "/w", "launcher": "yarn"}
    request = JobRequest(**members, gpus_per_worker=1)
    with pytest.raises(UsageError, match="yarn gave the job several places on h1") as caught:
        plans.make_plan(request, allocation, SETUP)
    assert caught.value.hint == "--worker-gpus 1"
    asked = EngineOptions(worker=Needs(gpus=1))
    plan, _ = plans.make_plan(JobRequest(**members, gpus_per_worker=1, engine=asked), allocation, SETUP)
    assert [task.gpus for task in plan.tasks] == [(0, 1), (0, 1)], "each is the first of its place"


def warnings(text: str, workers: int, **more: object) -> list[str]:
    plan, _ = make(workers, 0, parse(text, "hosts"), **more)  # type: ignore[arg-type]
    return plans.device_warnings(plan)


def test_more_workers_than_gpus_are_warned_about_by_name() -> None:
    assert warnings("d1 gpus=2\nd2 gpus=2\n", 4) == []
    (one,) = warnings("d1 gpus=0,2\n", 3)
    assert one.startswith("d1: more workers than GPUs: CUDA_VISIBLE_DEVICES=0,2 shows 2 GPUs, ")
    assert "cuda:LOCAL_RANK in worker-2." in one
    (several,) = warnings("d1 gpus=1\nd2 gpus=1\nd3\n", 9)
    assert several.startswith("d[1-2]: more workers than GPUs: CUDA_VISIBLE_DEVICES=0 shows 1 GPU, ")
    assert "cuda:LOCAL_RANK in worker-3, worker-6, worker-4, worker-7." in several
    (many,) = warnings("d1 gpus=1\n", 20)
    assert "worker-8 and 11 more." in many
    given = (Setting("CUDA_VISIBLE_DEVICES", "5"),)
    (chosen,) = warnings("d1 gpus=4\n", 2, settings=given)
    assert "CUDA_VISIBLE_DEVICES=5 shows 1 GPU" in chosen


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_not_warned_about(value: str) -> None:
    assert warnings("d1 gpus=2\n", 3, settings=(Setting("CUDA_VISIBLE_DEVICES", value),)) == []
    assert warnings("d1 gpus=0\n", 3) == []


def test_tasks_start_in_the_folder_that_is_copied_to() -> None:
    plan, _ = make(sync_dst_dir="/there")
    assert {task.cwd for task in plan.tasks} == {plan.cwd} == {"/there"}


def test_unbuffered_unless_the_user_says_otherwise() -> None:
    assert added(make()[0], "worker-0")["PYTHONUNBUFFERED"] == "1"
    assert "PYTHONUNBUFFERED" not in added(make(setup={"inherited": {"PYTHONUNBUFFERED": ""}})[0], "worker-0")
    assert added(make(settings=(Setting("PYTHONUNBUFFERED", ""),))[0], "worker-0")["PYTHONUNBUFFERED"] == ""


def test_workers_that_use_bundled_servers_copy_large_arrays_past_the_caches_unless_the_user_says_otherwise() -> None:
    plan, _ = make()
    assert added(plan, "worker-1")["GLIBC_TUNABLES"] == plans.COPIES
    assert "GLIBC_TUNABLES" not in added(plan, "server-0")
    for how in ({"servers": 0}, {"ps": requests.COMMAND}, {"setup": {"inherited": {"GLIBC_TUNABLES": "a=1"}}}):
        assert "GLIBC_TUNABLES" not in added(make(**how)[0], "worker-0")  # type: ignore[arg-type]
    assert added(make(settings=(Setting("GLIBC_TUNABLES", ""),))[0], "worker-0")["GLIBC_TUNABLES"] == ""


def test_hidden_values_are_named_in_the_plan_and_held_by_the_secrets() -> None:
    settings = (Setting("API_KEY", "s3cret", hidden=True), Setting("A", "1"), Setting("B", "2", "server"))
    plan, secrets = make(settings=settings)
    assert plan.task("worker-0").secret_env == ("API_KEY",)
    assert added(plan, "worker-0")["A"] == "1"
    assert "B" not in added(plan, "worker-0")
    assert added(plan, "server-0")["B"] == "2"
    assert secrets.env == {"API_KEY": "s3cret"}
    text = json.dumps(contract.to_json(plan)) + repr(plan) + repr(secrets)
    assert "s3cret" not in text
    assert "70cce1" not in text


def test_one_hidden_name_with_two_values_is_refused_without_showing_them() -> None:
    settings = (Setting("API_KEY", "one", hidden=True), Setting("API_KEY", "two", "server", hidden=True))
    with pytest.raises(UsageError, match="API_KEY has different values for two roles") as caught:
        make(settings=settings)
    assert "one" not in str(caught.value).replace("sent once", "")


def test_outer_variables_are_removed_unless_kept() -> None:
    assert make()[0].unset == environ.STALE
    assert make(keep_outer_env=True)[0].unset == ()


def test_options_become_tuning_variables() -> None:
    env = added(make(op_timeout_s=2.5, start_timeout_s=30.0, port_range="5000-5010")[0], "server-0")
    assert env["DISTRUN_OP_TIMEOUT"] == "2.5"
    assert env["DISTRUN_START_TIMEOUT"] == "30"
    assert env["DISTRUN_PORT_RANGE"] == "5000-5010"


def test_a_plan_survives_json() -> None:
    plan, _ = make(3, 3, FIVE)
    assert contract.from_json(json.loads(json.dumps(contract.to_json(plan)))) == plan


@pytest.mark.parametrize(
    ("activated", "hosts", "names", "brings"),
    [
        ((), "d1", ["train.py", "data"], False),
        (("/opt/venv",), "d1", ["train.py"], False),
        (None, "d1", [], True),
        ((), "d1", ["numpy"], True),
        ((), "d1", ["zmq.py"], True),
        ((), "d1 workdir=/w", [], True),
    ],
)
def test_interpreters_are_looked_at_before_the_copy_unless_they_may_come_with_it(
    activated: tuple[str, ...] | None, hosts: str, names: list[str], brings: bool
) -> None:
    request = JobRequest(command=("true",), workers=1, servers=1, cwd="/w", activated=activated)
    assert plans.may_bring(request, parse(hosts, "hosts").specs, names) is brings


def test_tasks_of_two_places_of_a_node_are_told_apart() -> None:
    slots = slots_in([("worker", 0, "d1", "7"), ("worker", 1, "d1", "8"), ("worker", 2, "d1", "8")])
    places = (Place("7", "d1"), Place("8", "d1"))
    allocation = plans.Allocation(named(("d1",)), slots, places=places)
    request = JobRequest(command=("python", "t.py"), workers=3, servers=0, cwd="/w")
    plan, _ = plans.make_plan(request, allocation, SETUP)
    assert plan.places == places
    assert [host.name for host in plan.hosts] == ["d1"]
    found = [added(plan, task.name) for task in plan.tasks]
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DISTRUN_NODE_RANK", "DMLC_NODE_HOST", "MASTER_PORT")
    assert [tuple(env[name] for name in names) for env in found] == [
        ("0", "1", "0", "0", "{host:7.address}", "{7/port:master}"),
        ("0", "2", "1", "0", "{host:8.address}", "{7/port:master}"),
        ("1", "2", "1", "0", "{host:8.address}", "{7/port:master}"),
    ]


def planned(folder: Path, **more: Any) -> plans.PlannedJob | plans.QueuedJob:
    return plans.plan_job(
        JobRequest(**{"command": ("true",), "workers": 2, "servers": 1, "cwd": "/", **more}), JobStore(folder)
    )


def test_tasks_of_this_machine_keep_what_its_user_has_set_and_those_of_hosts_do_not(tmp_path: Path) -> None:
    for more, value in (({}, None), ({"launcher": "ssh", "hosts": named(("h1",))}, "1")):
        job = planned(tmp_path, outer={"PYTHONUNBUFFERED": ""}, **more)
        assert isinstance(job, plans.PlannedJob)
        assert job.plan.task("worker-0").env.get("PYTHONUNBUFFERED") == value


def test_files_are_copied_by_the_rules_to_the_folder_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("12345")
    there = {"cwd": str(tmp_path), "launcher": "ssh", "hosts": named(("h1",))}
    for more in ({}, {"sync_rules": CopyRules()}, {"sync_dst_dir": "/there"}):
        job = planned(tmp_path / "jobs", **there, **more)
        assert isinstance(job, plans.PlannedJob)
        assert (job.tree, job.plan.sync) == (None, None)
    job = planned(tmp_path / "jobs", **there, sync_rules=CopyRules(), sync_dst_dir="/there")
    assert isinstance(job, plans.PlannedJob)
    assert job.plan.sync is not None
    assert job.tree is not None
    assert (job.plan.sync.files, job.plan.sync.size, job.plan.cwd) == (1, 5, "/there")


def test_of_the_nodes_that_an_engine_gives_the_plan_has_what_a_hosts_file_says() -> None:
    grants = [Grant("h1", "h1", cores=2), Grant("h2", "h2", cores=2)]
    for hosts, lines in ((None, ["", ""]), (parse("h2 gpus=2", "hosts"), ["", "hosts:1"])):
        request = JobRequest(command=("true",), workers=2, servers=0, cwd="/w", hosts=hosts)
        plan, _ = plans.make_plan(request, plans.granted(request, "slurm", grants), SETUP)
        assert [host.named for host in plan.hosts] == lines
        assert [host.gpus for host in plan.hosts] == ["", "" if hosts is None else "2"]


def test_a_dry_run_makes_no_names_and_no_secrets(tmp_path: Path) -> None:
    dry, ready = planned(tmp_path, dry_run=True), planned(tmp_path)
    assert isinstance(dry, plans.PlannedJob)
    assert (dry.plan.job, dry.plan.nonce, dry.secrets.token) == (plans.DRY_RUN_ID, plans.DRY_RUN_ID, "")
    assert isinstance(ready, plans.PlannedJob)
    assert ready.plan.job != plans.DRY_RUN_ID
    assert (len(ready.plan.nonce), len(ready.secrets.token)) == (16, 64)


def test_a_job_of_an_engine_is_planned_when_it_has_its_places(tmp_path: Path) -> None:
    assert isinstance(planned(tmp_path), plans.PlannedJob)
    assert isinstance(planned(tmp_path, launcher="slurm"), plans.QueuedJob)


def test_hosts_are_sent_the_runtime_and_this_machine_has_it(tmp_path: Path) -> None:
    here, there = planned(tmp_path), planned(tmp_path, launcher="ssh", hosts=named(("h1",)))
    assert isinstance(here, plans.PlannedJob)
    assert here.plan.runtime.path
    assert not here.runtime
    assert isinstance(there, plans.PlannedJob)
    assert not there.plan.runtime.path
    assert there.runtime


@pytest.mark.parametrize(
    ("network", "address"), [({}, "127.0.0.1"), ({"interface": "lo"}, ""), ({"subnet": "127.0.0.0/8"}, "")]
)
def test_the_agents_find_the_addresses_in_a_network_that_the_user_chose(
    tmp_path: Path, network: dict[str, str], address: str
) -> None:
    job = planned(tmp_path, **network)
    assert isinstance(job, plans.PlannedJob)
    assert [host.address for host in job.plan.hosts] == [address]


@pytest.mark.parametrize(
    ("launcher", "more", "words"),
    [
        ("slurm", {"scheduler_host": "h1"}, "--scheduler-host is not for --launcher slurm"),
        ("slurm", {"coordinator_host": "h1"}, "--coordinator-host is not for --launcher slurm"),
        (
            "slurm",
            {"gpus_per_worker": 3, "engine": EngineOptions(worker=Needs(gpus=2))},
            "--gpus-per-worker 3: each worker is to get 2 from the engine",
        ),
        ("local", {"engine": EngineOptions(time_s=60.0)}, "--time is for engines, and --launcher local is none"),
        ("local", {"engine": EngineOptions(queue="gpu")}, "--queue is for engines"),
        ("local", {"engine": EngineOptions(own={"node_label": "gpu"})}, "--node-label is for engines"),
        ("local", {"coordinator_host": "here"}, "only a detached job has its coordinator on a host"),
        ("ssh", {"coordinator_host": "h1"}, "only a detached job has its coordinator on a host"),
        ("ssh", {"coordinator_host": "h2", "detach": True}, "--coordinator-host: 'h2' is no host of this job"),
        ("local", {"python": "no-such-python"}, "--python: there is no program 'no-such-python' on this machine"),
        (
            "ssh",
            {"port_range": "5000-5004"},
            "--port-range 5000-5004 has 5 ports, and host h1 needs 6: 1 scheduler + 1",
        ),
        ("ssh", {"port_range": "5000-5000", "servers": 0}, "--port-range 5000-5000 has 1 port, and host h1 needs 2: 2"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused_when_the_job_is_planned(
    tmp_path: Path, launcher: str, more: dict[str, Any], words: str
) -> None:
    hosts = {"hosts": named(("h1",))} if launcher == "ssh" else {}
    with pytest.raises(UsageError) as caught:
        planned(tmp_path, launcher=launcher, **hosts, **more)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        ("slurm", {"gpus_per_worker": 2, "engine": EngineOptions(worker=Needs(gpus=2))}),
        ("slurm", {"gpus_per_worker": 2}),
        ("local", {"engine": EngineOptions(config={"queue": "config.toml"})}),
        ("ssh", {"coordinator_host": "h1", "detach": True}),
        ("local", {"python": "no-such-python", "servers": 0}),
        ("local", {"python": "no-such-python", "ps": requests.COMMAND}),
        ("ssh", {"port_range": "5000-5005"}),
        ("ssh", {"port_range": "5000-5001", "servers": 0}),
        ("ssh", {"port_range": "5000-5002", "ps": requests.COMMAND}),
    ],
)
def test_what_a_launcher_can_do_is_not_refused(tmp_path: Path, launcher: str, more: dict[str, Any]) -> None:
    hosts = {"hosts": named(("h1",))} if launcher == "ssh" else {}
    assert planned(tmp_path, launcher=launcher, **hosts, **more) is not None


def test_a_program_for_the_servers_is_looked_for_in_their_own_path(tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text("")
    program.chmod(0o755)
    setting = Setting("PATH", str(tmp_path))
    assert planned(tmp_path / "jobs", python="mine", settings=(setting,)) is not None
    with pytest.raises(UsageError, match="no program 'mine'"):
        planned(tmp_path / "jobs", python="mine", settings=(setting._replace(role="worker"),))
