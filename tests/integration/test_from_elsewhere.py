"""The pages for users of torchrun and others: what they say to type here is parsed, planned and run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from distrun_cli import Distrun, wait_until
from lab import Done, Site
from peers import python_of
from slowness import scaled

from distrun.cli import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "from-elsewhere.md").read_text("utf-8")
DDP = (DOCS / "torch-ddp.md").read_text("utf-8")
PACKED = "launch -n 8 -s 0 -H hosts --placement pack"
LIMIT_S = 150.0


def blocks(page: str, language: str) -> list[str]:
    return re.findall(r"^```%s\n(.*?)^```$" % language, page, re.MULTILINE | re.DOTALL)


FILES = {"hosts": blocks(PAGE, "text")[0], "train.py": blocks(PAGE, "python")[0], "job.toml": blocks(PAGE, "toml")[0]}
SPANS = {span for row in re.findall(r"^\|.*\| (.*) \|$", PAGE, re.MULTILINE) for span in re.findall("`([^`]+)`", row)}
"""Code in our column of the tables."""
COMMANDS = sorted(span.partition(" ")[2] for span in SPANS if span.startswith("distrun "))
LAUNCHES = [text for text in COMMANDS if text.startswith("launch ")]
HERE = [text for text in LAUNCHES if "--launcher local" in text]
ON_HOSTS = [text for text in LAUNCHES if text not in HERE]
VERBS = [text for text in COMMANDS if "JOB" in text]
OPTIONS = sorted(span for span in SPANS if span.startswith("-"))
ATTRIBUTES = sorted(span for span in SPANS if re.match(r"\w+=\S", span) and "/" not in span.partition("=")[0])


@pytest.fixture
def folder(distrun: Distrun) -> Distrun:
    """The command, in a folder with the files of the page."""
    for name, text in {**FILES, "secrets.env": "A=1\n"}.items():
        (distrun.work / name).write_text(text)
    return distrun


def test_each_command_of_the_tables_is_understood() -> None:
    assert (len(HERE), len(ON_HOSTS), len(VERBS)) >= (4, 4, 9)
    with click.Context(cli) as parent:
        # Launches are planned below. For `rerun`, which reads the job's record, it has to exist.
        for command in {*COMMANDS} - {*LAUNCHES, "rerun JOB"}:
            verb, *words = shlex.split(command)
            _, found, rest = cli.resolve_command(parent, [verb, *words])
            assert found, command
            found.make_context(verb, rest, parent)


def test_each_launch_option_and_attribute_of_the_tables_gives_a_plan(folder: Distrun) -> None:
    options = [
        "%s %s python3 train.py" % (PACKED.replace("-H hosts", "") if "slurm" in o else PACKED, o) for o in OPTIONS
    ]
    assert len(options) > 20
    for command in [*LAUNCHES, *options]:
        verb, *words = shlex.split(command)
        done = folder.answer(verb, "--dry-run", *words)
        assert done.returncode == 0, command + "\n" + done.stderr.decode()
    for attribute in ATTRIBUTES:
        (folder.work / "one").write_text("h1 %s\n" % attribute)
        done = folder.answer("hosts", "one")
        assert done.returncode == 0, attribute + "\n" + done.stderr.decode()
    toml = [span for span in SPANS if re.match(r"[\w-]+ = ", span)]
    assert len(toml) >= 4
    assert all(span in FILES["job.toml"] for span in toml)


@pytest.mark.parametrize("command", HERE)
def test_a_command_for_this_machine_runs_four_workers(folder: Distrun, command: str) -> None:
    verb, *words = shlex.split(command)
    done = folder.run(verb, "--no-prefix", *words)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.decode().splitlines())
    ranks = ["rank %d of 4 local rank %d" % (rank, rank) for rank in range(4)]
    assert lines in (ranks, ["rank %d" % rank for rank in range(4)], ["first", "other", "other", "other"])


@pytest.mark.slow
def test_a_command_about_a_job_does_that_for_one_that_is_over_or_runs(folder: Distrun) -> None:
    assert folder.launch("-n", "4", "-s", "0", "python3", "train.py").returncode == 0
    job = folder.job.name
    live = [verb for verb in VERBS if verb.split()[0] in ("kill", "stack")]
    assert len(live) == 2
    for verb in set(VERBS) - {*live}:
        done = folder.run(*shlex.split(verb.replace("JOB", job)))
        assert done.returncode == 0, verb + "\n" + done.stderr.decode()
    assert sorted(path.name for path in (folder.work / job).rglob("rank-*")) == ["rank-%d" % rank for rank in range(4)]
    (folder.work / "waits.py").write_text(
        "import time, distrun_runtime\ndistrun_runtime.report(step=1)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    job = folder.launch("--detach", "-n", "1", "-s", "0", "python3", "waits.py").stdout.decode().strip()
    wait_until(lambda: b"up" in folder.run("logs", job).stdout, 60, "the program has offered its stacks")
    for verb in sorted(live, reverse=True):
        done = folder.run(*shlex.split(verb.replace("JOB", job)))
        assert done.returncode == 0, verb + "\n" + done.stderr.decode()


def run_on_hosts(lab: Site, command: str, code: int = 0) -> Done:
    """Run a launch command of a page in a folder with its files."""
    verb, *words = shlex.split(command)
    copies = [] if {"-f", "--sync-dst-dir"} & {*words} else ["--sync-dst-dir", "~/job"]
    done = lab.distrun(verb, "--timeout", "%g" % scaled(120), *copies, *words, timeout_s=LIMIT_S)
    assert done.code == code, command + "\n" + done.out + done.err
    return done


def test_a_command_for_hosts_runs_eight_workers_on_two(lab: Site) -> None:
    for name, text in FILES.items():
        (lab.work / name).write_text(text)
    runs = [command for command in ON_HOSTS if not {"--launcher", "--detach"} & {*command.split()}]
    assert len(runs) >= 4
    for command in runs:
        packed = "-f" in command or "pack" in command
        places = [(rank, rank // 4, rank % 4) if packed else (rank, rank % 2, rank // 2) for rank in range(8)]
        lines = ["worker-%d@h%d | rank %d of 8 local rank %d" % (rank, host + 1, rank, at) for rank, host, at in places]
        assert sorted(run_on_hosts(lab, command).out.splitlines()) == lines, command
    (doctor,) = (command for command in COMMANDS if command.startswith("doctor "))
    checked = lab.distrun(*shlex.split(doctor), "--sync-dst-dir", "~/job")
    assert checked.code == 0, checked.out


# --- docs/torch-ddp.md

(PROGRAM,) = blocks(DDP, "python")
PRINTED, SLOTS, GPUS, FAILED = blocks(DDP, "text")
DDP_HERE, DDP_HOSTS, DDP_NCCL = re.findall(r"^distrun (launch .*)$", DDP, re.MULTILINE)
TORCH_ABORTS, TRIES = 134, 5
"""The exit code of a rank that torch aborts as it ends, which the page says may happen; and how often it is tried."""


def run_ddp_here(distrun: Distrun, program: str, workers: int) -> tuple[int, str, str]:
    """Run a program by the page's command for this machine; return the exit code, stdout and stderr."""
    (distrun.work / "train_ddp.py").write_text(program)
    command = DDP_HERE.replace("-n 2", "-n %d" % workers).replace("python3", shlex.quote(python_of("torch")))
    done = distrun.run(*shlex.split(command), timeout_s=LIMIT_S)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.peers
