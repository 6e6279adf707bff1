"""Scripts of a test, launched as jobs on this machine; and programs of many cases, each of which is a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from slowness import scaled

ROOT = Path(__file__).resolve().parents[2]


def run_script(
    folder: Path, text: str, *words: str, python: str = sys.executable, workers: int = 2, servers: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a script with these arguments as a job, whose lines have no prefix. Its files are in the folder."""
    script = folder / "program.py"
    script.write_text(text, "utf-8")
    command = [sys.executable, "-m", "distrun", "launch", "-q", "-n", str(workers), "-s", str(servers)]
    command += ["--launcher", "local", "--no-prefix", "--run-dir", str(folder / "jobs"), python, str(script), *words]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)


def cases_of(program: Path) -> list[str]:
    """Return the names of the cases of a program (`cases.run_cases`): functions below `# --- the cases`."""
    text = program.read_text("utf-8").partition("# --- the cases")[2]
    return [name for name in re.findall(r"^def (\w+)\(\) -> None:", text, re.MULTILINE) if name != "main"]


def outcomes_of(program: Path, python: str) -> dict[str, str]:
    """Run a program of cases (`cases.run_cases`); return their tracebacks by name, empty where one ended well."""
    path = os.pathsep.join([str(ROOT / "runtime"), str(program.parent)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, program], env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result
