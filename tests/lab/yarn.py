"""A real YARN on the hosts of a lab: HDFS, ResourceManager with the services API, NodeManagers.

    python -m yarn install          # the jars, by Maven, into CACHE; once
    cluster = yarn.up(lab)          # on the hosts of a `hostlab.Lab`; it ends with the lab

The first host runs ZooKeeper, NameNode, DataNode and ResourceManager, all others a NodeManager each. They are plain
java programs: Hadoop's own scripts are not in the jars that Maven Central has. Hosts have the jars at the same path as
this machine. Nothing else is shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hostlab import Host, Lab, Process, Unavailable
from hostlab.host import wait_until

VERSION = "3.4.2"
ARTIFACTS = (
    "hadoop-common",
    "hadoop-hdfs",
    "hadoop-yarn-server-resourcemanager",
    "hadoop-yarn-server-nodemanager",
    "hadoop-yarn-client",
    "hadoop-yarn-server-timelineservice",
    "hadoop-yarn-services-api",
    "hadoop-yarn-services-core",
    "hadoop-yarn-applications-distributedshell",
)
CACHE = Path("/var/cache/distrun-lab")
"""Where jars are kept. Not below /tmp, /run or a home: hosts have their own."""
PACKAGES = {"java": "openjdk-17-jre-headless", "mvn": "maven"}
"""Programs that are needed, and the Debian package of each. Maven is needed only where the jars are not in CACHE."""

CONF = "/etc/hadoop"
"""Folder of the configuration, on hosts and in the launcher's place."""
DATA = "/var/yarn"
"""Folder of all that the daemons write, with their logs."""
MARK = "-Dlab.daemon="
"""Argument by which the daemons are told from what jobs started."""
MEMORY_MB = 2048
"""What each NodeManager offers."""
CORES = 4
UP_S = 240.0
MAVEN_S = 900
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")

HEAPS = {
    "zookeeper": ("org.apache.zookeeper.server.ZooKeeperServerMain", 64),
    "namenode": ("org.apache.hadoop.hdfs.server.namenode.NameNode", 160),
    "datanode": ("org.apache.hadoop.hdfs.server.datanode.DataNode", 96),
    "resourcemanager": ("org.apache.hadoop.yarn.server.resourcemanager.ResourceManager", 320),
    "nodemanager": ("org.apache.hadoop.yarn.server.nodemanager.NodeManager", 128),
}
"""Main class and largest heap (MiB) of each daemon."""

