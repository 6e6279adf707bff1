"""`launch -f`, `--print-config`, `config` and `rerun`: where the options of a launch come from."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from distrun_cli import Distrun
from slowness import scaled

GOLDEN = Path(__file__).parent / "golden"
JOB = """\
workers = 2
servers = 0
launcher = "local"
name = "small"
run = '''
echo "$GREETING $WHO"
echo "secret: $KEY"
'''
setup = "export WHO=you"
[env]
GREETING = "hello"
KEY = {file = "key.txt"}
[profile.one]
workers = 1
"""


@pytest.fixture
def job(distrun: Distrun) -> Distrun:
    """A folder with a job file."""
    (distrun.work / "job.toml").write_text(JOB)
    (distrun.work / "key.txt").write_text("s3cret\n")
    return distrun


def config(distrun: Distrun, *words: str, **env: str) -> str:
    done = distrun.answer("config", *words, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def golden(name: str, shown: str, distrun: Distrun) -> None:
    for folder, name_of_it in ((distrun.work, "FOLDER"), (distrun.home, "HOME")):
        shown = shown.replace(str(folder), name_of_it)
    if os.environ.get("DISTRUN_UPDATE_GOLDEN") == "1":
        (GOLDEN / name).write_text(shown)
    assert shown == (GOLDEN / name).read_text(), "it changed; if on purpose: DISTRUN_UPDATE_GOLDEN=1"


def test_a_job_file_is_launched_and_its_record_again_with_other_options(job: Distrun) -> None:
    done = job.run("launch", "-f", "job.toml")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" | ")[2] for line in done.stdout.decode().splitlines()]
    assert sorted(lines) == ["hello you", "hello you", "secret: s3cret", "secret: s3cret"]
    again = job.run("rerun", "small", "-n", "1", "--env", "GREETING=bye", "--no-prefix", cwd=job.home)
    assert again.stdout == b"bye you\nsecret: s3cret\n", again.stderr
    last = job.run("rerun", "small", "--no-prefix", 'echo "$GREETING"', cwd=job.home)
    assert last.stdout == b"bye\n"
    records = [json.loads((folder / "request.json").read_text()) for folder in job.jobs]
    assert [record["given"]["workers"] for record in records] == ["2", "1", "1"]
    assert "s3cret" not in json.dumps(records)
    (job.jobs[0] / "request.json").write_text(json.dumps({**records[0], "cwd": "/nowhere"}))
    assert b"hint: make that folder again" in job.answer("rerun", job.jobs[0].name).stderr


def test_what_print_config_prints_is_a_job_file_and_nothing_starts(job: Distrun) -> None:
    words = ("--profile", "one", "--env", "API_KEY=s3cret", "--timeout", "90", "--print-config")
    done = job.answer("launch", "-f", "job.toml", *words)
    golden("print-config.toml", done.stdout.decode(), job)
    (job.work / "again.toml").write_bytes(done.stdout)
    assert job.answer("launch", "-f", "again.toml", "--print-config").stdout == done.stdout
    assert not job.jobs


def test_config_says_where_each_value_was_given(job: Distrun) -> None:
    (job.home / "pyproject.toml").write_text("[tool.distrun]\nworkers = 7\ntimeout = 60\n")
    user = job.home / "config" / "distrun"
    user.mkdir(parents=True)
    (user / "config.toml").write_text(
        "timeout = 1\nhosts = ['x']\n[slurm]\nargs = '-Q'\n[profile.one]\ngrace = 3\nworkers = 9\n"
    )
    env = {"DISTRUN_NAME": "mine", "DISTRUN_DETACH": "1", "DISTRUN_OP_TIMEOUT": "5"}
    golden("config.toml", config(job, "-f", "job.toml", "--profile", "one", "--show-origin", **env), job)
    assert 'name = "mine"\n' in config(job, **env)


def test_a_command_on_the_command_line_takes_the_place_of_the_files(job: Distrun) -> None:
    done = job.answer("launch", "-f", "job.toml", "--dry-run", "--json", "echo", "a b")
    assert json.loads(done.stdout)["tasks"][0]["argv"] == ["echo", "a b"]


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (("launch", "-f", "nothing.toml"), {}, "cannot read nothing.toml: No such file or directory"),
        (("launch", "-f", "job.toml", "--profile", "two"), {}, "there is no profile 'two'; the files have one"),
        (("launch", "true"), {"DISTRUN_WORKERS": "x"}, "DISTRUN_WORKERS: expected a whole number from 1 to 65536"),
        (("launch", "true"), {"DISTRUN_DETACH": "yes"}, "DISTRUN_DETACH: expected a whole number from 0 to 1"),
        (("launch", "-f", "bad.toml"), {}, "1 error in the job file or configuration"),
        (("launch", "-n", "1", "--env", "A@nothing", "true"), {}, "--env A: cannot read 'nothing'"),
        (("rerun",), {}, "Missing argument 'JOB'"),
        (("rerun", "-n", "2"), {}, "The job comes first"),
        (("rerun", "no-job"), {}, "no job 'no-job'"),
    ],
)
def test_a_source_that_is_wrong_ends_with_2(
    job: Distrun, words: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    (job.work / "bad.toml").write_text("workrs = 1\n")
    done = job.answer(*words, env=env)
    assert done.returncode == 2
    assert message in done.stderr.decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hosts = "d1 d2"', "3:10: E102: invalid host name 'd1 d2': separate hosts with commas\n{}\n           ^\n"),
        ('hosts = ["d1", "d2:22", "e:5"]', "3:26: E105: 'e:5' is ambiguous"),
        ('hosts = ["d1:22", "d1"]', "3:20: E108: 'd1' already listed on line 1 with different port (22 vs none)\n"),
        ("hosts = []", "3:9: E101: no hosts in ''\n"),
        ("hostfile = 'nothing'", "3:12: E100: hosts file not found: "),
        ("hosts = 'd1'\nhostfile-format = 'x'", "4:19: hostfile-format: expected one of auto, "),
        ("launcher = 'slrum'", "3:12: launcher: there is no launcher 'slrum'"),
        ("queue = 'x'", "3:9: queue is for engines, and --launcher local is none\n"),
        ("[worker]\ncores = 2", "4:9: cores is for engines, "),
        ("launcher = 'kubernetes'\nvolume = ['x']", "4:10: volume: expected SOURCE:DIR[:ro]"),
        ("hosts = 'd1'\nactivate = 'venv:'", "4:12: activate venv:: expected venv:PATH"),
        ("hosts = 'd1'\nsync-dst-dir = '/'", "4:16: sync-dst-dir: '/' cannot take copies\n"),
        ("sync-exclude = ['x']", "3:16: sync-exclude: nothing is copied without --sync-dst-dir\n"),
        ("hosts = 'd1'\nscheduler.host = 'd2'", "4:18: host: 'd2' is none of the job's hosts: d1\n"),
        ("show = 'wroker-0'", "3:8: show: no task 'wroker-0' in this job; there is: worker-0"),
        ("quiet = true\nverbose = 1", "3:9: quiet and -v contradict each other\n"),
        ("reconnect = true", "3:13: reconnect: a job on this machine has no connections"),
        ("env-file = 'x'", "3:12: env-file: cannot read '"),
        ("[env]\nA = 1\nKEY = {file = 'x'}", "5:7: env KEY: cannot read '"),
        ("[env]\nDISTRUN_OP_TIMEOUT = 'x'", "4:22: DISTRUN_OP_TIMEOUT='x' on host "),
        ("[profile.p]\nqueue = 'x'", "4:9: queue is for engines, "),
        ("lost-after = 5\nsuspect-after = 10", "4:17: suspect-after 10 is more than --lost-after 5\n"),
        ("suspect-after = 60", "3:17: suspect-after 60 is more than --lost-after 30\n"),
        ("hosts = 'd1'\nplacement = 'pack'\nservers = 2", "1:11: E115: 1 worker + 2 server processes need 3 slots, "),
    ],
)
def test_a_mistake_that_is_found_later_is_told_at_its_place_in_the_job_file(
    distrun: Distrun, text: str, message: str
) -> None:
    words = ("--profile", "p") if "profile" in text else ()
    (distrun.work / "job.toml").write_text(f"workers = 1\ncommand = ['true']\n{text}\n")
    done = distrun.answer("launch", "-f", "job.toml", "--dry-run", *words)
    assert done.returncode == 2
    assert f"job.toml:{message.format('  ' + text)}" in done.stderr.decode()
    assert "distrun: error: 1 error in the " in done.stderr.decode()


def test_a_mistake_that_was_typed_has_no_place_in_the_job_file(job: Distrun) -> None:
    done = job.answer("launch", "-f", "job.toml", "--queue", "x", "--dry-run")
    assert done.stderr.decode().startswith("distrun: error: --queue is for engines, and --launcher local is none\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("-f", "job.toml"), "-n N, or workers = N above all tables of job.toml"),
        (("job.toml",), "for a job file, type distrun launch -f job.toml"),
        (("true",), "-n N, the number of workers"),
    ],
)
def test_a_number_of_workers_that_is_missing_is_answered_with_what_to_type(
    distrun: Distrun, words: tuple[str, ...], hint: str
) -> None:
    (distrun.work / "job.toml").write_text("command = ['true']\n")
    assert f"distrun: hint: {hint}\n" in distrun.answer("launch", *words).stderr.decode()


@pytest.mark.parametrize(
    ("text", "words", "messages"),
    [
        ("[profile.p]\nworkers = 1\ncommand = ['true']", (), ["2:1: workers is", "3:1: command is"]),
        ("workers = 1\n[profile.p]\ncommand = ['true']", (), ["3:1: command is"]),
        ("[profile.p]\nrun = 'true'", ("-n", "1"), ["2:1: run is"]),
        ("command = ['true']\n[profile.q]\n[profile.p]\nworkers = 1", ("--profile", "q"), ["4:1: workers is"]),
    ],
)
def test_what_a_launch_lacks_and_only_a_profile_has_is_told_with_its_place(
    distrun: Distrun, text: str, words: tuple[str, ...], messages: list[str]
) -> None:
    (distrun.work / "job.toml").write_text(text)
    done = distrun.answer("launch", "-f", "job.toml", *words)
    assert done.returncode == 2
    what = " in [profile.p], which is not used: move it above that table, or type --profile p"
    found = [line.partition("job.toml:")[2] for line in done.stderr.decode().splitlines() if "job.toml:" in line]
    assert found == [message + what for message in messages]


def test_a_command_that_is_in_no_profile_either_is_asked_for(distrun: Distrun) -> None:
    (distrun.work / "job.toml").write_text("workers = 1\n[profile.p]\nworkers = 2\n")
    assert "error: there is no command to run\n" in distrun.answer("launch", "-f", "job.toml").stderr.decode()


@pytest.mark.parametrize("words", [("--suspect-after", "60"), ("--suspect-after", "15", "--lost-after", "6")])
def test_a_host_that_would_be_suspect_after_it_is_lost_is_refused(distrun: Distrun, words: tuple[str, ...]) -> None:
    done = distrun.answer("launch", "-n", "1", *words, "--dry-run", "true")
    lost = words[3] if words[2:] else "30"
    assert f"error: --suspect-after {words[1]} is more than --lost-after {lost}\n" in done.stderr.decode()
    assert done.returncode == 2


def test_a_host_that_is_lost_soon_is_suspect_no_later_if_that_is_not_given(distrun: Distrun) -> None:
    done = distrun.answer("launch", "-n", "1", "--lost-after", "6", "--dry-run", "--json", "true")
    limits = json.loads(done.stdout)["limits"]
    assert (limits["suspect_s"], limits["lost_s"]) == (6, 6)


def test_variables_of_a_task_are_no_options_of_a_launch_in_it(distrun: Distrun) -> None:
    env = {"DISTRUN_RUN_DIR": "/nowhere", "DISTRUN_HOST": "x", "DISTRUN_RANK": "1"}
    assert config(distrun, **env) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_pyproject_toml_of_another_user_is_ignored(distrun: Distrun) -> None:
    (distrun.work / "pyproject.toml").write_text("[tool.distrun]\nworkers = 7\n")
    assert config(distrun) == "workers = 7\n"
    os.chown(distrun.work / "pyproject.toml", 4711, -1)
    done = distrun.answer("config")
    assert done.stdout == b""
    assert b"pyproject.toml is ignored: it belongs to another user" in done.stderr
    # Nor is a file of this user to which another one has put a link: its relative paths would be the other's.
    os.chown((distrun.work / "pyproject.toml").rename(distrun.home / "mine.toml"), 0, -1)
    (distrun.work / "pyproject.toml").symlink_to(distrun.home / "mine.toml")
    assert config(distrun) == "workers = 7\n"
    os.lchown(distrun.work / "pyproject.toml", 4711, -1)
    assert config(distrun) == ""


def test_a_pyproject_toml_that_is_no_file_is_not_waited_for(distrun: Distrun) -> None:
    os.mkfifo(distrun.work / "pyproject.toml")
    assert distrun.run("config").returncode == 0


@pytest.mark.parametrize(
    ("hosts", "recorded"),
    [
        ("h2\nh1\n", 'hosts = "h2,h1"'),
        ("h1\nh2\n", 'hosts = "h[1-2]"'),
        ("bob@h1:2222 slots=4\nfe80::1 port=22\n", 'hosts = "bob@h1:2222*4,[fe80::1]:22"'),
        ("h1 gpus=2\n", 'hostfile = "-"'),
    ],
)
def test_hosts_from_standard_input_are_recorded_with_all_that_is_said_of_them(
    distrun: Distrun, hosts: str, recorded: str
) -> None:
    words = ("launch", "-n", "1", "-s", "0", "-H", "-", "--print-config", "true")
    argv = ["sh", "-c", 'printf \'%s\' "$0" | "$@"', hosts, *distrun.argv(*words)]
    found = subprocess.run(
        argv, env=distrun.env, cwd=distrun.work, capture_output=True, timeout=scaled(100), check=True
    )
    assert recorded in found.stdout.decode().splitlines()


def test_files_of_variables_are_recorded_with_their_whole_paths(job: Distrun) -> None:
    done = job.answer("launch", "-n", "1", "--env", "KEY@key.txt", "--print-config", "true")
    assert f'KEY = {{file = "{job.work}/key.txt"}}' in done.stdout.decode().splitlines()


def test_files_of_secrets_are_not_copied(distrun: Distrun) -> None:
    (distrun.work / "key.txt").write_text("s3cret\n")
    words = ("launch", "-n", "1", "--hosts", "d1", "--sync-dst-dir", "/x", "--dry-run", "--json")
    assert json.loads(distrun.answer(*words, "true").stdout)["sync"]["files"] == 1
    assert json.loads(distrun.answer(*words, "--env", "KEY@key.txt", "true").stdout)["sync"]["files"] == 0
