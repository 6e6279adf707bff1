"""YARN without a cluster: the spec, what is refused, and what answers that were recorded on a real one mean."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from webservers import Reply, Server, servers

from distrun.backends import yarn, yarn_answers
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import (
    ENDED,
    QUEUED,
    RUNNING,
    EngineError,
    Explanation,
    Handle,
    RoleGroup,
    Submission,
    examined,
)
from distrun.backends.yarn import Yarn, YarnPreparation
from distrun.backends.yarn_answers import Container, Exit, YarnQueue
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs
from distrun_runtime.contract.dataclass import read, written
from distrun_runtime.contract.plan import SERVER, WORKER

__all__ = ["servers"]
RECORDED = Path(__file__).with_name("yarn")
GIB = 1 << 30
MARKER = "distrun-calm-otter-0123456789abcdef"


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def submission(folder: Path = Path("/job/engine"), *, is_dry: bool = False, **options: Any) -> Submission:
    return Submission(
        job="calm-otter",
        marker=MARKER,
        groups=(RoleGroup(SERVER, 1, Needs()), RoleGroup(WORKER, 2, Needs(cores=2, memory=3 * GIB))),
        options=EngineOptions(**options),
        bootstrap=Bootstrap("calm-otter", "ab" * 32, ("10.0.0.1:4000", "[fd00::1]:4000"), 120.0),
        folder=folder,
        cwd="/work",
        secret="5ec7e7",
        found=YarnPreparation(home="/user/ann", rm="http://rm:8088"),
        is_dry=is_dry,
    )


# The spec


def test_the_spec_has_a_component_for_each_role() -> None:
    script = Yarn().render(submission(queue="prod", time_s=5400.5))
    spec = json.loads(script.files["service.json"])
    commands = [each.pop("launch_command") for each in spec["components"]]
    assert spec == recorded("spec")
    assert commands[0] == commands[1]
    assert script.commands[1] == ("POST", "http://rm:8088/app/v1/services", "service.json")


def test_the_secret_is_in_no_spec_and_no_command() -> None:
    script = Yarn().render(submission())
    assert "5ec7e7" not in repr(script)


def test_the_command_means_in_yarns_shell_what_it_should() -> None:
    """YARN writes it between double quotes, unescaped, as the argument of `bash -c`."""
    made = submission()
    line = yarn.launch_command(made).replace("${COMPONENT_INSTANCE_NAME}", "worker-1")
    script = f'exec /bin/bash -c "{line} 1>out 2>err"'
    [_, _, _, inner] = shlex.split(script.replace("\\$(", "$("))
    words = shlex.split(inner.replace("$(readlink -f distrun-secret)", "/local/distrun-secret"))
    expected = made.bootstrap.command("python3", "worker-1", "/local/distrun-secret")
    assert tuple(words) == ("exec", *expected, "1>out", "2>err")


def test_a_python_that_yarn_cannot_be_told_is_refused() -> None:
    import dataclasses

    with pytest.raises(UsageError, match=r"cannot be written in a spec of YARN"):
        yarn.launch_command(dataclasses.replace(submission(), python="/opt/$x/python"))


def test_gpus_label_and_image_are_asked_for() -> None:
    import dataclasses

    own = {"node_label": "gpu", "docker_image": "repo/image:1"}
    groups = (RoleGroup(WORKER, 1, Needs(gpus=2)),)
    [worker] = yarn.service(dataclasses.replace(submission(own=own), groups=groups))["components"]
    assert worker["resource"] == {"cpus": 1, "memory": "1024", "additional": {"yarn.io/gpu": {"value": 2, "unit": ""}}}
    assert worker["placement_policy"]["constraints"][0]["node_partitions"] == ["gpu"]
    assert worker["artifact"] == {"type": "DOCKER", "id": "repo/image:1"}


def test_an_engine_arg_is_laid_over_the_spec() -> None:
    arg = '{"configuration": {"properties": {"x": "1"}}, "kerberos_principal": {"principal_name": "ann@REALM"}}'
    spec = yarn.service(submission(args=(arg,)))
    assert spec["configuration"]["properties"]["x"] == "1"
    assert spec["configuration"]["properties"]["yarn.service.am-restart.max-attempts"] == "1"
    assert spec["kerberos_principal"] == {"principal_name": "ann@REALM"}


@pytest.mark.parametrize("arg", ["-l gpu", "[1]"])
def test_an_engine_arg_that_is_no_object_is_refused(arg: str) -> None:
    with pytest.raises(UsageError, match="--engine-arg"):
        yarn.service(submission(args=(arg,)))


def test_a_template_of_the_users_is_taken(tmp_path: Path) -> None:
    component = {"name": "@{role}", "resource": {}}
    own = {"name": "@{name}", "components": [component], "quicklinks": {"job": "https://wiki/@{job}"}}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    spec = yarn.service(submission(config={"template": str(path)}))
    assert spec["quicklinks"] == {"job": "https://wiki/calm-otter"}
    path.write_text('{"components": []}')
    with pytest.raises(UsageError, match="template of YARN's spec"):
        yarn.service(submission(config={"template": str(path)}))


# What is refused before anything is submitted


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (Needs(memory=8 * GIB), "--worker-memory: 8192 MiB asked for, but no node of YARN's has more than 2048 MiB"),
        (Needs(cores=5), "--worker-cores: 5 asked for, but no node of YARN's has more than 4"),
        (Needs(gpus=1), "--worker-gpus: 1 asked for, but no node of YARN's has more than 0"),
    ],
)
def test_more_than_any_node_has_is_refused(needs: Needs, text: str) -> None:
    nodes = yarn_answers.nodes_of(recorded("nodes"))
    yarn_answers.refuse_too_big([RoleGroup(WORKER, 99, Needs(cores=4, memory=2 * GIB))], nodes)
    with pytest.raises(UsageError) as raised:
        yarn_answers.refuse_too_big([RoleGroup(WORKER, 1, needs)], nodes)
    assert str(raised.value) == text


def test_a_cluster_without_a_node_is_an_error() -> None:
    with pytest.raises(EngineError, match="no node that is up"):
        yarn_answers.refuse_too_big([], yarn_answers.nodes_of({"nodes": None}))


def test_an_unknown_queue_is_refused_with_those_that_there_are() -> None:
    queues = yarn_answers.queues_of(recorded("full-scheduler"))
    yarn_answers.refuse_queue("", queues)
    yarn_answers.refuse_queue("root.small", queues)
    with pytest.raises(UsageError, match="no queue smal; it has: default, small") as raised:
        yarn_answers.refuse_queue("smal", queues)
    assert raised.value.hint == "did you mean small?"


def test_a_stopped_queue_is_refused() -> None:
    with pytest.raises(UsageError, match="it is stopped"):
        yarn_answers.refuse_queue("q", [YarnQueue("q", "root.q", None, 0, "STOPPED")])


def test_the_fair_schedulers_queues_are_known() -> None:
    leaf = {"queueName": "root.a.b", "maxResources": {"memory": 200}, "usedResources": {"memory": 50}}
    root = {"queueName": "root", "childQueues": {"queue": {"queueName": "root.a", "childQueues": {"queue": [leaf]}}}}
    said = {"scheduler": {"schedulerInfo": {"type": "fairScheduler", "rootQueue": root}}}
    assert yarn_answers.queues_of(said) == (YarnQueue("b", "root.a.b", 25.0),)


def test_an_unknown_label_is_refused() -> None:
    yarn_answers.refuse_label("gpu", {"nodeLabelInfo": [{"name": "gpu"}]})
    with pytest.raises(UsageError, match="no node label gpu; it has: none"):
        yarn_answers.refuse_label("gpu", {})


# How a job stands


def test_a_job_in_a_full_queue_says_why_it_waits() -> None:
    queue = yarn_answers.queue_named(yarn_answers.queues_of(recorded("full-scheduler")), "root.small")
    assert yarn_answers.waiting(recorded("full-app")["app"], 0, 0, queue) == (
        "ACCEPTED: Application is Activated, waiting for resources to be assigned for AM; "
        "still asked for: 1 x 256 MiB, 1 core; queue small is 83 % full"
    )


def test_a_job_with_some_of_its_places_says_what_it_still_asks_for() -> None:
    service = recorded("half-service")
    placed, wanted = len(yarn_answers.containers_of(service)), yarn_answers.wanted_of(service)
    text = yarn_answers.waiting(recorded("half-app")["app"], placed, wanted, YarnQueue("default", "root.default", 87.5))
    assert text == "5 of 9 places; still asked for: 4 x 1024 MiB, 1 core; queue default is 88 % full"


def test_containers_are_ordered_by_role_and_rank() -> None:
    found = yarn_answers.containers_of(recorded("running-service"))
    assert [(each.place, each.role, each.node) for each in found] == [
        ("worker-0", "worker", "h4"),
        ("worker-1", "worker", "h3"),
    ]
    assert all(each.is_localized and not each.is_over for each in found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("killed-app", "killed: Application application_1795517619279_0009 was killed by user root"),
        (
            "life-app",
            "killed: Application is killed by ResourceManager as it has exceeded the lifetime period.",
        ),
        ("seven-app", "failed"),
    ],
)
def test_how_an_application_ended_is_told(name: str, text: str) -> None:
    assert yarn_answers.ending(recorded(name)["app"]) == text


# Why it ended


def container(role: str = "worker") -> Container:
    return Container("container_1_1_01_000002", "worker-0", role, "h3", "FAILED", True)


def log(name: str) -> Mapping[str, Exit]:
    return yarn_answers.exits_of((RECORDED / f"serviceam-{name}.log").read_text())


def test_too_much_memory_is_explained() -> None:
    found = yarn_answers.explained(log("oom")["worker-0"], container())
    assert found == Explanation(137, "YARN: out of memory (155.1 MB of 128 MB physical memory); raise --worker-memory")


def test_a_container_that_ended_by_itself_is_not_explained() -> None:
    assert log("seven")["worker-0"].code == 7
    assert yarn_answers.explained(log("seven")["worker-0"], container()) is None
    assert yarn_answers.explained(None, container()) is None


@pytest.mark.parametrize(("code", "word"), [(-100, "lost"), (-102, "preempted")])
def test_a_lost_or_preempted_container_is_a_lost_host(code: int, word: str) -> None:
    found = yarn_answers.explained(Exit(code, ""), container())
    assert found.code == 7
    assert word in found.text


def test_the_last_words_of_the_bootstrap_are_told() -> None:
    text = "Exception from container-launch.\nLast 4096 bytes of stderr.txt :\ndistrun: no coordinator\n\n\nFor more"
    assert yarn_answers.told(Exit(6, text)) == ": exit code 6: distrun: no coordinator"


@pytest.mark.parametrize(("name", "code"), [("killed-app", 143), ("life-app", 124)])
def test_why_an_application_was_killed_is_explained(name: str, code: int) -> None:
    found = yarn_answers.explained_application(recorded(name)["app"])
    assert found.code == code


def test_an_application_that_ended_by_itself_is_not_explained() -> None:
    assert yarn_answers.explained_application(recorded("seven-app")["app"]) is None


# The engine, against answers


class Rm:
    """A ResourceManager and a NameNode of recorded answers. `app` and `service` are what it says of the job."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.app = recorded("full-app")
        self.service: Any = {}
        self.off = False
        self.files: dict[str, str] = {}
        self.deleted: list[str] = []
        self.refusal = ""
        self.is_accepted = False
        self.containers: Any = {}
        self.attempts: list[dict[str, str]] = [{"appAttemptId": "appattempt_1"}]
        self.nodes = recorded("nodes")
        server.answer = self.answer

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Reply:
        where = path.partition("?")[0]
        status, said = self._said(method, where, path)
        return status, json.dumps(said).encode(), {}

    def _said(self, method: str, where: str, path: str) -> tuple[int, Any]:
        if where.startswith("/webhdfs/v1"):
            return self._hdfs(where[len("/webhdfs/v1") :], path)
        if where == "/app/v1/services/version":
            return (404, {}) if self.off else (200, {"hadoop_version": "3.4.2 from x"})
        if where == "/app/v1/services" and method == "POST":
            if self.refusal:
                return 500, {"diagnostics": self.refusal}
            return 202, {"diagnostics": "Application ID: application_1795517619279_0007", "state": "ACCEPTED"}
        if where.startswith("/app/v1/services/"):
            if method == "DELETE":
                self.deleted.append(where.rpartition("/")[2])
                return 200, {}
            return 200, self.service
        if where == "/ws/v1/cluster/scheduler":
            return 200, recorded("full-scheduler")
        if where == "/ws/v1/cluster/info":
            return 200, {"clusterInfo": {"resourceManagerVersion": "3.4.2", "haState": "ACTIVE"}}
        if where == "/ws/v1/cluster/nodes":
            return 200, self.nodes
        if where.endswith("/appattempts"):
            return 200, {"appAttempts": {"appAttempt": self.attempts}}
        if where.endswith("/appattempts/appattempt_1/containers"):
            return 200, self.containers
        if where.endswith("/state"):
            self.app = recorded("killed-app")
            return 202, {"state": "KILLING"}
        if where.startswith("/ws/v1/cluster/apps/"):
            return (200, self.app) if self.app else (404, {"RemoteException": {"message": "not found"}})
        if where == "/ws/v1/cluster/apps":
            name = MARKER if self.is_accepted else "other"
            return 200, {"apps": {"app": [dict(self.app["app"], name=name), dict(self.app["app"], name="mine")]}}
        return 404, {}

    def _hdfs(self, file: str, path: str) -> tuple[int, Any]:
        if "GETHOMEDIRECTORY" in path:
            return 200, {"Path": "/user/ann"}
        if "op=CREATE" in path:
            self.files[file] = path
            return 201, {}
        if "op=DELETE" in path:
            self.files = {name: value for name, value in self.files.items() if not name.startswith(file)}
        return 200, {"boolean": True}


