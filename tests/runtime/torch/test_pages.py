"""The page about torch and its two programs: blocks run, and the lines that it shows are all that distrun needs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import run_script
from slowness import scaled

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "torch.md").read_text("utf-8")
SECTIONS = ("Training with torch", "Checkpoints", "Data", "Metrics and early stop", "From DDP or Horovod")
EXAMPLES = {"torch_resnet": lambda accuracy: accuracy >= 0.9, "torch_lm": lambda loss: loss < 2.3}

pytestmark = pytest.mark.peers


def section(title: str) -> str:
    (text,) = re.findall(r"^##? %s\n(.*?)(?=^## |\Z)" % title, PAGE, re.MULTILINE | re.DOTALL)
    return text


def blocks(text: str, language: str) -> list[str]:
    return re.findall(r"^```%s\n(.*?)^```$" % language, text, re.MULTILINE | re.DOTALL)


def alone(folder: Path, text: str, *words: str, path: Path = ROOT / "runtime") -> str:
    """Return what a program prints that runs by itself in a folder; its distrun is looked for in a path."""
    (folder / "alone.py").write_text(text, "utf-8")
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [python_of("torch"), "alone.py", *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(110), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_of_the_page_are_one_program_alone_and_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "\n".join(block for title in SECTIONS for block in blocks(section(title), "python"))
    prints = re.findall(r"# prints (.*)$", program, re.MULTILINE)
    assert alone(tmp_path, program).splitlines() == prints
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.chdir(job)
    done = run_script(job, program.replace('"local"', '"dist_sync"'), python=python_of("torch"), servers=1)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(prints * 2)


def without_distrun(program: str, diff: str) -> str:
    """Return a program in which the lines of a diff are undone."""
    for removed, added in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n))", diff, re.MULTILINE):
        old, new = (re.sub(r"^.", "", lines, flags=re.MULTILINE) for lines in (added, removed))
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


def last(lines: list[str]) -> float:
    return float(lines[-1].split()[-1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_with_and_without_the_six_lines_that_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = (ROOT / "examples" / (name + ".py")).read_text("utf-8")
    (text,) = (
        block
        for block in blocks(section("Two programs, with and without distrun"), "diff")
        if ("dt.resume" in block) == (name == "torch_lm")
    )
    assert len(re.findall(r"^\+", text, re.MULTILINE)) <= 6
    (tmp_path / "alice.txt").symlink_to(ROOT / "examples" / "alice.txt")
    monkeypatch.chdir(tmp_path)
    learned = EXAMPLES[name]
    for each, path in ((without_distrun(program, text), tmp_path), (program, ROOT / "runtime")):
        (tmp_path / "torch_lm.pt").unlink(missing_ok=True)
        assert learned(last(alone(tmp_path, each, "--epochs", "2", path=path).splitlines()))
    (tmp_path / "torch_lm.pt").unlink(missing_ok=True)
    for epochs in ("1", "2"):
        done = run_script(tmp_path, program, "--epochs", epochs, python=python_of("torch"), servers=1)
        assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("Epoch 1: ")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert learned(last(lines))
    # The language model went on after its first epoch.
    assert ("Epoch 0: " in done.stdout) == (name != "torch_lm")
