"""A job on the lab's hosts, and what it may not leave behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostlab import Process
from lab import Running, Site, wait_until

from distrun_runtime.agent import stopping
from distrun_runtime.contract import facts

EVERYWHERE = Path("/tmp")
"""A folder that launcher and hosts have, each its own."""

OBEYS = "echo up; sleep 300 & wait"
STUBBORN = "trap '' TERM INT HUP; echo up; while :; do sleep 0.1; done"
ESCAPES = (
    "(setsid bash -c \"trap '' TERM INT HUP; while :; do sleep 0.1; done\" >/dev/null 2>&1 &); "
    "(setsid bash -c 'nohup sleep 301 >/dev/null 2>&1 & disown') ; "
    "env -i $(command -v setsid) $(command -v sleep) 302 & " + OBEYS
)
SHORT = ("--suspect-after", "2", "--lost-after", "6", "--connect-timeout", "3")
"""A host is lost after 6 s of silence; its own tasks end 9 s after they last heard of the launcher."""
AGENT = stopping.AGENT.encode()
"""Part of the command line of agents and guards."""
LIMIT_S = 60.0
"""For what takes some seconds on a machine that has nothing else to do."""
WHEN_TOLD = "until [ -e /tmp/go ]; do sleep 0.05; done; rm /tmp/go; "
"""Before a task fails: until then all are up."""


class Job:
    """A job over ssh, worker N on host N+1 unless there are servers; started, and by then all its workers are up.

    With the word `--detach`, it is a detached one: `running` has ended with 0.
    """

    def __init__(self, lab: Site, script: str, *words: str, workers: int = 2, hosts: Sequence[str] = (), **more: Any):
        self.lab = lab
        self.workers = workers
        hosts = hosts or list(lab.hosts)[: max(2, workers)]
        if "/tmp/go" in script:
            for host in {*hosts} & {*lab.hosts}:
                lab[host].exec("rm", "-f", "/tmp/go")
        told = ("-n", str(workers), "-s", "0", "--grace", "1", *words, script)
        more.setdefault("cwd", EVERYWHERE)
        self.running: Running = lab.start("launch", "-H", lab.hosts_file(*hosts), *told, **more)
        if "--detach" in words:
            assert self.running.wait(LIMIT_S) == 0, self.err
            return
        wait_until(self._is_up, LIMIT_S, "all workers are up")
        assert self.running.poll() is None, self.err

    def _is_up(self) -> bool:
        return self.running.poll() is not None or len(re.findall(r"\| up$", self.out, re.M)) == self.workers

    @property
    def out(self) -> str:
        return self.running.out

    @property
    def err(self) -> str:
        return self.running.err

    @property
    def id(self) -> str:
        found = re.search(r"distrun: job (\S+) ", self.err)
        assert found, self.err
        return found[1]

    @property
    def folder(self) -> Path:
        return self.lab.home_folder / "state" / "distrun" / "jobs" / self.id

    @property
    def outcome(self) -> dict[str, Any]:
        return json.loads((self.folder / "outcome.json").read_text())

    @property
    def culprit(self) -> str | None:
        """The task that is named, as task@host."""
        found = self.outcome["culprit"]
        return found and "%s@%s" % (found["task"], found["host"])

    def task(self, name: str) -> Process:
        """The process of a task."""
        mark = name.split("-")
        for process in self.lab.marked(self.id):
            env = process.environ()
            leads = env.get(b"DISTRUN_ROLE", env.get(b"DMLC_ROLE")) == mark[0].encode()
            if leads and (len(mark) == 1 or env.get(b"DISTRUN_RANK") == mark[1].encode()):
                return process
        raise AssertionError("no process of %s among: %s" % (name, "; ".join(map(str, self.lab.marked()))))

    def pid(self, name: str) -> int:
        """The process id that the outcome tells of a task."""
        return int(next(task["pid"] for task in self.outcome["tasks"] if task["name"] == name))

    def go(self, *hosts: str) -> None:
        """Let the tasks of some hosts go on that wait for it."""
        for host in hosts:
            self.lab[host].exec("touch", "/tmp/go")

    def ends(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the launcher's end; when it has ended nothing of the job may live where it could be reached."""
        code = self.running.wait(limit_s)
        assert self.lab.marked(self.id) == []
        return code


def nothing_stays(lab: Site, limit_s: float = LIMIT_S) -> None:
    wait_until(lambda: not lab.leftovers(), limit_s, "nothing is left")


def nothing_remains(lab: Site, job: Job) -> None:
    """After a job: no process, no socket, no private folder, no half-written file; it has an outcome."""
    nothing_stays(lab)
    places = [lab.file("/var/tmp"), *(lab[host].root / "var/tmp" for host in lab.hosts if lab[host].processes())]
    pattern = "distrun-%d/%s*" % (os.geteuid(), job.id)
    wait_until(lambda: not [path for place in places for path in place.glob(pattern)], LIMIT_S, "its files are gone")
    assert not list(job.folder.rglob("*.tmp"))
    assert job.outcome["id"] == job.id
    assert json.loads((job.folder / "state.json").read_text())["state"] in facts.OVER
