"""Hints for typical mistakes: each says what was found and what to type, and none is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from distrun_cli import Distrun
from fakehosts import write

PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n"


@pytest.fixture
def distrun(tmp_path: Path) -> Distrun:
    made = Distrun(tmp_path)
    write(made.work, **{"train.py": "import sys", "strict.py": PARSES, "run.sh": "#!/bin/sh\n", "hosts": "h1\n"})
    (made.work / "run.sh").chmod(0o755)
    write(made.work, **{"plain.sh": "true", "tool": "true"})
    return made


def hints(result: subprocess.CompletedProcess[bytes]) -> list[str]:
    lines = result.stderr.decode().splitlines()
    return [line.removeprefix("distrun: hint: ") for line in lines if line.startswith("distrun: hint: ")]


def notes(result: subprocess.CompletedProcess[bytes]) -> list[str]:
    return [line for line in result.stderr.decode().splitlines() if "behind the command" in line]


@pytest.mark.parametrize(
    ("command", "code", "hint"),
    [
        (
            ("FOO=1", "BAR=a b", "python3", "train.py"),
            127,
            "FOO=1 is not a program: to set variables, type --env FOO=1 --env 'BAR=a b' before the command",
        ),
        (
            ("MY_TOKEN=s3cret", "true"),
            127,
            "MY_TOKEN=... is not a program: to set variables, type --env MY_TOKEN=... before the command",
        ),
        (("run.sh",), 127, "run.sh is a file of this directory, which is not searched for programs: type ./run.sh"),
        (
            ("train.py",),
            127,
            "train.py is a file of this directory, which is not searched for programs: type python3 train.py",
        ),
        (
            ("plain.sh",),
            127,
            "plain.sh is a file of this directory, which is not searched for programs: type bash plain.sh",
        ),
        (
            ("tool",),
            127,
            "tool is a file of this directory, which is not searched for programs: type ./tool after chmod +x tool",
        ),
        (("cd", "/tmp"), 127, "cd is the shell's own; give the command as one quoted word"),
        (
            ("echo a & echo b", "-s", "0"),
            127,
            "options of distrun come before the command: distrun launch --launcher local -n 1 -s 0 -s 0 "
            "'echo a & echo b'",
        ),
        (
            ("echo a", "b"),
            127,
            "'echo a' is taken for one program with blanks in its name: give all words in one pair of quotes, or none",
        ),
        (
            (sys.executable, "-m", "strict", "--lr", "1", "-H", "nowhere", "--grace", "3"),
            2,
            "`-H nowhere` stands behind the command, which got it; if it is meant for distrun, type it before %s"
            % sys.executable,
        ),
        (("exit 127 # now",), 127, ""),
        (("no-such-program",), 127, ""),
        (("./no-such-program",), 127, ""),
        ((sys.executable, "strict.py", "--rate", "1"), 2, ""),
        (("exit 2",), 2, ""),
    ],
)
def test_a_command_that_failed_gets_the_hint_that_fits(
    command: tuple[str, ...], code: int, hint: str, distrun: Distrun
) -> None:
    result = distrun.launch("-n", "1", "-s", "0", *command)
    assert result.returncode == code, result.stderr
    assert hints(result) == ([hint] if hint else [])
    assert notes(result) == [line for line in notes(result) if "hint: " in line]
    if "MY_TOKEN=s3cret" in command:
        assert "s3cret" not in "".join(hints(result))


def test_python_is_missing_where_python3_is_there(distrun: Distrun, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "bash", "python3"):
        (tmp_path / "bin" / name).symlink_to("/bin/sh")
    env = {"PATH": str(tmp_path / "bin")}
    result = distrun.launch("-n", "1", "-s", "0", "python", "train.py", env=env)
    assert result.returncode == 127
    for text in ("there is no program python on ", "(in no folder of the tasks' PATH)", "-> did you mean python3?"):
        assert text in result.stderr.decode()
    result = distrun.launch("-n", "1", "-s", "0", "true; python train.py", env=env)
    assert result.returncode == 127
    assert hints(result) == ["many systems have no python, only python3: type that in the command"]
    (tmp_path / "bin" / "python3").unlink()
    result = distrun.launch("-n", "1", "-s", "0", "python", "train.py", env=env)
    assert b"python3" not in result.stderr


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (("train.py", "-n", "2"), "distrun launch -n 2 train.py"),
        (("-v", "python", "a.py", "-n", "2", "--lr", "3", "-s", "1"), "distrun launch -v -n 2 python a.py --lr 3 -s 1"),
        (("python", "train.py", "-n", "2", "-s", "0"), "distrun launch -n 2 -s 0 python train.py"),
        (("python a.py", "--num-workers=2", "-H", "hosts"), "distrun launch --num-workers=2 -H hosts 'python a.py'"),
        (("--env", "MY_TOKEN=x", "a b", "-n", "2"), "distrun launch --env MY_TOKEN=... -n 2 'a b'"),
        (("python", "train.py"), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_a_command_before_the_options_is_put_right(words: tuple[str, ...], typed: str, distrun: Distrun) -> None:
    result = distrun.run("launch", *words)
    assert result.returncode == 2
    assert "distrun: error: Missing option '-n' / '--num-workers'.\n" in result.stderr.decode()
    told = "options of distrun come before the command: %s" % typed
    assert hints(result) == [told if typed else "-n N, the number of workers"]


@pytest.mark.parametrize(
    ("words", "shown", "script"),
    [
        (("python3", "train.py", "-H", "hosts"), "-H hosts", "train.py"),
        (("python3", "-u", "train.py", "--hostfile=hosts"), "--hostfile=hosts", "train.py"),
        (("./run.sh", "-H", "hosts"), "-H hosts", "run.sh"),
        (
            ("python3", "train.py", "--lr", "3", "--sync-dst-dir", "a b", "--env-server", "A:1"),
            "--sync-dst-dir 'a b' --env-server A:1",
            "train.py",
        ),
        (
            ("python3", "train.py", "-n", "5", "--name", "x", "--timeout=3", "-v", "--env", "MY_TOKEN=s", "--json"),
            "-n 5 --name x --timeout=3 -v --env MY_TOKEN=... --json",
            "train.py",
        ),
        (("python3", "-s", "train.py", "--launcher", "pytorch", "-H", "768"), "--launcher pytorch -H 768", "train.py"),
    ],
)
def test_options_that_the_script_gets_by_mistake_are_noted_once(
    words: tuple[str, ...], shown: str, script: str, distrun: Distrun
) -> None:
    result = distrun.launch("-n", "1", "-s", "0", "--dry-run", *words)
    assert result.returncode == 0
    assert notes(result) == [
        "distrun: `%s` stands behind the command, so %s gets it; if it is meant for distrun, type it before %s"
        % (shown, script, words[0])
    ]
    if script == "run.sh":
        assert len(notes(distrun.launch("-n", "2", "-s", "0", *words))) == 1
    assert notes(distrun.launch("-q", "-n", "1", "-s", "0", "--dry-run", *words)) == []


def test_a_dry_run_that_the_script_gets_by_mistake_is_noted(distrun: Distrun) -> None:
    (note,) = notes(distrun.launch("-n", "1", "-s", "0", sys.executable, "train.py", "--dry-run"))
    assert "`--dry-run` stands behind the command, so train.py gets it" in note


def test_the_note_is_not_repeated_when_the_script_refuses_the_option(distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", sys.executable, "strict.py", "-H", "hosts")
    assert result.returncode == 2
    assert len(notes(result)) == 1
    assert hints(result) == []


@pytest.mark.parametrize(
    "words",
    [
        ("python3", "own/other.py", "-n", "5", "--name", "x", "--timeout", "3", "--num-workers", "4"),
        ("python3", "-s", "train.py"),
        ("mpirun", "-H", "hosts", "--hostfile", "hosts", "./run.sh"),
        ("python3", "-m", "torch.distributed.run", "--hostfile", "hosts"),
        ("python3", "train.py --sync-dst-dir x"),
        ("python3", "own/main.py", "--sync-dst-dir", "x", "-H", "hosts", "--launcher", "ssh"),
        ("bash -c 'run -H hosts'",),
    ],
)
def test_a_script_that_has_such_options_itself_is_left_alone(words: tuple[str, ...], distrun: Distrun) -> None:
    write(distrun.work, **{"own/main.py": "import opts"})
    write(distrun.work, **{"own/lib/opts.py": "add('-H'); add('--launcher'); add(\"--sync-dst-dir\"); add('-n')"})
    write(
        distrun.work,
        **{"own/other.py": "import flags\nflags.add('name')\nclass A:\n    timeout: int\n    num_workers: int"},
    )
    result = distrun.launch("-n", "1", "-s", "0", "--dry-run", *words)
    assert result.returncode == 0, result.stderr
    assert notes(result) == []


def test_an_option_that_was_given_before_the_command_and_behind_it_is_noted(distrun: Distrun) -> None:
    result = distrun.launch("-H", "hosts", "-n", "1", "-s", "0", "--dry-run", "python3", "train.py", "-n", "5")
    assert len(notes(result)) == 1


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("FOO=1", "true"), "FOO=1 is not a program: to set variables, type --env FOO=1 before the command"),
        (
            ("train.py",),
            "train.py is a file of this directory, which is not searched for programs: type python3 train.py",
        ),
    ],
)  # fmt: skip
def test_a_command_that_servers_and_scheduler_run_gets_the_hint_whoever_fails_first(
    command: tuple[str, ...], hint: str, distrun: Distrun
) -> None:
    result = distrun.launch("--ps", "command", "-n", "1", "-s", "1", *command)
    assert result.returncode == 127, result.stderr
    assert hints(result) == [hint]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("launch", "--p3", "true"), "No such option --p3. Leave it out: every store sends by priority.\n"),
        (
            ("launch", "--host", "a", "true"),
            "No such option --host. Did you mean --hosts A,B (names of hosts), or -H FILE (a hosts file)?\n",
        ),
        (("exec", "--host", "a", "true"), "Did you mean --hosts A,B (names of hosts), or -H FILE (a hosts file)?\n"),
        (("launch", "--cluster", "ssh", "true"), "No such option --cluster. Did you mean --launcher NAME?\n"),
        (("sync", "--cluster", "ssh"), "No such option --cluster.\n"),
        (("sync", "--p3"), "No such option --p3.\n"),
        (("launch", "--host-file", "x", "true"), "Did you mean -H FILE?\n"),
        (
            ("launch", "--sge-log-dir", "x", "true"),
            "No such option --sge-log-dir. Leave it out, or did you mean --run-dir DIR? Jobs keep their logs there.\n",
        ),
        (("launch", "--jobname", "x", "true"), "Did you mean --name NAME?\n"),
        (("launch", "--nproc_per_node", "2", "true"), "Did you mean -n N, the number of all workers?\n"),
        (("launch", "-x", "FOO", "true"), "Did you mean --env NAME?\n"),
        (("launch", "--master-addr", "h1", "true"), "Leave it out: workers are given MASTER_ADDR and MASTER_PORT.\n"),
        (("launch", "--max-restarts", "3", "true"), "To launch a job again: distrun rerun JOB\n"),
        (("launch", "--workdir", ".", "true"), "Did you mean --sync-dst-dir DIR?\n"),
        (("launch", "--workers", "2", "true"), "No such option --workers. Did you mean -n N?\n"),
        (("launch", "--servers", "2", "true"), "No such option --servers. Did you mean -s N?\n"),
        (("launch", "--gpus", "2", "true"), "No such option --gpus. Did you mean --gpus-per-worker N?\n"),
        (("logs", "--tail", "2"), "No such option --tail. Did you mean -n N, the last N lines?\n"),
        (("launch", "--tail", "2", "true"), "No such option --tail.\n"),
        (("launch", "--qqq", "true"), "No such option --qqq.\n"),
        (("launch", "--lost-aftr", "3", "true"), "Did you mean --lost-after?\n"),
        (("launch", "-np", "2", "true"), "there is no option -np\ndistrun: hint: it is mpirun's; type -n N\n"),
        (
            ("launch", "-n", "1", "--env", "FOO:a b", "true"),
            "--env: expected NAME=VALUE, NAME or PREFIX*, found 'FOO:a b'\ndistrun: hint: type --env 'FOO=a b'\n",
        ),
        (("launch", "-n", "1", "--env", "MY_SECRET:hush", "true"), "found 'MY_SECRET:...'\n"),
    ],
)
def test_options_of_other_launchers_get_what_to_type_here(words: tuple[str, ...], text: str, distrun: Distrun) -> None:
    result = distrun.answer(*words)
    assert result.returncode == 2
    assert text in result.stderr.decode()
    assert b"hush" not in result.stderr


def test_a_variable_with_a_colon_in_its_name_can_be_forwarded(distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", "--env", "A:B", "--env", "C:D=1", "env", env={"A:B": "x"})
    assert result.returncode == 0, result.stderr
    assert b" | A:B=x\n" in result.stdout
    assert b" | C:D=1\n" in result.stdout