@pytest.fixture
def rm(servers: Callable[[], Server]) -> Rm:
    return Rm(servers())


def of(rm: Rm, **options: Any) -> dict[str, Any]:
    return {"own": {"yarn_rm": rm.server.url, "yarn_hdfs": rm.server.url}, **options}


def submitted(rm: Rm) -> tuple[Yarn, Handle]:
    engine, made = Yarn(), submission(**of(rm))
    return engine, engine.submit(made, engine.render(made))


def test_a_cluster_is_asked_before_anything_is_submitted(rm: Rm) -> None:
    import dataclasses

    small = dataclasses.replace(submission(**of(rm)), groups=(RoleGroup(WORKER, 2, Needs()),))
    assert Yarn().prepare(small) == YarnPreparation(home="/user/ann", rm=rm.server.url)
    with pytest.raises(UsageError, match="--worker-memory"):
        Yarn().prepare(submission(**of(rm)))
    assert rm.files == {}


def test_an_api_that_is_off_is_an_error_that_names_the_setting(rm: Rm, monkeypatch: pytest.MonkeyPatch) -> None:
    rm.off = True
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="services API is off") as raised:
        Yarn().prepare(submission(**of(rm)))
    assert "yarn.webapp.api-service.enable=true" in raised.value.hint


@pytest.mark.parametrize("is_off", [False, True])
def test_a_configuration_that_asks_for_the_shell_hears_of_no_services_api(
    is_off: bool, rm: Rm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rm.off = is_off
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match=r"asks for YARN's distributed shell \(shell = true\), and") as raised:
        Yarn().prepare(submission(**of(rm, config={"shell": "yes", "yarn": "/opt/yarn"})))
    assert str(raised.value).endswith("there is no program `/opt/yarn` here")
    assert "services API" not in str(raised.value)
    assert raised.value.hint.endswith("or leave shell = true out")


