"""The first job, and the example to start from."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from distrun_cli import Distrun
from peers import python_of

ACCURACY = re.compile(rb"epoch 10 of 10: loss [\d.]+, accuracy (0\.\d+|1\.0+)\n")


def on_path(python: str) -> dict[str, str]:
    """Return variables with which a command finds `python` first."""
    return {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}


def test_the_demo_learns_and_says_what_to_type_next(distrun: Distrun) -> None:
    done = distrun.run("demo")
    assert done.returncode == 0, done.stderr
    assert float(ACCURACY.findall(done.stdout)[0]) > 0.95
    assert b"  distrun init my-job " in done.stderr
    assert {task["role"] for task in distrun.state()["tasks"]} == {"worker", "server", "scheduler"}


def test_the_demo_takes_no_options_from_files(distrun: Distrun) -> None:
    (distrun.work / "pyproject.toml").write_text('[tool.distrun]\nfetch = ["out/*"]\nworkers = 3\n')
    config = distrun.work.parent / "config" / "distrun" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('env = ["RATE=1"]\ntimeout = "1ms"\n')
    done = distrun.run("demo", env={"XDG_CONFIG_HOME": str(config.parent.parent)})
    assert done.returncode == 0, done.stderr


def test_what_init_writes_runs_at_once_and_is_never_overwritten(distrun: Distrun) -> None:
    env = on_path(sys.executable)
    assert distrun.answer("init", "a/b c", env=env).returncode == 0
    folder = distrun.work / "a" / "b c"
    assert sorted(path.name for path in folder.iterdir()) == ["hosts", "job.toml", "train.py"]
    done = distrun.run("launch", "-f", "job.toml", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert float(ACCURACY.findall(done.stdout)[0]) > 0.95
    (folder / "train.py").write_text("mine")
    (folder / "hosts").unlink()
    done = distrun.answer("init", "a/b c")
    assert (done.returncode, (folder / "train.py").read_text()) == (2, "mine")
    assert b"a/b c has job.toml, train.py already; nothing was written" in done.stderr
    assert not (folder / "hosts").exists()


def test_the_profile_of_the_example_takes_its_hosts(distrun: Distrun) -> None:
    assert distrun.answer("init").returncode == 0
    done = distrun.answer("launch", "-f", "job.toml", "--profile", "hosts", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert b"localhost" in done.stdout


def test_a_python_that_is_not_on_the_path_is_named_by_its_path(distrun: Distrun) -> None:
    assert distrun.answer("init", env={"PATH": "/nowhere"}).returncode == 0
    commands = re.findall("command = .*", (distrun.work / "job.toml").read_text())
    assert commands == [f'command = ["{sys.executable}", "train.py"]', 'command = ["python3", "train.py"]']  # on hosts


@pytest.mark.peers
def test_the_example_of_torch_learns(distrun: Distrun) -> None:
    env = on_path(python_of("torch"))
    assert distrun.answer("init", "--torch").returncode == 0
    done = distrun.run("launch", "-f", "job.toml", "-n", "2", "python3", "train.py", env=env)
    assert done.returncode == 0, done.stderr
    assert float(ACCURACY.findall(done.stdout)[0]) > 0.9
