"""Jobs on real hosts whose terminals close, whose clients or coordinator die, and whose hosts or links fail meanwhile.

After each: exit codes and causes as docs/failures.md says, and no process, no socket, no half-written file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from lab import Running, Site, wait_until
from labjob import ESCAPES, EVERYWHERE, LIMIT_S, OBEYS, SHORT, WHEN_TOLD, Job, nothing_remains, nothing_stays

ENDS = {
    signal.SIGINT: (130, True),
    signal.SIGTERM: (143, True),
    signal.SIGHUP: (129, True),
    signal.SIGQUIT: (129, False),
    signal.SIGKILL: (129, False),
}
"""By the signal that launch is sent: the job's exit code, and whether launch hears of it, and ends with the job."""


def name(number: int) -> str:
    return signal.Signals(number).name


def attached(lab: Site, job: str, *words: str) -> Running:
    """Start `distrun attach`; return when it shows the job."""
    running = lab.start("attach", "--since-start", *words, job)
    wait_until(lambda: running.out.count("| up") >= 2 or running.poll() is not None, LIMIT_S, "it shows the job")
    assert running.poll() is None, running.err
    return running


def only_job(lab: Site) -> str:
    (path,) = wait_until(lambda: list((lab.home_folder / "state/distrun/jobs").glob("*/control.json")), LIMIT_S)
    return str(path.parent.name)


# Terminals.


def test_a_job_is_left_by_closing_its_terminal_read_from_another_one_and_stopped_there(lab: Site) -> None:
    """What docs/jobs.md promises to a new user."""
    script = "for i in $(seq 2000); do echo step $i; sleep 0.1; done"
    words = ("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1", "--name", "mine", script)
    first = lab.in_terminal(*words, cwd=EVERYWHERE)
    first.expect("| step 3\r", 2)
    assert lab.distrun("detach", "mine").code == 0
    first.expect("goes on without this terminal; to come back: distrun attach " + only_job(lab))
    assert first.ends() == 0
    second = lab.in_terminal("attach", "--since-start", "mine")
    second.expect("| step 12\r", 2)
    merged = lab.distrun("logs", "--merge", "mine").out
    seen = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", second.shown).splitlines() if " | step" in line]
    assert len(seen) >= 24
    assert merged.splitlines()[: len(seen)] == seen
    for task in ("worker-0@h1", "worker-1@h2"):
        assert [line for line in seen if line.startswith(task)][:12] == [
            "%s | step %d" % (task, i + 1) for i in range(12)
        ]
    second.type("\x03")
    second.expect("[d]etach, [s]top the job, or [g]o on?")
    second.type("s")
    assert second.ends() == 130
    assert lab.distrun("wait", "mine").code == 130
    nothing_stays(lab)


# Signals to launch, and what other clients hear of it.


@pytest.mark.parametrize("number", ENDS, ids=name)
def test_a_signal_that_ends_launch_ends_its_job_and_other_clients_get_the_jobs_code(
    number: signal.Signals, lab: Site
) -> None:
    job = Job(lab, ESCAPES)
    other, waiting = attached(lab, job.id), lab.start("wait", job.id)
    job.running.signal(number)
    code, is_heard = ENDS[number]
    assert job.running.wait(LIMIT_S) == (code if is_heard else -number), job.err
    assert [other.wait(LIMIT_S), waiting.wait(LIMIT_S)] == [code, code], other.err
    assert (job.outcome["exit_code"], job.outcome["survivors"]) == (code, [])
    assert (name(number) if is_heard else "distrun launch was killed or crashed") in job.outcome["message"]
    nothing_remains(lab, job)


LOGS_IN = "import socket; held = socket.create_connection(('h1', 22)); held.recv(1); input()"
"""Python that holds a connection to h1 on which nobody logs in."""


def test_clients_follow_by_ssh_a_job_whose_host_drops_connections_when_it_has_too_many(lab: Site) -> None:
    job = Job(lab, "echo up; %secho over" % WHEN_TOLD, "--detach")
    lab["h1"].restart_sshd({"MaxStartups": "1:100:1"})
    busy = lab.spawn(sys.executable, "-c", LOGS_IN, stdin=subprocess.PIPE)
    wait_until(lab["h1"].sessions, LIMIT_S, "h1 has as many logins as it takes")
    clients = [lab.start("attach", "--since-start", "-q", job.id) for _ in range(2)]
    wait_until(lambda: "MaxStartups" in lab["h1"].log, LIMIT_S, "h1 drops a connection")
    busy.write(b"\n")
    wait_until(lambda: all(client.out.count("| up") == 2 for client in clients), LIMIT_S, "all show the job")
    job.go("h1", "h2")
    assert [client.wait(LIMIT_S) for client in clients] == [0, 0]
    assert {client.out.count("| over") for client in clients} == {2}
    assert not [client.err for client in clients if "kex_exchange" in client.err]
    nothing_remains(lab, job)


# Coordinators.


def test_a_coordinator_on_a_host_that_is_killed_is_lost_and_kill_ends_the_job(lab: Site) -> None:
    job = Job(lab, OBEYS, *SHORT, "--detach")
    other, waiting = attached(lab, job.id), lab.start("wait", job.id)
    os.kill(coordinator(lab, job), signal.SIGKILL)
    assert [other.wait(LIMIT_S), waiting.wait(LIMIT_S)] == [7, 7]
    assert re.search(r"its coordinator \(pid \d+ on \w+\) is gone", other.err), other.err
    # It was on a host: of that one it is only known when it last wrote.
    lab["h1"].exec("touch", "-d", "-60 seconds", "/root/.local/state/distrun/jobs/%s/state.json" % job.id)
    assert re.search(r"^%s +unknown " % job.id, lab.distrun("status", job.id).out)
    nothing_stays(lab)
    assert "distrun kill " + job.id in other.err
    assert lab.distrun("kill", job.id).code == 0
    assert job.outcome["message"] == "its launcher was gone; distrun kill ended what was left"
    nothing_remains(lab, job)