def test_the_ddp_program_trains_here_and_goes_on_from_its_checkpoint(distrun: Distrun) -> None:
    code, out, err = run_ddp_here(distrun, PROGRAM, 2)
    assert (code, out) == (0, PRINTED.replace("@h1", "@" + distrun.job_host())), err
    assert run_ddp_here(distrun, PROGRAM, 1)[:2] == (0, "")


@pytest.mark.peers
def test_a_rank_that_fails_is_shown_as_the_ddp_page_says(distrun: Distrun) -> None:
    fails = PROGRAM.replace("\nfor epoch", '\nif rank == 1:\n    raise ValueError("bad example")\n\nfor epoch')
    for _ in range(TRIES):
        code, _, err = run_ddp_here(distrun, fails, 2)
        if code != TORCH_ABORTS or "| terminate called without an active exception" not in err:
            break
    (job,) = re.findall(r"distrun: job (\S+)", err)
    shown = FAILED.replace("calm-otter-7f3", job).replace("worker-5 on h2", "worker-1 on " + distrun.job_host())
    shown = shown.replace("worker-5", "worker-1").replace("rank5", "rank1")
    shown = shown.replace("line 31", "line %d" % (fails.partition("raise")[0].count("\n") + 1))
    said = re.sub(r"of them: .*/jobs/", "of them: ~/.local/state/distrun/jobs/", err)
    assert code == 1, err
    assert shown in re.sub(r'File ".*/train_ddp', 'File "~/job/train_ddp', said)


