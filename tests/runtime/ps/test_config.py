"""What a node reads from its environment: every variable missing and every one wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distrun_runtime.contract import environ
from distrun_runtime.errors import ContractError
from distrun_runtime.ps import node
from distrun_runtime.ps.node import import_all
from distrun_runtime.transport.base import Heartbeat

BASE = {
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NODE_HOST": "127.0.0.1",
}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in BASE.items() if key != name}


def test_the_seeds_variables_are_enough() -> None:
    """The manual start sets only the DMLC_* ones."""
    read = node.read("worker", BASE)
    assert (read.role, read.rank, read.job, read.token) == ("worker", -1, node.OPEN_JOB, b"")
    assert (read.workers, read.servers, read.root, read.root_port) == (2, 3, "127.0.0.1", 9091)
    assert (read.address, read.root_endpoint) == ("127.0.0.1", "tcp://127.0.0.1:9091")
    assert (read.heartbeat, read.start_timeout_s, read.op_timeout_s) == (Heartbeat(2, 10), 120, 1800)
    assert (read.bigarray_bound, read.verbose, read.ports, read.incarnation) == (1_000_000, 0, (), 0)


def test_all_that_the_launcher_gives_is_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"abc\n")
    more = {
        "DISTRUN_JOB_ID": "calm-otter-7f3",
        "DISTRUN_HOST": "d7",
        "DISTRUN_TOKEN_FILE": str(token),
        "DISTRUN_RESTART": "2",
        "DMLC_RANK": "1",
        "PS_HEARTBEAT_INTERVAL": "0.5",
        "PS_HEARTBEAT_TIMEOUT": "3",
        "DISTRUN_START_TIMEOUT": "7",
        "DISTRUN_OP_TIMEOUT": "8",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "10",
        "PS_VERBOSE": "2",
        "DISTRUN_PORT_RANGE": "20000-20002",
    }
    read = node.read("worker", {**BASE, **more})
    assert (read.job, read.host, read.token, read.incarnation, read.rank) == ("calm-otter-7f3", "d7", b"abc", 2, 1)
    assert (read.heartbeat, read.start_timeout_s, read.op_timeout_s) == (Heartbeat(0.5, 3), 7, 8)
    assert (read.bigarray_bound, read.verbose, read.ports) == (10, 2, (20000, 20001, 20002))


def test_modules_of_users_rules_are_the_servers_business() -> None:
    env = {**BASE, "DISTRUN_SERVER_IMPORT": "my_rules, more.rules,"}
    assert node.read("server", env).server_imports == ("my_rules", "more.rules")
    assert node.read("worker", env).server_imports == ()
    assert node.read("server", BASE).server_imports == ()


def test_the_device_of_a_server_is_read_by_servers() -> None:
    env = {**BASE, "DISTRUN_SERVER_DEVICE": "cuda:2", "DISTRUN_SERVER_GPU_MEMORY": "3", "DISTRUN_LOCAL_RANK": "1"}
    read = node.read("server", env)
    assert (read.server_device, read.server_gpu_bytes, read.local_rank) == ("gpu:2", 3 << 20, 1)
    assert node.read("server", BASE).server_device == node.read("worker", env).server_device == "auto"
    with pytest.raises(
        ContractError, match=r"DISTRUN_SERVER_DEVICE='gpu-2' on host .*: expected auto, cpu, gpu or gpu"
    ):
        node.read("server", {**env, "DISTRUN_SERVER_DEVICE": "gpu-2"})


@pytest.mark.parametrize("name", ["DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"])
@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_variable_that_is_missing_is_named(role: str, name: str) -> None:
    with pytest.raises(ContractError, match="%s is not set on host " % name):
        node.read(role, without(name))


@pytest.mark.parametrize("role", ["worker", "server"])
def test_without_a_job_the_way_to_one_is_shown(role: str) -> None:
    with pytest.raises(ContractError, match="a dist store needs a job: DMLC_NUM_WORKER is not set") as caught:
        node.read(role, {})
    assert "distrun launch -n 2 -s 2" in str(caught.value)
    assert "`local` needs none" in str(caught.value)


def test_a_job_without_servers_is_an_error_that_says_how_to_have_some() -> None:
    with pytest.raises(ContractError, match="at least one: launch with -s 1 or more"):
        node.read("worker", {**BASE, "DMLC_NUM_SERVER": "0"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DMLC_NUM_WORKER", "two"),
        ("DMLC_NUM_WORKER", "0"),
        ("DMLC_NUM_WORKER", "-1"),
        ("DMLC_NUM_SERVER", "1.5"),
        ("DMLC_NUM_SERVER", "-1"),
        ("DMLC_PS_ROOT_PORT", "0"),
        ("DMLC_PS_ROOT_PORT", "65536"),
        ("DMLC_PS_ROOT_PORT", "http"),
        ("DMLC_RANK", "-1"),
        ("DMLC_RANK", "x"),
        ("DMLC_WORKER_ID", "x"),
        ("DISTRUN_RESTART", "-1"),
        ("PS_HEARTBEAT_INTERVAL", "0"),
        ("PS_HEARTBEAT_TIMEOUT", "nan"),
        ("DISTRUN_START_TIMEOUT", "soon"),
        ("DISTRUN_OP_TIMEOUT", "0"),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "0"),
        ("PS_VERBOSE", "3"),
        ("DISTRUN_PORT_RANGE", "20000"),
        ("DISTRUN_PORT_RANGE", "20001-20000"),
        ("DISTRUN_PORT_RANGE", "0-10"),
        ("DISTRUN_PORT_RANGE", "1-65536"),
        ("DISTRUN_PORT_RANGE", "a-b"),
        ("DISTRUN_PORT_RANGE", "-5"),
    ],
)
def test_a_wrong_value_is_named_with_the_variable_and_what_would_be_right(name: str, value: str) -> None:
    with pytest.raises(ContractError) as caught:
        node.read("worker", {**BASE, name: value})
    assert "%s=%r" % (name, value) in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_timeout_that_is_not_longer_than_the_interval_is_an_error() -> None:
    env = {**BASE, "PS_HEARTBEAT_INTERVAL": "5", "PS_HEARTBEAT_TIMEOUT": "5"}
    with pytest.raises(ContractError, match="PS_HEARTBEAT_TIMEOUT=5 is not longer than PS_HEARTBEAT_INTERVAL=5"):
        node.read("worker", env)


@pytest.mark.parametrize(
    ("role", "given", "rank"),
    [
        ("worker", {"DMLC_WORKER_ID": "1"}, 1),
        ("server", {"DMLC_SERVER_ID": "2"}, 2),
        ("worker", {"DMLC_SERVER_ID": "2"}, -1),
        ("worker", {"DMLC_RANK": "0", "DMLC_WORKER_ID": "1"}, 0),
        ("scheduler", {"DMLC_RANK": "1"}, -1),
        ("worker", {"DMLC_RANK": ""}, -1),
    ],
)
def test_the_rank_is_the_launchers_index_or_none(role: str, given: dict[str, str], rank: int) -> None:
    assert node.read(role, {**BASE, **given}).rank == rank


def test_a_scheduler_without_a_port_publishes_one_and_needs_no_address_of_itself() -> None:
    env = {key: value for key, value in BASE.items() if "ROOT" not in key}
    read = node.read("scheduler", env)
    assert (read.root, read.root_port, read.address) == ("", 0, "127.0.0.1")
    with pytest.raises(ContractError, match="DMLC_PS_ROOT_URI is not set"):
        node.read("scheduler", without("DMLC_PS_ROOT_URI"))


def test_a_token_file_that_cannot_be_read_or_is_empty_is_an_error(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text(" \n")
    for path, words in ((missing, "cannot be read on host .*No such file"), (empty, "is empty on host")):
        with pytest.raises(ContractError, match=words):
            node.read("worker", {**BASE, "DISTRUN_TOKEN_FILE": str(path)})


def test_an_interface_that_does_not_exist_is_an_error() -> None:
    env = {**without("DMLC_NODE_HOST"), "DMLC_INTERFACE": "no-such-if0"}
    with pytest.raises(ContractError, match="no-such-if0"):
        node.read("worker", env)


def test_the_role_is_checked() -> None:
    assert node.role_of({}) == ""
    assert node.role_of({"DMLC_ROLE": "server"}) == "server"
    with pytest.raises(ContractError, match="DMLC_ROLE='boss'"):
        node.role_of({"DMLC_ROLE": "boss"})


def test_an_ipv6_scheduler_is_bracketed() -> None:
    assert node.read("worker", {**BASE, "DMLC_PS_ROOT_URI": "::1"}).root_endpoint == "tcp://[::1]:9091"


def test_a_node_introduces_itself_by_what_it_read() -> None:
    who = node.read("server", {**BASE, "DISTRUN_HOST": "d7"}).identity("tcp://10.0.0.7:1", 2)
    assert (who.name, who.host, who.endpoint, who.workers, who.servers) == ("server-2", "d7", "tcp://10.0.0.7:1", 2, 3)


def test_resending_and_faults_are_off_unless_asked_for() -> None:
    quiet = node.read("worker", {**BASE, "PS_RESEND_TIMEOUT": "500"})
    assert (quiet.resend_s, quiet.faults.is_none, quiet.identity("").resends) == (0.0, True, False)
    bad = node.read("worker", {**BASE, "PS_RESEND": "1", "PS_DROP_MSG": "5", "DISTRUN_FAULTS": "reorder=2,seed=7"})
    assert (bad.resend_s, bad.identity("").resends) == (1.0, True)
    assert (bad.faults.drop, bad.faults.reorder, bad.faults.seed) == (5.0, 2.0, 7)


def test_faults_of_another_form_are_an_error_with_the_form() -> None:
    with pytest.raises(ContractError, match=r"DISTRUN_FAULTS='lose=1' on host .*: 'lose=1' is none of drop=PERCENT"):
        node.read("worker", {**BASE, "DISTRUN_FAULTS": "lose=1"})


# Users' modules


def test_a_module_that_is_not_there_is_an_error_that_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError) as caught:
        import_all(("no_such_rules",), "d1")
    text = str(caught.value)
    assert "names module no_such_rules, which cannot be imported on host d1: ModuleNotFoundError" in text
    assert "This server started in %s: " % tmp_path in text
    assert "--env PYTHONPATH=DIR" in text
    assert "--sync-dst-dir" in text


def test_what_a_module_raises_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rules.py").write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ContractError, match=r"(?s)on host d1: ZeroDivisionError: .*broken_rules\.py\", line 2"):
        import_all(("broken_rules",), "d1")


def test_a_server_process_without_its_modules_ends_at_once_with_2(tmp_path: Path) -> None:
    given = {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": "1"}
    env = {**environ.snapshot(), **given, "DMLC_PS_ROOT_URI": "127.0.0.1", "DISTRUN_SERVER_IMPORT": "no_such_rules"}
    command = [sys.executable, "-m", "distrun_runtime", "server"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("distrun: error: DISTRUN_SERVER_IMPORT (--server-import) names module no_such_rules")