def coordinator(lab: Site, job: Job) -> int:
    """Return the machine's number of the job's coordinator."""
    where = json.loads((job.folder / "control.json").read_text())
    return next(each.pid for each in lab.processes(where["host"]) if each.inner == where["pid"])


def test_a_coordinator_that_is_stopped_for_longer_than_the_lease_loses_its_hosts(lab: Site) -> None:
    job = Job(lab, OBEYS, *SHORT, "--detach")
    pid = coordinator(lab, job)
    other = attached(lab, job.id)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not lab.marked(job.id), LIMIT_S, "the agents have ended their tasks")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert other.wait(LIMIT_S) == job.outcome["exit_code"] == 7, other.err
    assert re.match(r"lost h[12]: ", job.outcome["message"]), job.outcome
    nothing_remains(lab, job)


# Hosts and links of detached jobs.


def test_the_host_of_a_detached_jobs_coordinator_that_is_powered_off_ends_it_on_the_others(lab: Site) -> None:
    job = Job(lab, OBEYS, *SHORT, "--detach")
    other = attached(lab, job.id)
    lab["h1"].poweroff()
    assert other.wait(LIMIT_S) == 7, other.err
    wait_until(lambda: not lab.marked(job.id), LIMIT_S, "the agent of h2 has ended its task with its lease")
    killed = lab.distrun("kill", job.id)
    assert killed.code != 0
    assert "h1: cannot be asked" in killed.out + killed.err, killed.err


# Clocks.


WRAPPER = """#!/bin/sh
words=
while [ $# -gt 0 ] && [ "$1" != -c ]; do words="$words $1"; shift; done
[ $# -gt 0 ] || exec /usr/bin/python3 $words
code=$2; shift 2
exec /usr/bin/python3 $words -c %s"$code" "$@"
"""


def python_of_a_wrong_clock(lab: Site, host: str) -> str:
    """Make a python3 on a host whose clock is off by what is written to /tmp/clock there; return its path.

    A kernel has one clock for all hosts of a lab. What an agent sees of it is `time.time`.
    """
    code = (
        "import time as clock, os\n"
        "def off(right=clock.time):\n"
        "    with open('/tmp/clock') as file: return right() + float(file.read())\n"
        "clock.time = off\n"
    )
    path = lab[host].root / "tmp/python3"
    path.write_text(WRAPPER % shlex.quote(code))
    path.chmod(0o755)
    return "/tmp/python3"


def set_clock(lab: Site, host: str, off_s: float) -> None:
    (lab[host].root / "tmp/clock.new").write_text("%r" % off_s)
    (lab[host].root / "tmp/clock.new").rename(lab[host].root / "tmp/clock")


@pytest.mark.parametrize(("off_h", "words"), [(12, "ahead of"), (-12, "behind")])
def test_a_host_whose_clock_is_12_h_off_is_refused_with_what_sets_it(off_h: int, words: str, lab: Site) -> None:
    path = python_of_a_wrong_clock(lab, "h2")
    set_clock(lab, "h2", off_h * 3600.0)
    hosts = lab.hosts_file("h1", "h2 python=" + path)
    done = lab.distrun("launch", "-H", hosts, "-n", "2", "-s", "0", "hostname", cwd=EVERYWHERE)
    assert done.code == 3, done.err
    assert re.search(
        r"^h2 +clock .*the clock of h2 is 4(3200|3199|3201) s %s that of this machine" % words, done.err, re.M
    ), done.err
    assert "timedatectl set-ntp true" in done.err
    assert done.out == ""
    nothing_stays(lab)


@pytest.mark.parametrize("off_h", [12, -12])
def test_a_clock_that_is_set_by_12_h_during_a_job_ends_nothing_and_does_not_change_the_order(
    off_h: int, lab: Site
) -> None:
    path = python_of_a_wrong_clock(lab, "h2")
    set_clock(lab, "h2", 0.0)
    script = (
        "echo up; for i in $(seq 30); do echo step $i; sleep 0.1; done; %s[ $RANK = 0 ] || exit 4; sleep 0.2; exit 5"
        % WHEN_TOLD
    )
    job = Job(lab, script, hosts=["h1", "h2 python=" + path])  # 12 h are more than any limit: none need be short
    set_clock(lab, "h2", off_h * 3600.0)
    other = attached(lab, job.id)
    wait_until(lambda: other.out.count("| step 30") == 2 or other.poll() is not None, LIMIT_S, "it goes on")
    assert other.poll() is None, job.err
    job.go("h2", "h1")
    assert job.ends() == 4, job.err
    assert (other.wait(LIMIT_S), job.culprit) == (4, "worker-1@h2")
    assert re.search(r"the clock of h2 \(or of this machine\) was set by [+-]4(3200|3199|3201) s", job.err), job.err
    assert lab.distrun("logs", "--merge", job.id).out == other.out
    assert "step" in lab.distrun("logs", "--since", "1m", "--merge", job.id).out
    nothing_remains(lab, job)
