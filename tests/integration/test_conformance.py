"""MXNet's conformance tests as its CI runs them: seven workers and seven servers on one machine, by the launcher.

One job runs all of them, tests/integration/conformance/job.py; docs/conformance.md has the whole table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT

import pytest
from manual import ManualJob
from slowness import scaled

SCRIPT = Path(__file__).parent / "conformance" / "job.py"
SUPPORT = Path(__file__).parents[1] / "support"
SEVEN = 7
PARTS = [
    "trainer_reset",
    "invalid_pull",
    "gluon_type_cpu",
    "gluon_step_cpu",
    "gluon_sparse_step_cpu",
    "async_trainer",
    "gluon_trainer_type",
    "profiled",
    "default_cpu",
    "check_row_sparse_keys",
    "check_row_sparse_keys_with_zeros",
    "check_big_row_sparse_keys",
    "device_push_pull",
    "custom_broadcast_pushpull",
    "compressed_own",
    "compressed_cpu_1bit",
    "compressed_cpu_2bit",
    "many_keys_of_init",
]


@pytest.fixture(scope="module")
def said() -> Iterator[str]:
    """Run the job; yield what it wrote."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)
        patch.setenv("TRACES", folder + "/traces:of,all")
        # As there: large values are on all seven servers. Jobs in threads have both ways of placing them.
        patch.setenv("DISTRUN_PARTITION", "mxnet")
        # Large values are copied and added by three threads of each process.
        patch.setenv("DISTRUN_COPY_THREADS", "3")
        # Calls that are planned and others come in any order.
        patch.setenv("PYTHONPATH", str(SUPPORT / "alternating"), prepend=os.pathsep)
        # numpy's loops: fourteen processes would compile or load numba's, which give the same bytes (test_compiled.py).
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        command = [sys.executable, "-m", "distrun", "launch", "-n", str(SEVEN), "--launcher", "local"]
        done = subprocess.run(
            [*command, sys.executable, str(SCRIPT), *PARTS],
            capture_output=True,
            text=True,
            timeout=scaled(280),
            check=False,
        )
        yield done.stdout + done.stderr + "\nexit code %d" % done.returncode


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_seven_workers_and_seven_servers_are_exact(said: str, part: str) -> None:
    for rank in range(SEVEN):
        assert "%s: exact on worker %d of %d" % (part, rank, SEVEN) in said, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_job_of_seven_workers_and_seven_servers_ends_well(said: str) -> None:
    assert said.endswith("exit code 0"), said


BLOCKED = """
    import os
    import numpy as np
    from distrun_runtime import kvstore

    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4, "float32"))
    kv.push("w", np.ones(4, "float32")) if kv.rank == 0 else None
    kv.barrier()
    print("ready as rank %d of process %d" % (kv.rank, os.getpid()), flush=True)
    if kv.rank == 0:
        kv.pull("w", np.zeros(4, "float32"))
    else:
        HOW
"""


def ranks(job: ManualJob) -> tuple[str, str]:
    """Return the names of the processes of ranks 0 and 1, both ready."""
    for name in ("worker-0", "worker-1"):
        job.until(name, "ready as rank")
    names = ["worker-0", "worker-1"] if "ready as rank 0" in job.out("worker-0") else ["worker-1", "worker-0"]
    return names[0], names[1]


def test_ctrl_c_in_a_blocked_pull_ends_it_at_once_and_the_others_hear_why() -> None:
    """There the pull ignored it, and a worker that took it hung in its own exit."""
    with ManualJob() as job:
        job.start_all(job.script(BLOCKED.replace("HOW", "kv.barrier()")))
        blocked, other = ranks(job)
        begun = time.monotonic()
        job.processes[blocked].send_signal(SIGINT)
        assert job.wait(blocked, other, "scheduler-0") == [-SIGINT, 1, 1], job.report()
        assert time.monotonic() - begun < 30
        assert "KeyboardInterrupt" in job.err(blocked)
        assert "PeerLost" in job.err(other)
        assert "KeyboardInterrupt" in job.err(other)


def test_a_worker_that_leaves_by_os_exit_is_lost_and_nothing_stays() -> None:
    """There servers, scheduler and the other worker stayed for ever."""
    with ManualJob() as job:
        job.start_all(job.script(BLOCKED.replace("HOW", "os._exit(0)")))
        blocked, other = ranks(job)
        assert job.wait(blocked, other, "scheduler-0") == [1, 0, 1], job.report()
        assert "PeerLost" in job.err(blocked)
        job.wait("server-0", "server-1")


def test_a_rank_0_or_server_that_is_started_again_is_refused_with_the_reason() -> None:
    """There rank 0's second `init` was a gradient, and a server came back empty, without rule and rounds."""
    with ManualJob() as job:
        script = job.script(
            BLOCKED.replace("if kv.rank == 0:", "if False:").replace("HOW", "import time; time.sleep(60)")
        )
        job.start_all(script, 0)
        for rank in "01":
            job.start("worker", script, DMLC_WORKER_ID=rank)
        first, _ = ranks(job)
        for victim in (first, "server-0"):
            job.processes[victim].kill()
            job.wait(victim)
        job.until("scheduler-0", "is lost")
        again = [job.start("worker", script, DMLC_WORKER_ID="0"), job.start("server", DMLC_SERVER_ID="0")]
        assert all(job.wait(*again)), job.report()
        for name in again:
            assert re.search(r"refused .*: the job is ending: .* is lost", job.err(name)), job.report()
            assert "ready" not in job.out(name)
