"""Failures on real hosts: whatever breaks, the job ends with the right code, the right culprit, and nothing stays."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hostlab import Options, Process
from lab import Running, Site, wait_until
from labjob import AGENT, ESCAPES, EVERYWHERE, LIMIT_S, OBEYS, SHORT, WHEN_TOLD, Job, nothing_stays

# Tasks.


# The launcher.


def test_a_killed_launcher_whose_hosts_hear_nothing_leaves_nothing(lab: Site) -> None:
    """A power cut where the launcher is: no end of input reaches the hosts; their lease runs out."""
    job = Job(lab, ESCAPES, *SHORT)
    for host in ("h1", "h2"):
        lab[host].down()
    job.running.signal(signal.SIGKILL)
    job.running.wait(LIMIT_S)
    assert len({process.host for process in lab.strangers()}) == 2
    nothing_stays(lab)


# Hosts that cannot be used at the start: nothing is started anywhere.


def frozen(lab: Site) -> None:
    lab["h2"].stop()


def test_all_bad_hosts_are_told_at_once_and_nothing_is_started(lab: Site) -> None:
    lab["h2"].reject(22)
    lab["h3"].boot(Options(python=False))
    lab["h4"].stop()
    hosts = lab.hosts_file("h1", "h2", "h3", "h4", "nobody-has-this-name")
    mark = EVERYWHERE / ("started-%d" % os.getpid())
    words = ("-n", "5", "-s", "0", "--connect-timeout", "10", "touch %s; sleep 0" % mark)
    done = lab.distrun("launch", "-H", hosts, *words, cwd=EVERYWHERE)
    assert done.code == 3
    rows = dict(line.split()[:2] for line in done.err.splitlines() if re.match(r"(h\d|nobody)\S* ", line))
    assert rows == {"h2": "refused", "h3": "python", "h4": "timeout", "nobody-has-this-name": "dns"}, done.err
    assert "nothing was started on any host" in done.err
    assert not (lab["h1"].root / str(mark).lstrip("/")).exists()
    lab["h4"].cont()
    nothing_stays(lab)


def test_a_folder_that_hosts_do_not_have_is_told_with_the_option_that_brings_it(lab: Site) -> None:
    done = lab.distrun("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "hostname")
    assert done.code == 3
    assert "--sync-dst-dir" in done.err


# Hosts that are lost midway.


def cut(lab: Site) -> None:
    lab["h2"].down()


def all_killed(lab: Site) -> None:
    lab["h2"].kill()


def power(lab: Site) -> None:
    lab["h2"].poweroff()


def session_killed(lab: Site) -> None:
    lab["h2"].kill_sessions()


# By openssh once in silence and once by the connection's end: the others look the same to it.
@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        *((fault, "fabric") for fault in (cut, all_killed, power, session_killed, frozen)),
        *((fault, "openssh") for fault in (cut, session_killed)),
    ],
)
def test_a_host_that_is_lost_ends_the_job_with_7_and_is_named(
    fault: Callable[[Site], None], transport: str, lab: Site
) -> None:
    job = Job(lab, ESCAPES, *SHORT, "--transport", transport, workers=3)
    fault(lab)
    assert job.running.wait(LIMIT_S) == 7, job.err
    assert "h2" in job.outcome["message"], job.outcome
    assert job.outcome["reason"] == "host_lost"
    if fault in (cut, power, frozen):
        assert job.err.index("h2 has been silent") < job.err.index("lost h2")
    others = lambda: {process.host for process in lab.strangers()} - {"h2"}  # noqa: E731
    wait_until(lambda: not others(), LIMIT_S, "the other hosts have ended theirs")
    # The lost side ends its tasks by itself: when its lease is over, or as soon as it runs again.
    lab["h2"].cont()
    wait_until(lambda: not lab.strangers(), LIMIT_S, "the lost host has ended its tasks")


def test_a_host_that_hears_nobody_ends_its_tasks_though_it_is_heard(lab: Site) -> None:
    """One direction only: the launcher's packets vanish, h2's arrive."""
    job = Job(lab, OBEYS, *SHORT)
    lab["h2"].drop("launcher")
    assert job.running.wait(LIMIT_S) == 7
    wait_until(lambda: not lab.strangers(), LIMIT_S, "the lost host has ended its tasks")


STORE = (
    "import numpy as np; from distrun_runtime import kvstore; kv = kvstore.create('dist_sync');"
    "kv.init('w', np.zeros(4)); kv.push('w', np.ones(4)); kv.pull('w', out=np.zeros(4)); print('up', flush=True);"
    "import time; time.sleep(300 if kv.rank == 1 else 0.3); kv.push('w', np.ones(4)); kv.pull('w', out=np.zeros(4))"
)
"""Three workers, of which two soon wait for worker-1's round."""
WITH_SERVER = ("-s", "1", "--python", sys.executable, "--", sys.executable, "-c")
SOON = ("--env", "PS_HEARTBEAT_INTERVAL=1", "--env", "PS_HEARTBEAT_TIMEOUT=5")
"""The store gives up a silent peer after 5 s, not 10."""


