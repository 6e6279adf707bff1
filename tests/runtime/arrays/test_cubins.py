"""Compiled programs on disk: compiled once, whatever happens to the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distrun_runtime.arrays import cupy_driver


class Compiler:
    """Counts how often it compiled."""

    def __init__(self, code: bytes = b"machine code") -> None:
        self.code, self.calls = code, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.code


def test_a_program_is_compiled_once_for_each_architecture_and_compiler(tmp_path: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        for version in (("sm_80", "12.9"), ("sm_90", "12.9"), ("sm_90", "13.0")):
            assert cupy_driver.kept(str(tmp_path), "k" * 64, *version, compiler) == b"machine code"
    assert compiler.calls == 3


def test_names_of_versions_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    cupy_driver.kept(str(folder), "../../key", "../sm", "1/2", Compiler())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200])
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, damage: bytes) -> None:
    compiler = Compiler()
    cupy_driver.kept(str(tmp_path), "key", "sm_90", "12.9", compiler)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    for _ in range(2):
        assert cupy_driver.kept(str(tmp_path), "key", "sm_90", "12.9", compiler) == b"machine code"
    assert compiler.calls == 2


def test_a_folder_that_is_gone_or_none_costs_a_compilation_and_nothing_else(tmp_path: Path) -> None:
    compiler = Compiler()
    for folder in ("", str(tmp_path / "gone")):
        assert cupy_driver.kept(folder, "key", "sm_90", "12.9", compiler) == b"machine code"
    assert compiler.calls == 2


def test_what_the_compiler_raises_is_raised_and_nothing_stays(tmp_path: Path) -> None:
    def fails() -> bytes:
        raise RuntimeError("line 3: expected ;")

    with pytest.raises(RuntimeError, match="line 3"):
        cupy_driver.kept(str(tmp_path), "key", "sm_90", "12.9", fails)
    assert not list(tmp_path.iterdir())


def test_files_that_were_not_used_for_a_month_go_when_another_comes(tmp_path: Path) -> None:
    compiler = Compiler()
    for key in ("old", "used"):
        cupy_driver.kept(str(tmp_path), key, "sm_90", "12.9", compiler)
    (tmp_path / "of somebody else").touch()
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    cupy_driver.kept(str(tmp_path), "used", "sm_90", "12.9", compiler)  # makes it young
    cupy_driver.kept(str(tmp_path), "new", "sm_90", "12.9", compiler)
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"used", "new", "of somebody else"}


def test_the_folder_is_in_the_users_cache_and_the_users_alone(tmp_path: Path) -> None:
    found = cupy_driver.find_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert found == str(tmp_path / "distrun" / "cubins")
    assert os.stat(found).st_mode & 0o777 == 0o700


def test_without_a_cache_it_is_a_private_one_among_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    env = {"XDG_CACHE_HOME": str(tmp_path / "file")}  # no folder can be made in it, by root neither
    found = cupy_driver.find_folder(env, str(tmp_path / "tmp"))
    assert found == str(tmp_path / "tmp" / ("distrun-cubins-%d" % os.geteuid()))
    assert os.stat(found).st_mode & 0o777 == 0o700
    assert cupy_driver.find_folder(env, str(tmp_path / "tmp")) == found


@pytest.mark.parametrize("is_link", [True, False])
def test_a_temporary_folder_that_others_may_enter_or_a_link_is_not_used(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / ("distrun-cubins-%d" % os.geteuid())
    if is_link:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        path.chmod(0o770)
    (tmp_path / "file").touch()
    assert cupy_driver.find_folder({"XDG_CACHE_HOME": str(tmp_path / "file")}, str(tmp_path)) == ""
