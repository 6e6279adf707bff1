"""A kubelet for tests: runs the pods that the scheduler binds to a node as processes of the host that it runs on.

    python3 kubelet.py node NAME ADDRESS SERVER FOLDER
    python3 kubelet.py pod FOLDER <SPEC    # what the first one starts for each pod

FOLDER of the node has `token` and `ca.crt` for the API server, `tls.crt` and `tls.key` for logs. It needs the standard
library and `unshare`, and is one file, because hosts get it as one. It does what a launcher can see of a kubelet
(https://kubernetes.io/docs/reference/node/): it registers the node, renews its lease, reports phases, addresses and
exit codes, waits for secrets, asks a pod to end and kills it after its grace period, serves logs, and removes what was
deleted.

Unlike a real one, it has no images: a pod has the host's files, network and process table. Its host name, mounts and
process tree are its own. A pod has one container, which is never restarted. Its first process is not number 1, but gets
only the signals that it handles, as number 1 does from the kernel (pid_namespaces(7)). Three faults can be asked for:

* An image of a registry below `.invalid` cannot be pulled, and one below `.private.test` only with a pull secret.
* A pod above its memory limit is killed (OOMKilled); the limit is held by watching.
* On SIGUSR1 the node is short of memory: every pod on it is evicted.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import http.server
import json
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of images that say nothing else."""
BEAT_S = 1.0
RETRY_S = 1.0
"""Time between two attempts to start a pod that waits for something."""
MEMORY_S = 0.2
WATCH_S, SILENT_S = 8, 10
"""Time after which a watch is begun anew, and after which an answer is no longer waited for."""
LOG_PORT = 10250
GPU = "nvidia.com/gpu"
CAPACITY = {"cpu": "4", "memory": "4Gi", "pods": "20", "ephemeral-storage": "4Gi", GPU: "2"}
EVICTED = "The node was low on resource: memory. Container %s was using more than its request."
MESSAGE_SIZE, MESSAGE_LINES = 2048, 80
"""Of a log that becomes the message of a container that failed."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
ASKED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)
"""What the parent of a pod's processes is told: a child has ended; ask the pod to end; kill it."""
CUT_OFF = (OSError, http.client.HTTPException)
"""What a request raises when the node is cut off, before or within the answer."""
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Waits(Exception):
    """A container cannot be started yet: reason and message, as Kubernetes gives them."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message


# What a pod's specification means. Pure, but for `read`, which gets an object of the cluster by its path.

Read = Callable[[str], Json]


def quantity(text: str) -> float:
    """Return the number that a quantity of Kubernetes stands for, such as 500m, 2 or 64Mi."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    if not found or found[2] not in UNITS:
        raise ValueError(f"expected a quantity such as 500m or 64Mi, found {text!r}")
    return float(found[1]) * UNITS[found[2]]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replace $(NAME), as Kubernetes does in commands, arguments and values: unknown names stay, $$ is one $."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def field(pod: Json, path: str, address: str) -> str:
    """Return a field of a pod by the path of a `fieldRef`."""
    meta, spec = pod["metadata"], pod["spec"]
    if found := re.fullmatch(r"metadata\.(annotations|labels)\['(.*)'\]", path):
        return str(meta.get(found[1], {}).get(found[2], ""))
    known = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec["nodeName"],
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": address,
        "status.podIP": address,
        "status.podIPs": address,
    }
    if path not in known:
        raise Waits("CreateContainerConfigError", f"unsupported fieldPath {path}")
    return str(known[path])


def data_of(read: Read, namespace: str, kind: str, name: str) -> dict[str, bytes]:
    """Return the data of a secret or config map. Raises Waits if there is none."""
    try:
        found = read(f"/api/v1/namespaces/{namespace}/{kind}s/{name}")
    except urllib.error.HTTPError as error:
        raise Waits("CreateContainerConfigError", f'{kind} "{name}" not found') from error
    decode = base64.b64decode if kind == "secret" else str.encode
    return {key: decode(value) for key, value in (found.get("data") or {}).items()}


