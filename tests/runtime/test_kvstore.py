from __future__ import annotations

import subprocess
import sys

import pytest

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.store.base import KVStore


def test_the_public_names_are_these() -> None:
    assert sorted(kvstore.__all__) == ["KVStore", "TYPES", "create"]
    assert kvstore.KVStore is KVStore


@pytest.mark.parametrize("name", ["local", "Local", "LOCAL"])
def test_names_are_taken_in_any_case(name: str) -> None:
    assert kvstore.create(name).type == "local"


def test_local_is_the_default() -> None:
    assert kvstore.create().type == "local"


@pytest.mark.parametrize("name", [None, 3, b"local"])
def test_a_name_that_is_no_str_is_a_type_error(name: object) -> None:
    with pytest.raises(TypeError, match=r"created by name \(local, dist, dist_sync, dist_async\), not by"):
        kvstore.create(name)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foo", "unknown store type 'foo'; known are local, dist, dist_sync, dist_async"),
        ("dist_snyc", r"unknown store type 'dist_snyc' \(did you mean 'dist_sync'\?\)"),
        ("", "unknown store type ''"),
        (" local", "unknown store type ' local' .did you mean 'local'"),
        ("local_update_cpu", "unknown store type 'local_update_cpu'"),
        ("device", r"'device' \(arrays on GPUs\) is not in this version; use 'local'"),
        ("dist_device_sync", "not in this version; use 'dist_sync'"),
        ("dist_async_device", "not in this version; use 'dist_async'"),
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