def test_a_worker_that_is_killed_is_the_culprit_though_others_fail_of_its_loss(lab: Site) -> None:
    job = Job(lab, STORE, *WITH_SERVER, workers=3, hosts=["h1", "h2", "h3", "h4"])
    os.kill(job.task("worker-1").pid, signal.SIGKILL)
    assert job.ends() == 137, job.err
    assert job.culprit == "worker-1@h3"
    nothing_stays(lab)


def test_a_frozen_host_of_the_scheduler_is_the_culprit_and_not_a_healthy_server(lab: Site) -> None:
    hosts = ["h1", "h2", "h3", "h4"]
    words = ("--scheduler-host", "h4", "--suspect-after", "4", "--lost-after", "12", "--connect-timeout", "3", *SOON)
    job = Job(lab, STORE, *words, *WITH_SERVER, workers=2, hosts=hosts)
    lab["h4"].stop()
    assert job.running.wait(2 * LIMIT_S) == 7, job.err
    assert job.outcome["message"].startswith("lost h4: silent for ")
    silences = [int(seconds) for seconds in re.findall(r"silent for (\d+) s(?: \(suspect\)|, and|;)", job.err)]
    assert silences == sorted(silences), job.err
    assert "running" not in {task["state"] for task in job.outcome["tasks"]}
    assert "running" not in lab.distrun("status", job.id).out
    lab["h4"].cont()
    nothing_stays(lab)


@pytest.mark.parametrize("name", ["scheduler", "server-0", "worker-1"])
def test_a_frozen_task_is_named_though_its_host_answers(name: str, lab: Site) -> None:
    job = Job(lab, STORE, *SOON, *WITH_SERVER, workers=3, hosts=["h1", "h2", "h3", "h4"])
    os.kill(job.task(name).pid, signal.SIGSTOP)
    assert job.ends() == 1, job.err
    assert job.culprit == name + ("@h3" if name == "worker-1" else "@h1")
    assert "although it ran" in job.outcome["message"]
    nothing_stays(lab)


def test_a_scheduler_that_is_told_to_end_is_named_and_no_server(lab: Site) -> None:
    job = Job(lab, STORE, *WITH_SERVER, workers=3, hosts=["h1", "h2", "h3", "h4"])
    os.kill(job.task("scheduler").pid, signal.SIGTERM)
    assert job.ends() == 1, job.err
    assert job.culprit == "scheduler@h1"
    assert job.outcome["message"].endswith("it was asked to end by SIGTERM, not by distrun")


def test_a_task_that_never_registers_is_named_and_not_the_scheduler(lab: Site) -> None:
    freezes = "import os; print('up', flush=True); os.environ['RANK'] == '1' and os.kill(os.getpid(), 19); "
    job = Job(
        lab, freezes + STORE.replace("print('up', flush=True);", ""), "--start-timeout", "5", *WITH_SERVER, workers=2
    )
    assert job.ends() == 1, job.err
    assert job.culprit == "worker-1@%s" % next(t["host"] for t in job.outcome["tasks"] if t["name"] == "worker-1")
    assert "registration ended after 5 s" in job.outcome["message"]