def test_a_project_is_refused(rm: Rm) -> None:
    with pytest.raises(UsageError, match="--project"):
        Yarn().prepare(submission(**of(rm, project="x")))


def test_a_dry_run_needs_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    found = Yarn().prepare(submission(is_dry=True))
    assert found == YarnPreparation(home="{home}", rm="{ResourceManager}")
    with pytest.raises(UsageError, match="no ResourceManager is known"):
        Yarn().prepare(submission())


def test_the_secret_is_in_hdfs_from_the_submission_until_all_containers_have_it(rm: Rm) -> None:
    engine, handle = submitted(rm)
    assert handle.id == "application_1795517619279_0007"
    [path] = rm.files
    assert path == f"/user/ann/.distrun/{MARKER}/distrun-secret"
    assert "permission=600" in rm.files[path]
    assert engine.look(handle).state == QUEUED
    assert rm.files
    rm.app, rm.service = recorded("half-app"), recorded("half-service")
    assert engine.look(handle).text.startswith("5 of 9 places")
    assert rm.files
    rm.service = recorded("running-service")
    standing = engine.look(handle)
    assert standing.state == RUNNING
    assert [(each.place, each.node, each.takes) for each in standing.grants] == [
        ("worker-0", "h4", {"worker": 1}),
        ("worker-1", "h3", {"worker": 1}),
    ]
    assert rm.files == {}


