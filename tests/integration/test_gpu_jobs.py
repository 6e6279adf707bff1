"""Real processes whose GPUs are stand-ins (`support/gpustandin`): jobs, failures of a GPU, forks, and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cxx
import pytest
from distrun_cli import Distrun, wait_until

FOLDER = Path(__file__).resolve().parents[1] / "support" / "gpustandin"
RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
PYTHONPATH = f"PYTHONPATH={FOLDER}"
LIMIT_S = 60
ONE = ("-n", "1", "-s", "1")

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="there is no C++ compiler: apt-get install g++")

TRAIN = """
import os
import sys

import numpy as np
from distrun_runtime import kvstore
from distrun_runtime.errors import StoreClosed

if sys.argv[1] == "gpu":
    import cupy

    put, empty, get = cupy.asarray, cupy.empty, cupy.ndarray.get
else:
    put, empty, get = np.array, np.empty, np.asarray
shapes = {"a": (300,), "b": (20, 30)}
keys = list(shapes)


def made(number):
    random = np.random.default_rng(number)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes.values()]


kv = kvstore.create("dist_device_sync")
kv.set_optimizer("adam", learning_rate=0.01)
kv.init(keys, [put(value) for value in made(0)])
for turn in range(3):
    parts = [made(10 * turn + 2 * kv.rank + device) for device in range(2)]
    kv.push(keys, [[put(part) for part in each] for each in zip(*parts)])
outs = [empty(shape, np.float32) for shape in shapes.values()]
kv.pull(keys, out=outs)
with open("weights-%s-%d" % (sys.argv[1], kv.rank), "wb") as file:
    for out in outs:
        file.write(get(out).tobytes())
devices = {each["device"] for each in kv.stats()}
assert devices == {sys.argv[2]}, devices
"""

RULE = 'kv.set_optimizer("adam", learning_rate=0.01)\n'

FORK = """
child = os.fork()
if child == 0:
    try:
        kv.pull(keys, out=outs)
    except StoreClosed:
        outs.clear()  # destructors, and the end of the process, call nothing
        sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
"""


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    made = Distrun(tmp_path)
    yield made
    wait_until(lambda: not made.left(), LIMIT_S, "nothing is left; left: %s" % made.left())


def launch(distrun: Distrun, device: str, values: str, *words: str, script: str = TRAIN) -> tuple[int, str]:
    """Run a script as two workers with two servers, or as `words` say; return the exit code and stderr."""
    (distrun.work / "train.py").write_text(script)
    options = ("-n", "2", "-s", "2", "--server-device", device, "--env", PYTHONPATH, *words)
    done = distrun.launch(*options, sys.executable, "train.py", values, device if ":" in device else "cpu:0")
    return done.returncode, done.stderr.decode()


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of one process to its end."""
    path = os.pathsep.join([str(FOLDER), str(RUNTIME)])
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_job_on_gpus_has_the_bytes_of_one_without(distrun: Distrun) -> None:
    code, said = launch(distrun, "gpu:0", "gpu", script=TRAIN + FORK)
    assert code == 0, said
    code, said = launch(distrun, "cpu", "cpu")
    assert code == 0, said
    weights = {path.read_bytes() for path in distrun.work.glob("weights-*")}
    assert len(list(distrun.work.glob("weights-*"))) == 4
    assert len(weights) == 1


def test_a_server_whose_gpu_meets_an_illegal_address_ends_the_job_by_name(distrun: Distrun) -> None:
    words = (*ONE, "--env-server", "STANDIN_FAULT=operation:3")
    code, said = launch(distrun, "gpu:0", "cpu", *words, script=TRAIN.replace(RULE, ""))
    assert code == 1, said
    assert "cudaErrorIllegalAddress" in said
    assert "this process cannot use the GPU any more" in said
    assert "distrun: error: server-" in said.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_whose_gpu_meets_an_illegal_address_ends_the_job_by_name(distrun: Distrun) -> None:
    code, said = launch(distrun, "cpu", "gpu", "--env-worker", "STANDIN_FAULT=operation:9")
    assert code == 1, said
    last = said.splitlines()[-1]
    assert last.startswith("distrun: error: worker-"), said
    assert "cudaErrorIllegalAddress" in last