def test_a_silent_host_is_the_culprit_though_tasks_elsewhere_fail_of_its_loss_first(lab: Site) -> None:
    """The store's heartbeat gives up after some seconds, long before the host counts as lost."""
    words = ("--suspect-after", "3", "--lost-after", "60", "--connect-timeout", "3", *SOON)
    job = Job(lab, STORE, *words, *WITH_SERVER, workers=3, hosts=["h1", "h2", "h3", "h4"])
    lab["h3"].poweroff()
    assert job.running.wait(LIMIT_S) == 7, job.err
    assert "h3" in job.outcome["message"]
    nothing_stays(lab)


def test_a_worker_whose_host_was_cut_off_for_a_while_is_named_and_not_the_scheduler(lab: Site) -> None:
    """It lost the scheduler, and may say so first; all others lost only it."""
    job = Job(lab, STORE, *SOON, *WITH_SERVER, workers=3, hosts=["h1", "h2", "h3", "h4"])
    lab["h3"].down()
    wait_until(lambda: "worker-1@h3" in job.err, LIMIT_S, "the others say that they lost it")
    lab["h3"].up()
    assert job.running.wait(LIMIT_S) in (1, 7), job.err
    culprit = job.outcome["culprit"]
    assert culprit["host"] == "h3", job.outcome["message"]
    nothing_stays(lab)


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
def test_a_suspect_host_that_comes_back_in_time_loses_no_line(transport: str, lab: Site) -> None:
    count = 1000
    script = "echo up; for i in $(seq %d); do echo line $i; sleep 0.002; done; echo end" % count
    job = Job(lab, script, "--suspect-after", "1", "--lost-after", "60", "--transport", transport)
    lab["h2"].down()
    wait_until(lambda: "h2 has been silent" in job.err, LIMIT_S, "h2 is suspect")
    lab["h2"].up()
    assert job.ends(100) == 0, job.err
    for task in ("worker-0@h1", "worker-1@h2"):
        lines = [line.split(" | ")[1] for line in job.out.splitlines() if line.startswith(task)]
        assert lines == ["up", *("line %d" % (i + 1) for i in range(count)), "end"]
    for task in ("worker-0", "worker-1"):
        assert (job.folder / "logs" / (task + ".log")).read_text().count("\n") == count + 2


def test_a_job_goes_on_over_a_slow_network_that_loses_packets(lab: Site) -> None:
    lab["h2"].delay(40, 10, 60)
    lab["h1"].loss(5)
    script = "for i in $(seq 300); do echo $i; done"
    done = lab.distrun("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", script, cwd=EVERYWHERE)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 600


def test_sshd_may_restart_while_a_job_runs(lab: Site) -> None:
    job = Job(lab, "echo up; " + WHEN_TOLD)
    lab["h2"].restart_sshd()
    job.go("h1", "h2")
    assert job.ends() == 0


# Connections that are made again (--reconnect).

COUNTS = "echo up; for i in $(seq 1000); do echo line $i; sleep 0.002; done; " + WHEN_TOLD + "echo end"
LINES = ["up", *("line %d" % (i + 1) for i in range(1000)), "end"]


def lines(job: Job, task: str) -> list[str]:
    return [line.split(" | ")[1] for line in job.out.splitlines() if line.startswith(task)]


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
def test_a_connection_that_is_killed_in_the_middle_of_output_is_made_again_and_no_line_is_lost(
    transport: str, lab: Site
) -> None:
    job = Job(lab, COUNTS, "--reconnect", "--transport", transport)
    for _ in range(2):
        above = agents(lab, "h2")[0].parent  # the sshd process of this connection
        count = job.err.count("h2: reconnected after")
        os.kill(connection_of(lab, above), signal.SIGKILL)
        wait_until(lambda count=count: job.err.count("h2: reconnected after") > count, LIMIT_S, "h2 is back")  # type: ignore[misc]
    assert "h2: connection lost, trying again" in job.err
    job.go("h1", "h2")
    assert job.ends() == 0, job.err
    for task in ("worker-0@h1", "worker-1@h2"):
        assert lines(job, task) == LINES
    nothing_stays(lab)


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
def test_a_link_that_is_cut_for_less_than_the_lease_costs_no_line(transport: str, lab: Site) -> None:
    """The lease is 30 s; after a third of it the silent connection is given up, and another one is made."""
    words = ("--suspect-after", "2", "--lost-after", "20", "--connect-timeout", "2", "--transport", transport)
    job = Job(lab, COUNTS, "--reconnect", *words)
    lab["h2"].down()
    wait_until(lambda: "h2: connection lost" in job.err, LIMIT_S, "the cut is noticed")
    lab["h2"].up()
    wait_until(lambda: "h2: reconnected after" in job.err, LIMIT_S, "h2 is back")
    job.go("h1", "h2")
    assert job.ends() == 0, job.err
    for task in ("worker-0@h1", "worker-1@h2"):
        assert lines(job, task) == LINES
    nothing_stays(lab)


