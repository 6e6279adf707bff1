"""Launched jobs whose workers share stores in groups that overlap, end at different times, or have one member."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distrun_cli import PYTHON, Distrun

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
