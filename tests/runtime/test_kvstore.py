from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore


def test_the_public_names_are_these() -> None:
    assert kvstore.__all__ == ["TYPES", "KVStore", "KVStoreBase", "Pending", "RowSparse", "create", "schedule"]
    assert kvstore.KVStore is KVStore
    assert kvstore.schedule.Factor(10).step == 10


@pytest.mark.parametrize("name", ["local", "Local", "LOCAL"])
def test_names_are_taken_in_any_case(name: str) -> None:
    assert kvstore.create(name).type == "local"


def test_local_is_the_default() -> None:
    assert kvstore.create().type == "local"


@pytest.mark.parametrize("name", ["local", "device", "dist_sync", "dist_device_sync"])
@pytest.mark.parametrize("staleness", [0, 3])
def test_staleness_is_for_asynchronous_stores_only(name: str, staleness: int) -> None:
    with pytest.raises(KVError, match="staleness bounds a dist_async store; a '%s' store has none" % name):
        kvstore.create(name, staleness=staleness)


@pytest.mark.parametrize("staleness", [-1, 1.5, True, "2"])
def test_staleness_is_a_whole_number(staleness: object) -> None:
    with pytest.raises(KVError, match="staleness is a number of pushes, a whole number from 0"):
        kvstore.create("dist_async", staleness=staleness)  # type: ignore[call-overload]  # what is tested


@pytest.mark.parametrize("name", [None, 3, b"local"])
def test_a_name_that_is_no_str_is_a_type_error(name: object) -> None:
    with pytest.raises(TypeError, match=r"created by name \(local, device, dist, .*dist_async_device\), not by"):
        kvstore.create(name)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foo", "unknown store type 'foo'; known are %s" % ", ".join(kvstore.TYPES)),
        ("dist_snyc", r"unknown store type 'dist_snyc' \(did you mean 'dist_sync'\?\)"),
        ("", "unknown store type ''"),
        (" local", "unknown store type ' local' .did you mean 'local'"),
        ("local_update_cpu", r"store type 'local_update_cpu' is MXNet's; fix: create\('local'\); known are local"),
        ("nccl", r"store type 'nccl' is MXNet's; fix: create\('device'\); known are local"),
    ],
)
def test_an_unknown_type_lists_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(KVError, match=words):
        kvstore.create(name)


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_server_or_scheduler_process_gets_no_local_store(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_ROLE", role)
    with pytest.raises(KVError, match="this process is a %s" % role):
        kvstore.create("local")


def test_a_local_store_needs_no_zeromq() -> None:
    code = "import sys; from distrun_runtime import kvstore; kvstore.create('local'); assert 'zmq' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "how", "text"),
    [
        ("local", {"group": "g", "members": [0]}, "a group shares a distributed store, not a 'local' store"),
        ("device", {"members": [0]}, "a group shares a distributed store, not a 'device' store"),
        ("dist_sync", {"members": [0]}, "members are those of a group, which has a name; fix: create"),
        (
            "dist_sync",
            {"group": "", "members": [0]},
            "a group has a name of 1 to 100 letters, no blanks around it, not ''",
        ),
        ("dist_sync", {"group": 7}, "a group has a name of 1 to 100 letters, no blanks around it, not 7"),
        ("dist_sync", {"group": "g ", "members": [0]}, "no blanks around it, not 'g '"),
        ("dist_sync", {"group": "g", "members": []}, "one or more from 0, not []"),
        ("dist_sync", {"group": "g", "members": [-1, 0]}, "one or more from 0, not [-1, 0]"),
        ("dist_sync", {"group": "g", "members": [0, 2, 2]}, "members of group 'g': worker-2 is named 2 times"),
        ("dist_sync", {"group": "g", "members": [0, 0.5]}, "ranks of workers, such as [0, 2], not [0, 0.5]"),
        ("dist_sync", {"group": "g", "members": 3}, "ranks of workers, such as [0, 2], not 3"),
    ],
)
def test_a_group_has_a_name_and_ranks_as_members_and_a_distributed_store(
    name: str, how: dict[str, Any], text: str
) -> None:
    """Said before this process joins a job."""
    with pytest.raises(KVError, match=re.escape(text)):
        kvstore.create(name, **how)


def test_the_only_member_of_a_store_in_one_process_is_worker_0() -> None:
    assert kvstore.create("local").members == [0]
