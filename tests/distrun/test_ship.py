from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distrun_runtime
from distrun import shipping
from distrun.errors import PreflightError
from distrun_runtime.agent import cache


def package(parent: Path) -> Path:
    folder = parent / "distrun_runtime"
    (folder / "contract").mkdir(parents=True)
    (folder / "__init__.py").write_text("X = 1\n")
    (folder / "contract" / "__init__.py").write_text("Y = 2\n")
    (folder / "py.typed").touch()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "junk.pyc").write_bytes(b"junk")
    return folder


def test_a_checkout_is_used_as_it_is() -> None:
    root = shipping.runtime_root({})
    assert root == Path(distrun_runtime.__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("sibling", "expected"),
    [("README.md", False), ("__pycache__", False), (".git", False), ("numpy", True), ("six.py", True), ("a.pth", True)],
)
def test_siblings_are_what_could_be_imported(sibling: str, expected: bool, tmp_path: Path) -> None:
    folder = package(tmp_path)
    path = tmp_path / sibling
    path.touch() if "." in sibling[1:] else path.mkdir()
    assert shipping.has_siblings(folder) is expected


def test_beside_others_it_is_copied_once_under_the_name_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "numpy").mkdir()
    monkeypatch.setattr(distrun_runtime, "__file__", str(folder / "__init__.py"))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    root = shipping.runtime_root(env, copy=False)
    assert not root.exists()
    assert shipping.runtime_root(env) == root
    assert shipping.runtime_root(env) == root
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    assert not list(root.rglob("*.pyc"))
    code = "import distrun_runtime.contract as c, distrun_runtime as d; print(d.X, c.Y)"
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, check=True
    )
    assert out.stdout == b"1 2\n"
    (folder / "__init__.py").write_text("X = 3\n")
    assert shipping.runtime_root(env) != root


@pytest.fixture
def beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package in a site-packages; returns a folder for the cache."""
    folder = package(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "numpy").mkdir()
    monkeypatch.setattr(distrun_runtime, "__file__", str(folder / "__init__.py"))
    return tmp_path / "cache"


def test_the_sources_of_the_programs_for_gpus_come_along() -> None:
    with zipfile.ZipFile(io.BytesIO(shipping.archive()[1])) as archive:
        names = set(archive.namelist())
    assert "distrun_runtime/arrays/prelude.c" in names


def test_a_copy_is_one_that_agents_take_as_it_is(beside_others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        root = shipping.runtime_root({"XDG_CACHE_HOME": str(beside_others)})
    finally:
        os.umask(before)
    assert (beside_others / "distrun").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(beside_others))
    assert cache.find(root.name) == str(root)


def test_a_copy_that_others_may_write_to_is_made_anew(beside_others: Path) -> None:
    env = {"XDG_CACHE_HOME": str(beside_others)}
    root = shipping.runtime_root(env)
    (root / "distrun_runtime" / "__init__.py").write_text("X = 'theirs'\n")
    root.chmod(0o777)
    assert shipping.runtime_root(env) == root
    assert (root / "distrun_runtime" / "__init__.py").read_text() == "X = 1\n"


def test_a_folder_of_somebody_else_is_never_put_on_the_path(
    beside_others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"XDG_CACHE_HOME": str(beside_others)}
    shipping.runtime_root(env)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PreflightError, match="is no folder, or not this user's"):
        shipping.runtime_root(env)


def test_a_relative_cache_does_not_count(beside_others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".cache" in shipping.runtime_root({"XDG_CACHE_HOME": "relative"}).parents


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "numpy").mkdir()
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(distrun_runtime, "__file__", str(folder / "__init__.py"))
    with pytest.raises(PreflightError, match="cannot keep a copy of the runtime"):
        shipping.runtime_root({"XDG_CACHE_HOME": str(tmp_path / "cache")})