@pytest.mark.slow
def test_a_server_whose_gpu_hangs_ends_the_job_by_name_before_its_workers_give_up(distrun: Distrun) -> None:
    words = (*ONE, "--op-timeout", "10", "--env-server", "STANDIN_FAULT=hang")
    code, said = launch(distrun, "gpu:0", "cpu", *words, script=TRAIN.replace(RULE, ""))
    assert code == 1, said
    last = said.splitlines()[-1]
    assert last.startswith("distrun: error: server-0"), said
    assert re.search(r"gpu:0 has not finished its (kernels|copies in|copies out) after 5 s", said)


@pytest.mark.slow
def test_what_finds_no_place_on_a_servers_gpu_is_told_by_key_and_bytes(distrun: Distrun) -> None:
    code, said = launch(distrun, "gpu:0", "cpu", *ONE, "--env-server", "STANDIN_MEMORY=1000")
    assert code == 1, said
    last = said.splitlines()[-1]
    assert re.search(r"server-\d cannot take the values of keys? '[ab]'.*wanted \d+ bytes, free are 1000 of 1000", last)
    assert "fix: launch with --server-device cpu" in last


def test_without_cupy_a_job_with_gpu_servers_says_what_to_install(distrun: Distrun, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    # Whatever this environment has: the tasks' interpreters find no cupy.
    (missing / "sitecustomize.py").write_text("import sys; sys.modules['cupy'] = None\n")
    code, said = launch(distrun, "gpu:0", "cpu", *ONE, "--env", f"PYTHONPATH={missing}")
    assert code == 2, said
    assert "--server-device gpu:0 (DISTRUN_SERVER_DEVICE): a GPU needs cupy, which is not installed" in said
    assert "fix: pip install 'distrun[cuda12]'" in said


LOCAL = """
import os
import sys

import cupy
import numpy as np
from distrun_runtime import kvstore
from distrun_runtime.errors import StoreClosed

kv = kvstore.create("device")
kv.init("w", np.zeros(300, np.float32))
kv.set_optimizer("sgd", learning_rate=0.5)
for _ in range(2):
    kv.push("w", [cupy.asarray(np.full(300, each, np.float32)) for each in (1, 2)])
out = cupy.empty(300, np.float32)
kv.pull("w", out=out)
print(set(out.get().tolist()), flush=True)
"""


def test_one_process_sums_and_updates_on_its_gpu_and_its_forked_child_makes_no_call() -> None:
    done = run(LOCAL + FORK.replace("keys, out=outs", "'w', out=out").replace("outs.clear()", "del out"))
    assert (done.returncode, done.stdout) == (0, "{-3.0}\n"), done.stderr


FAILS = """
out = np.empty(300, np.float32)
try:
    kv.pull("w", out=out)
except ValueError as err:
    print(err)
kv.push("w", out)
"""


def test_a_process_whose_gpu_has_failed_says_so_at_every_call_and_ends() -> None:
    done = run(LOCAL.partition("out =")[0] + FAILS, STANDIN_FAULT="operation:3")
    assert done.returncode == 1
    for text in (done.stdout.splitlines()[-1], done.stderr.splitlines()[-1]):
        assert "cudaErrorIllegalAddress" in text
        assert "this process cannot use the GPU any more" in text


AGREED = """
import time
from distrun_runtime.arrays import device
while sys.argv[1] == "gpu" and kv._backend._node.exports(device.get("gpu:0")) is None:
    time.sleep(0.01)
kv.barrier()
"""
LARGE = TRAIN.replace("(300,)", "(30000,)").replace("(20, 30)", "(200, 300)")


def test_workers_and_servers_on_one_gpu_share_its_memory_and_have_the_bytes_of_a_job_without(distrun: Distrun) -> None:
    code, said = launch(
        distrun, "gpu:0", "gpu", "--env", "PS_VERBOSE=1", script=LARGE.replace("for turn", AGREED + "for turn")
    )
    assert code == 0, said
    assert said.count("path=gpu") == 8, said
    code, said = launch(distrun, "cpu", "cpu", script=LARGE)
    assert code == 0, said
    assert len({path.read_bytes() for path in distrun.work.glob("weights-*")}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--env-worker", "STANDIN_UUID=7"), "reason=this process does not use the GPU of UUID 0000"),
        (
            ("--env-worker", "STANDIN_FAULT=open_shared:1:801"),
            "reason=open_shared on gpu:0 failed: cuda",
        ),
        (("--env-server", "DISTRUN_DATA_PATHS=host"), ""),
    ],
)
def test_values_that_cannot_be_shared_on_the_gpu_go_by_way_of_the_host_and_the_log_says_why(
    distrun: Distrun, words: tuple[str, ...], why: str
) -> None:
    code, said = launch(distrun, "gpu:0", "gpu", "--env", "PS_VERBOSE=1", *words, script=LARGE)
    assert code == 0, said
    assert "path=segments " + why in said or not why
    assert len({path.read_bytes() for path in distrun.work.glob("weights-*")}) == 1