OPENS = "--add-opens=java.base/java.lang=ALL-UNNAMED --add-opens=java.base/java.util=ALL-UNNAMED"
"""What Hadoop needs of Java 17."""

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>lab</groupId><artifactId>yarn</artifactId><version>1</version><packaging>pom</packaging><dependencies>
%s
</dependencies></project>
"""


# Getting the jars


def jars() -> Path:
    """Return the folder that has, or will have, the jars."""
    return CACHE / ("hadoop-" + VERSION) / "lib"


def why_not() -> str:
    """Return why YARN cannot run on this machine, or nothing."""
    if not shutil.which("java"):
        return "YARN needs Java: %s" % PACKAGES["java"]
    if not jars().is_dir():
        return "YARN's jars are not in %s; scripts/test engines gets them" % jars()
    return ""


def install() -> Path:
    """Get Java, Maven and the jars, if they are not here; return the jars' folder. Takes two minutes and 94 MB.

    Raises:
        Unavailable: a program is missing and cannot be installed, or Maven failed.
    """
    wanted = ["java"] if jars().is_dir() else ["java", "mvn"]
    missing = [PACKAGES[program] for program in wanted if not shutil.which(program)]
    if missing and shutil.which("apt-get"):
        with contextlib.suppress(Unavailable):  # the lists that are here may do
            _run([*APT, "update"], "apt-get update")
        argv = [*APT, "install", "-y", "--no-install-recommends", *missing]
        _run(argv, "installing " + " ".join(missing), env={"DEBIAN_FRONTEND": "noninteractive"})
    if jars().is_dir():
        return jars()
    wanted_jars = "\n".join(
        "<dependency><groupId>org.apache.hadoop</groupId><artifactId>%s</artifactId><version>%s</version></dependency>"
        % (name, VERSION)
        for name in ARTIFACTS
    )
    jars().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=jars().parent) as folder:
        Path(folder, "pom.xml").write_text(POM % wanted_jars)
        argv = ["mvn", "-B", "-q", "dependency:copy-dependencies", "-DoutputDirectory=lib"]
        _run(argv, "Maven", cwd=folder)
        Path(folder, "lib").rename(jars())  # whole or not at all
    return jars()


def _run(argv: Sequence[str], what: str, cwd: str = "/", env: Mapping[str, str] | None = None) -> None:
    variables = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=variables, capture_output=True, text=True, timeout=MAVEN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Unavailable("%s failed: %s" % (what, err)) from err
    if done.returncode:
        raise Unavailable("%s failed: %s" % (what, (done.stdout + done.stderr).strip()[-2000:]))


# Configuration


def configuration(master: str, queues: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Return the configuration files by name. `queues`: capacity and maximum of each, per cent."""
    core = {
        "fs.defaultFS": "hdfs://%s:8020" % master,
        "hadoop.tmp.dir": DATA + "/tmp",
        "hadoop.registry.zk.quorum": "%s:2181" % master,
        "hadoop.proxyuser.root.hosts": "*",
        "hadoop.proxyuser.root.groups": "*",
        "ipc.client.connect.max.retries": "3",
        # Users of the web services that name nobody.
        "hadoop.http.staticuser.user": "nobody",
        # An application master whose service has ended, or that was killed, stays as long as its shutdown hooks may
        # take (30 s by default): they wait for a thread that waits for them.
        "hadoop.service.shutdown.timeout": "1s",
    }
    hdfs = {
        "dfs.replication": "1",
        "dfs.namenode.name.dir": "file://%s/nn" % DATA,
        "dfs.datanode.data.dir": "file://%s/dn" % DATA,
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.datanode.du.reserved": "0",
        "dfs.blocksize": "8388608",
        "dfs.namenode.fs-limits.min-block-size": "0",
        "dfs.namenode.safemode.extension": "0",
    }
    yarn = {
        "yarn.resourcemanager.hostname": master,
        "yarn.webapp.api-service.enable": "true",
        "yarn.service.framework.path": "/yarn/service-dep.tar.gz",
        "yarn.service.am.java.opts": "-Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "yarn.service.am-resource.memory": "256",
        "yarn.dispatcher.drain-events.timeout": "1000",
        "yarn.application.classpath": "%s,%s/*" % (CONF, jars()),  # of the distributed shell's
        "yarn.nodemanager.resource.memory-mb": str(MEMORY_MB),
        "yarn.nodemanager.resource.cpu-vcores": str(CORES),
        "yarn.nodemanager.local-dirs": DATA + "/local",
        "yarn.nodemanager.log-dirs": DATA + "/log",
        "yarn.nodemanager.disk-health-checker.enable": "false",
        "yarn.nodemanager.vmem-check-enabled": "false",
        # Memory is watched by the NodeManager, not by control groups.
        "yarn.nodemanager.pmem-check-enabled": "true",
        "yarn.nodemanager.resource.memory.enforced": "false",
        "yarn.nodemanager.resource-monitor.interval-ms": "500",
        # By JDK_JAVA_OPTIONS application masters find the jars that every host has; their own archive is empty.
        "yarn.nodemanager.env-whitelist": "JAVA_HOME,HADOOP_CONF_DIR,JDK_JAVA_OPTIONS,PATH,LANG",
        "yarn.nodemanager.delete.debug-delay-sec": "0",
        "yarn.nodemanager.sleep-delay-before-sigkill.ms": "1000",
        "yarn.scheduler.minimum-allocation-mb": "64",
        "yarn.scheduler.maximum-allocation-mb": str(MEMORY_MB),
        "yarn.nm.liveness-monitor.expiry-interval-ms": "6000",
        "yarn.am.liveness-monitor.expiry-interval-ms": "180000",
        "yarn.resourcemanager.nm.liveness-monitor.interval-ms": "1000",
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
        "yarn.resourcemanager.application-timeouts.monitor.interval-ms": "1000",
        "yarn.resourcemanager.scheduler.class": (
            "org.apache.hadoop.yarn.server.resourcemanager.scheduler.capacity.CapacityScheduler"
        ),
    }
    prefix = "yarn.scheduler.capacity."
    capacity = {
        prefix + "root.queues": ",".join(queues),
        # A tenth by default, which not even one application master of a small cluster fits in.
        prefix + "maximum-am-resource-percent": "1.0",
        prefix + "resource-calculator": "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
    }
    for name, (share, most) in queues.items():
        capacity[prefix + "root.%s.capacity" % name] = str(share)
        capacity[prefix + "root.%s.maximum-capacity" % name] = str(most)
    return {
        "core-site.xml": xml(core),
        "hdfs-site.xml": xml(hdfs),
        "yarn-site.xml": xml(yarn),
        "capacity-scheduler.xml": xml(capacity),
        "zoo.cfg": "tickTime=2000\ndataDir=%s/zk\nclientPort=2181\nadmin.enableServer=false\n" % DATA,
        "log4j.properties": LOG4J,
        "yarn": YARN % {"jars": jars(), "opens": OPENS},
    }