def test_a_link_that_is_cut_for_longer_than_the_lease_loses_the_host(lab: Site) -> None:
    job = Job(lab, OBEYS, "--reconnect", *SHORT)
    lab["h2"].down()
    assert job.running.wait(LIMIT_S) == 7, job.err
    assert "h2: connection lost, trying again" in job.err
    assert "h2" in job.outcome["message"]
    lab["h2"].up()
    nothing_stays(lab)  # the lease of the agent on h2 has ended


def test_the_agents_of_a_coordinator_that_was_killed_end_all_with_their_leases(lab: Site) -> None:
    job = Job(lab, OBEYS, "--reconnect", *SHORT)
    os.kill(job.running.coordinator(), signal.SIGKILL)
    assert job.running.wait(LIMIT_S) == 8, job.err
    assert job.lab.marked(job.id), "its tasks go on until then"
    nothing_stays(lab)


def test_a_job_that_is_stopped_while_a_connection_is_cut_leaves_nothing(lab: Site) -> None:
    job = Job(lab, OBEYS, "--reconnect", *SHORT)
    lab["h2"].down()
    wait_until(lambda: "h2: connection lost" in job.err, LIMIT_S, "the cut is noticed")
    job.running.signal(signal.SIGINT)
    lab["h2"].up()
    assert job.running.wait(LIMIT_S) == 130, job.err
    nothing_stays(lab)


def connection_of(lab: Site, pid: int) -> int:
    """Return the newest process of sshd on h2 that carries a connection of a job: the relay's, or else the agent's."""
    relays = [each for each in lab.strangers() if each.host == "h2" and b"copy(s.recv" in each.command]
    return relays[0].parent if relays else pid


# The agents.


def agents(lab: Site, host: str) -> list[Process]:
    """Guard and agent of a host, in this order: each starts the next."""
    found = [process for process in lab.strangers() if process.host == host and AGENT in process.command]
    pids = {process.pid for process in found}
    return sorted(found, key=lambda process: process.parent in pids)


# Agents and guards that froze: nothing ends by itself there.


def freeze(lab: Site, host: str, *, agent: int = 0, guard: int = 0) -> None:
    """Send signals to the agent and the guard of a host."""
    found = agents(lab, host)
    assert len(found) == 2, [str(process) for process in lab.strangers()]
    # Who is to be stopped comes first: it would end by itself when the other one dies.
    pairs = sorted(zip((guard, agent), found, strict=True), key=lambda pair: pair[0] != signal.SIGSTOP)
    for number, process in pairs:
        if number:
            os.kill(process.pid, number)


@pytest.mark.parametrize(
    ("agent", "guard", "transport"),
    [
        (signal.SIGSTOP, 0, "fabric"),
        (signal.SIGSTOP, signal.SIGSTOP, "openssh"),
        (signal.SIGKILL, signal.SIGSTOP, "fabric"),
        (signal.SIGSTOP, signal.SIGKILL, "openssh"),
    ],
)
def test_a_host_whose_agent_froze_is_swept_and_that_is_said(agent: int, guard: int, transport: str, lab: Site) -> None:
    job = Job(lab, OBEYS, *SHORT, "--transport", transport)
    freeze(lab, "h2", agent=agent, guard=guard)
    assert job.ends() == 7, job.err
    nothing_stays(lab)
    assert job.outcome["survivors"] == []
    assert "its own agent ends" not in job.err
    if guard == 0 and "; no process is left there" in job.outcome["message"]:
        return  # a guard that runs ends all when the agent's lease is over, which may be before h2 is reached again
    assert re.search(r"lost h2: .*; \d+ process(es)? left there w(ere|as) ended$", job.outcome["message"]), job.outcome
    assert re.search(r"distrun: h2: ended .*pid \d+ \(distrun's (agent|guard)\)", job.err), job.err


