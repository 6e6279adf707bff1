"""A task that is killed at any moment of a round, whichever way values travel: the others never take a wrong sum for a
right one, the job ends and names who died, and no process stays."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest
from distrun_cli import Distrun, processes, wait_until
from manual import ManualJob
from slowness import scaled

LIMIT_S = 60.0
"""For what takes a second or two on a machine that has nothing else to do."""
WORKERS, SERVERS = 3, 2
VICTIMS = [
    *("worker-%d" % rank for rank in range(WORKERS)),
    *("server-%d" % rank for rank in range(SERVERS)),
    "scheduler",
]

TRAIN = """\
import os
import sys

import numpy as np

from distrun_runtime import kvstore

form, folder = sys.argv[1:3]
kv = kvstore.create("dist_sync")
make = kv.empty if form in ("empty", "view") else lambda size: np.empty(size, np.float32)
sizes = [3, 1_000, 100_000, 600_001, 50]
keys = list(range(len(sizes)))
gradients, outs = [make(size) for size in sizes], [make(size) for size in sizes]
if form == "fp16":
    kv.set_gradient_compression({"type": "fp16", "two_way": True})
kv.init(keys, [np.zeros(size, np.float32) for size in sizes])


def value(key, number, factor):
    return float((number + key) % 50 * factor)  # float16 and float32 add such numbers exactly


def check(number, found):
    for key, array in zip(keys, found):
        expected = value(key, number, kv.num_workers * (kv.num_workers + 1) // 2)
        if not (np.asarray(array) == expected).all():
            print("WRONG: rank %d, round %d, key %d: %r, not %g" % (kv.rank, number, key, array, expected), flush=True)
            os._exit(99)


number = 0
while True:
    number += 1
    for key, gradient in zip(keys, gradients):
        gradient.fill(value(key, number, kv.rank + 1))
    if form == "view":
        pushed = kv.push(keys, gradients, wait=False)
        with kv.view(keys) as arrays:
            check(number, arrays)
        pushed.wait()
    elif form == "keys":
        calls = [kv.push(key, gradients[key], wait=False) for key in keys]
        calls += [kv.pull(key, out=outs[key], wait=False) for key in keys]
        for call in calls:
            call.wait()
        check(number, outs)
    elif form == "loop":
        for key in keys:
            kv.push(key, gradients[key])
            kv.pull(key, out=outs[key])
        check(number, outs)
    else:
        kv.pushpull(keys, gradients, out=outs)
        check(number, outs)
    if number == 3:
        open(os.path.join(folder, "up-%d" % kv.rank), "w").close()
"""

FORMS = ("list", "empty", "view", "keys", "loop", "fp16")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds tasks in /proc"),
]


def pid_of(distrun: Distrun, task: str) -> int:
    """Return the pid of a task: of its own process, not of an agent."""
    job = b"DISTRUN_JOB_ID=" + distrun.job.name.encode()
    role, _, rank = task.partition("-")
    wanted = {job, b"DMLC_ROLE=" + role.encode(), b"DISTRUN_RANK=" + (rank or "0").encode()}
    found = [pid for pid, environ, _ in processes() if wanted <= set(environ.split(b"\0"))]
    assert found, "no process of %s" % task
    return min(found)


# In shared memory every form is used once and every task dies once; elsewhere each kind of call and of task.
CASES = [
    *((form, "segments", victim) for form, victim in zip(FORMS, VICTIMS, strict=True)),
    *(("loop", "none", "server-1"), ("fp16", "none", "worker-2")),
    *(("view", "none", "scheduler"), ("keys", "none", "worker-0")),
]


@pytest.mark.parametrize(("form", "paths", "victim"), CASES)
def test_whoever_is_killed_whenever_no_wrong_sum_is_taken_and_nothing_stays(
    distrun: Distrun, form: str, paths: str, victim: str
) -> None:
    chance = random.Random("%s %s %s" % (form, paths, victim))
    (distrun.work / "train.py").write_text(TRAIN, "utf-8")
    words = ("-n", str(WORKERS), "-s", str(SERVERS), "--grace", "1", "--env", "DISTRUN_DATA_PATHS=%s" % paths)
    launcher = distrun.begin(*words, sys.executable, "train.py", form, ".")
    try:
        wait_until(lambda: len(list(distrun.work.glob("up-*"))) == WORKERS, LIMIT_S, "three rounds of every worker")
        time.sleep(chance.uniform(0, 0.2))  # Not for luck: it is killed at a moment that nobody has chosen.
        os.kill(pid_of(distrun, victim), signal.SIGKILL)
        code = launcher.wait(scaled(LIMIT_S))
    finally:
        launcher.kill()
        launcher.wait()
    out, err = (distrun.home / "out").read_text(), (distrun.home / "err").read_text()
    assert "WRONG" not in out, out
    assert code not in (0, 99), err
    assert victim in err, err


@pytest.mark.parametrize(
    ("form", "victim"),
    [("list", "server-0"), ("view", "worker-1"), ("keys", "scheduler-0"), ("fp16", "server-1"), ("list", "worker-2")],
)
def test_the_same_holds_where_workers_of_a_host_add_before_anything_leaves_it(form: str, victim: str) -> None:
    """Two hosts by name: each has two workers and a server, which stands in for the other one."""
    chance = random.Random("relays %s %s" % (form, victim))
    with ManualJob(4, SERVERS, PS_HEARTBEAT_INTERVAL="0.5", PS_HEARTBEAT_TIMEOUT="5") as job:
        script = job.script(TRAIN)
        job.start("scheduler")
        for rank in range(SERVERS):
            job.start("server", DMLC_RANK=str(rank), DISTRUN_HOST="host-%d" % rank)
        for rank in range(4):
            where = {"DMLC_RANK": str(rank), "DISTRUN_HOST": "host-%d" % (rank // 2)}
            job.start("worker", script, form, str(job.path("")), **where)
        wait_until(lambda: len(list(job.path("").glob("up-*"))) == 4, LIMIT_S, "three rounds of every worker")
        time.sleep(chance.uniform(0, 0.2))  # As above.
        job.processes[victim].kill()
        codes = dict(zip(job.processes, job.wait(), strict=True))
        said = {name: job.err(name) for name in codes}
        wrong = [job.out(name) for name in codes if "WRONG" in job.out(name)]
    assert not wrong
    workers = {name: code for name, code in codes.items() if name.startswith("worker") and name != victim}
    assert all(code not in (0, 99) for code in workers.values()), (victim, said)
    named = "scheduler" if victim == "scheduler-0" else victim
    assert all(named in said[name] for name in workers), said
