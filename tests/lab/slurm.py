"""A Slurm cluster on a lab's hosts: the first host is the controller, every host is a node, the launcher can submit.

Nothing of the machine is changed: hosts have their own files, and the launcher reads its configuration from the lab's
private folder (`Slurm.env`). `python -m slurm install` installs Debian's packages; `packages` names them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hostlab import Lab
from hostlab.host import Host, wait_until
from hostlab.lab import search_path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
"""Needed with `accounting=True` only."""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
DAEMONS = ("slurmctld", "slurmscriptd", "slurmd", "munged", "slurmdbd", "mariadbd")
"""What runs on hosts as long as the cluster is up."""
STATE = Path("/run/distrun-slurm")
"""The launcher's files: in the lab's private /run, so no other lab has the same."""
NODE_MEMORY_MB = 4000
UP_S = 60.0

CONTROLLER = """\
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/{track}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ReturnToService=1
MpiDefault=none
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
OverTimeLimit=0
MinJobAge=3600
AccountingStorageType=accounting_storage/{accounting}
GresTypes=gpu
NodeName={nodes} CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=small Nodes={controller} MaxTime=5 State=UP PriorityTier=1
"""
"""slurm.conf. A node's processors may be more than the machine has (config_overrides)."""

CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
"""cgroup.conf: 22.05's slurmd looks for control groups also where nothing uses them, and ends if it finds none."""

CONFINED = "ConstrainCores=yes\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
GPUS = ("etc/slurm/gpu0", "etc/slurm/gpu1")
"""Files that Slurm takes for the devices of a node."""
GRES = "Name=gpu File=/etc/slurm/gpu[0-%d]\n" % (len(GPUS) - 1)

NODE = """\
set -e
mkdir -p /var/spool/slurmd /var/spool/slurmctld /etc/slurm /var/log
install -d -o munge -g munge -m 755 /run/munge
install -d -o munge -g munge -m 711 /var/lib/munge
install -d -o munge -g munge -m 700 /var/log/munge /etc/munge
base64 -d >/etc/munge/munge.key
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
setpriv --reuid=munge --regid=munge --clear-groups munged
"""
"""Run on a host, with the key as standard input."""

CONTROLLERS = ("cpuset", "memory", "freezer", "cpuacct", "devices")
GROUPS = """\
mountpoint -q /sys/fs/cgroup || mount -t tmpfs lab /sys/fs/cgroup
for name in %s; do
    mkdir -p /sys/fs/cgroup/$name
    mountpoint -q /sys/fs/cgroup/$name || mount -t cgroup -o $name lab /sys/fs/cgroup/$name
done
""" % " ".join(CONTROLLERS)
"""Run on a host: control groups are the machine's; a node's are named by the node (`slurm_h1`)."""

DATABASE = """\
set -e
install -d -o mysql -g mysql -m 755 /run/mysqld
setsid -f mariadbd --user=mysql --skip-networking --skip-log-bin --innodb-flush-log-at-trx-commit=0 \\
    </dev/null >/var/log/mariadbd.log 2>&1
until mariadb-admin ping >/dev/null 2>&1; do sleep 0.1; done
mariadb -e "create database if not exists slurm_acct_db;
    grant all on slurm_acct_db.* to slurm@localhost identified by 'x';"
chmod 600 /etc/slurm/slurmdbd.conf
slurmdbd
until sacctmgr -i list cluster >/dev/null 2>&1; do sleep 0.1; done
sacctmgr -i add cluster lab >/dev/null || true
"""


def missing(accounting: bool = False) -> str:
    """Return why there can be no cluster on this machine, or nothing."""
    programs = (*PROGRAMS, *(("slurmdbd", "mariadbd") if accounting else ()))
    absent = [program for program in programs if not shutil.which(program, path=search_path())]
    packages = (*PACKAGES, *(ACCOUNTING_PACKAGES if accounting else ()))
    return "Slurm needs Debian's packages %s (no %s here)" % (" ".join(packages), ", ".join(absent)) if absent else ""


def why_not_confined() -> str:
    """Return why control groups cannot hold jobs to their processors and memory on this machine, or nothing."""
    mounts = " && ".join("mount -t cgroup -o %s lab /mnt && umount /mnt" % name for name in CONTROLLERS)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    return "version 1 of control groups is not here: %s" % done.stderr.strip() if done.returncode else ""


def remove_groups(nodes: Iterable[str]) -> None:
    """Remove the control groups that a cluster has left, where the machine shows them."""
    for node in nodes:
        for folder in Path("/sys/fs/cgroup").glob("*/slurm_%s" % node):
            for path, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)


def install() -> None:
    """Install Debian's packages, as root. No service is started where a policy forbids it (`scripts/test` has one)."""
    words = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends"]
    words += [*PACKAGES, *ACCOUNTING_PACKAGES]
    subprocess.run(words, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=True)