OTHERS = """
import sys

import numpy as np
from distrun_runtime import kvstore

if sys.argv[1] == "gpu":
    import cupy

put = cupy.asarray if sys.argv[1] == "gpu" else np.array
found = []
for number in range(4):
    kv = kvstore.create("dist_device_sync", deterministic=number % 2 == 1)
    if number == 2:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    if number == 3:
        kv.set_optimizer("lamb", learning_rate=0.01)
    kv.init(["a", "b"], [put(np.zeros(30000, np.float32)), put(np.zeros((200, 300), np.float16))])
    kv.init("small", put(np.ones(10000, np.float32)))
    AGREED
    for key, size in (("a", 30000), ("small", 10000)):
        out = np.empty(size, np.float32)
        kv.pull(key, out=out)
        found.append(out.tobytes())
    for turn in range(3):
        a = np.random.default_rng(turn + 10 * kv.rank).normal(size=30000).astype(np.float32)
        kv.push(["a", "b"], [put(a), put(np.resize(a, (200, 300)).astype(np.float16))], scale=1 - 0.5 * (number == 0))
        if turn == 1:
            out = np.empty(30000, np.float32)
            kv.pull("a", out=out)
            found.append(out.tobytes())
    with kv.view(["a", "b"]) as arrays:
        found += [each.tobytes() for each in arrays]
    kv.close()
with open("weights-%s-%d" % (sys.argv[1], kv.rank), "wb") as file:
    file.write(b"".join(found))
"""


@pytest.mark.slow
def test_what_is_not_made_on_the_gpu_has_the_same_bytes_where_its_memory_is_shared(distrun: Distrun) -> None:
    for device, values in (("gpu:0", "gpu"), ("cpu", "cpu")):
        script = OTHERS.replace("AGREED", AGREED.replace("\n", "\n    "))
        code, said = launch(distrun, device, values, "--env", "STANDIN_MEMORY=%d" % (1 << 28), script=script)
        assert code == 0, said
    assert len(list(distrun.work.glob("weights-*"))) == 4
    assert len({path.read_bytes() for path in distrun.work.glob("weights-*")}) == 1


LEAVES = """
import sys

import cupy
import numpy as np
from distrun_runtime import kvstore

kv = kvstore.create("dist_device_sync")
kv.init("w", np.zeros(30000, np.float32))
AGREED
part, out = cupy.asarray(np.full(30000, 1 + kv.rank, np.float32)), cupy.empty(30000, np.float32)
for _ in range(3):
    kv.push("w", part)
    if kv.rank == 0:
        kv.pull("w", out=out)
assert kv.rank or set(out.get().tolist()) == {3.0}
"""


def test_what_a_worker_has_pushed_on_its_gpu_counts_when_it_has_ended(distrun: Distrun) -> None:
    code, said = launch(
        distrun, "gpu:0", "gpu", "-n", "2", "-s", "1", "--env", "PS_VERBOSE=1", script=LEAVES.replace("AGREED", AGREED)
    )
    assert code == 0, said
    assert said.count("path=gpu") == 4, said
