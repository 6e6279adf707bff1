"""YARN by its services API: plain HTTP, no Java where distrun is typed.

A job is a *service* of YARN, each role a *component* of it, each task a *container* with an agent of its own. What is
posted is the service's *spec*, which is made from the template `yarn.json`. YARN keeps the spec in HDFS and escapes
nothing in it, so only the bootstrap and words of safe characters go there. The enrolment secret is a file of its own in
HDFS, which only the user can read; YARN copies it into each container (docs/security.md).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrun.backends import hadoop
from distrun.backends.engine import (
    ANSWER_S,
    ENDED,
    MARK,
    MIB,
    QUEUED,
    RUNNING,
    SECRET,
    CheckResult,
    Engine,
    EngineError,
    Explanation,
    FoundJob,
    Grant,
    Handle,
    Preparation,
    QueueStatus,
    Script,
    Submission,
    hint_of,
    merged,
    template,
    tries,
)
from distrun.backends.yarn_answers import (
    GONE,
    GPU,
    LIVE,
    OVER,
    Container,
    Exit,
    Node,
    YarnQueue,
    containers_of,
    ending,
    exits_of,
    explained,
    explained_application,
    listed,
    nodes_of,
    queue_named,
    queues_of,
    refuse_label,
    refuse_queue,
    refuse_too_big,
    told,
    waiting,
    wanted_of,
)
from distrun.errors import UsageError
from distrun.templates import fill
from distrun_runtime.contract import environ, facts, process

if TYPE_CHECKING:
    from distrun.request import EngineOptions

TEMPLATE = "yarn.json"
SPEC = "service.json"
"""Name of the spec in the job's folder."""
API = "yarn.webapp.api-service.enable"
"""The ResourceManager's setting without which there is no services API."""
FOLDER = ".distrun"
"""In the user's home in HDFS: a folder for each job whose containers have not all started."""
SECRET_FILE = "distrun-secret"
"""Name of the enrolment secret in a container: a link to YARN's copy."""
MEMORY_MB = 1024
"""What a task gets that asks for none: YARN has no default."""
SUBMIT_S = 60.0
"""How long the ResourceManager may take to accept a service: it writes to HDFS and to ZooKeeper meanwhile."""
GONE_S = 15.0
"""How long YARN may take to end an application that is to be killed."""
EXPLAIN_S = 3.5
"""How long YARN may take to record why a container ended."""
NODE_S = 2.0
"""How long a NodeManager may take to show a log."""
AM_LOGS = ("serviceam.log", "serviceam-err.txt")
"""Files in which an application master may write its log, which depends on the cluster."""
AM_LOG_BYTES = 1 << 20
"""How much of it is read, from its end."""
CONF_FOLDER = "/etc/hadoop/conf"
"""Where Hadoop's configuration is, if HADOOP_CONF_DIR does not say."""

_SAFE = re.compile(r"[A-Za-z0-9_./:=@%+-]+")
"""Words that mean the same with and without a shell."""
_SINGLE = re.compile(r"[^'\\$`!]*")
"""What may stand in single quotes inside YARN's double quotes, once its own double quotes are escaped."""


@dataclass(frozen=True)
class YarnPreparation(Preparation):
    """Where the parts of the cluster are."""

    home: str = "{home}"
    """The user's folder in HDFS."""
    rm: str = "{ResourceManager}"
    yarn: str = ""
    """The program that submits; empty: the services API does."""
    jar: str = ""
    """Of YARN's shell, which `yarn` runs."""


