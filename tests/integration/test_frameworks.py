"""The programs for JAX, XGBoost and LightGBM that the documentation shows, launched by the commands that it shows.

They need `.peers/frameworks`, which `scripts/install peers` makes; without it they are skipped, or fail with
DISTRUN_PEERS=required, which `scripts/test peers` sets once it has installed all peers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import Done, Site
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
MODELS = {"xgboost": "model.json", "lightgbm": "model.txt"}


@dataclass(frozen=True)
class Page:
    """What a page shows: a program, the name to save it as, launch commands (words), and what the workers print."""

    program: str
    script: str
    commands: list[list[str]]
    printed: list[str]

    @property
    def here(self) -> list[str]:
        """The command for this machine."""
        (words,) = (words for words in self.commands if "local" in words)
        return words

    @property
    def on_hosts(self) -> list[str]:
        """The command for several hosts."""
        (words,) = (words for words in self.commands if "-H" in words)
        return words


def shown(name: str) -> Page:
    text = (ROOT / "docs" / (name + ".md")).read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (script,) = re.findall(r"Save it as `([\w.]+)`", text)
    commands = [shlex.split(line) for line in re.findall(r"^distrun launch .*$", text, re.MULTILINE)]
    return Page(program, script, commands, printed.splitlines())


def shown_for_jax() -> Page:
    text = (ROOT / "docs" / "environment.md").read_text("utf-8")
    (section,) = re.findall(r"^## JAX\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for line in re.findall(r"^distrun launch .*$", section, re.MULTILINE)]
    return Page(program, commands[0][-1], commands, re.findall(r"`(process [^`]*)`", section))


def launch_here(page: Page, folder: Path, program: str = "", code: int = 0) -> str:
    """Run a page's command for this machine, with its `python` that of the frameworks; return stdout and stderr."""
    (folder / page.script).write_text(program or page.program, "utf-8")
    assert page.here[:2] == ["distrun", "launch"]
    assert page.here[-2:] == ["python", page.script]
    argv = [sys.executable, "-m", "distrun", "launch", "--no-prefix", "--timeout", "%g" % scaled(120), *page.here[2:-2]]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DISTRUN_"))}
    env["XDG_STATE_HOME"] = str(folder / "state")
    argv += [python_of("frameworks"), page.script]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of(output: str, first: str) -> list[str]:
    """Return the lines that begin with a word, sorted; the frameworks' own lines are left out."""
    return sorted(line for line in output.splitlines() if line.startswith(first + " "))


def launch_on_hosts(lab: Site, page: Page, words: list[str]) -> Done:
    """Run a page's program on two hosts, which have the frameworks in `~/venv` for the time of this call."""
    (lab.work / page.script).write_text(page.program, "utf-8")
    hosts = lab.hosts_file("h1", "h2")
    venv = Path(python_of("frameworks")).parents[1]
    linked = lab.distrun("exec", "-H", hosts, "ln -sfn %s ~/venv" % shlex.quote(str(venv)))
    assert linked.code == 0, linked.out + linked.err
    words = [hosts if word == "hosts" else word for word in words]
    try:
        # The hosts share one machine's processors, where threads that spin while they wait take them from each other.
        env = {"OMP_WAIT_POLICY": "passive"}
        done = lab.distrun(words[1], "--timeout", "%g" % scaled(120), *words[2:], env=env, timeout_s=LIMIT_S)
    finally:
        lab.distrun("exec", "-H", hosts, "rm -f ~/venv")
    assert done.code == 0, done.out + done.err
    return done


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_a_page_s_program_prints_what_the_page_says_and_saves_its_model(name: str, tmp_path: Path) -> None:
    page = shown(name)
    assert lines_of(launch_here(page, tmp_path), "worker") == page.printed
    assert (tmp_path / MODELS[name]).stat().st_size > 0


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_a_page_s_program_trains_on_several_hosts(name: str, lab: Site) -> None:
    """The page's own command, and one with two workers a host, which share its processors but not its ports."""
    page = shown(name)
    done = launch_on_hosts(lab, page, page.on_hosts)
    lines = [line.partition(" | ") for line in done.out.splitlines() if " | worker " in line]
    assert sorted(text for _, _, text in lines) == page.printed
    assert {who for who, _, _ in lines} == {"worker-0@h2", "worker-1@h1"}
    assert (lab.distrun("exec", "-H", lab.hosts_file("h2"), "cat ~/job/" + MODELS[name])).code == 0

    four = shlex.split(shlex.join(page.on_hosts).replace("-n 2", "-n 4"))
    done = launch_on_hosts(lab, page, four)
    rows = [line.partition(" | ")[2] for line in done.out.splitlines() if " rows " in line]
    assert sorted(rows) == ["worker %d rows 1000 of 4000" % rank for rank in range(4)]


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_a_worker_that_fails_in_training_ends_the_job_with_its_code(name: str, tmp_path: Path) -> None:
    page = shown(name)
    train = re.search(r"^( *)(model = .*train\(.*\))$", page.program, re.MULTILINE)
    assert train
    # The other worker's error comes at the same moment. Here it comes late, so that which one was first is known.
    lines = (
        "if rank == 1:",
        "    os._exit(9)",
        "try:",
        "    " + train[2],
        "except Exception:",
        "    __import__('time').sleep(60)",
        "    raise",
    )
    fails = "\n".join(train[1] + line for line in lines)
    output = launch_here(page, tmp_path, page.program.replace(train[0], fails), code=9)
    assert "worker-1" in output.splitlines()[-1]
    assert "exit code 9" in output.splitlines()[-1]


