"""The distribution: wheel and sdist hold what they should, and each way of installing works."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from slowness import scaled

pytestmark = [pytest.mark.package, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = "distrun/templates/README.md"


def run(*argv: object, cwd: Path | None = None) -> str:
    command = [str(word) for word in argv]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=scaled(280), check=False)
    assert result.returncode == 0, " ".join(command) + "\n" + result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel built from that sdist: what an index would get."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment that sees this one's packages, except distrun: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    purelib = run(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    here = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A plain path line, not `site.addsitedir`: so the .pth of the editable install over there is not followed.
    Path(purelib, "zz-borrowed.pth").write_text(here + "\n", encoding="utf-8")
    return folder


def install(venv: Path, *what: object) -> None:
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--no-deps", "--quiet", *what)


def check(venv: Path, cwd: Path) -> str:
    """Check the installation in `venv` from a folder that is not the checkout; return where the runtime is."""
    assert run(venv / "bin/distrun", "--version", cwd=cwd).strip().endswith(version())
    assert run(venv / "bin/python", "-m", "distrun", "--version", cwd=cwd).strip().endswith(version())
    assert "\ndockerfile " in run(venv / "bin/distrun", "template", "list", cwd=cwd)
    code = "import distrun, distrun_runtime, importlib.resources as r; from distrun_runtime import kvstore\n"
    code += "kvstore.create('local').close(); print(r.files('distrun_runtime'))"
    return run(venv / "bin/python", "-c", code, cwd=cwd).strip()


def version() -> str:
    from distrun import __version__

    return __version__


def test_wheel_has_both_packages_and_the_templates_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "distrun",
        "distrun_runtime",
        "distrun-%s.data" % version(),  # the manual pages
        "distrun-%s.dist-info" % version(),
    }
    modules = {p.relative_to(ROOT / "runtime").as_posix() for p in (ROOT / "runtime").rglob("*.py")}
    modules |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "distrun").rglob("*.py")}
    kernels = {"distrun_runtime/arrays/kernels.c", "distrun_runtime/arrays/prelude.c"}
    assert modules | kernels | {
        TEMPLATES,
        "distrun/cli/topics/hosts.txt",
        "distrun/start/train.py",
        "distrun/py.typed",
        "distrun_runtime/py.typed",
    } <= set(names)


def test_sdist_has_what_the_tests_and_scripts_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "scripts/demo", "scripts/test", "tests/test_package.py", "hosts.example"} <= names
    assert {"examples/digits.py", "docs/overview.md", "templates/README.md"} <= names
    assert not [name for name in names if name.startswith((".venv", ".ci"))]


def test_wheel_installs_and_runs(built: Path, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    install(venv, "--force-reinstall", *built.glob("*.whl"))
    where = check(venv, tmp_path)
    assert where.startswith(str(venv))
    assert (Path(where).parent / TEMPLATES).is_file()
    assert (venv / "share" / "man" / "man1" / "distrun-launch.1").is_file()
    assert "accuracy 0.9" in run(venv / "bin/distrun", "demo", cwd=tmp_path)
    run(venv / "bin/distrun", "init", "first", cwd=tmp_path)
    assert "accuracy 0.9" in run(venv / "bin/distrun", "launch", "-f", "job.toml", cwd=tmp_path / "first")


def test_checkout_installs_editable_and_runs(venv: Path, tmp_path: Path) -> None:
    install(venv, "--force-reinstall", "--editable", ROOT)
    assert check(venv, tmp_path) == str(ROOT / "runtime" / "distrun_runtime")