class Yarn(Engine):
    """`--launcher yarn`."""

    name = "yarn"

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._containers: dict[str, Container] = {}
        """What was last seen of this job's containers, for `explain`."""
        self._is_clean: set[str] = set()
        """Jobs whose secret was removed from HDFS."""

    # ------------------------------------------------------------------ before a job is submitted

    def prepare(self, submission: Submission) -> YarnPreparation:
        """Find the active ResourceManager and HDFS, and refuse what this cluster cannot do."""
        options = submission.options
        if options.project:
            raise UsageError("--project: YARN has no projects", "say --queue NAME")
        try:
            cluster = Cluster.of(options)
            found = self._asked(cluster, submission)
        except (EngineError, UsageError) as err:
            if not submission.is_dry or (isinstance(err, UsageError) and not isinstance(err, _NoAddress)):
                raise
            return YarnPreparation()
        self._cluster = cluster
        return found

    def _asked(self, cluster: Cluster, submission: Submission) -> YarnPreparation:
        config = submission.options.config
        yarn, _ = _way(cluster, config)
        jar = ""
        if yarn:
            hadoop.refuse_args(submission.options.args)
            jar = config.get("shell_jar", "") or hadoop.find_jar(yarn)
        else:
            merged({}, submission.options.args, _ARG)
        refuse_too_big(submission.groups, cluster.nodes())
        refuse_queue(submission.options.queue, cluster.queues())
        label = submission.options.own.get("node_label", "")
        if label:
            refuse_label(label, cluster.rm.json("/ws/v1/cluster/get-node-labels"))
        return YarnPreparation(home=cluster.files.home(), rm=cluster.rm.addresses[0], yarn=yarn, jar=jar)

    def render(self, submission: Submission) -> Script:
        """Return the spec, and the request that posts it; where the services API is off, the shell's script."""
        if submission.found.yarn:
            argv = hadoop.command(submission, submission.found.yarn, submission.found.jar, MEMORY_MB)
            return Script({hadoop.SCRIPT: hadoop.agent_script(submission)}, (argv,))
        spec = service(submission)
        text = json.dumps(spec, indent=2) + "\n"
        commands = (
            ("PUT", "webhdfs:" + secret_path(submission.found.home, submission.marker), "(the secret, mode 0600)"),
            ("POST", submission.found.rm + "/app/v1/services", SPEC),
        )
        return Script({SPEC: text}, commands)

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Put the secret into HDFS, then post the spec; or have `yarn` upload both secret and script."""
        cluster = self._cluster or Cluster.of(submission.options)
        is_shell = bool(submission.found.yarn)
        home = submission.found.home
        path = secret_path(home, submission.marker)
        try:
            if is_shell:
                # The shell's own folder: made now, so that no other user can enter it.
                path = f"{home}/{submission.marker}/{hadoop.SECRET_FILE}"
                cluster.files.make_private(path.rpartition("/")[0])
                app = hadoop.submit(script.commands[0], submission.folder / "yarn.log")
                if submission.options.time_s:
                    cluster.limit(app, submission.options.time_s)
            else:
                cluster.files.write(path, submission.secret.encode("ascii") + b"\n")
                app = self._post(cluster, submission.marker, script.files[SPEC])
        except BaseException:
            # YARN may have accepted it all the same, and only the answer was lost. What was said first counts.
            with contextlib.suppress(EngineError):
                for each in self._found(cluster):
                    if each.marker == submission.marker:
                        self.cancel(each.handle)
            with contextlib.suppress(EngineError):
                cluster.delete(submission.marker)
            with contextlib.suppress(EngineError):
                cluster.files.remove(path.rpartition("/")[0])
            raise
        more = {**cluster.more(), "name": submission.marker, "secret": path}
        if is_shell:
            more.update(tasks=submission.tasks, servers=submission.servers)
        return Handle(self.name, app, more)

    @staticmethod
    def _post(cluster: Cluster, marker: str, spec: str) -> str:
        answer = cluster.rm.ask("POST", "/app/v1/services", spec.encode("utf-8"), limit_s=SUBMIT_S)
        answer.expect("YARN refused the job", 200, 202, hint=hint_of(answer.said, HINTS))
        match = re.search(r"application_\d+_\d+", answer.said)
        app = match.group() if match else str(cluster.service(marker).get("id", ""))
        if not app:
            raise EngineError(f"YARN accepted the job and did not say its id: {answer.said}")
        return app

    # ------------------------------------------------------------------ while it waits and runs

    def look(self, handle: Handle) -> QueueStatus:
        """Return how the service stands. Removes from HDFS what is no longer needed there."""
        cluster = self._of(handle)
        app = cluster.application(handle.id)
        if app is None:
            self._forget(cluster, handle)
            return QueueStatus(ENDED, "YARN does not know it")
        if app["state"] in OVER:
            self._forget(cluster, handle)
            is_killed = app["state"] == "KILLED"
            why = explained_application(app) if is_killed else cluster.lost_master(handle.id)
            return QueueStatus(ENDED, ending(app), why=why)
        containers, wanted = self._placed(cluster, handle, app)
        self._containers.update((each.place, each) for each in containers)
        if not wanted or len(containers) < wanted:
            lost = next((each for each in containers if each.is_over), None)
            if lost is not None:
                # The job cannot get all its places any more, and YARN would keep the others.
                how = told(cluster.exits(app).get(lost.place))
                self.cancel(handle)
                return QueueStatus(ENDED, f"{lost.place} ended on {lost.node} before all had started{how}")
            queue = queue_named(cluster.queues(), str(app.get("queue", "")))
            return QueueStatus(QUEUED, waiting(app, len(containers), wanted, queue))
        if all(each.is_localized for each in containers):
            self._remove_secret(cluster, handle)
        grants = tuple(Grant(each.place, each.node, {each.role: 1}) for each in containers)
        gone = {each.place: f"its container on {each.node} has ended" for each in containers if each.is_over}
        return QueueStatus(RUNNING, "", grants, gone)

    def _placed(self, cluster: Cluster, handle: Handle, app: Mapping[str, Any]) -> tuple[tuple[Container, ...], int]:
        """Return the containers that a job has, and how many it is to have; 0: not known yet."""
        if app["state"] != "RUNNING":
            return (), 0
        if "tasks" not in handle.more:
            found = cluster.service(handle.more["name"])
            return containers_of(found), wanted_of(found)
        known = {each.id: each for each in self._containers.values()}
        there = hadoop.containers_of(cluster.attempt(handle.id), handle.more["servers"])
        # The ResourceManager forgets a container when it ends.
        over = (each._replace(state="STOPPED") for each in known.values() if each.id not in {one.id for one in there})
        kept = [known[each.id] if len(known) >= handle.more["tasks"] else each for each in there]
        return (*kept, *over), handle.more["tasks"]

    def cancel(self, handle: Handle) -> None:
        """Kill the application, then delete the service."""
        cluster = self._of(handle)
        for _ in tries(GONE_S):
            app = cluster.application(handle.id)
            if app is None or app["state"] in OVER:
                break
            cluster.kill(handle.id)
        self._forget(cluster, handle)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return why YARN ended a container, or the whole application."""
        cluster = self._of(handle)
        app = cluster.application(handle.id)
        if app is None:
            return None
        lost = cluster.lost_master(handle.id)
        if lost is not None:  # its NodeManager, which is asked below, would not answer
            return lost
        container = self._containers.get(place)
        if container is not None:
            for _ in tries(EXPLAIN_S):  # the application master hears of it some time after the container has ended
                exit = cluster.exits(app).get(place)
                found = explained(exit, container)
                if found is not None:
                    return found
                if exit is not None or app["state"] in OVER:
                    break
            state = cluster.state_of_node(container.node)
            if state in GONE:
                return Explanation(facts.EXIT_HOST_LOST, f"YARN: the node {container.node} is {state.lower()}")
        if app["state"] == "FAILED" and not self._containers:
            return None  # before it had any: how it ended, `look` has said
        return explained_application(app)

    def find(self) -> Sequence[FoundJob]:
        """Return this user's jobs that are distrun's and have not ended."""
        return self._found(self._any())

    def examine(self) -> Iterator[CheckResult]:
        """Yield what is there: ResourceManager, services API, nodes, queues, HDFS."""
        cluster = self._any()
        info = cluster.rm.json("/ws/v1/cluster/info")["clusterInfo"]
        version = info.get("resourceManagerVersion", "?")
        yield CheckResult(True, f"ResourceManager {cluster.rm.addresses[0]}: YARN {version}, user {cluster.user}")
        try:
            yield CheckResult(True, _way(cluster, self.options.config)[1])
        except EngineError as err:
            yield CheckResult(False, str(err), err.hint)
        try:
            up = [each.room for each in cluster.nodes() if each.state == "RUNNING"]
            if up:
                most = max(up, key=lambda each: each.memory)
                size = f"{most.memory // MIB} MiB, {most.cores} cores"
                yield CheckResult(True, f"{len(up)} nodes are up; the largest has {size}")
            else:
                yield CheckResult(False, "no node is up", "ask for the nodes: yarn node -list -all")
            queues = cluster.queues()
            told = ", ".join(each.name + ("" if each.full is None else f" ({each.full:.0f} % full)") for each in queues)
            yield CheckResult(bool(queues), f"queues: {told or 'none'}", "say --queue NAME")
        except EngineError as err:
            yield CheckResult(False, str(err), err.hint)
        try:
            yield CheckResult(True, f"HDFS by WebHDFS; your home is {cluster.files.home()}")
        except EngineError as err:
            fix = "have dfs.webhdfs.enabled set, or name an HttpFS server: --yarn-hdfs"
            yield CheckResult(False, str(err), err.hint or fix)

    # ------------------------------------------------------------------ helpers

    def _any(self) -> Cluster:
        return self._cluster or Cluster.of(self.options)

    def _found(self, cluster: Cluster) -> Sequence[FoundJob]:
        query = {"states": LIVE, "user": cluster.user}
        said = cluster.rm.json("/ws/v1/cluster/apps", query=query)
        home = cluster.files.home()
        found = []
        for app in listed(said.get("apps"), "app"):
            name = str(app["name"])
            if name.startswith(MARK):
                is_shell = app.get("applicationType") != "yarn-service"
                path = f"{home}/{name}/{hadoop.SECRET_FILE}" if is_shell else secret_path(home, name)
                more = {**cluster.more(), "name": name, "secret": path}
                found.append(FoundJob(Handle(self.name, str(app["id"]), more), name, str(app["state"])))
        return found

    def _of(self, handle: Handle) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster.from_handle(handle)
        return self._cluster

    def _forget(self, cluster: Cluster, handle: Handle) -> None:
        """Delete a service that has ended, which keeps its name and its files in HDFS until then."""
        if handle.id in self._is_clean:
            return
        self._remove_secret(cluster, handle)
        cluster.delete(handle.more["name"])
        self._is_clean.add(handle.id)

    def _remove_secret(self, cluster: Cluster, handle: Handle) -> None:
        path = handle.more["secret"]
        if path not in self._is_clean:
            cluster.files.remove(path.rpartition("/")[0])
            self._is_clean.add(path)