def test_a_lost_host_that_cannot_be_reached_again_is_said_to_be_so_with_what_to_do(lab: Site) -> None:
    job = Job(lab, OBEYS, *SHORT)
    lab["h2"].poweroff()
    assert job.running.wait(LIMIT_S) == 7, job.err
    fix = "; to make sure: distrun kill " + job.id
    assert "it cannot be reached again: if that machine still runs" in job.outcome["message"]
    assert job.outcome["message"].endswith("ends the tasks there within 9 s" + fix)
    assert job.outcome["survivors"] == [{"what": f"worker-1 (pid {job.pid('worker-1')})", "host": "h2"}]
    assert {task["state"] for task in job.outcome["tasks"]} == {"stopped", "failed"}


def test_a_secret_is_on_no_command_line_and_in_no_file_of_any_host(lab: Site) -> None:
    secret = "hunter2-%d-of-the-lab" % time.monotonic_ns()
    script = 'echo up; [ -n "$LAB_API_TOKEN" ] && echo right; until [ -e /tmp/go ]; do sleep 0.05; done'
    words = ("--env", "LAB_API_TOKEN", "-s", "1", "--python", sys.executable)
    seen: set[Process] = set()
    names = ("LAB_API_TOKEN", "MXNET_PASSWORD", "PS_SOMETHING", "AWS_SECRET_ACCESS_KEY")
    job = Job(lab, script, *words, env=dict.fromkeys(names, secret), hosts=["h1", "h2", "h3"])
    end = time.monotonic() + 1
    while time.monotonic() < end:
        seen |= set(lab.processes())
        time.sleep(0.05)
    assert len({process.host for process in seen}) >= 4
    assert [str(process) for process in seen if secret.encode() in process.command] == []
    files = "find /tmp /var/tmp /run /root /home /dev/shm -xdev -type f -exec grep -l '%s' {} +" % secret
    for host in ("h1", "h2", "h3"):
        found = lab[host].exec("sh", "-c", files, check=False)
        assert found == "", found
    job.go("h1", "h2", "h3")
    assert job.ends() == 0, job.err
    assert job.out.count("| right") == 2
    here = ["grep", "-rl", secret, str(lab.home_folder), lab.cache]
    assert subprocess.run(here, capture_output=True, check=False).stdout == b""
    assert secret not in job.out + job.err


def test_a_job_that_distrun_kill_ends_on_its_hosts_is_killed_and_no_host_is_lost(lab: Site) -> None:
    job = Job(lab, OBEYS)
    done = lab.distrun("kill", "-H", lab.hosts_file("h2"), "-y")
    assert done.code == 0, done.err
    assert job.ends() == 143, job.err
    assert (job.outcome["reason"], job.outcome["message"]) == ("terminated", "stopped by distrun kill on h2")
    assert "lost h2" not in job.err
    shown = lab.distrun("status", job.id).out
    assert re.search(r"^%s +killed " % job.id, shown), shown
    nothing_stays(lab)


# Memory, disks, terminals, several jobs.


def test_a_worker_that_the_kernel_kills_for_its_memory_is_named_with_that_guess(lab: Site) -> None:
    lab["h2"].mem(150)
    grow = "exec /usr/bin/python3 -c 'import time; x = bytearray(200 << 20); time.sleep(300)'"
    job = Job(lab, "echo up; [ $DMLC_RANK = 0 ] && exec sleep 300; %s%s" % (WHEN_TOLD, grow))
    job.go("h2")
    assert job.ends() == 137
    assert job.culprit == "worker-1@h2"
    assert "memory" in job.err


def test_a_host_that_cannot_start_more_processes_ends_the_job(lab: Site) -> None:
    lab["h2"].pids(30)
    script = "echo up; [ $DMLC_RANK = 0 ] && exec sleep 300; for i in $(seq 60); do sleep 300 & done; exec sleep 300"
    launch = lab.start(
        *("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1", script), cwd=EVERYWHERE
    )
    wait_until(lambda: launch.out.count("| up") == 2 or launch.poll() is not None, LIMIT_S)
    launch.signal(signal.SIGTERM)
    assert launch.wait(LIMIT_S) in (143, 254, 1), launch.err
    nothing_stays(lab)