def test_a_refused_job_leaves_nothing(rm: Rm) -> None:
    rm.refusal = "Application application_1_0002 submitted by user ann to unknown queue: nope"
    engine = Yarn()
    made = submission(**of(rm))
    with pytest.raises(EngineError, match="unknown queue: nope"):
        engine.submit(made, engine.render(made))
    assert rm.files == {}


def test_a_job_whose_acceptance_was_not_heard_is_killed(rm: Rm) -> None:
    rm.refusal = "read timed out"
    rm.is_accepted = True
    engine = Yarn()
    made = submission(**of(rm))
    with pytest.raises(EngineError, match="read timed out"):
        engine.submit(made, engine.render(made))
    assert rm.app["app"]["state"] == "KILLED"
    assert MARKER in rm.deleted
    assert rm.files == {}


def test_a_job_is_killed_then_deleted_from_another_process_by_its_handle(rm: Rm) -> None:
    engine = Yarn()
    made = submission(**of(rm))
    handle = read(Handle, json.loads(json.dumps(written(engine.submit(made, engine.render(made))))))
    other = Yarn()
    other.cancel(handle)
    other.cancel(handle)
    assert rm.files == {}
    assert rm.deleted == [MARKER]
    assert Yarn().look(handle).state == ENDED


def test_a_job_that_yarn_does_not_know_has_ended(rm: Rm) -> None:
    _, handle = submitted(rm)
    rm.app = None
    assert Yarn().look(handle).state == ENDED
    Yarn().cancel(handle)


