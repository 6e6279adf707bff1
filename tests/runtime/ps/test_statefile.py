"""Files of saved states: what is written is read again, and everything else is an error that names file and host."""

from __future__ import annotations

import errno
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrun_runtime.arrays.dtypes import BFLOAT16
from distrun_runtime.errors import KVError
from distrun_runtime.ps import statefile
from distrun_runtime.ps.statefile import StateFile

KEY = {"key": "w", "number": 0, "index": 0, "shape": [2, 3], "dtype": "float32", "stype": "default"}
HOLDS = {"bytes": 7, "bfloat16": [], "pieces": [[0, 0, 6]], "counters": {"0.0": {"updates": 3, "best": None}}}


def written(folder: Path, arrays: dict[str, Any], part: str = "data-1") -> dict[str, Any]:
    return statefile.write(str(folder), part, "server-0.npz", arrays, "d1")


def read(folder: Path, holds: dict[str, Any], part: str = "data-1") -> dict[str, Any]:
    with closing(StateFile(str(folder), part, "server-0.npz", holds, "d2")) as file:
        return {name: file.array(name) for name in file.names()}


def manifest(part: str) -> dict[str, Any]:
    return {
        **{"format": 1, "type": "dist_sync", "data": part, "rule": None, "workers": 2, "servers": 1},
        **{"keys": [KEY], "rounds": [[0, 3]], "files": {"server-0.npz": dict(HOLDS)}},
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, BFLOAT16])
def test_arrays_come_back_with_shape_type_and_bits(tmp_path: Path, dtype: Any) -> None:
    values = np.frombuffer(np.arange(96, dtype=np.uint8).tobytes(), dtype)[:6].reshape(2, 3)
    holds = written(tmp_path, {"0.0.weight": values})
    found = read(tmp_path, holds)["0.0.weight"]
    assert (found.dtype, found.shape) == (values.dtype, (2, 3))
    assert found.tobytes() == values.tobytes()


def test_bfloat16_stands_in_the_file_as_uint16(tmp_path: Path) -> None:
    holds = written(tmp_path, {"0.0.weight": np.zeros(3, BFLOAT16)})
    assert holds["bfloat16"] == ["0.0.weight"]
    assert np.load(tmp_path / "data-1" / "server-0.npz", allow_pickle=False)["0.0.weight"].dtype == np.uint16


def test_the_members_of_a_piece_are_found_by_key_and_offset(tmp_path: Path) -> None:
    one = np.zeros(1)
    names = ("0.0.weight", "0.0.state.momentum", "0.10.weight", "1.0.state.a.b")
    holds = written(tmp_path, dict.fromkeys(names, one))
    with closing(StateFile(str(tmp_path), "data-1", "server-0.npz", holds, "d2")) as file:
        assert file.members("0.0") == ["weight", "state.momentum"]
        assert file.members("1.0") == ["state.a.b"]
        assert file.members("1.1") == []


def test_objects_are_neither_written_nor_read(tmp_path: Path) -> None:
    """They would be pickles."""
    with pytest.raises(KVError, match="cannot be written"):
        written(tmp_path, {"0.0.weight": np.array([{}], dtype=object)})
    (tmp_path / "data-1" / "server-0.npz").parent.mkdir(exist_ok=True)
    np.savez(tmp_path / "data-1" / "server-0.npz", save=np.array("data-1"), bad=np.array([{}], dtype=object))
    with pytest.raises(KVError, match="cannot be read: ValueError: Object arrays"):
        read(tmp_path, {})


def test_nothing_temporary_stays(tmp_path: Path) -> None:
    written(tmp_path, {"0.0.weight": np.zeros(3)})
    statefile.write_manifest(str(tmp_path), manifest("data-1"), "d1")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data-1", "manifest.json", "server-0.npz"]


def test_a_missing_file_names_its_path_and_host_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KVError) as caught:
        read(tmp_path, {})
    assert str(caught.value) == (
        "%s/data-1/server-0.npz on host d2 is not there: all files of a save must be in one folder that every host of"
        " the job shares" % tmp_path
    )


def test_a_shortened_file_is_an_error(tmp_path: Path) -> None:
    holds = written(tmp_path, {"0.0.weight": np.zeros(100)})
    path = tmp_path / "data-1" / "server-0.npz"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(
        KVError, match=r"server-0\.npz on host d2 has \d+ bytes where the manifest says %d" % holds["bytes"]
    ):
        read(tmp_path, holds)
    with pytest.raises(KVError, match="on host d2 cannot be read: BadZipFile"):
        read(tmp_path, {})


