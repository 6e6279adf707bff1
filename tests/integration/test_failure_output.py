"""What a user sees of a job that fails: one line of each consequence, and the cause at the end with its traceback."""

from __future__ import annotations

import pytest
from distrun_cli import PYTHON, Distrun

LIMIT_S = 60.0
WORKERS = 4

TRAIN = """
import sys
import numpy as np
from distrun_runtime import kvstore

def step(kv, number):
    kv.push("w", np.ones(4))
    kv.pull("w", out=np.zeros(4))
    if kv.rank == 3 and number == 2:
        raise ValueError("my bug")

def main():
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4))
    for number in range(5):
        step(kv, number)

main()
"""


def launch(distrun: Distrun, text: str, *words: str) -> tuple[int, list[str]]:
    """Run a script as a job's workers; return the exit code and the lines of stderr."""
    (distrun.work / "train.py").write_text(text)
    done = distrun.launch("--name", "train", *words, PYTHON, "train.py")
    return done.returncode, done.stderr.decode().splitlines()


def said_by(worker: int, lines: list[str]) -> list[str]:
    return [line.partition(" | ")[2] for line in lines if line.startswith("worker-%d@" % worker)]


def test_an_exception_in_one_worker_is_the_last_thing_shown_and_the_others_have_a_line_each(distrun: Distrun) -> None:
    code, lines = launch(distrun, TRAIN, "-n", str(WORKERS), "-s", "2")
    assert code == 1
    for worker in set(range(WORKERS)) - {3}:
        for line in said_by(worker, lines):
            assert line.startswith("distrun: ended by the loss of worker-3: "), line
            assert "ValueError: my bug" in line
            assert "train.py:18 in <module>, train.py:16 in main, train.py:" in line
        assert len(said_by(worker, lines)) <= 1
    own = said_by(3, lines)
    assert own[0] == "Traceback (most recent call last):"
    assert [line.rpartition("line ")[2] for line in own if line.startswith("  File ")] == [
        "18, in <module>",
        "16, in main",
        "10, in step",
    ]
    report = lines[lines.index("first failure: worker-3 on %s: exit code 1" % distrun.job_host()) :]
    assert [line[6:] for line in report if line.startswith("    | ")] == own
    assert report[-1].startswith("distrun: error: worker-3 on ")
    assert report[-1].endswith(" failed with exit code 1: ValueError: my bug")
    assert len(lines) < 3 * WORKERS + 2 * len(own)


@pytest.mark.slow
def test_the_whole_tracebacks_are_shown_with_vv(distrun: Distrun) -> None:
    code, lines = launch(distrun, TRAIN, "-n", str(WORKERS), "-s", "1", "-vv")
    assert code == 1
    others = [line for worker in set(range(WORKERS)) - {3} for line in said_by(worker, lines)]
    assert any("distrun_runtime/kvstore.py" in line for line in others)
    assert not any("ended by the loss" in line for line in others)


@pytest.mark.parametrize(
    ("servers", "name", "said"),
    [
        ("1", "dist_snyc", "KVError: unknown store type 'dist_snyc' (did you mean 'dist_sync'?); known are local, "),
        ("0", "dist_sync", "ContractError: this job has no servers (DMLC_NUM_SERVER=0), and a dist store needs "),
    ],
)
def test_why_a_store_could_not_be_created_is_in_the_last_line(
    servers: str, name: str, said: str, distrun: Distrun
) -> None:
    text = "from distrun_runtime import kvstore\nkv = kvstore.create(%r)\n" % name
    code, lines = launch(distrun, text, "-n", "1", "-s", servers)
    assert code == 1
    assert " failed with exit code 1: " + said in lines[-1]
    assert [line for line in lines if "distrun_runtime/" in line] == []


def test_a_worker_that_ends_while_others_need_it_is_named_with_what_to_do(distrun: Distrun) -> None:
    text = (
        "import numpy as np\nfrom distrun_runtime import kvstore\nkv = kvstore.create('dist_sync')\n"
        "kv.init('w', np.zeros(4))\n"
        "for number in range(3 - kv.rank):\n    kv.push('w', np.ones(4))\n    kv.pull('w', out=np.zeros(4))\n"
    )
    code, lines = launch(distrun, text, "-n", "2", "-s", "1")
    assert code == 1
    assert lines[-1].startswith("distrun: error: worker-1 on ")
    assert " ended with 0 while others still needed it: " in lines[-1]
    assert "without pushing round 3 of key 'w'; a worker that runs out of data calls kv.join()" in lines[-1]


def test_a_worker_that_leaves_first_is_named_although_another_one_catches_the_error_and_ends_first(
    distrun: Distrun,
) -> None:
    text = (
        "import atexit, sys, time\nimport numpy as np\nfrom distrun_runtime import kvstore\n"
        "kv = kvstore.create('dist_sync')\nkv.init('w', np.zeros(4))\n"
        "if kv.rank == 0:\n    atexit.register(lambda: (kv.close(), time.sleep(0.7)))\n    sys.exit(3)\n"
        "try:\n    kv.push('w', np.ones(4))\n    kv.pull('w', out=np.zeros(4))\n"
        "except ConnectionError:\n    sys.exit(5)\n"
    )
    code, lines = launch(distrun, text, "-n", "2", "-s", "1")
    assert code == 3
    assert lines[-1] == f"distrun: error: worker-0 on {distrun.job_host()} failed with exit code 3"


def test_the_time_limit_names_who_had_not_ended(distrun: Distrun) -> None:
    for limit_s in (2, 20):  # a busy machine may not have started the agent after two seconds
        words = ("--timeout", str(limit_s), "--grace", "1", "[ $RANK = 1 ] || exec sleep 300")
        done = distrun.launch("-n", "3", "-s", "0", *words)
        assert done.returncode == 124
        last = done.stderr.decode().splitlines()[-1]
        if last.endswith("had not ended"):
            break
    host = distrun.job_host()
    assert last == (
        "distrun: error: the job did not end within %d s (--timeout): worker-0 on %s, worker-2 on %s had not ended"
        % (limit_s, host, host)
    )
