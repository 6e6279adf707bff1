"""The rules of the house, as far as a machine can see them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "runtime" / "distrun_runtime"
BARE = ("contract", "agent", "coordinator")
"""The rooms that need nothing but Python 3.8."""


def python(code: str, interpreter: str = sys.executable, path: str = "") -> str:
    env = {**os.environ, "PYTHONPATH": path} if path else None
    command = [interpreter, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def modules(folder: Path) -> list[str]:
    """Return the dotted names of all modules below a package's folder, without `__main__`."""
    source = ROOT if folder.is_relative_to(ROOT / "distrun") else ROOT / "runtime"
    names = [path.relative_to(source).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
    return [".".join(parts).removesuffix(".__init__") for parts in names if parts[-1] != "__main__"]


def text_files() -> dict[str, str]:
    """Return path and text of every file that is, or is about to be, in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a clone, to know which files are the repository's")
    paths = [ROOT / name for name in listed.split("\0") if name]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8", "replace") for path in paths if path.is_file()}


def test_every_import_rule_is_kept() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_bare_packages_never_import_numpy_or_zmq() -> None:
    """import-linter does not see what the package's `__init__` would load on the way."""
    names = [name for package in BARE for name in modules(CLUSTER / package)]
    loaded = python(
        "import importlib, sys\nfor name in %r: importlib.import_module(name)\nprint(*sorted(sys.modules))" % names
    )
    foreign = {"numpy", "zmq", "click", "rich", "paramiko", "fabric"}
    assert not foreign & set(loaded.split())


def test_importing_the_runtime_does_nothing() -> None:
    """Also in a process whose role is server: MXNet serves and exits at import; decision: importing never does."""
    code = (
        "import os, sys, threading\n"
        "os.environ.update(DMLC_ROLE='server', DMLC_PS_ROOT_URI='127.0.0.1', DMLC_PS_ROOT_PORT='1',"
        " DMLC_NUM_WORKER='1', DMLC_NUM_SERVER='1')\n"
        "import distrun_runtime\n"
        "print('numpy' in sys.modules, 'zmq' in sys.modules, end=' ')\n"
        "import logging\n"
        "from distrun_runtime import kvstore\n"
        "import distrun_runtime.ps.node\n"
        "print('asyncio' in sys.modules, end=' ')\n"
        "print(threading.active_count(), logging.getLogger().handlers)\n"
    )
    assert python(code) == "False False False 1 []\n"


NOTHING_HAPPENS = """\
import importlib, logging, signal, sys, threading
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
for name in %r: importlib.import_module(name)
assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before
assert threading.active_count() == 1, threading.enumerate()
assert not logging.getLogger().handlers
"""


def test_no_module_of_the_repository_acts_on_import() -> None:
    """No thread, handler, child, signal handler or output comes of importing everything."""
    names = set(modules(CLUSTER) + modules(ROOT / "distrun")) - set(modules(CLUSTER / "torch"))
    assert python(NOTHING_HAPPENS % sorted(names)) == ""


@pytest.mark.peers
def test_nor_does_a_module_that_needs_torch() -> None:
    assert python(NOTHING_HAPPENS % modules(CLUSTER / "torch"), python_of("torch"), str(CLUSTER.parent)) == ""


def test_every_module_says_what_it_is_for() -> None:
    for path in [*CLUSTER.rglob("*.py"), *(ROOT / "distrun").rglob("*.py")]:
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path


def test_every_folder_of_tests_has_the_name_of_the_package_that_it_tests() -> None:
    folders = [path.parent for path in (ROOT / "tests").rglob("test_*.py")]
    for below, source in (("distrun", ROOT / "distrun"), ("runtime", CLUSTER)):
        mirror = ROOT / "tests" / below
        found = {folder.relative_to(mirror) for folder in folders if folder.is_relative_to(mirror)}
        assert len(found) > 5
        assert not [str(name) for name in found if not (source / name / "__init__.py").exists()]


def test_no_file_names_a_package_index_or_a_place_of_one_machine() -> None:
    # Put together, so that this file does not name them.
    index = "|".join(["py" + r"pi\.org", "python" + "hosted", r"pypi\." + "python", "conda" + r"\.anaconda"])
    place = "|".join(["/wo" + "rk/", "/opt/pe" + "ers", r"/home/(?!ubuntu/)[a-z]+/"])  # ubuntu: of every cloud's images
    forbidden = re.compile(index + "|" + place)
    for name, text in text_files().items():
        found = [line for line in text.splitlines() if forbidden.search(line)]
        assert not found, "%s: %s" % (name, found[0])


def test_command_line_answers_help_without_the_heavy_packages() -> None:
    loaded = python(
        "import sys\nfrom distrun.cli import main\nsys.argv = ['distrun', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'numpy', 'zmq', 'paramiko', 'fabric'} & set(sys.modules)))"
    )
    assert loaded.splitlines()[-1] == "[]"