class Slurm:
    """A running cluster. It ends with its lab.

    Arguments:
        lab: its hosts become nodes h1, h2, ...
        cpus: processors of each node, as Slurm sees them.
        accounting: with slurmdbd and MariaDB on the controller (2 s more).
        confined: jobs are held to their processors and memory by control groups. The machine must have `cpus`, and
            version 1 of control groups, see `why_not_confined`.
    """

    def __init__(self, lab: Lab, cpus: int = 4, accounting: bool = False, confined: bool = False) -> None:
        self.lab = lab
        self.controller = next(iter(lab.hosts.values()))
        names = list(lab.hosts)
        values = {
            "controller": self.controller.name,
            "nodes": "h[1-%d]" % len(names),
            "cpus": cpus,
            "memory": NODE_MEMORY_MB,
            "task": "affinity,task/cgroup" if confined else "none",
            "track": "cgroup" if confined else "linuxproc",
            "gpus": len(GPUS),
            "accounting": "slurmdbd\nAccountingStorageHost=%s" % self.controller.name if accounting else "none",
        }
        self._accounting = accounting
        self._files = {
            "slurm.conf": CONTROLLER.format_map(values),
            "cgroup.conf": CGROUPS + (CONFINED if confined else ""),
            "gres.conf": GRES,
        }
        if accounting:
            self._files["slurmdbd.conf"] = (
                "AuthType=auth/munge\nDbdHost=%s\nSlurmUser=root\nStorageType=accounting_storage/mysql\n"
                "StorageHost=localhost\nStorageUser=slurm\nStoragePass=x\nStorageLoc=slurm_acct_db\n"
                "LogFile=/var/log/slurmdbd.log\nPidFile=/run/slurmdbd.pid\n"
            ) % self.controller.name
        self._key = base64.b64encode(secrets.token_bytes(128)).decode()
        self._node = NODE + (GROUPS if confined else "")

    @property
    def env(self) -> Mapping[str, str]:
        """What the launcher's programs need to find the cluster."""
        return {"SLURM_CONF": str(STATE / "slurm.conf")}

    def up(self) -> None:
        """Start it; all nodes are idle then. LabError if they are not in time."""
        self._start_launcher()
        for host in self.lab.hosts.values():
            self._prepare(host)
        if self._accounting:
            self.controller.exec("sh", "-c", DATABASE)
        self.controller.exec("slurmctld")
        for host in self.lab.hosts.values():
            host.exec("slurmd", "-N", host.name)
        wait_until(lambda: self.idle() == list(self.lab.hosts), UP_S, "all nodes of Slurm are idle")

    def restart(self, host: Host) -> None:
        """Start a node again whose host has booted."""
        self._prepare(host)
        host.exec("slurmd", "-N", host.name)

    def idle(self) -> list[str]:
        """Return the nodes that are idle and answer."""
        told = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T", check=False)
        return sorted(line.split()[0] for line in told.splitlines() if line.endswith(" idle"))

    def run(self, *argv: str, text: str = "", check: bool = True) -> str:
        """Run a program as the launcher and return its stdout; LabError with its words if it fails."""
        return self.lab.inside(*argv, text=text, check=check, env=self.env)

    def jobs(self) -> list[str]:
        """Return the numbers of all jobs that wait, run or end."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def settle(self) -> None:
        """Cancel what there is and wait until all nodes are idle."""
        for job in self.jobs():
            self.run("scancel", "--signal=KILL", "--full", job, check=False)
            self.run("scancel", job, check=False)
        wait_until(lambda: not self.jobs() and len(self.idle()) == len(self.lab.hosts), UP_S, "Slurm is idle")

    def _prepare(self, host: Host) -> None:
        host.exec("sh", "-c", self._node, text=self._key)
        for name, text in self._files.items():
            (host.root / "etc/slurm" / name).write_text(text)
        for path in GPUS:
            host.exec("rm", "-f", "/" + path)
            host.exec("mknod", "-m", "666", "/" + path, "c", "1", "3")  # the null device

    def _start_launcher(self) -> None:
        """Give the launcher its configuration and a munged, both in the lab's own /run."""
        folder = self.lab.file(STATE)
        folder.mkdir(mode=0o755)
        for name, text in self._files.items():
            (folder / name).write_text(text)
        (folder / "munge.key").write_bytes(base64.b64decode(self._key))
        script = (
            "set -e; install -d -o munge -g munge -m 755 /run/munge; install -d -o munge -g munge -m 700 {0}/munge;"
            " chown munge:munge {0}/munge.key; chmod 400 {0}/munge.key; mv {0}/munge.key {0}/munge/;"
            " exec setpriv --reuid=munge --regid=munge --clear-groups munged --key-file={0}/munge/munge.key"
            " --seed-file={0}/munge/seed --log-file={0}/munge/log --pid-file={0}/munge/pid"
        )
        self.lab.inside("sh", "-c", script.format(STATE))


def main(words: Sequence[str]) -> int:
    """Do what the command line says."""
    if words == ["install"]:
        install()
    elif words == ["packages"]:
        print(*PACKAGES, *ACCOUNTING_PACKAGES)
    else:
        print("usage: python -m slurm install | packages", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