class _NoAddress(UsageError):
    """Nothing says where the cluster is."""


class Cluster:
    """A YARN cluster with its HDFS, as one user."""

    def __init__(self, rms: Sequence[str], hdfs: Sequence[str], user: str, ca: str = "") -> None:
        self.rm = hadoop.Web("ResourceManager", rms, user, ca)
        self.user = user
        self._hdfs = tuple(hdfs)
        self._ca = ca

    @staticmethod
    def of(options: EngineOptions) -> Cluster:
        """Return the cluster that the options, the configuration file or HADOOP_CONF_DIR name.

        Raises:
            UsageError: nothing names one, or the address is none.
        """
        config = options.config
        typed = options.own.get("yarn_rm", "") or config.get("rm", "")
        folder = environ.snapshot().get("HADOOP_CONF_DIR", "") or CONF_FOLDER
        site = hadoop.read_site(Path(folder))
        rms = hadoop.addresses(typed, "--yarn-rm") if typed else hadoop.resource_managers(site)
        if not rms:
            raise _NoAddress(
                f"--launcher yarn: no ResourceManager is known; {folder} (HADOOP_CONF_DIR) names none",
                "--yarn-rm http://HOST:8088, or set HADOOP_CONF_DIR",
            )
        named = options.own.get("yarn_hdfs", "") or config.get("hdfs", "")
        # The files of another cluster say nothing about the one that the user named.
        hdfs = hadoop.addresses(named, "--yarn-hdfs") if named else () if typed else hadoop.name_nodes(site)
        user = environ.snapshot().get("HADOOP_USER_NAME", "") or process.user_name()
        if not user:
            raise UsageError("this user has no name on this machine", "set HADOOP_USER_NAME")
        return Cluster(rms, hdfs, user, config.get("ca", ""))

    @staticmethod
    def from_handle(handle: Handle) -> Cluster:
        """Return the cluster of a job. Raises EngineError: the handle is damaged."""
        try:
            return Cluster(*(handle.more[key] for key in ("rm", "hdfs", "user", "ca")))
        except KeyError as err:
            raise EngineError(f"the record of YARN's {handle.id} has no {err}") from None

    def more(self) -> dict[str, Any]:
        """Return what a handle has to say of the cluster."""
        return {"rm": self.rm.addresses, "hdfs": self._hdfs, "user": self.user, "ca": self._ca}

    @functools.cached_property
    def files(self) -> hadoop.HdfsFiles:
        """HDFS. The ResourceManager says where it is, unless it was given. Raises EngineError."""
        self._hdfs = self._hdfs or self._asked_hdfs()
        return hadoop.HdfsFiles(hadoop.Web("NameNode (WebHDFS)", self._hdfs, self.user, self._ca))

    def _asked_hdfs(self) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        with contextlib.suppress(EngineError):  # shown to administrators only
            found = hadoop.name_nodes(hadoop.shown_properties(self.rm.json("/conf")))
        if not found:
            raise EngineError(
                "where HDFS is, is not known: the job's secret is handed to containers by a file there",
                "--yarn-hdfs http://NAMENODE:9870 (WebHDFS), or an HttpFS server",
            )
        return found

    def application(self, app: str) -> Mapping[str, Any] | None:
        """Return what the ResourceManager knows of an application; None: nothing. Raises EngineError."""
        answer = self.rm.ask("GET", f"/ws/v1/cluster/apps/{app}")
        answer.expect(f"the ResourceManager, asked for {app}", 200, 404)
        return None if answer.status == 404 else answer.json["app"]

    def service(self, name: str) -> Mapping[str, Any]:
        """Return a service with its components and containers; nothing if there is none. Raises EngineError."""
        answer = self.rm.ask("GET", f"/app/v1/services/{name}")
        if answer.status != 200:
            return {}  # its application master is starting, or ending
        found: Mapping[str, Any] = answer.json
        return found

    def lost_master(self, app: str) -> Explanation | None:
        """Return why an application ended whose master's node is lost; None: it is not. Raises EngineError."""
        failed = [each for each in self._attempts(app) if each.get("appAttemptState") == "FAILED"]
        for node in (str(each.get("nodeHttpAddress") or "").partition(":")[0] for each in failed):
            if node and self.state_of_node(node) in GONE:
                text = f"YARN: the node {node} is lost, which ran the job's application master"
                return Explanation(facts.EXIT_HOST_LOST, text)
        return None

    def _attempts(self, app: str) -> list[Any]:
        return listed(self.rm.json(f"/ws/v1/cluster/apps/{app}/appattempts").get("appAttempts"), "appAttempt")

    def attempt(self, app: str) -> Mapping[str, Any]:
        """Return the containers of an application's last attempt that have not ended. Raises EngineError."""
        attempts = self._attempts(app)
        if not attempts:
            return {}
        name = attempts[-1]["appAttemptId"]
        found: Mapping[str, Any] = self.rm.json(f"/ws/v1/cluster/apps/{app}/appattempts/{name}/containers")
        return found

    def limit(self, app: str, time_s: float) -> None:
        """Have an application ended after so long from now. Raises EngineError."""
        end = time.strftime("%Y-%m-%dT%H:%M:%S.000+0000", time.gmtime(time.time() + time_s))
        body = json.dumps({"timeout": {"type": "LIFETIME", "expiryTime": end}}).encode("ascii")
        answer = self.rm.ask("PUT", f"/ws/v1/cluster/apps/{app}/timeout", body)
        answer.expect(f"YARN does not take --time for {app}", 200)

    def kill(self, app: str) -> None:
        """Have an application killed; does not wait. Raises EngineError."""
        body = b'{"state":"KILLED"}'
        answer = self.rm.ask("PUT", f"/ws/v1/cluster/apps/{app}/state", body)
        answer.expect(f"YARN does not kill {app}", 200, 202, 404, hint=f"yarn app -kill {app}")

    def delete(self, name: str) -> None:
        """Delete a service that has ended; one that is not there is no error. Raises EngineError."""
        answer = self.rm.ask("DELETE", f"/app/v1/services/{name}", limit_s=ANSWER_S)
        if b"doesn't exist" not in answer.body:
            answer.expect(f"YARN does not delete the service {name}", 200, 204, 404, hint=f"yarn app -destroy {name}")

    def exits(self, app: Mapping[str, Any]) -> Mapping[str, Exit]:
        """Return how the containers of an application have ended, by place: its application master's log says.

        No other part of YARN keeps that. Nothing, if the node of the application master does not answer.
        """
        where = str(app.get("amContainerLogs") or "")
        match = re.fullmatch(r"(https?://[^/]+)/node/containerlogs/([^/]+)/.*", where)
        found: dict[str, Exit] = {}
        if match is not None:
            node = hadoop.Web("NodeManager", (match.group(1),), self.user, self._ca)
            with contextlib.suppress(EngineError):  # what does not answer once is not asked again
                for file in (*AM_LOGS, *hadoop.AM_LOGS):
                    path = f"/ws/v1/node/containerlogs/{match.group(2)}/{file}"
                    answer = node.ask("GET", path, query={"size": f"-{AM_LOG_BYTES}"}, limit_s=NODE_S)
                    if answer.status == 200:
                        found.update(exits_of(answer.body.decode("utf-8", "replace")))
        return found

    def state_of_node(self, name: str) -> str:
        """Return `RUNNING`, `LOST` and so on; empty: the ResourceManager does not know it."""
        states: list[str] = []
        with contextlib.suppress(EngineError):
            states += [each.state for each in self.nodes() if name in (each.name, each.name.partition(".")[0])]
        # A node that came back under another port is listed twice.
        return "RUNNING" if "RUNNING" in states else (states or [""])[0]

    def nodes(self) -> Sequence[Node]:
        """Return the nodes of the cluster. Raises EngineError."""
        return nodes_of(self.rm.json("/ws/v1/cluster/nodes"))

    def queues(self) -> Sequence[YarnQueue]:
        """Return the queues that take jobs. Raises EngineError."""
        return queues_of(self.rm.json("/ws/v1/cluster/scheduler"))


