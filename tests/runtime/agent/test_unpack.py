"""The agent's end of a copy over its channel: archives whole and hostile, folders, links, modes, what stays."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distrun_runtime.agent import unpack
from distrun_runtime.agent.unpack import Unpacking
from distrun_runtime.contract.agent_messages import TYPES
from distrun_runtime.contract.folder import MARKER, PARTIAL, STAGE, leads_out
from distrun_runtime.contract.plan import Host, Plan, Sync

RUN = "c0ffee"

Say = tuple[str, dict[str, object]]


class Taking:
    """One copy into a folder; what the agent says is in `said`."""

    def __init__(self, folder: Path, delete: bool = False, run: str = RUN, rules: list[list[object]] | None = None):
        plan = Plan("j", "", "fake", ("x",), str(folder), (Host("h1"),), (), sync=Sync("/nowhere", 1, 1, delete))
        self.said: list[Say] = []
        self.run = run
        channel: Any = SimpleNamespace(say=lambda message, **more: self.said.append((TYPES[message], more)))
        self.copy = Unpacking(plan, " on h1", run, rules or [], channel)
        self.copy.begin()

    def take(self, archive: bytes, piece: int = 1000) -> Say:
        """Give it an archive in pieces; return the last thing that it says."""
        pieces = [archive[start : start + piece] for start in range(0, len(archive), piece)]
        for number, each in enumerate(pieces):
            assert self.copy.take(self.run, each, number == len(pieces) - 1, "")
        while self.copy.is_placing:
            self.copy.proceed()
        return self.said[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "job"
    found.mkdir(mode=0o755)
    yield found
    assert not [name for name in os.listdir(found) if name.startswith(PARTIAL)], "nothing of the copy stays"


def tar(*members: tuple[str, object], mode: int = 0o644, format: int = tarfile.GNU_FORMAT) -> bytes:
    """Return an archive: text is a file's, None makes a folder, a function changes the member that it gets."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as whole:
        for name, what in members:
            info = tarfile.TarInfo(name)
            info.mode = mode
            data = b""
            if what is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(what, str):
                data = what.encode()
            elif callable(what):
                what(info)
            info.size = len(data)
            whole.addfile(info, io.BytesIO(data))
    return out.getvalue()


