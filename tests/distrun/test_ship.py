from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import distrun_runtime
from distrun import ship
from distrun.errors import PreflightError


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
    root = ship.runtime_root({})
    assert root == Path(distrun_runtime.__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("neighbour", "expected"),
    [("README.md", False), ("__pycache__", False), (".git", False), ("numpy", True), ("six.py", True), ("a.pth", True)],
)
def test_neighbours_are_what_could_be_imported(neighbour: str, expected: bool, tmp_path: Path) -> None:
    folder = package(tmp_path)
    path = tmp_path / neighbour
    path.touch() if "." in neighbour[1:] else path.mkdir()
    assert ship.has_neighbours(folder) is expected


def test_beside_others_it_is_copied_once_under_the_name_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "numpy").mkdir()
    monkeypatch.setattr(distrun_runtime, "__file__", str(folder / "__init__.py"))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    root = ship.runtime_root(env, copy=False)
    assert not root.exists()
    assert ship.runtime_root(env) == root
    assert ship.runtime_root(env) == root
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    assert not list(root.rglob("*.pyc"))
    code = "import distrun_runtime.contract as c, distrun_runtime as d; print(d.X, c.Y)"
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, check=True
    )
    assert out.stdout == b"1 2\n"
    (folder / "__init__.py").write_text("X = 3\n")
    assert ship.runtime_root(env) != root


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "numpy").mkdir()
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(distrun_runtime, "__file__", str(folder / "__init__.py"))
    with pytest.raises(PreflightError, match="cannot keep a copy of the runtime"):
        ship.runtime_root({"XDG_CACHE_HOME": str(tmp_path / "cache")})
