"""Brings up a real Grid Engine (Debian's 8.1.9) on the hosts of a lab.

h1 runs the queue master. Every host of the lab is an execution host with SLOTS slots; hosts and launcher submit. There
are the queue all.q and the parallel environments of ENVIRONMENTS. It ends with the lab, and nothing of the machine is
changed.

    PYTHONPATH=tests/lab python -m sge install     as root on Debian: the packages
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from hostlab import Host, Lab, LabError, Unavailable, layout
from hostlab.host import wait_until

PACKAGES = ("gridengine-client", "gridengine-exec", "gridengine-master")
MAIL = ("msmtp-mta", "bsd-mailx")
"""What Grid Engine mails with; without these apt installs a mail server."""
COMMON = "/var/lib/gridengine/default/common"
SPOOL = "/var/spool/gridengine/execd"
OWNER = "sgeadmin"
DAEMONS = ("sge_qmaster", "sge_execd")
"""Process names that are there as long as the lab is."""
SLOTS = 4
UP_S = 60.0

ENVIRONMENTS = {
    "mpi": ("$round_robin", "TRUE"),
    "fill": ("$fill_up", "TRUE"),
    "loose": ("$round_robin", "FALSE"),
    "smp": ("$pe_slots", "TRUE"),
}
"""Parallel environments by name: allocation rule, and whether `qrsh -inherit` may be used (control_slaves)."""

GLOBAL = {
    "load_report_time": "00:00:02",
    "max_unheard": "00:00:06",
    "reschedule_unknown": "00:00:00",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
    "joblog=false sharelog=00:00:00",
    "min_uid": "0",
    "min_gid": "0",
}
"""Lines of the cluster's configuration: jobs of root, accounting at once, a lost host noticed soon."""

SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "job_load_adjustments": "NONE",
}
"""Lines of the scheduler's configuration; by default it runs every 15 s."""

