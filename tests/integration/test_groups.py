"""Launched jobs whose workers share stores in groups that overlap, end at different times, or have one member."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from distrun_cli import PYTHON, Distrun
from manual import ManualJob

SCRIPT = """
import os, sys
import numpy as np
from distrun_runtime import kvstore

me = int(os.environ["DMLC_RANK"])

def trained(kv, rounds):
    kv.init("w", np.zeros(3000, np.float32))
    kv.set_optimizer("sgd", learning_rate=1.0)
    out = np.empty(3000, np.float32)
    for number in range(rounds):
        kv.push("w", np.full(3000, 1 + me, np.float32))
        kv.pull("w", out)
    kv.barrier()
    assert len(set(out.tolist())) == 1
    return float(out[0])

found = {}
if me != 1:
    with kvstore.create("dist_sync", group="ends", members=[2, 0]) as ends:
        found["ends"] = ends.rank, ends.num_workers, ends.members, trained(ends, 4)
with kvstore.create("dist_sync", group="alone-%d" % me, members=[me]) as alone:
    found["alone"] = alone.rank, alone.num_workers, alone.members, trained(alone, 2)
if me == 0:
    print(found)
    sys.exit()
low = kvstore.create("dist_sync", group="rest", members=[1, 2])
found["rest"] = low.rank, low.num_workers, low.members, trained(low, 3)
print(found)
"""

FAILING = """
import os, sys, time
import numpy as np
from distrun_runtime import kvstore

me = int(os.environ["DMLC_RANK"])
if me == 2:
    kvstore.create("dist_sync", group="alone", members=[2])
    raise ValueError("my bug")
kv = kvstore.create("dist_sync", group="pair", members=[0, 1])
kv.init("w", np.zeros(3, np.float32))
while True:
    kv.push("w", np.ones(3, np.float32))
    kv.pull("w", np.empty(3, np.float32))
    time.sleep(0.01)
"""


KILLED = """
    import os, time
    import numpy as np
    from distrun_runtime import kvstore
    from distrun_runtime.errors import PeerLost

    me = int(os.environ["DMLC_RANK"])
    out = np.empty(2)
    if me > 0:
        late = kvstore.create("dist_sync", group="late", members=[1, 2])
        late.init("w", np.zeros(2))
    if me == 2:
        print("ready", flush=True)
        time.sleep(60)
    pair = kvstore.create("dist_sync", group="pair", members=[0, 1])
    pair.init("w", np.zeros(2))
    print("init", flush=True)
    if me == 1:
        try:
            late.push("w", np.ones(2))
            late.pull("w", out)
        except PeerLost as err:
            print("lost:", err.lost_peer + ":", err, flush=True)
    for _ in range(5):
        pair.push("w", np.full(2, 4.0))
        pair.pull("w", out)
    print("pair", out.tolist(), flush=True)
"""


@pytest.fixture
def distrun(tmp_path: Path) -> Distrun:
    found = Distrun(tmp_path)
    (found.work / "groups.py").write_text(SCRIPT)
    (found.work / "failing.py").write_text(FAILING)
    return found


def test_workers_train_in_groups_beside_each_other(distrun: Distrun) -> None:
    done = distrun.launch("-n", "3", "-s", "2", "--launcher", "local", PYTHON, "groups.py")
    assert done.returncode == 0, done.stderr
    found = [distrun.log("worker-%d" % rank).decode().strip() for rank in range(3)]
    ends, rest = "[0, 2], -16.0", "[1, 2], -15.0"
    assert found == [
        "{'ends': (0, 2, %s), 'alone': (0, 1, [0], -2.0)}" % ends,
        "{'alone': (0, 1, [1], -4.0), 'rest': (0, 2, %s)}" % rest,
        "{'ends': (1, 2, %s), 'alone': (0, 1, [2], -6.0), 'rest': (1, 2, %s)}" % (ends, rest),
    ]


def test_a_worker_that_fails_ends_the_job_also_if_others_share_no_store_with_it(distrun: Distrun) -> None:
    done = distrun.launch("--json", "-n", "3", "-s", "2", "--launcher", "local", PYTHON, "failing.py")
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, outcome["culprit"]["task"]) == (1, "worker-2"), outcome


def test_a_worker_that_is_killed_ends_only_the_groups_that_it_shares_where_nothing_else_ends_the_job() -> None:
    """Started by hand. Worker 2 shares a store with worker 1, and worker 1 one with worker 0."""
    with ManualJob(workers=3, servers=1) as job:
        for role in ("scheduler", "server"):
            job.start(role)
        script = job.script(KILLED)
        for rank in range(3):
            job.start("worker", script, DMLC_RANK=str(rank))
        job.until("worker-2", "ready")
        job.until("worker-0", "init")
        job.processes["worker-2"].kill()
        assert job.wait("worker-0", "worker-1", "server-0", "scheduler-0") == [0, 0, 1, 1], job.report()
        lost = re.search(r"lost: worker-\d: .*worker-\d@.* is lost: .*", job.out("worker-1"))
        assert lost, job.report()
        assert "pair [8.0, 8.0]" in job.out("worker-0")
        assert "error" not in job.err("worker-0"), "this does not concern it"