def variables(pod: Json, address: str, read: Read) -> dict[str, str]:
    """Return the variables that the container's `env` gives it. Raises Waits."""
    container, namespace = pod["spec"]["containers"][0], pod["metadata"]["namespace"]
    kinds = {"secretKeyRef": "secret", "configMapKeyRef": "configmap"}
    env: dict[str, str] = {}
    for row in container.get("env", ()):
        value = expand(row.get("value", ""), env)
        for word, reference in row.get("valueFrom", {}).items():
            if word == "fieldRef":
                value = field(pod, reference["fieldPath"], address)
            elif word in kinds:
                values = data_of(read, namespace, kinds[word], reference["name"])
                if reference["key"] not in values:
                    message = f"couldn't find key {reference['key']} in {kinds[word]} {namespace}/{reference['name']}"
                    raise Waits("CreateContainerConfigError", message)
                value = values[reference["key"]].decode()
            else:
                raise Waits("CreateContainerConfigError", f"unsupported source {word} of variable {row['name']}")
        env[row["name"]] = value
    return env


def refused_image(pod: Json, read: Read) -> str:
    """Return why the image cannot be pulled, or nothing."""
    image = pod["spec"]["containers"][0]["image"]
    registry = image.partition("/")[0] if "/" in image else "docker.io"
    if registry.partition(":")[0].endswith(".invalid"):
        return (
            f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": failed to do request: '
            f'Head "https://{registry}/v2/": dial tcp: lookup {registry}: no such host'
        )
    if registry.partition(":")[0].endswith(".private.test"):
        for reference in pod["spec"].get("imagePullSecrets", ()):
            with contextlib.suppress(Waits):
                config = data_of(read, pod["metadata"]["namespace"], "secret", reference["name"])
                if registry in json.loads(config.get(".dockerconfigjson", b"{}")).get("auths", {}):
                    return ""
        return (
            f'failed to pull and unpack image "{image}": pull access denied, insufficient_scope: authorization failed'
        )
    return ""


# A pod's process: the parent of all that runs in the pod.


