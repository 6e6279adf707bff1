"""Snapshots: what is in them, how much, what is left out, and what cannot be read."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from distrun import planning
from distrun.errors import SyncError, UsageError
from distrun.request import JobRequest
from distrun.sync import tree
from distrun.sync.rules import CopyRules, Extra, filters
from distrun.sync.tree import Snapshot, Tree, check_channel_size, left_out_text, take_snapshot
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.jobstore import JobStore

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")


def read(snapshot: Snapshot) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(snapshot.pieces(lambda offset: None)))) as whole:
        return {info.name: info for info in whole}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    found = tmp_path / "source"
    (found / "a" / "empty").mkdir(parents=True)
    (found / "a" / "x").write_text("x" * 100)
    (found / "a" / "run").write_text("#!/bin/sh\n")
    (found / "a" / "run").chmod(0o755)
    (found / "a" / "l").symlink_to("x")
    (found / "a" / "x.pyc").touch()
    (found / ".git").mkdir()
    (found / ("odd" + os.fsdecode(b"\xff") + "\n")).touch()
    os.mkfifo(found / "fifo")
    return found


def test_it_has_what_rsync_copies(source: Path, tmp_path: Path) -> None:
    rules = CopyRules()
    there = tmp_path / "there"
    command = ["rsync", "-rlt", *filters(rules, str(source)), f"{source}/", f"{there}/"]
    subprocess.run(command, check=True, capture_output=True)
    snapshot = take_snapshot(str(source), rules)
    found = read(snapshot)
    assert sorted(found) == sorted(
        os.fsencode(p.relative_to(there)).decode("utf-8", "surrogateescape") for p in there.rglob("*")
    )
    assert (snapshot.files, snapshot.size) == (4, 110)
    assert found["a/run"].mode == 0o755
    assert found["a/x"].mtime == int((source / "a" / "x").stat().st_mtime)
    assert found["a/l"].linkname == "x"
    assert (found["a/x"].uid, found["a/x"].uname) == (0, "")
    snapshot.close()


def test_a_folder_comes_before_what_is_in_it(source: Path) -> None:
    snapshot = take_snapshot(str(source), CopyRules())
    names = list(read(snapshot))
    assert all(names.index(str(Path(name).parent)) < names.index(name) for name in names if "/" in name)
    snapshot.close()


def test_it_is_of_one_moment(source: Path) -> None:
    snapshot = take_snapshot(str(source), CopyRules())
    (source / "a" / "x").write_text("later")
    (source / "a" / "new").touch()
    found = read(snapshot)
    assert found["a/x"].size == 100
    assert "a/new" not in found
    snapshot.close()


def test_extras_are_in_it_under_their_names_and_links_to_them_are_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "lib.so.1").write_text("lib")
    (tmp_path / "lib.so").symlink_to("lib.so.1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1").write_text("1")
    rules = CopyRules(extra=(Extra(str(tmp_path / "lib.so"), "b/lib.so"), Extra(str(tmp_path / "data"), "d")))
    snapshot = take_snapshot(str(source), rules)
    found = read(snapshot)
    assert found["b/lib.so"].isreg()
    assert found["b/lib.so"].size == 3
    assert found["d/1"].size == 1
    snapshot.close()


def test_links_that_lead_out_are_left_out_and_told_of(source: Path) -> None:
    for name, target in (("out", "/srv/data"), ("a/above", "../../x")):
        (source / name).symlink_to(target)
    snapshot = take_snapshot(str(source), CopyRules())
    assert not {"out", "a/above"} & set(read(snapshot))
    assert left_out_text(snapshot) == (
        "links that lead out of the directory are not copied: out -> /srv/data, a/above -> ../../x; "
        "--sync-extra TARGET:NAME copies a target"
    )
    snapshot.close()


def test_it_knows_how_many_files_an_offset_has_passed(source: Path) -> None:
    snapshot = take_snapshot(str(source), CopyRules())
    offsets: list[int] = []
    assert sum(map(len, snapshot.pieces(offsets.append))) == snapshot.total
    assert offsets == [0, snapshot.total]
    assert [snapshot.passed(offset) for offset in offsets] == [0, 4]
    snapshot.close()


def test_who_reads_it_when_it_is_closed_hears_that(source: Path) -> None:
    snapshot = take_snapshot(str(source), CopyRules())
    pieces = snapshot.pieces(lambda offset: None)
    snapshot.close()
    with pytest.raises(SyncError, match="the copy is over"):
        next(pieces)


def test_a_file_that_is_removed_meanwhile_is_left_out_and_one_that_cannot_be_read_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tree.members(str(source), CopyRules())
    monkeypatch.setattr(tree, "members", lambda *more: found)
    (source / "a" / "run").unlink()
    snapshot = take_snapshot(str(source), CopyRules())
    assert "a/run" not in read(snapshot)
    snapshot.close()
    (source / "a" / "x").unlink()
    os.mkfifo(source / "a" / "x")
    with pytest.raises(SyncError, match=f"cannot read {source}/a/x: it is no file any more"):
        take_snapshot(str(source), CopyRules())


def test_a_disk_without_room_for_it_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(SyncError, match=r"a snapshot of the files cannot be kept in .*: No space left") as caught:
        take_snapshot(str(source), CopyRules())
    assert "TMPDIR" in caught.value.hint
    assert tempfile.gettempdir() in str(caught.value)


def test_more_than_the_limit_is_refused_with_what_to_do_instead(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_channel_size(Tree(1, facts.CHANNEL_COPY_LIMIT))
    with pytest.raises(UsageError) as caught:
        check_channel_size(Tree(7, facts.CHANNEL_COPY_LIMIT + 1, (("data", 6, facts.CHANNEL_COPY_LIMIT),)))
    assert str(caught.value) == (
        "--sync-dst-dir: 7 files, 1.0 GiB are too much to be sent to the job's agents, which take 1.0 GiB; "
        "the most is in data (1.0 GiB)"
    )
    for word in ("--sync-exclude", "all hosts share", "read its data"):
        assert word in caught.value.hint
    monkeypatch.setattr(facts, "CHANNEL_COPY_LIMIT", 100)
    with pytest.raises(UsageError, match="too much"):
        take_snapshot(str(source), CopyRules())


def test_a_job_with_too_much_is_refused_before_anything_is_submitted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "CHANNEL_COPY_LIMIT", 100)
    request = JobRequest(
        command=("true",),
        workers=1,
        servers=0,
        cwd=str(source),
        launcher="local",
        sync_dst_dir="~/job",
        sync_rules=CopyRules(),
    )
    planning.plan_job(request, JobStore(tmp_path / "state"))
    monkeypatch.setattr("distrun.backends.local.Local.copies_over_channels", True)
    with pytest.raises(UsageError, match="too much"):
        planning.plan_job(request, JobStore(tmp_path / "state"))