def test_a_changed_byte_is_an_error(tmp_path: Path) -> None:
    holds = written(tmp_path, {"0.0.weight": np.arange(1000, dtype=np.float64)})
    path = tmp_path / "data-1" / "server-0.npz"
    content = bytearray(path.read_bytes())
    content[content.index(np.float64(500).tobytes()) + 7] ^= 1
    path.write_bytes(content)
    with pytest.raises(KVError, match="cannot be read: BadZipFile: Bad CRC-32"):
        read(tmp_path, holds)["0.0.weight"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no more", b"hello", b"\x93NUMPY", b"\x80\x04pickle."])
def test_what_is_no_npz_is_an_error(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, {})
    (tmp_path / "data-1" / "server-0.npz").write_bytes(content)
    with pytest.raises(KVError, match=r"server-0\.npz on host d2 cannot be read"):
        read(tmp_path, {})


def test_a_file_of_another_save_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, {"0.0.weight": np.zeros(3)}, "data-1")
    (tmp_path / "data-1").rename(tmp_path / "data-2")
    with pytest.raises(KVError, match="belongs to another save, 'data-1'"):
        read(tmp_path, {}, "data-2")


def test_a_folder_that_cannot_be_made_names_file_and_host(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KVError, match=r"states cannot be written to .*server-0\.npz on host d1: "):
        statefile.write(str(tmp_path / "file"), "data-1", "server-0.npz", {}, "d1")


# The manifest


def test_a_manifest_that_cannot_be_put_in_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(KVError, match=r"the manifest .*manifest\.json cannot be written on host d1: "):
        statefile.write_manifest(str(tmp_path), manifest("data-1"), "d1")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no module be imported that was not: the process has as many files open as it may."""

    class Full:
        def find_spec(self, name: str, *more: object) -> None:
            raise OSError(errno.EMFILE, f"too many open files: {name}")

    for name in ("shutil", "zipfile", "zlib"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Full()])


def test_a_manifest_is_put_in_its_place_if_what_removes_older_data_cannot_be_imported(
    tmp_path: Path, without_files: None
) -> None:
    (tmp_path / "data-00112233445566aa").mkdir()
    statefile.write_manifest(str(tmp_path), manifest("data-1"), "d1")
    assert statefile.read_manifest(str(tmp_path), "d1")["data"] == "data-1"


def test_data_that_cannot_be_discarded_stays(tmp_path: Path, without_files: None) -> None:
    (tmp_path / "data-1").mkdir()
    statefile.discard(str(tmp_path), "data-1")
    assert (tmp_path / "data-1").is_dir()


def test_what_reads_a_file_and_cannot_be_imported_is_an_error_that_names_file_and_host(
    tmp_path: Path, without_files: None
) -> None:
    (tmp_path / "data-1").mkdir()
    (tmp_path / "data-1" / "server-0.npz").write_bytes(b"")
    with pytest.raises(KVError, match=r"server-0\.npz on host d2 cannot be read: OSError: .*too many open files"):
        StateFile(str(tmp_path), "data-1", "server-0.npz", {}, "d2")


def test_data_of_earlier_saves_is_removed_once_the_new_manifest_is_there(tmp_path: Path) -> None:
    parts = [statefile.new_part() for _ in range(2)]
    for part in parts:
        written(tmp_path, {}, part)
    (tmp_path / "mine.txt").write_text("stays")
    statefile.write_manifest(str(tmp_path), manifest(parts[1]), "d1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [parts[1], "manifest.json", "mine.txt"]


def test_a_save_that_was_not_finished_leaves_the_one_before(tmp_path: Path) -> None:
    holds = written(tmp_path, {"0.0.weight": np.ones(3)}, "data-1")
    statefile.write_manifest(str(tmp_path), manifest("data-1"), "d1")
    written(tmp_path, {"0.0.weight": np.zeros(3)}, "data-2")
    found = statefile.read_manifest(str(tmp_path), "d1")
    assert read(tmp_path, holds, found["data"])["0.0.weight"].sum() == 3
    statefile.discard(str(tmp_path), "data-2")
    assert not (tmp_path / "data-2").exists()


def test_data_that_the_manifest_names_is_not_discarded(tmp_path: Path) -> None:
    """Rank 0 may hear of another worker's end after it has put the manifest in its place."""
    written(tmp_path, {}, "data-1")
    statefile.write_manifest(str(tmp_path), manifest("data-1"), "d1")
    statefile.discard(str(tmp_path), "data-1")
    assert (tmp_path / "data-1" / "server-0.npz").exists()