def descendants() -> list[int]:
    """Return the pids of all processes below this one that live."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(") ")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    found, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def memory_of(pids: Sequence[int]) -> int:
    """Return the bytes that processes have in memory; what several share is counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def handles(pid: int, number: int) -> bool:
    """Tell whether a process has a handler of a signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def kill_descendants() -> None:
    """End all that lives below this process, and collect it."""
    while True:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def run_pod(folder: Path, spec: Json) -> Json:
    """Run a container until its first process ends; return exitCode, reason and message. SIGUSR1 kills it."""
    for source, target, is_read_only in spec["mounts"]:
        Path(target).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", source, target], check=True)
        if is_read_only:
            subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
    socket.sethostname(spec["hostname"])
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    with (folder / "log").open("ab") as log:
        try:
            main = subprocess.Popen(
                spec["argv"],
                env=spec["env"],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=spec["user"],
                group=spec["user"],
                extra_groups=None if spec["user"] is None else [],
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),  # noqa: PLW1509
            )
        except OSError as error:
            return {"exitCode": 128, "reason": "StartError", "message": f"exec: {spec['argv'][0]!r}: {error.strerror}"}
    reason = ""
    while True:
        got = signal.sigtimedwait(ASKED, MEMORY_S if spec["limit"] else 3600)
        if got and got.si_signo == signal.SIGTERM and handles(main.pid, signal.SIGTERM):
            os.kill(main.pid, signal.SIGTERM)
        elif got and got.si_signo == signal.SIGUSR1:
            os.kill(main.pid, signal.SIGKILL)
        if not reason and spec["limit"] and memory_of(descendants()) > spec["limit"]:
            reason = "OOMKilled"
            os.kill(main.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == main.pid:
                    kill_descendants()
                    code = os.waitstatus_to_exitcode(ended[1])
                    code = code if code >= 0 else 128 - code
                    return {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}


# The cluster's API.


class Api:
    """The API server, with a node's token."""

    def __init__(self, server: str, folder: Path) -> None:
        self.server = server
        self._token = (folder / "token").read_text()
        self._trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def open(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Any:
        """Send a request; return the open answer. Raises HTTPError, OSError."""
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        request = urllib.request.Request(self.server + path, data=data, headers=head, method=method)
        return urllib.request.urlopen(request, timeout=SILENT_S, context=self._trust)

    def call(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Send a request until it is answered; return the answer's object. Raises HTTPError."""
        while True:
            try:
                with self.open(method, path, body, kind) as answer:
                    return dict(json.load(answer))
            except urllib.error.HTTPError:
                raise
            except CUT_OFF as error:
                print(f"{method} {path}: {error}", file=sys.stderr, flush=True)
                time.sleep(RETRY_S)

    def get(self, path: str) -> Json:
        """Read an object."""
        return self.call("GET", path)

    def patch_status(self, path: str, status: Json) -> None:
        """Merge into an object's status; nothing happens if it is gone."""
        with contextlib.suppress(urllib.error.HTTPError):
            self.call("PATCH", path + "/status", {"status": status}, "application/strategic-merge-patch+json")


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def conditions(states: Mapping[str, bool], reason: str = "") -> list[Json]:
    """Return conditions by type."""
    return [
        {"type": name, "status": str(state), "lastTransitionTime": now(), **({"reason": reason} if reason else {})}
        for name, state in states.items()
    ]


def path_of(pod: Json) -> str:
    """Return the path of a pod."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


# The node.


@dataclass
class Run:
    """A pod on the node. Without a process it waits to be started."""

    pod: Json
    folder: Path
    process: subprocess.Popen[str] | None = None
    started: str = ""
    kill_at: float = 0.0
    """When it is killed, by the monotonic clock; 0 if nobody has asked it to end."""
    retry_at: float = 0.0
    refusals: int = 0
    """How often its image could not be pulled."""
    is_evicted: bool = False
    gpus: tuple[int, ...] = ()


class Node:
    """The pods of one node. All is done in the thread of `serve`; others only put into its queue or beat."""

    def __init__(self, name: str, address: str, api: Api, folder: Path) -> None:
        self.name = name
        self.address = address
        self.api = api
        self.folder = folder
        self.runs: dict[str, Run] = {}
        """What runs or is to run, by the uid of the pod."""
        self.over: set[str] = set()
        """Pods that have ended: what the watch still tells of their lives is old."""
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._server = urlsplit(api.server)

    # Registration and life sign.

    def register(self) -> None:
        """Make the node, unless it is there."""
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}}
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.call("POST", "/api/v1/nodes", node)

    def beat(self) -> None:
        """Renew lease and status until the process ends."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
                spec = {"holderIdentity": self.name, "leaseDurationSeconds": 4, "renewTime": stamp}
                try:
                    self.api.call("PATCH", f"{leases}/{self.name}", {"spec": spec}, "application/merge-patch+json")
                except urllib.error.HTTPError:  # there is none yet
                    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
                    self.api.call("POST", leases, {**lease, "spec": spec})
                self.api.patch_status(f"/api/v1/nodes/{self.name}", self._status())
            time.sleep(BEAT_S)

    def _status(self) -> Json:
        [ready] = conditions({"Ready": True}, "KubeletReady")
        addresses = {"InternalIP": self.address, "Hostname": self.name}
        return {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "addresses": [{"type": kind, "address": address} for kind, address in addresses.items()],
            "conditions": [{**ready, "lastHeartbeatTime": now()}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": LOG_PORT}},
        }

    # The loop.

    def watch(self) -> None:
        """Put the node's pods, and every change of them, into the queue until the process ends."""
        pods = f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}"
        while True:
            with contextlib.suppress(*CUT_OFF, ValueError):
                listed = self.api.get(pods)
                self.events.put(("LIST", listed["items"]))
                version = listed["metadata"]["resourceVersion"]
                since = f"&watch=1&timeoutSeconds={WATCH_S}&resourceVersion={version}"
                with self.api.open("GET", pods + since) as answer:
                    for line in answer:
                        event = json.loads(line)
                        self.events.put((event["type"], event["object"]))
            time.sleep(0.1)

    def serve(self) -> None:
        """Act on what changes, until the process ends."""
        while True:
            try:
                kind, what = self.events.get(timeout=0.1)
            except queue.Empty:
                kind, what = "", None
            if kind == "LIST":
                there = {pod["metadata"]["uid"] for pod in what}
                for pod in what:
                    self._changed(pod)
                for uid in self.runs.keys() - there:
                    self._kill(self.runs[uid])
            elif kind in ("ADDED", "MODIFIED"):
                self._changed(what)
            elif kind == "DELETED" and (run := self.runs.get(what["metadata"]["uid"])):
                self._kill(run)
            elif kind == "ended":
                self._ended(*what)
            elif kind == "evict":
                self._evict()
            for run in [*self.runs.values()]:
                self._due(run)

    def _changed(self, pod: Json) -> None:
        run = self.runs.get(pod["metadata"]["uid"])
        phase = pod["status"].get("phase")
        if pod["metadata"].get("deletionTimestamp"):
            if run is None:
                self._remove(pod)
            else:
                run.pod = pod
                self._ask_to_end(run, float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))
        elif run is not None:
            run.pod = pod
        elif pod["metadata"]["uid"] in self.over:
            return
        elif phase == "Pending":
            folder = Path(tempfile.mkdtemp(prefix="pod-", dir=self.folder))
            (folder / "log").touch()
            self.runs[pod["metadata"]["uid"]] = Run(pod, folder)
        elif phase == "Running":
            ended = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "The node was restarted."}
            self._report(pod, "Failed", {"terminated": ended})

    def _due(self, run: Run) -> None:
        """Do what it is time for."""
        clock = time.monotonic()
        if run.process is None and clock >= run.retry_at:
            run.retry_at = clock + RETRY_S
            try:
                self._start(run)
            except Waits as waits:
                self._report(run.pod, "Pending", {"waiting": {"reason": waits.reason, "message": waits.message}})
            except OSError as error:
                print(f"{path_of(run.pod)}: {error}", file=sys.stderr, flush=True)
        elif run.process is not None and run.kill_at and clock >= run.kill_at:
            self._kill(run)

    # One pod.

    def _start(self, run: Run) -> None:
        pod, container = run.pod, run.pod["spec"]["containers"][0]
        if reason := refused_image(pod, self.api.get):
            run.refusals += 1
            if run.refusals % 2:
                raise Waits("ErrImagePull", reason)
            raise Waits("ImagePullBackOff", f'Back-off pulling image "{container["image"]}": ErrImagePull: {reason}')
        mounts = self._mounts(run)
        env = {
            "PATH": PATH,
            "HOME": "/root",
            "HOSTNAME": self._hostname(pod),
            "KUBERNETES_SERVICE_HOST": str(self._server.hostname),
            "KUBERNETES_SERVICE_PORT": str(self._server.port),
            **variables(pod, self.address, self.api.get),
        }
        limits = container.get("resources", {}).get("limits", {})
        if count := int(limits.get(GPU, 0)):
            taken = {gpu for other in self.runs.values() if other is not run for gpu in other.gpus}
            run.gpus = tuple(gpu for gpu in range(int(CAPACITY[GPU])) if gpu not in taken)[:count]
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(map(str, run.gpus))
        security = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
        spec = {
            "argv": [expand(word, env) for word in (*container.get("command", ()), *container.get("args", ()))],
            "env": env,
            "hostname": self._hostname(pod),
            "limit": quantity(limits.get("memory", "0")),
            "mounts": mounts,
            "user": security.get("runAsUser"),
        }
        apart = ["unshare", "--mount", "--uts", "--propagation", "private", "--"]
        run.process = subprocess.Popen(
            [*apart, sys.executable, os.path.abspath(__file__), "pod", str(run.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ASKED),  # noqa: PLW1509 - until it listens
        )
        assert run.process.stdin is not None
        threading.Thread(target=self._wait, args=(pod["metadata"]["uid"], run.process), daemon=True).start()
        with contextlib.suppress(OSError), run.process.stdin as stdin:  # it may have ended; `_wait` reports that
            stdin.write(json.dumps(spec))
        run.started = now()
        self._report(pod, "Running", {"running": {"startedAt": run.started}})

    @staticmethod
    def _hostname(pod: Json) -> str:
        return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]

    def _wait(self, uid: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        told = process.stdout.read()
        process.wait()
        lost = {"exitCode": 128, "reason": "StartError", "message": "the lab could not start it; see the kubelet's log"}
        self.events.put(("ended", (uid, json.loads(told) if told else lost)))

    def _mounts(self, run: Run) -> list[tuple[str, str, bool]]:
        """Return (source, target, whether it is read only) of the container's mounts."""
        sources = {}
        for volume in run.pod["spec"].get("volumes", ()):
            [kind] = volume.keys() - {"name"}
            folder = run.folder / "volumes" / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            sources[volume["name"]] = str(folder)
            if kind == "emptyDir":
                folder.chmod(0o777)
            elif kind == "hostPath":
                sources[volume["name"]] = self._host_path(volume)
            elif kind == "persistentVolumeClaim":
                sources[volume["name"]] = self._claimed(run.pod, volume[kind]["claimName"])
            else:
                files = self._files(run.pod, volume[kind]["sources"] if kind == "projected" else [{kind: volume[kind]}])
                for name, data in files.items():
                    (folder / name).write_bytes(data)
        container = run.pod["spec"]["containers"][0]
        return [
            (sources[mount["name"]], mount["mountPath"], bool(mount.get("readOnly")))
            for mount in container.get("volumeMounts", ())
        ]

    @staticmethod
    def _host_path(volume: Json) -> str:
        path = str(volume["hostPath"]["path"])
        if volume["hostPath"].get("type") == "Directory" and not Path(path).is_dir():
            raise Waits("ContainerCreating", f"hostPath type check failed: {path} is not a directory")
        Path(path).mkdir(parents=True, exist_ok=True)
        return path

    def _claimed(self, pod: Json, claim: str) -> str:
        """Return the folder of a claim's volume, which is one of the host."""
        there = self.api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/persistentvolumeclaims/{claim}")
        path = str(self.api.get(f"/api/v1/persistentvolumes/{there['spec']['volumeName']}")["spec"]["hostPath"]["path"])
        Path(path).mkdir(parents=True, exist_ok=True)
        return path

    def _files(self, pod: Json, sources: Sequence[Json]) -> dict[str, bytes]:
        """Return the files of a volume that is made of objects of the cluster."""
        namespace = pod["metadata"]["namespace"]
        files: dict[str, bytes] = {}
        for source in sources:
            for kind, what in source.items():
                if kind == "serviceAccountToken":
                    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"]}
                    spec = {"expirationSeconds": 3600, "boundObjectRef": {**bound, "uid": pod["metadata"]["uid"]}}
                    account = pod["spec"].get("serviceAccountName", "default")
                    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
                    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
                    files[what["path"]] = self.api.call("POST", path, body)["status"]["token"].encode()
                elif kind == "downwardAPI":
                    for item in what["items"]:
                        files[item["path"]] = field(pod, item["fieldRef"]["fieldPath"], self.address).encode()
                elif kind in ("secret", "configMap"):
                    data = data_of(self.api.get, namespace, kind.lower(), what.get("secretName") or what["name"])
                    renamed = {item["key"]: item["path"] for item in what.get("items", ())}
                    files.update({renamed.get(key, key): value for key, value in data.items()})
                else:
                    raise Waits("ContainerCreating", f"the lab has no volumes of the kind {kind}")
        return files

    def _ask_to_end(self, run: Run, grace_s: float) -> None:
        if run.process is None:
            self._forget(run)
            self._remove(run.pod)
            return
        if not run.kill_at:
            run.process.terminate()
        end = time.monotonic() + grace_s
        run.kill_at = min(run.kill_at or end, end)

    def _kill(self, run: Run) -> None:
        run.kill_at = run.kill_at or time.monotonic()
        if run.process is None:
            self._forget(run)
        elif run.process.poll() is None:
            run.process.send_signal(signal.SIGUSR1)

    def _evict(self) -> None:
        """End all pods that run, as a kubelet does that is short of memory."""
        for run in self.runs.values():
            if run.process is not None and not run.is_evicted:
                run.is_evicted = True
                self._kill(run)

    def _ended(self, uid: str, state: Json) -> None:
        run = self.runs[uid]
        container = run.pod["spec"]["containers"][0]
        state = {**state, "startedAt": run.started, "finishedAt": now()}
        if state["exitCode"] and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = (run.folder / "log").read_text(errors="replace")[-MESSAGE_SIZE:].splitlines(keepends=True)
            state.setdefault("message", "".join(lines[-MESSAGE_LINES:]))
        phase = "Failed" if state["exitCode"] else "Succeeded"
        more: Json = {}
        if run.is_evicted:
            phase = "Failed"
            more = {"reason": "Evicted", "message": EVICTED % container["name"]}
        self._report(run.pod, phase, {"terminated": state}, more)
        self._forget(run, keeps_log=True)
        if run.pod["metadata"].get("deletionTimestamp"):
            self._remove(run.pod)

    def _forget(self, run: Run, keeps_log: bool = False) -> None:
        uid = run.pod["metadata"]["uid"]
        del self.runs[uid]
        self.over.add(uid)
        if keeps_log:
            os.replace(run.folder / "log", self._log(run.pod["metadata"]["namespace"], run.pod["metadata"]["name"]))
        shutil.rmtree(run.folder)

    def _log(self, namespace: str, name: str) -> Path:
        """Return the file that has the log of a pod that has ended."""
        return self.folder / f"{namespace}_{name}.log"

    def _remove(self, pod: Json) -> None:
        """Remove a pod from the API that has been asked to end and runs no more."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.call("DELETE", path_of(pod), body)
        self._log(pod["metadata"]["namespace"], pod["metadata"]["name"]).unlink(missing_ok=True)

    def _report(self, pod: Json, phase: str, state: Json, more: Mapping[str, Any] | None = None) -> None:
        container, is_up = pod["spec"]["containers"][0], "running" in state
        states = conditions({"Initialized": True}) + conditions({"Ready": is_up, "ContainersReady": is_up})
        if more:
            states += conditions({"DisruptionTarget": True}, "TerminationByKubelet")
        one = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        status: Json = {
            "phase": phase,
            "hostIP": self.address,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": pod["status"].get("startTime") or now(),
            "conditions": states,
            "containerStatuses": [{**one, "ready": is_up, "started": is_up, "state": state}],
            **(more or {}),
        }
        self.api.patch_status(path_of(pod), status)

    # Logs.

    def log_of(self, namespace: str, name: str) -> Path:
        """Return the file that has a pod's log."""
        run = self._run(namespace, name)
        return run.folder / "log" if run else self._log(namespace, name)

    def has(self, namespace: str, name: str) -> bool:
        """Tell whether a pod has not ended."""
        return self._run(namespace, name) is not None

    def _run(self, namespace: str, name: str) -> Run | None:
        names = {"namespace": namespace, "name": name}
        return next((run for run in [*self.runs.values()] if names.items() <= run.pod["metadata"].items()), None)


def serve_logs(node: Node, folder: Path) -> None:
    """Serve the logs of pods to the API server, for `kubectl logs`, until the process ends."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, namespace, name, *_ = [*urlsplit(self.path).path.split("/"), "", "", ""]
            follows = "follow=true" in urlsplit(self.path).query
            try:
                log = node.log_of(namespace, name).open("rb")
            except OSError:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            with log:
                while True:
                    is_over = not follows or not node.has(namespace, name)
                    self.wfile.write(log.read())
                    if is_over:
                        return
                    time.sleep(0.1)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((node.address, LOG_PORT), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def end_process(what: threading.ExceptHookArgs) -> None:
    """End the process with the traceback of a thread: the node is lost then, as when a kubelet ends."""
    sys.excepthook(what.exc_type, what.exc_value or what.exc_type(), what.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def run_node(name: str, address: str, server: str, folder: Path) -> None:
    """Run the pods of a node until a signal ends the process."""
    node = Node(name, address, Api(server, folder), folder)
    threading.excepthook = end_process
    signal.signal(signal.SIGUSR1, lambda *_: node.events.put(("evict", None)))
    node.register()
    for target, arguments in ((node.beat, ()), (node.watch, ()), (serve_logs, (node, folder))):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    node.serve()


if __name__ == "__main__":
    if sys.argv[1] == "node":
        run_node(sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        print(json.dumps(run_pod(Path(sys.argv[2]), json.load(sys.stdin))))