# ---------------------------------------------------------------------- the spec; pure


def secret_path(home: str, marker: str) -> str:
    """Return where in HDFS the secret of a job is."""
    return f"{home}/{FOLDER}/{marker}/{SECRET_FILE}"


def service(submission: Submission) -> dict[str, Any]:
    """Return the spec of the service.

    Raises:
        UsageError: the template or an --engine-arg is none.
    """
    options = submission.options
    text = template(TEMPLATE, options)
    try:
        pattern = json.loads(text)
        [component] = pattern["components"]
    except (ValueError, KeyError, TypeError) as err:
        raise UsageError(
            f"the template of YARN's spec is none: {err}", "it is JSON, with one component, which stands for every role"
        ) from None
    values: dict[str, str] = {
        "name": submission.marker,
        "job": submission.job,
        "queue": options.queue or "default",
        "lifetime": str(math.ceil(options.time_s)) if options.time_s else "-1",
        "secret": secret_path(submission.found.home, submission.marker),
        "command": launch_command(submission),
    }
    components = []
    for group in submission.groups:
        needs = group.needs
        values.update(
            role=group.role,
            count=str(group.count),
            cores=str(max(1, needs.cores)),
            megabytes=str(-(-needs.memory // MIB) or MEMORY_MB),
        )
        made = _filled(component, values)
        if needs.gpus:
            made["resource"]["additional"] = {GPU: {"value": needs.gpus, "unit": ""}}
        label, image = options.own.get("node_label", ""), options.own.get("docker_image", "")
        if label:
            rule = {"type": "AFFINITY", "scope": "NODE", "node_partitions": [label]}
            made["placement_policy"] = {"constraints": [rule]}
        if image:
            made["artifact"] = {"type": "DOCKER", "id": image}
        components.append(made)
    pattern["components"] = []
    spec: dict[str, Any] = _filled(pattern, values)
    return merged({**spec, "components": components}, options.args, _ARG)


def launch_command(submission: Submission) -> str:
    """Return the line that YARN puts, between double quotes and unescaped, behind `bash -c`.

    YARN replaces COMPONENT_INSTANCE_NAME by the place's name. The secret's link is resolved: the bootstrap takes none.
    """
    marks = {"{place}": "${COMPONENT_INSTANCE_NAME}", SECRET: f'\\"\\$(readlink -f {SECRET_FILE})\\"'}
    words = []
    for word in submission.bootstrap.command(submission.python, "{place}", SECRET):
        if word in marks:
            words.append(marks[word])
        elif _SAFE.fullmatch(word):
            words.append(word)
        elif _SINGLE.fullmatch(word):
            words.append("'" + word.replace('"', '\\"') + "'")
        else:
            raise UsageError(f"{word!r} cannot be written in a spec of YARN", "python = PATH of plain characters")
    return "exec " + " ".join(words)


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Return a template with its texts filled in; a text that is one placeholder of a number becomes the number."""
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if not isinstance(value, str):
        return value
    text = fill(value, values)
    return int(text) if value in ("@{count}", "@{cores}", "@{lifetime}") else text


_ARG = """--engine-arg '{"configuration": {"properties": {"NAME": "VALUE"}}}'"""


HINTS = {
    "unknown queue": "say --queue NAME; distrun doctor --launcher yarn lists them",
    "larger than configured max": "ask for less, --worker-memory or --worker-cores; or have "
    "yarn.scheduler.maximum-allocation-* raised",
    "src_file": "--yarn-hdfs must name the file system that YARN uses (fs.defaultFS)",
    "does not exist": "--yarn-hdfs must name the file system that YARN uses (fs.defaultFS)",
}
"""What to do about a refusal, by words in it."""


def _way(cluster: Cluster, config: Mapping[str, str]) -> tuple[str, str]:
    """Return how jobs are submitted: the path of `yarn` for the distributed shell, empty for the services API; and why.

    Raises:
        EngineError: neither can be used.
    """
    if config.get("shell", "").lower() in ("yes", "true", "1"):
        why, fix = (
            "the configuration file asks for YARN's distributed shell (shell = true)",
            "or leave shell = true out",
        )
    else:
        answer = cluster.rm.ask("GET", "/app/v1/services/version")
        if answer.status == 200:
            return "", f"services API: {str(answer.json.get('hadoop_version', '')).partition(' ')[0]}"
        why = f"YARN's services API is off ({answer.url} answers {answer.status})"
        fix = f"or have {API}=true set in the ResourceManager's yarn-site.xml, and the ResourceManager restarted"
    yarn = hadoop.program(config)
    if not yarn:
        raise EngineError(
            f"{why}, and there is no program `{config.get('yarn', 'yarn')}` here",
            f"install Hadoop's client here, or name its program by yarn = PATH, for the distributed shell; {fix}",
        )
    return yarn, f"{why}: the distributed shell is used, by {yarn}"