@pytest.mark.peers
def test_the_ddp_program_trains_on_two_hosts(lab: Site) -> None:
    """With a quarter of the page's workers: the hosts are one machine."""
    (lab.work / "train_ddp.py").write_text(PROGRAM)
    (lab.work / "hosts").write_text(SLOTS.replace("slots=4", "slots=1"))
    venv = shlex.quote(str(Path(python_of("torch")).parents[1].resolve()))
    assert lab.distrun("exec", "-H", "hosts", "rm -rf ~/job; ln -sfn %s ~/venv" % venv).code == 0
    try:
        done = run_on_hosts(lab, DDP_HOSTS.replace("-n 8", "-n 2"))
    finally:
        lab.distrun("exec", "-H", "hosts", "rm -rf ~/venv ~/job")
    assert done.out == PRINTED
    assert [path.name for path in lab.work.rglob("h1/out/*")] == ["checkpoint.pt"]


def test_gpus_of_the_ddp_page_give_four_workers_a_host(folder: Distrun) -> None:
    (folder.work / "hosts").write_text(GPUS)
    (folder.work / "train_ddp.py").write_text(PROGRAM)
    verb, *words = shlex.split(DDP_NCCL)
    plan = folder.answer(verb, "--dry-run", *words).stdout.decode()
    assert "h2: worker-4 worker-5 worker-6 worker-7\n" in plan
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in plan
    assert "NCCL_DEBUG=INFO" in plan


def names_here(argv: Sequence[str], script: Path) -> set[str]:
    """Return the variables that a launcher gives to a Python script, beside those of the table's heading and ours."""
    env = {"PATH": os.environ["PATH"], "HOME": str(script.parent), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    done = subprocess.run(argv, cwd=script.parent, env=env, capture_output=True, text=True, check=True)
    return {*done.stdout.split()} - {*env}


@pytest.mark.peers
def test_the_ddp_page_says_of_each_variable_of_torchrun_whether_it_is_set(distrun: Distrun) -> None:
    script = distrun.work / "names.py"
    script.write_text("import os\nif os.environ['RANK'] == '0':\n    print(*os.environ)\n")
    python = python_of("torch")
    theirs = names_here(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name], script
    )
    ours = names_here(
        distrun.argv("launch", "-q", "--no-prefix", *shlex.split("-n 2 -s 0 --launcher local"), python, script.name),
        script,
    )
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", DDP.partition("## Torchrun's variables")[2], re.MULTILINE)
    told = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    assert theirs - {"LC_CTYPE"} <= {*told}
    assert {name for name, text in told.items() if not text.startswith("Not set")} == {*told} & ours