HOST = """\
hostname {host}
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""

ENVIRONMENT = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves {tight}
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""

QUEUE = {
    "qname": "all.q",
    "hostlist": "@allhosts",
    "load_thresholds": "NONE",  # a busy machine would close the queue
    "pe_list": " ".join(ENVIRONMENTS),
    "shell": "/bin/sh",
    "shell_start_mode": "unix_behavior",
}


def missing() -> str:
    """Return why Grid Engine cannot be brought up here, or nothing."""
    lacks = [name for name in ("sge_qmaster", "sge_execd", "qsub", "qconf") if not shutil.which(name, path=_path())]
    return f"Grid Engine needs Debian's packages {' '.join(PACKAGES)}" if lacks else ""


def install() -> None:
    """Install the packages, as root on Debian. No daemon starts where a policy forbids it (`scripts/test` has one)."""
    answers = [
        "gridengine-common shared/gridengineconfig boolean true",
        "gridengine-common shared/gridenginecell string default",
        *(f"gridengine-{name} shared/gridenginemaster string h1" for name in ("common", "client", "master")),
    ]
    subprocess.run(["debconf-set-selections"], input="\n".join(answers) + "\n", text=True, check=True, timeout=60)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    subprocess.run([*apt, "update"], check=False, timeout=300)  # the lists that are here may do
    words = [*apt, "install", "-y", "--no-install-recommends", *MAIL, *PACKAGES]
    subprocess.run(words, check=True, timeout=900, env=env, stdout=subprocess.DEVNULL)


def up(lab: Lab, common: Path, slots: int = SLOTS) -> None:
    """Bring Grid Engine up on a lab's hosts and wait until all of them take jobs.

    `common`: an empty folder that all hosts share with the launcher. It holds what hosts of a Grid Engine share: where
    the queue master is, and the accounting.

    Raises:
        Unavailable: it is not installed.
        LabError: it did not come up.
    """
    if why := missing():
        raise Unavailable(why)
    master, *_ = lab.hosts.values()
    shutil.copytree(COMMON, common, dirs_exist_ok=True)
    (common / "act_qmaster").write_text(master.name + "\n")
    for path in (common, *common.iterdir()):
        shutil.chown(path, OWNER, OWNER)  # the queue master writes there
    lab.inside("mount", "--bind", str(common), COMMON)
    _prepare(master, common)
    master.exec("sge_qmaster")
    wait_until(lambda: master.exec("qconf", "-sh", check=False), UP_S, "the queue master answers")
    _configure(master, list(lab.hosts), slots)
    for host in lab.hosts.values():
        _start_execd(host, common)
    wait_ready(lab)


def mend(lab: Lab, common: Path) -> None:
    """Start execution daemons again on hosts that were booted since; all queues open, all hosts ready.

    Raises LabError.
    """
    started = False
    for host in lab.hosts.values():
        if not any(process.name == "sge_execd" for process in host.processes()):
            _start_execd(host, common)
            started = True
    if started:
        wait_ready(lab)


def wait_ready(lab: Lab) -> None:
    """Wait until every host reports its load, and so takes jobs. Raises LabError."""
    master, *_ = lab.hosts.values()

    def is_ready() -> bool:
        # A host that has not reported has no architecture ("-NA-"), one that is not heard of any more has state u.
        lines = [line.split() for line in master.exec("qstat", "-f", check=False).splitlines() if "all.q@" in line]
        return len(lines) == len(lab.hosts) and all(len(line) == 5 and "NA" not in line[4] for line in lines)

    wait_until(is_ready, UP_S, "all hosts take jobs")


def clear(lab: Lab) -> None:
    """Delete all jobs of all users and wait until they are gone. Raises LabError."""
    master, *_ = lab.hosts.values()

    def is_empty() -> bool:
        if not master.exec("qstat", "-u", "*", check=False).strip():
            return True
        master.exec("qdel", "-f", "-u", "*", check=False)
        return False

    wait_until(is_empty, UP_S, "no job is left in Grid Engine")


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _prepare(host: Host, common: Path) -> None:
    host.exec("sh", "-c", f"mountpoint -q {COMMON} || mount --bind {common} {COMMON}")
    host.exec("install", "-d", "-o", OWNER, "-g", OWNER, "/run/gridengine", SPOOL)


def _start_execd(host: Host, common: Path) -> None:
    _prepare(host, common)
    host.exec("sge_execd")


def _configure(master: Host, hosts: list[str], slots: int) -> None:
    everyone = ",".join((*hosts, layout.LAUNCHER))
    master.exec("qconf", "-ah", everyone)
    master.exec("qconf", "-as", everyone)
    _apply(master, "-Mconf", "global", changed(master.exec("qconf", "-sconf"), GLOBAL))
    _apply(master, "-Msconf", "scheduler", changed(master.exec("qconf", "-ssconf"), SCHEDULER))
    for host in hosts:
        _apply(master, "-Ae", "host", HOST.format(host=host))
    _apply(master, "-Ahgrp", "hosts", "group_name @allhosts\nhostlist {}\n".format(" ".join(hosts)))
    for name, (rule, tight) in ENVIRONMENTS.items():
        _apply(master, "-Ap", "pe", ENVIRONMENT.format(name=name, rule=rule, tight=tight))
    # Without a name, -sq prints the template of a queue.
    _apply(master, "-Aq", "queue", changed(master.exec("qconf", "-sq"), {**QUEUE, "slots": str(slots)}))


def changed(text: str, values: dict[str, str]) -> str:
    """Return a configuration with these values in place of what it says."""
    joined = text.replace("\\\n", " ")
    kept = [line for line in joined.splitlines() if line.split() and line.split()[0] not in values and line[0] != "#"]
    return "".join(f"{line}\n" for line in (*kept, *(f"{name} {value}" for name, value in values.items())))


def _apply(master: Host, option: str, name: str, text: str) -> None:
    """Give `qconf` a file; with these options it opens no editor."""
    path = f"/tmp/{name}"
    master.exec("sh", "-c", f"cat >{path}", text=text)
    said = master.exec("sh", "-c", f"qconf {option} {path} 2>&1", check=False)
    if not any(word in said for word in ("added", "modified", "changed")):
        raise LabError(f"qconf {option}: {said.strip()}")


def main(words: Iterable[str]) -> int:
    """Do what the command line says; return the exit code."""
    if list(words) != ["install"]:
        print("usage: python -m sge install", file=sys.stderr)
        return 2
    if missing():
        install()
    if why := missing():
        print(f"sge: {why}", file=sys.stderr)
    return int(bool(missing()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