def kind(which: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = which, target

    return change


def link(target: str) -> Callable[[tarfile.TarInfo], None]:
    return kind(tarfile.SYMTYPE, target)


def tree(folder: Path) -> dict[str, object]:
    """What is in a folder: text of files, targets of links, None of folders."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        elif name != MARKER:
            found[name] = None if path.is_dir() else path.read_text()
    return found


@pytest.mark.parametrize("piece", [1, 511, 512, 100_000])
def test_an_archive_is_unpacked_whatever_the_pieces_it_comes_in(piece: int, folder: Path) -> None:
    long = "n" * 120 + "/" + "é" * 100
    archive = tar(
        ("a", None),
        ("a/x", "x" * 700),
        ("a/l", link("x")),
        ("e", ""),
        ("n" * 120, None),
        (long, "y"),
        ("m", link(long)),
    )
    taking = Taking(folder)
    assert taking.said == [("folder", {"state": "mine", "notes": ()})]
    assert taking.take(archive, piece) == ("copied", {"files": 5, "bytes": 701})
    assert tree(folder) == {
        "a": None,
        "a/x": "x" * 700,
        "a/l": "-> x",
        "e": "",
        "n" * 120: None,
        long: "y",
        "m": "-> " + long,
    }


HOSTILE = {
    "above": tar(("../x", "x")),
    "above, later": tar(("a", None), ("a/../../x", "x")),
    "absolute": tar(("/tmp/x", "x")),
    "the folder itself": tar((".", None)),
    "an empty part": tar(("a//x", "x")),
    "a link out": tar(("l", link("/etc"))),
    "a link above": tar(("a", None), ("a/l", link("../../x"))),
    "a link to where nobody knows": tar(("l", link("a/../../x"))),
    "a link without a target": tar(("l", link(""))),
    "through a link": tar(("l", link(".")), ("l/x", "x")),
    "through a file": tar(("l", "x"), ("l/x", "x")),
    "a file for a folder": tar(("a", None), ("a/x", "x"), ("a", "x")),
    "twice": tar(("x", "x"), ("x", link("y"))),
    "a device": tar(("x", kind(tarfile.CHRTYPE))),
    "a fifo": tar(("x", kind(tarfile.FIFOTYPE))),
    "a hard link": tar(("y", "y"), ("x", kind(tarfile.LNKTYPE, "y"))),
    "a pax header": tar(("x" * 300, "x"), format=tarfile.PAX_FORMAT),
    "the marker": tar((MARKER, "x")),
    "the stage": tar((PARTIAL + RUN + STAGE, None)),
    "no archive": bytes(range(256)) * 8,
    "cut off": tar(("x", "x" * 5000))[:2048],
    "no end": tar(("x", "x"))[:1024],
    "more after the end": tar(("x", "x")) + tar(("y", "y")),
}


@pytest.mark.parametrize("archive", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_archive_that_is_not_for_the_folder_is_refused_and_nothing_is_written(archive: bytes, folder: Path) -> None:
    (folder / "x").write_text("before")
    said, more = Taking(folder).take(archive)
    assert said == "copy_failed"
    assert more["kind"] == "protocol", more
    assert tree(folder) == {"x": "before"}
    assert os.listdir(folder.parent) == ["job"]


def test_a_long_name_that_leads_out_is_refused_too(folder: Path) -> None:
    said, more = Taking(folder).take(tar(("a/" * 60 + "../" * 80 + "x", "x")))
    assert (said, more["kind"]) == ("copy_failed", "protocol")


@pytest.mark.parametrize(
    ("name", "target", "is_out"),
    [
        ("l", "x", False),
        ("l", "./x", False),
        ("l", "..", True),
        ("a/l", "../x", False),
        ("a/l", "..", False),
        ("a/b/l", "../../x/y", False),
        ("a/b/l", "../../..", True),
        ("a/l", "x/../y", True),
        ("l", "/x", True),
        ("l", "", True),
        ("l", "..x", False),
    ],
)
def test_which_links_lead_out(name: str, target: str, is_out: bool) -> None:
    assert leads_out(name, target) is is_out


def test_no_link_that_was_there_is_followed(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "x").write_text("theirs")
    (folder / "a").symlink_to(outside)
    (folder / "y").symlink_to(outside / "x")
    assert Taking(folder).take(tar(("a", None), ("a/x", "mine"), ("y", "mine")))[0] == "copied"
    assert tree(folder) == {"a": None, "a/x": "mine", "y": "mine"}
    assert (outside / "x").read_text() == "theirs"


def test_new_files_have_the_modes_of_the_source_and_old_ones_keep_theirs_but_for_execution(folder: Path) -> None:
    for name, mode in (("old", 0o640), ("run", 0o755)):
        (folder / name).write_text("before")
        (folder / name).chmod(mode)
    old = os.umask(0o022)
    try:
        assert Taking(folder).take(tar(("new", "x"), ("old", "x"), mode=0o777))[0] == "copied"
        assert Taking(folder, run="2").take(tar(("run", "x"), ("secret", "x"), mode=0o4600))[0] == "copied"
    finally:
        os.umask(old)
    modes = {name: (folder / name).stat().st_mode & 0o7777 for name in ("new", "old", "run", "secret")}
    assert modes == {"new": 0o755, "old": 0o750, "run": 0o644, "secret": 0o600}


def test_a_folder_with_files_is_not_replaced_by_a_file_unless_files_are_deleted(folder: Path) -> None:
    (folder / MARKER).touch()
    (folder / "x").mkdir()
    (folder / "x" / "mine").write_text("mine")
    said, more = Taking(folder).take(tar(("x", "x")))
    assert (said, more["kind"]) == ("copy_failed", "folder")
    assert str(more["reason"]).startswith(f"{folder}/x on h1 is a folder")
    assert (folder / "x" / "mine").read_text() == "mine"
    assert Taking(folder, delete=True, run="2").take(tar(("x", "x")))[0] == "copied"
    assert tree(folder) == {"x": "x"}


def test_nothing_changes_before_all_files_have_come(folder: Path) -> None:
    (folder / "x").write_text("before")
    taking = Taking(folder)
    archive = tar(("x", "after"), ("y", "y"))
    assert taking.copy.take(RUN, archive[:-512], False, "")
    assert (folder / "x").read_text() == "before"
    assert taking.copy.take(RUN, b"", True, "the coordinator's disk went")
    assert taking.said[-1] == (
        "copy_failed",
        {"reason": "the files were not sent whole: the coordinator's disk went", "kind": "other", "fix": ""},
    )
    assert tree(folder) == {"x": "before"}
    assert taking.copy.take(RUN, archive, True, ""), "what still comes is dropped"
    assert len(taking.said) == 2
    assert not taking.copy.take("another", archive, True, "")


def test_the_second_agent_that_sees_the_folder_gets_no_files(folder: Path) -> None:
    first, second = Taking(folder), Taking(folder)
    assert second.said == [("folder", {"state": "shared", "notes": ()})]
    assert first.take(tar(("x", "x")))[0] == "copied"
    assert tree(folder) == {"x": "x"}


def test_two_copies_into_one_folder_at_once_do_not_break_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each deletes what it does not know; what both have stays."""
    (folder / MARKER).touch()
    for name in ("x", "y", "z"):
        (folder / "gone" / name).mkdir(parents=True)
        (folder / "gone" / name / "file").touch()
    monkeypatch.setattr(unpack, "SLICE_S", 0.0)
    copies = [Taking(folder, delete=True, run=run) for run in ("1", "2")]
    archive = tar(*((f"a/{number}/x", str(number)) for number in range(9)), ("l", link("a")))
    for each in copies:
        assert each.copy.take(each.run, archive, True, "")
    while any(each.copy.is_placing for each in copies):
        for each in copies:
            each.copy.proceed()
    assert [each.said[-1] for each in copies] == [("copied", {"files": 10, "bytes": 9})] * 2
    assert {name for name, what in tree(folder).items() if what is not None} == {
        *(f"a/{number}/x" for number in range(9)),
        "l",
    }
    assert not (folder / "gone").exists()


def test_what_a_killed_agent_left_is_removed_after_a_day_and_not_before(folder: Path) -> None:
    for name, age_s in (("old", 90_000), ("young", 3600)):
        stage = folder / (PARTIAL + name + STAGE)
        stage.mkdir()
        (stage / "0").touch()
        os.utime(stage, (stage.stat().st_mtime - age_s,) * 2)
    assert Taking(folder).take(tar(("x", "x")))[0] == "copied"
    assert [name for name in os.listdir(folder) if name.startswith(PARTIAL)] == [PARTIAL + "young" + STAGE]
    (folder / (PARTIAL + "young" + STAGE) / "0").unlink()
    (folder / (PARTIAL + "young" + STAGE)).rmdir()


def test_a_file_for_another_file_system_below_the_folder_is_copied_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refusing(source: str, target: str, **more: int) -> None:
        if more["src_dir_fd"] != more["dst_dir_fd"]:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target, **more)

    monkeypatch.setattr(unpack.os, "rename", refusing)
    assert Taking(folder).take(tar(("a", None), ("a/x", "x"), mode=0o751))[0] == "copied"
    assert tree(folder) == {"a": None, "a/x": "x"}
    assert (folder / "a" / "x").stat().st_mode & 0o700 == 0o700


def test_many_files_are_put_into_place_in_many_short_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "SLICE_S", 0.0)
    monkeypatch.setattr(unpack, "TOLD_S", 0.0)
    taking = Taking(folder)
    assert taking.take(tar(*((str(number), "x") for number in range(5)))) == ("copied", {"files": 5, "bytes": 5})
    assert [more["files"] for said, more in taking.said if said == "copying"] == [0, 1, 2, 3, 4]
