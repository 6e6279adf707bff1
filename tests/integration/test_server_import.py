"""Users' rules in launched jobs: imported by the servers, failing with the server's traceback in the worker's error."""

from __future__ import annotations

from pathlib import Path

import pytest
from distrun_cli import PYTHON, Distrun

RULES = """
from distrun_runtime.ops.optimizers import Param, Rule

class Half(Rule):
    '''w -= share * g.'''

    name = "half"
    table = (Param("share", 0.5),)

    def start(self, weight):
        return {}

    def update(self, weight, grad, state, rates):
        weight -= self.params["share"] * grad

class Broken(Half):
    def update(self, weight, grad, state, rates):
        raise ZeroDivisionError("my rule has a bug")

def keep_largest(key, received, stored):
    stored[...] = [max(pair) for pair in zip(received, stored)]
"""

HEAD = """
import sys
import numpy as np
from distrun_runtime import kvstore
from distrun_runtime.errors import RuleError

def opened(**keys):
    kv = kvstore.create("dist_sync")
    kv.init(list(keys), [np.full(3, value, np.float32) for value in keys.values()])
    return kv

def pulled(kv, key):
    out = np.empty(3, np.float32)
    kv.pull(key, out)
    return out.tolist()
"""

SCRIPT = """
kv = opened(w=1)
kv.set_optimizer("my_rules:Half", share=0.25)
kv.push("w", np.ones(3, np.float32))
print("rule", pulled(kv, "w"), "my_rules" in sys.modules)

kv = opened(w=1)
kv.set_optimizer("my_rules:Broken")
kv.push("w", np.ones(3, np.float32))
try:
    pulled(kv, "w")
except RuleError as err:
    print("error", err)
    print("trace", "my_rules.py" in err.server_traceback, 'ZeroDivisionError("my rule' in err.server_traceback)

kv = opened(w=1, v=0)
try:
    kv.set_optimizer("other_rules:Half")
except ValueError as err:
    print("refused", err)
kv.barrier()  # else one finds the other's updater
import my_rules
kv.set_updater(my_rules.keep_largest)
kv.barrier()
kv.push(["w", "v"], [np.full(3, 0.75 * kv.rank, np.float32), np.full(3, 2 + kv.rank, np.float32)])
print("function", pulled(kv, "w"), pulled(kv, "v"))
"""


@pytest.fixture
def distrun(tmp_path: Path) -> Distrun:
    found = Distrun(tmp_path)
    (found.work / "my_rules.py").write_text(RULES)
    return found


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What both workers of one job said, each line once."""
    distrun = Distrun(tmp_path_factory.mktemp("job"))
    (distrun.work / "my_rules.py").write_text(RULES)
    (distrun.work / "train.py").write_text(HEAD + SCRIPT)
    size = ("-n", "2", "-s", "2", "--no-prefix", "-q", "--server-import", "my_rules")
    done = distrun.run("launch", *size, PYTHON, "train.py")
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode().splitlines()
    assert all(said.count(line) == 2 for line in said), "both workers say the same"
    return list(dict.fromkeys(said))


def line(lines: list[str], word: str) -> str:
    """Return the line that begins with a word, without it."""
    [found] = [each for each in lines if each.startswith(word + " ")]
    return found.removeprefix(word + " ")


def test_a_rule_of_the_users_own_runs_on_the_servers_and_no_worker_imports_it(lines: list[str]) -> None:
    assert line(lines, "rule") == "[0.5, 0.5, 0.5] False"


def test_a_rule_that_fails_shows_the_servers_traceback_in_the_workers_error(lines: list[str]) -> None:
    assert "the rule failed on server-" in line(lines, "error")
    assert "my rule has a bug" in line(lines, "error")
    assert line(lines, "trace") == "True True"


def test_a_rule_of_a_module_that_was_not_named_is_refused_with_the_fix(lines: list[str]) -> None:
    assert "start the job with --server-import other_rules" in line(lines, "refused")


def test_a_function_of_the_users_own_is_installed_on_every_server_when_set_updater_returns(lines: list[str]) -> None:
    assert line(lines, "function") == "[1.0, 1.0, 1.0] [5.0, 5.0, 5.0]"


def test_a_module_that_is_not_there_ends_the_job_at_once_with_2_and_is_named(distrun: Distrun) -> None:
    size = ("-n", "1", "-s", "1", "--no-prefix", "-q", "--server-import", "no_such_rules")
    done = distrun.run("launch", *size, "sleep", "100")
    assert done.returncode == 2
    assert b"names module no_such_rules, which cannot be imported on host" in done.stderr
    assert b"--env PYTHONPATH=DIR" in done.stderr


def test_the_dry_run_shows_the_servers_device(distrun: Distrun) -> None:
    words = ("launch", "-n", "1", "-s", "1", "--server-device", "cuda:1", "--dry-run")
    assert "DISTRUN_SERVER_DEVICE=gpu:1" in distrun.run(*words, "true").stdout.decode()
    refused = distrun.run("launch", "-n", "1", "-s", "0", "--server-device", "gpu", "true")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert "--server-device gpu: this job has no servers (-s 0)" in refused.stderr.decode()


@pytest.mark.slow
def test_states_saved_with_2_servers_are_loaded_by_3_and_training_goes_on(distrun: Distrun) -> None:
    """One job saves after two of four steps, another one of other size does the rest: as one that did all four."""
    script = """
kv = opened(w=1)
big = np.arange(7001, dtype=np.float32)
kv.init("big", big)
begin, end = int(sys.argv[1]), int(sys.argv[2])
if begin:
    kv.load_states("states")
else:
    kv.set_optimizer("adam", learning_rate=0.125)
for step in range(begin, end):
    for key, size in (("w", 3), ("big", 7001)):
        kv.push(key, np.full(size, (step + 1.0) * (kv.rank + 1), np.float32))
if not begin and end < 4:
    kv.save_states("states")
whole = np.empty(7001, np.float32)
kv.pull("big", whole)
print(pulled(kv, "w"), whole.tobytes().hex()[-64:], float(whole.sum()))
"""

    def trained(servers: int, *span: str) -> str:
        (distrun.work / "train.py").write_text(HEAD + script)
        size = ("-n", "2", "-s", str(servers), "--no-prefix", "-q")
        # On all servers.
        place = ("--env", "DISTRUN_PARTITION=mxnet", "--env", "MXNET_KVSTORE_BIGARRAY_BOUND=1000")
        done = distrun.run("launch", *size, *place, PYTHON, "train.py", *span)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    through = trained(2, "0", "4")
    trained(2, "0", "2")
    assert trained(3, "2", "4") == through
