"""The Python of docs/python.md runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab import Site
from slowness import scaled

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(MODULE,) = (block for block in BLOCKS if block.startswith("# work.py"))
(ON_HOSTS,) = (block for block in BLOCKS if "hosts=" in block)
HERE = [block for block in BLOCKS if block not in (MODULE, ON_HOSTS)]
(FUNCTIONS,) = (block for block in HERE if "import work" in block)


def printed(program: str) -> list[str]:
    return re.findall(r"# prints (.*)$", program, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(MODULE)
    script = "import os\nprint('worker', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    (tmp_path / "train.py").write_text(script)
    return tmp_path


def test_all_that_runs_on_this_machine_is_one_program(folder: Path) -> None:
    program = "\n".join(HERE)
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed(program)


def test_a_function_is_copied_to_hosts_and_its_results_come_back(folder: Path, lab: Site) -> None:
    imports = FUNCTIONS.partition("\n\n")[0]
    call = ON_HOSTS.replace("hosts=", f"python={sys.executable!r}, hosts=")
    done = lab.run(sys.executable, "-c", f"{imports}\n{call}", cwd=folder)
    assert done.code == 0, done.err
    assert done.out.splitlines() == printed(ON_HOSTS)