def test_a_folder_without_a_manifest_has_no_saved_states(tmp_path: Path) -> None:
    with pytest.raises(KVError) as caught:
        statefile.read_manifest(str(tmp_path), "d1")
    assert str(caught.value) == "no saved states in %s on host d1: there is no manifest.json" % tmp_path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a manifest of format 1"),
        (json.dumps({"format": 2, "data": "data-1"}), r"is not a manifest of format 1 \(format 2\)"),
        (json.dumps({"format": 1, "data": "../elsewhere"}), "is not a manifest"),
        (json.dumps({"format": 1}), "is not a manifest"),
        ("\udcff", "cannot be read"),
    ],
)
def test_what_is_no_manifest_of_ours_is_an_error_that_names_file_and_host(
    tmp_path: Path, content: str, text: str
) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(KVError, match=r"manifest.json on host d1 " + text):
        statefile.read_manifest(str(tmp_path), "d1")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rounds": [[0, -1]]}, r"rounds: expected pairs of whole numbers, at least 0, found \[\[0, -1\]\]"),
        ({"rounds": [[0, 2.5]]}, "rounds: expected"),
        ({"rounds": [[0, True]]}, "rounds: expected"),
        ({"rounds": [[0, 2**63]]}, "rounds: expected"),
        ({"rounds": [[0]]}, "rounds: expected"),
        ({"rounds": 7}, "rounds: expected"),
        ({"workers": "2"}, "workers: expected a whole number, at least 1, found '2'"),
        ({"workers": 0}, "workers: expected"),
        ({"servers": None}, "servers: expected"),
        ({"type": None}, "type: expected a type of store, found None"),
        ({"keys": {}}, "keys: expected a list of keys"),
        ({"keys": [{**KEY, "shape": [2, -3]}]}, "keys: expected"),
        ({"keys": [{**KEY, "dtype": "object"}]}, "keys: expected"),
        ({"keys": [{**KEY, "key": None}]}, "keys: expected"),
        ({"keys": [KEY, {**KEY, "key": "v"}]}, "keys: a key or number is there twice"),
        ({"keys": [KEY, {**KEY, "number": 1}]}, "keys: a key or number is there twice"),
        ({"rule": "sgd"}, "rule: expected a rule or null, found 'sgd'"),
        ({"rule": {"name": "nosuch", "params": {}}}, "rule: unknown rule 'nosuch'"),
        ({"files": []}, "files: expected names of files"),
        ({"files": {"server-0.npz": {**HOLDS, "bytes": -1}}}, "files: server-0.npz: bytes: expected"),
        ({"files": {"server-0.npz": {**HOLDS, "bfloat16": 5}}}, "files: server-0.npz: bfloat16: expected"),
        ({"files": {"server-0.npz": {**HOLDS, "pieces": [[0, -1, 3]]}}}, "files: server-0.npz: pieces: expected"),
        ({"files": {"server-0.npz": {**HOLDS, "counters": {"0.0": 5}}}}, "files: server-0.npz: counters: expected"),
        (
            {"files": {"server-0.npz": {**HOLDS, "counters": {"0.0": {"updates": "five"}}}}},
            "files: server-0.npz: counters of 0.0: updates='five': expected a whole number, at least 0",
        ),
        ({"files": {"server-0.npz": {**HOLDS, "counters": {"0.0": {"updates": -1}}}}}, "updates=-1: expected"),
        ({"files": {"server-0.npz": {**HOLDS, "counters": {"0.0": {"best": [1]}}}}}, "counters: expected"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_an_error_before_anybody_acts_on_it(
    tmp_path: Path, change: Any, text: str
) -> None:
    """Negative rounds ended the worker's node; a counter that is a text failed the first step after the load."""
    changed = {**manifest("data-1"), **change}
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(KVError, match=r"manifest\.json on host d1 is malformed: .*" + text):
        statefile.read_manifest(str(tmp_path), "d1")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(KVError, match="cannot be written on host d1: .*" + text):
        statefile.write_manifest(str(tmp_path), changed, "d1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("member", ["type", "keys", "rule", "workers", "servers", "rounds", "files"])
def test_a_manifest_that_lacks_a_member_is_an_error_that_names_it(tmp_path: Path, member: str) -> None:
    whole = manifest("data-1")
    del whole[member]
    (tmp_path / "manifest.json").write_text(json.dumps(whole))
    with pytest.raises(KVError, match="is malformed: it has no member '%s'" % member):
        statefile.read_manifest(str(tmp_path), "d1")


def test_names_of_data_folders_do_not_repeat() -> None:
    names = {statefile.new_part() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("data-") for name in names)


def test_folders_of_the_users_stay_whatever_they_are_called(tmp_path: Path) -> None:
    """States may be saved beside `data-train`."""
    mine = [tmp_path / name for name in ("data-train", "data-2026", "data-")]
    for folder in mine:
        folder.mkdir()
    statefile.write_manifest(str(tmp_path), manifest(statefile.new_part()), "d1")
    assert all(folder.is_dir() for folder in mine)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("data-1", "../../secret.npz"),
        ("data-1", "/etc/passwd"),
        ("data-1", "fifo"),
        ("data-1/..", "server-0.npz"),
        ("..", "server-0.npz"),
        ("/data-1", "server-0.npz"),
    ],
)
def test_no_message_and_no_manifest_leads_out_of_the_folder(tmp_path: Path, part: str, name: str) -> None:
    with pytest.raises(KVError, match="is not a file of a save"):
        StateFile(str(tmp_path), part, name, {}, "d2")
    with pytest.raises(KVError, match="is not a file of a save"):
        statefile.write(str(tmp_path), part, name, {"0.0.weight": np.zeros(1)}, "d2")