LOG4J = """\
log4j.rootLogger=INFO,c
log4j.appender.c=org.apache.log4j.ConsoleAppender
log4j.appender.c.target=System.err
log4j.appender.c.layout=org.apache.log4j.PatternLayout
log4j.appender.c.layout.ConversionPattern=%d %p %c{2}: %m%n
"""

YARN = """\
#!/bin/sh
# The few words of Hadoop's own "yarn" that the distributed shell needs.
conf=$(dirname "$(readlink -f "$0")")
word=$1
shift
case $word in
classpath) echo "$conf:%(jars)s/*" ;;
jar)
    jar=$1
    shift
    exec java -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 %(opens)s -cp "$jar:$conf:%(jars)s/*" "$@"
    ;;
*)
    echo "yarn: $word?" >&2
    exit 2
    ;;
esac
"""


def xml(properties: Mapping[str, str]) -> str:
    """Return a configuration file of Hadoop."""
    lines = [
        "<property><name>%s</name><value>%s</value></property>" % (name, value.replace("&", "&amp;"))
        for name, value in properties.items()
    ]
    return "<configuration>\n%s\n</configuration>\n" % "\n".join(lines)


# The cluster


class Cluster:
    """YARN and HDFS on the hosts of a lab."""

    def __init__(self, lab: Lab, queues: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.lab = lab
        names = list(lab.hosts)
        self.master = names[0]
        self.nodes = names[1:]
        """Hosts with a NodeManager."""
        self.files = configuration(self.master, queues or {"default": (70, 100), "small": (30, 30)})

    @property
    def url(self) -> str:
        """Of the ResourceManager's web services."""
        return "http://%s:8088" % self.master

    @property
    def hdfs_url(self) -> str:
        """Of WebHDFS."""
        return "http://%s:9870" % self.master

    def up(self) -> None:
        """Start all daemons and wait until every node has registered. LabError with the daemons' words otherwise."""
        for host in self.lab.hosts.values():
            self.prepare(host)
        self._write(self.lab.file("/run"), "hadoop-conf")  # the launcher's place has this machine's /etc
        master = self.lab[self.master]
        for daemon in ("zookeeper", "namenode", "datanode", "resourcemanager"):
            self.start(master, daemon)
        for name in self.nodes:
            self.start(self.lab[name], "nodemanager")
        wait_until(self._has_framework, UP_S, "HDFS takes files\n" + self.log(self.master, "namenode"))
        wait_until(
            lambda: self.active() == len(self.nodes), UP_S, "all nodes have registered\n" + self.log(self.master)
        )

    @property
    def conf(self) -> str:
        """Folder of the configuration in the launcher's place: HADOOP_CONF_DIR."""
        return "/run/hadoop-conf"

    def prepare(self, host: Host) -> None:
        """Write the configuration to a host that was booted."""
        self._write(host.root)

    def start(self, host: Host, daemon: str) -> None:
        """Start a daemon; does not wait."""
        main, heap = HEAPS[daemon]
        java = "java -Xmx%dm -XX:+UseSerialGC -XX:TieredStopAtLevel=1 %s -Dservice.libdir=%s" % (heap, OPENS, jars())
        path = "-cp '%s:%s/*'" % (CONF, jars())
        words = CONF + "/zoo.cfg" if daemon == "zookeeper" else ""
        script = "exec %s %s%s %s %s %s" % (java, MARK, daemon, path, main, words)
        if daemon == "namenode":
            script = "%s %sformat %s %s -format -nonInteractive && %s" % (java, MARK, path, main, script)
        variables = "HADOOP_CONF_DIR=%s JAVA_HOME=%s" % (CONF, java_home())
        if daemon == "nodemanager":
            variables += " JDK_JAVA_OPTIONS='%s -cp %s:%s/*'" % (OPENS, CONF, jars())
        log = "%s/%s.log" % (DATA, daemon)
        host.exec("sh", "-c", '%s setsid -f sh -c "$0" </dev/null >>%s 2>&1' % (variables, log), script)

    def log(self, host: str, daemon: str = "resourcemanager", size: int = 4000) -> str:
        """Return the last words of a daemon."""
        with contextlib.suppress(OSError):
            return (self.lab[host].root / DATA[1:] / (daemon + ".log")).read_text(errors="replace")[-size:]
        return ""

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Ask the ResourceManager, from the launcher's place; return status and what it says (0: no answer)."""
        return self._http(method, self.url + path, None if body is None else json.dumps(body))

    def active(self) -> int:
        """Return how many nodes have registered and are well."""
        status, said = self.call("GET", "/ws/v1/cluster/metrics")
        return int(said["clusterMetrics"]["activeNodes"]) if status == 200 else 0

    def applications(self) -> list[dict[str, Any]]:
        """Return the applications that have not ended."""
        states = "NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING"
        status, said = self.call("GET", "/ws/v1/cluster/apps?states=" + states)
        assert status == 200, said
        return list((said["apps"] or {}).get("app", []))

    def hdfs(self, method: str, path: str, query: str, user: str = "root", body: str | None = None) -> tuple[int, Any]:
        """Ask WebHDFS as a user; redirections are followed."""
        url = "%s/webhdfs/v1%s?user.name=%s&%s" % (self.hdfs_url, path, user, query)
        return self._http(method, url, body)

    def _write(self, root: Path, where: str = CONF[1:]) -> None:
        folder = root / where
        folder.mkdir(parents=True, exist_ok=True)
        (root / DATA[1:]).mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        (folder / "yarn").chmod(0o755)
        # HDFS does not start without its web pages' folders, which the jars lack.
        for page in ("hdfs", "datanode"):
            (folder / "webapps" / page).mkdir(parents=True, exist_ok=True)
        if where == CONF[1:]:
            (root / "etc/resolv.conf").unlink(missing_ok=True)
            (root / "etc/resolv.conf").write_text("")  # there is no name server: every start would wait 10 s for it

    def _has_framework(self) -> bool:
        folders = (("/yarn", "755"), ("/user", "755"), ("/user/root", "700"), ("/tmp", "1777"))
        for path, mode in folders:
            if self.hdfs("PUT", path, "op=MKDIRS&permission=%s" % mode)[0] != 200:
                return False
        query = "op=CREATE&overwrite=true&permission=644"
        return self.hdfs("PUT", "/yarn/service-dep.tar.gz", query, body="@empty.tgz")[0] == 201

    def _http(self, method: str, url: str, body: str | None) -> tuple[int, Any]:
        words = [method, url] if body is None else [method, url, body]
        text = self.lab.inside(sys.executable, "-c", HTTP, *words, check=False) or '[0, ""]'
        status, said = json.loads(text)
        with contextlib.suppress(ValueError):
            said = json.loads(said)
        return int(status), said


HTTP = """
import gzip, io, json, sys, tarfile, urllib.error, urllib.request
def empty():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("README"))
    return out.getvalue()
class Follow(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, *rest):
        url = rest[-1]
        return urllib.request.Request(url, data=request.data, headers=request.headers, method=request.get_method())
method, url = sys.argv[1:3]
body = sys.argv[3] if len(sys.argv) > 3 else None
data = None if body is None else empty() if body == "@empty.tgz" else body.encode()
kind = "application/octet-stream" if "webhdfs" in url else "application/json"
request = urllib.request.Request(url, data=data, headers={"Content-Type": kind}, method=method)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Follow)
try:
    with opener.open(request, timeout=30) as answer:
        said = answer.status, answer.read().decode()
except urllib.error.HTTPError as error:
    said = error.code, error.read().decode(errors="replace")
except OSError as error:
    said = 0, str(error)
print(json.dumps(said))
"""
"""A program for the launcher's place: METHOD URL [BODY] -> [status, text]."""


def is_daemon(process: Process) -> bool:
    """Return whether a process is one of a cluster's own: a daemon, or the shell that starts it."""
    return MARK.encode() in process.command


def java_home() -> str:
    """Return the folder of the Java that is on the search path."""
    program = shutil.which("java")
    if program is None:
        raise Unavailable(why_not())
    return str(Path(program).resolve().parents[1])


def up(lab: Lab, queues: Mapping[str, tuple[int, int]] | None = None) -> Cluster:
    """Bring YARN up on the hosts of a lab: the first is the master, all others are nodes.

    Raises:
        Unavailable: it cannot run on this machine.
    """
    if reason := why_not():
        raise Unavailable(reason)
    cluster = Cluster(lab, queues)
    cluster.up()
    return cluster


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit("python -m yarn install   gets Java and YARN's jars")
    try:
        print(install())
    except Unavailable as why:
        sys.exit("yarn: %s" % why)