def lose_master(rm: Rm) -> None:
    """The node of the application master is lost, and with it the application."""
    rm.app["app"].update(state="FAILED", diagnostics="Container released on a *lost* node")
    rm.attempts = [{"appAttemptId": "appattempt_1", "appAttemptState": "FAILED", "nodeHttpAddress": "h4:8042"}]
    for node in rm.nodes["nodes"]["node"]:
        if node["nodeHostName"] == "h4":
            node["state"] = "LOST"


def test_a_lost_node_that_ran_the_application_master_is_named_whichever_place_is_lost(rm: Rm) -> None:
    engine, handle = submitted(rm)
    rm.app, rm.service = recorded("half-app"), recorded("running-service")
    engine.look(handle)
    assert engine.explain(handle, "") is None
    lose_master(rm)
    for found in (engine.explain(handle, "worker-1"), engine.explain(handle, ""), engine.look(handle).why):
        assert found == Explanation(7, "YARN: the node h4 is lost, which ran the job's application master")
    rm.attempts[0]["nodeHttpAddress"] = "h3:8042"  # its process has failed there
    found = engine.explain(handle, "")
    assert "application master" in found.text
    assert "is lost" not in found.text


def test_a_node_that_does_not_answer_is_not_asked_for_each_log(rm: Rm, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = yarn.Cluster.of(submission(**of(rm)).options)
    asked = []

    def silent(self: object, method: str, path: str, **more: object) -> None:
        asked.append(path)
        raise EngineError("no answer")

    monkeypatch.setattr(yarn.hadoop.Web, "ask", silent)
    assert cluster.exits({"amContainerLogs": "http://h4:8042/node/containerlogs/container_1/ann"}) == {}
    assert len(asked) == 1


def test_a_container_that_ends_before_all_have_started_ends_the_job(rm: Rm) -> None:
    engine, handle = submitted(rm)
    rm.app, rm.service = recorded("half-app"), recorded("half-service")
    rm.service["components"][0]["containers"][1]["state"] = "FAILED"
    standing = engine.look(handle)
    assert standing.state == ENDED
    assert standing.text == "worker-1 ended on h4 before all had started"
    assert rm.deleted == [MARKER]


def test_my_jobs_are_found_by_their_marker(rm: Rm) -> None:
    rm.is_accepted = True
    engine = Yarn()
    engine.options = EngineOptions(**of(rm))
    [found] = engine.find()
    assert (found.marker, found.state, found.handle.id) == (MARKER, "ACCEPTED", "application_1795517619279_0007")
    assert found.handle.more["secret"] == f"/user/ann/.distrun/{MARKER}/distrun-secret"


def test_the_doctor_says_what_is_there(rm: Rm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    [finding] = examined(Yarn())
    assert not finding.ok
    assert "no ResourceManager is known" in finding.text
    engine = Yarn()
    engine.options = EngineOptions(config={"rm": rm.server.url, "hdfs": rm.server.url})
    rm.off = True
    texts = {finding.text: finding.ok for finding in engine.examine()}
    assert texts["3 nodes are up; the largest has 2048 MiB, 4 cores"]
    assert texts["queues: default (8 % full), small (83 % full)"]
    assert not next(ok for text, ok in texts.items() if "services API is off" in text)


# The distributed shell, where the services API is off


CONTAINERS = {
    "container": [
        {"containerId": f"container_1_0007_01_00000{number}", "assignedNodeId": f"h{number}:4{number}000"}
        for number in (4, 1, 2, 3)
    ]
}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `yarn` that says an application's id and goes on, as the shell's client does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "hadoop-yarn-applications-distributedshell-3.4.2.jar").touch()
    (folder / "yarn").write_text(
        f"#!/bin/sh\n[ $1 = classpath ] && echo '/x/*:{folder}/*' && exit\n"
        f"printf '%s\\n' \"$@\" >{folder}/words\n[ -e {folder}/broken ] && echo 'no such queue' && exit 3\n"
        "echo 'INFO impl.YarnClientImpl: Submitted application application_1795517619279_0007'; exec sleep 100\n"
    )
    (folder / "yarn").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def shell_job(rm: Rm, folder: Path, **options: Any) -> tuple[Yarn, Submission]:
    import dataclasses

    rm.off = True
    engine = Yarn()
    made = dataclasses.replace(
        submission(folder, **of(rm, **options)),
        groups=(RoleGroup(SERVER, 1, Needs()), RoleGroup(WORKER, 2, Needs(cores=2))),
    )
    return engine, dataclasses.replace(made, found=engine.prepare(made))


def test_a_job_is_submitted_by_the_distributed_shell_where_the_api_is_off(rm: Rm, stub: Path, tmp_path: Path) -> None:
    engine, made = shell_job(rm, tmp_path)
    script = engine.render(made)
    assert "5ec7e7" not in repr(script)
    assert '"$(readlink -f secret)"' in script.files["agent.sh"]
    handle = engine.submit(made, script)
    words = (stub / "words").read_text().split("\n")
    assert words[words.index("-num_containers") + 1] == "3"
    assert words[words.index("-container_resources") + 1] == "memory-mb=1024,vcores=2"
    assert words[words.index("-localize_files") + 1] == str(tmp_path / "secret")
    assert handle.id == "application_1795517619279_0007"
    assert engine.look(handle).state == QUEUED
    rm.app, rm.containers = recorded("half-app"), CONTAINERS
    standing = Yarn().look(handle)
    assert standing.state == RUNNING
    assert [(each.place, each.node, each.takes) for each in standing.grants] == [
        ("container_1_0007_01_000002", "h2", {"server": 1}),
        ("container_1_0007_01_000003", "h3", {"worker": 1}),
        ("container_1_0007_01_000004", "h4", {"worker": 1}),
    ]


def test_the_configuration_file_can_ask_for_the_shell(rm: Rm, stub: Path, tmp_path: Path) -> None:
    small = submission(tmp_path, **of(rm, config={"shell": "yes"}))
    import dataclasses

    assert Yarn().prepare(dataclasses.replace(small, groups=())).yarn == str(stub / "yarn")


def test_a_container_that_the_shell_has_lost_is_gone(rm: Rm, stub: Path, tmp_path: Path) -> None:
    engine, made = shell_job(rm, tmp_path)
    handle = engine.submit(made, engine.render(made))
    rm.app, rm.containers = recorded("half-app"), CONTAINERS
    engine.look(handle)
    rm.containers = {"container": CONTAINERS["container"][1:]}
    standing = engine.look(handle)
    assert standing.state == RUNNING
    assert set(standing.gone) == {"container_1_0007_01_000004"}


def test_what_the_shell_says_of_a_refusal_is_told(rm: Rm, stub: Path, tmp_path: Path) -> None:
    engine, made = shell_job(rm, tmp_path)
    (stub / "broken").touch()
    with pytest.raises(EngineError, match="yarn ended with 3: no such queue"):
        engine.submit(made, engine.render(made))


def test_the_doctor_says_that_the_shell_is_used(rm: Rm, stub: Path) -> None:
    engine = Yarn()
    rm.off = True
    for config, why in (({}, "services API is off"), ({"shell": "yes"}, "(shell = true)")):
        engine.options = EngineOptions(config={"rm": rm.server.url, "hdfs": rm.server.url, **config})
        [found] = [each for each in engine.examine() if "distributed shell is used" in each.text]
        assert found.ok
        assert why in found.text
        assert found.text.endswith(f"by {stub}/yarn")


def test_json_is_no_word_for_the_shell(rm: Rm, stub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--engine-arg"):
        shell_job(rm, tmp_path, args=("{}",))


def test_how_containers_of_the_shell_ended_is_in_its_log() -> None:
    line = (
        "INFO distributedshell.ApplicationMaster: application_1_0007 got container status for "
        "containerID=container_1_0007_01_000002, state=COMPLETE, exitStatus=-104, diagnostics=[2026] It is over\n"
    )
    assert yarn_answers.exits_of(line) == {"container_1_0007_01_000002": Exit(-104, "[2026] It is over")}