def test_a_full_disk_on_a_host_loses_no_output_and_ends_no_job(lab: Site) -> None:
    lab["h2"].disk(1)
    lab["h2"].disk(1, "/run")
    script = "echo up; for i in $(seq 40000); do echo line $i of a long text that fills the disk; done; exit 0"
    job = Job(lab, script)
    assert job.ends() == 0, job.err
    for task in ("worker-0@h1", "worker-1@h2"):
        assert sum(line.startswith(task + " | line") for line in job.out.splitlines()) == 40000


def test_a_host_whose_disk_is_full_from_the_start_is_told(lab: Site) -> None:
    for path in ("/tmp", "/run", "/root"):
        lab["h2"].disk(1, path)
        lab["h2"].exec("sh", "-c", "head -c 2000000 /dev/zero >%s/full 2>/dev/null; true" % path)
    done = lab.distrun(
        "launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "hostname; true", cwd=EVERYWHERE
    )
    told = [line.split()[1] for line in done.err.splitlines() if line.startswith("h2 ")]
    assert (done.code, told) == (3, ["disk"]), done.err
    lab["h2"].exec("rm", "-f", "/tmp/full", "/run/full", "/root/full")


OPENS = (
    "import numpy as np; from distrun_runtime import kvstore; kv = kvstore.create('dist_sync');"
    "kv.init('w', np.zeros(4)); out = np.zeros(4);"
)


def training(lab: Site, code: str, *words: str) -> Running:
    """Start a job on two hosts whose workers open a store and run this."""
    script = "exec %s -c %s" % (shlex.quote(sys.executable), '"%s"' % (OPENS + code))
    words = ("-H", lab.hosts_file("h1", "h2"), "--python", sys.executable, *words)
    return lab.start("launch", *words, script, cwd=EVERYWHERE)


def test_two_jobs_with_servers_on_the_same_hosts_both_end_well(lab: Site) -> None:
    code = "kv.push('w', np.ones(4)); kv.pull('w', out=out); assert out[0] == 2, out; kv.barrier()"
    jobs = [training(lab, code, "-n", "2", "-s", "2") for _ in range(2)]
    assert [job.wait(LIMIT_S) for job in jobs] == [0, 0], "\n".join(job.err + job.out for job in jobs)
    nothing_stays(lab)


@pytest.mark.parametrize("is_narrow", [False, True], ids=["wide", "narrow"])
def test_nodes_of_two_hosts_talk_by_tcp_of_their_own_where_the_range_of_ports_has_room(
    lab: Site, is_narrow: bool
) -> None:
    """A second port never takes the place of the first one of another node."""
    code = "[kv.pushpull('w', np.ones(4), out=out) for _ in range(300)]; assert out[0] == 2, out; kv.barrier()"
    ports = ("--port-range", "41000-41002" if is_narrow else "41000-41003")
    job = training(lab, code, "-n", "2", "-s", "1", *ports, "--env", "PS_VERBOSE=1")
    assert job.wait(LIMIT_S) == 0, job.err + job.out
    far = [line for line in job.err.splitlines() if re.match(r"worker-.@h2 ", line)]
    paths = set(re.findall(r"event=path link=server-0 path=(tcp|unix|zeromq)", "\n".join(far)))
    assert paths == {"zeromq" if is_narrow else "tcp"}, job.err
    nothing_stays(lab)


def test_a_host_with_several_workers_and_no_server_gets_one_that_adds_for_them(lab: Site) -> None:
    code = (
        "[kv.pushpull('w', np.ones(4), out=out) for _ in range(3)]; assert out[0] == 4, out; kv.barrier();"
        "print(*sorted(each['host'] for each in kv.stats()), [each['keys'] for each in kv.stats()])"
    )
    job = training(lab, code, "-n", "4", "-s", "1")
    assert job.wait(LIMIT_S) == 0, job.err + job.out
    assert job.out.count("| h1 h2 [1, 0]") == 4, job.out
    nothing_stays(lab)