@pytest.mark.peers
def test_neither_tree_library_can_bind_a_port_that_an_agent_holds(tmp_path: Path) -> None:
    """So both pages bring a port of another origin; this test fails when a release sets SO_REUSEADDR."""
    xgboost = shown("xgboost")
    program = """\
import os, sys
from xgboost.tracker import RabitTracker
if os.environ["RANK"] == "0":
    RabitTracker(n_workers=2, host_ip=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
"""
    (message,) = re.findall(r"fails with `(Failed to bind[^`]*)`", (ROOT / "docs" / "xgboost.md").read_text("utf-8"))
    assert message in launch_here(xgboost, tmp_path, program, code=1)
    program = """\
import os, lightgbm, numpy
port = int(os.environ["MASTER_PORT"])
machines = "%s:%d,%s:1" % (os.environ["MASTER_ADDR"], port, os.environ["MASTER_ADDR"])
network = {"machines": machines, "num_machines": 2, "local_listen_port": port}
if os.environ["RANK"] == "0":
    lightgbm.train(network, lightgbm.Dataset(numpy.ones((9, 2)), numpy.ones(9)))
"""
    output = launch_here(xgboost, tmp_path, program, code=1)
    assert re.search(r"Binding port \d+ failed", output), output


@pytest.mark.peers
def test_the_jax_program_of_the_page_gathers_from_all_processes(tmp_path: Path) -> None:
    page = shown_for_jax()
    assert len(page.printed) == 2
    assert lines_of(launch_here(page, tmp_path), "process") == page.printed


@pytest.mark.peers
def test_the_jax_program_of_the_page_runs_on_several_hosts(lab: Site) -> None:
    page = shown_for_jax()
    options = "-n 4 -s 0 -H hosts --sync-dst-dir ~/job --activate venv:~/venv python"
    done = launch_on_hosts(lab, page, ["distrun", "launch", *options.split(), page.script])
    lines = [line.partition(" | ") for line in done.out.splitlines() if " | process " in line]
    assert sorted(text for _, _, text in lines) == ["process %d of 4 gathered [0 1 2 3]" % rank for rank in range(4)]
    assert {who.partition("@")[2] for who, _, _ in lines} == {"h1", "h2"}


@pytest.mark.peers
def test_jax_without_arguments_finds_only_its_coordinator(tmp_path: Path) -> None:
    """The page says so; this test fails when a release reads more."""
    page = shown_for_jax()
    call = re.search(r"initialize\(.*?^\)", page.program, re.MULTILINE | re.DOTALL)
    assert call
    text = (ROOT / "docs" / "environment.md").read_text("utf-8")
    (message,) = re.findall(r"it ends\s+with `([^`]*)`", text)
    output = launch_here(page, tmp_path, page.program.replace(call[0], "initialize()"), code=1)
    assert "ValueError: " + message in output
    # With the other two given, the address comes from the variable.
    without = call[0].replace(re.findall(r"^ *coordinator_address=.*\n", call[0], re.MULTILINE)[0], "")
    assert lines_of(launch_here(page, tmp_path, page.program.replace(call[0], without)), "process") == page.printed
