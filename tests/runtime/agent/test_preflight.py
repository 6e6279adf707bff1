"""The folders of tasks: there, made, with room, and never deleted from unless they are distrun's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distrun_runtime.agent import preflight
from distrun_runtime.contract import folder
from distrun_runtime.contract.plan import Host, Plan, Sync, Task
from distrun_runtime.errors import PreflightFailure


def plan(cwd: Path | str, backend: str = "ssh", **more: Any) -> Plan:
    task = Task("worker-0", "worker", 0, "d2", ("x",), str(cwd))
    return Plan("j1", "", backend, ("x",), str(cwd), (Host("d2"),), (task,), **more)


def refused(value: Plan) -> PreflightFailure:
    with pytest.raises(PreflightFailure) as caught:
        preflight.check_folders(value, "d2")
    return caught.value


def test_a_folder_that_is_there_is_fine(tmp_path: Path) -> None:
    preflight.check_folders(plan(tmp_path), "d2")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named_with_its_host_and_what_to_type(tmp_path: Path) -> None:
    failure = refused(plan(tmp_path / "no"))
    assert (failure.kind, str(failure)) == ("folder", "%s does not exist on d2" % (tmp_path / "no"))
    assert failure.fix == "copy it there with --sync-dst-dir DIR, or mount it"
    assert refused(plan(tmp_path / "no", backend="local")).fix == ""
    (tmp_path / "file").write_text("")
    assert "is not a folder" in str(refused(plan(tmp_path / "file")))


def test_the_folder_of_a_copy_is_made_and_marked(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    preflight.check_folders(plan(target, sync=Sync("/src", 10, 2)), "d2")
    assert [path.name for path in target.iterdir()] == [".distrun-sync"]
    preflight.check_folders(plan(target, sync=Sync("/src", 10, 2, delete=True)), "d2")


def test_a_folder_with_files_is_not_marked_and_never_deleted_from(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    preflight.check_folders(plan(tmp_path, sync=Sync("/src")), "d2")
    assert os.listdir(tmp_path) == ["mine"]
    failure = refused(plan(tmp_path, sync=Sync("/src", delete=True)))
    assert failure.kind == "folder"
    assert "has files that distrun did not copy" in str(failure)
    # The launching machine itself, and another one that has a folder by the same name.
    preflight.check_folders(
        plan(tmp_path, sync=Sync("/else/where", delete=True, identity=folder.identity(str(tmp_path)))), "d2"
    )
    assert refused(plan(tmp_path, sync=Sync(str(tmp_path), delete=True, identity="1:2 other"))).kind == "folder"
    assert refused(plan(tmp_path, sync=Sync(str(tmp_path), delete=True))).kind == "folder"


def test_too_little_room_is_told_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(f_bavail=10, f_frsize=1024, f_files=100, f_favail=3)
    monkeypatch.setattr("distrun_runtime.agent.preflight.os.statvfs", lambda path: info)
    target = tmp_path / "new"
    failure = refused(plan(target, sync=Sync("/src", 5 * 1024 * 1024, 4)))
    assert failure.kind == "disk"
    told = "too little room in %s on d2: 10 KiB free, 5 MiB needed; 3 more files possible, 4 needed" % target
    assert str(failure) == told
    info.f_files = 0
    preflight.check_folders(plan(target, sync=Sync("/src", 10, 4)), "d2")


def test_a_folder_that_holds_files_already_is_not_asked_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("")
    info = SimpleNamespace(f_bavail=0, f_frsize=1024, f_files=0, f_favail=0)
    monkeypatch.setattr("distrun_runtime.agent.preflight.os.statvfs", lambda path: info)
    preflight.check_folders(plan(tmp_path, sync=Sync("/src", 5000, 4)), "d2")


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failure = refused(plan(tmp_path / "file" / "x", sync=Sync("/src")))
    assert failure.kind == "folder"
    assert "such as --sync-dst-dir '~/job'" in failure.fix
    assert "Not a directory" in str(failure)


@pytest.mark.parametrize("sync", [Sync("/src"), None])
def test_the_home_of_a_user_who_does_not_exist_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Sync | None
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = refused(plan(Path("~no_such_user_here/job"), sync=sync))
    assert (failure.kind, str(failure)) == ("folder", "there is no user ~no_such_user_here on d2")
    assert os.listdir(tmp_path) == []
    preflight.check_folders(plan("./~name", sync=Sync("/src")), "d2")


def test_home_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    preflight.check_folders(plan(Path("~/code"), sync=Sync("/src")), "d2")
    assert (tmp_path / "code" / ".distrun-sync").exists()
