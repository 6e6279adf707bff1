from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import click
import pytest
from distrun_cli import Distrun
from slowness import scaled

import distrun_runtime
from distrun import cli, shipping

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("DISTRUN_UPDATE_GOLDEN") == "1"
"""Golden files change only on purpose: DISTRUN_UPDATE_GOLDEN=1 pytest tests/distrun/cli/test_cli.py"""


def error(result: subprocess.CompletedProcess[bytes], code: int = 2) -> str:
    text = result.stderr.decode()
    assert result.returncode == code, text
    assert "distrun: error: " in text
    assert "Traceback" not in text
    return text


def mask(text: str, distrun: Distrun) -> str:
    """Replace what differs from machine to machine."""
    host = socket.gethostname().partition(".")[0]
    root = str(Path(distrun_runtime.__file__).resolve().parent.parent)
    for found, shown in (
        (json.dumps(shipping.BOOT)[1:-1], "BOOT"),
        (shlex.quote(sys.executable), "PYTHON"),
        (sys.executable, "PYTHON"),
        (root, "RUNTIME"),
        (str(distrun.home), "HOME"),
    ):
        text = text.replace(found, shown)
    text = re.sub(r"\$'exec\(.*?\.\.\.'|'exec\(.*?\.\.\.'", "BOOT", text)
    return re.sub(r"(?<![\w.-])%s(?![\w-])" % re.escape(host), "HERE", text)


CASES: dict[str, tuple[str, ...]] = {
    "two-by-two": ("-n", "2", "-s", "2", "python", "train.py", "--kv-store", "dist_sync"),
    "servers-default-to-workers": ("-n", "2", "python", "train.py"),
    "no-servers": ("-n", "2", "-s", "0", "python", "ddp.py"),
    "ps-command": ("-n", "1", "-s", "1", "--ps", "command", "python train.py > $DMLC_ROLE.txt"),
    "environment": (
        *("-n", "1", "-s", "1", "--env", "A=it's $x", "--env", "API_KEY=s3cret", "--env-server", "OMP_NUM_THREADS:3"),
        *("--env", "FORWARDED", "--interface", "eth9", "--port-range", "7000-7100", "--op-timeout", "5"),
        *("--timeout", "60", "--name", "digits", "--keep-outer-env", "--", "./run me", "ü", "a\nb"),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["json", "text"])
def test_dry_run_shows_what_it_always_showed(case: str, form: str, distrun: Distrun) -> None:
    options = ["--json"] if form == "json" else []
    env = {"FORWARDED": "forwarded-value", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
    result = distrun.launch("--dry-run", *options, *CASES[case], env=env)
    assert result.returncode == 0, result.stderr.decode()
    assert b"s3cret" not in result.stdout
    assert b"forwarded-value" not in result.stdout
    assert not distrun.jobs
    shown = mask(result.stdout.decode(), distrun)
    golden = GOLDEN / ("%s.%s" % (case, "json" if form == "json" else "txt"))
    if UPDATE:
        golden.write_text(shown)
    assert shown == golden.read_text(), "it changed; if on purpose: DISTRUN_UPDATE_GOLDEN=1"


@pytest.mark.parametrize("command", [(), ("launch",), ("status",), ("logs",), ("kill",)])
def test_h_equals_help(command: tuple[str, ...], distrun: Distrun) -> None:
    short, long = distrun.answer(*command, "-h"), distrun.answer(*command, "--help")
    assert short.returncode == long.returncode == 0
    assert short.stdout == long.stdout
    assert b"Usage: distrun" in short.stdout


def test_help_loads_nothing_heavy_and_few_modules_of_our_own() -> None:
    code = (
        "import sys\nfrom distrun import cli\nassert cli.run(['--help']) == 0\n"
        "print(*sorted(name for name in sys.modules if name.count('.') < 1 or name.startswith('distrun')))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(out.splitlines()[-1].split())
    assert not loaded & {"numpy", "zmq", "paramiko", "fabric", "invoke", "rich", "asyncio", "scipy"}
    ours = {name for name in loaded if name.startswith("distrun")}
    packages = {"distrun", "distrun_runtime", "distrun_runtime.contract"}
    needed = {"cli", "cli.console", "errors", "version"}
    found = ours - packages - {f"distrun.{name}" for name in needed}
    assert found == {"distrun_runtime.contract.facts", "distrun_runtime.contract.streams"}


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("launch", "-n", "2", "--launcher", "locl", "true"), ["no launcher 'locl'", "did you mean local?"]),
        (("launch", "-n", "2", "--launcher", "zzz", "true"), ["no launcher 'zzz'; known: local"]),
        (("launch", "-n", "2", "--launcher", "ssh", "true"), ["--launcher ssh: no hosts are given", "-H FILE"]),
        (("launch", "-n", "2", "--backend", "slrum", "true"), ["no launcher 'slrum'", "did you mean slurm?"]),
        (("launch", "-n", "2", "--hosts", "a,b!", "true"), ["E102: invalid host name 'b!'"]),
        (("launch", "-n", "2", "--reconnect", "true"), ["--reconnect: a job on this machine has no connections", "-H"]),
        (("launch", "-n", "2", "-H", "/dev/null", "true"), ["E101: no hosts in file"]),
        (("launch", "-n", "2", "--hosts", "a", "--sync-delete", "true"), ["without --sync-dst-dir", "add --sync-dst"]),
        (("launch", "-n", "2", "--lost-after", "0", "true"), ["--lost-after: expected a time in seconds, more than 0"]),
        (("launch", "-n", "2", "--activate", "venv:", "true"), ["--activate"]),
        (("launch", "-n", "2", "--python", "/nope", "true"), ["--python: there is no program '/nope'"]),
        (("launch", "-n", "0", "true"), ["-n/--num-workers: expected a whole number from 1 to 65536, found '0'"]),
        (("launch", "true"), ["Missing option '-n'"]),
        (("launch", "-n", "2"), ["no command"]),
        (("launch", "-n", "2", "--sync-dir", "/x", "true"), ["--sync-dir", "Did you mean --sync-dst-dir?"]),
        (("launch", "-n", "2", "--num-server", "1", "true"), ["Did you mean --num-servers?"]),
        (("launch", "-n", "2", "--env-file", "/nowhere/x.env", "true"), ["cannot read '/nowhere/x.env'"]),
        (("launch", "-n", "2", "-H", "/nowhere/hosts", "true"), ["E100: hosts file not found: '/nowhere/hosts'"]),
        (("launch", "-n", "2", "--launcher", "local", "-H", "/nowhere/hosts", "true"), ["E100: hosts file not found"]),
        (("launch", "-n", "2", "--env", "RANK=3", "true"), ["RANK is set by distrun itself"]),
        (("launch", "-n", "2", "--ps", "both", "true"), ["--ps: expected bundled or command, found 'both'"]),
        (("launch", "-n", "2", "-q", "-v", "true"), ["contradict"]),
        (("lanch", "-n", "2"), ["No such command 'lanch'", "Did you mean launch?"]),
        (("status", "no-such-job"), ["no job 'no-such-job'"]),
        (("logs", "no-such-job"), ["no job 'no-such-job'"]),
        (("kill", "no-such-job"), ["no job 'no-such-job'"]),
    ],
)
def test_bad_input_ends_with_2_and_words(words: tuple[str, ...], messages: list[str], distrun: Distrun) -> None:
    text = error(distrun.answer(*words))
    for message in messages:
        assert message in text
    assert not distrun.jobs


@pytest.mark.parametrize("name", ["DISTRUN_HOSTFILE", "DEEPLEARNING_WORKERS_PATH"])
def test_hosts_named_by_the_environment_mean_ssh(name: str, distrun: Distrun) -> None:
    text = error(distrun.answer("launch", "-n", "1", "true", env={name: "/nowhere/hosts"}))
    assert "E100: hosts file not found: '/nowhere/hosts'" in text
    assert "the file is named by the variable %s" % name in text


def numeric_options() -> list[tuple[str, str]]:
    """Every option of every command that takes a number: the command and the option."""
    group = click.Context(cli.cli)
    found = []
    for name in cli.cli.list_commands(group):
        command = cli.cli.get_command(group, name)
        for option in command.params:
            is_number = option.type.name in ("integer", "float", "integer range", "float range")
            assert not is_number or getattr(option, "count", False), "cli/values.py makes options for numbers"
            if option.metavar in ("N", "S"):
                found.append((name, option.opts[-1]))
    return found


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1", "1e300", "9" * 20, "9" * 6000, "x", ""])
def test_a_number_out_of_range_is_a_usage_error_that_says_the_range(
    value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = numeric_options()
    assert len(options) >= 14
    for command, option in options:
        if command == "rerun":
            continue  # its options are those of launch
        needed = ["-n", "1"] if command == "launch" and option != "--num-workers" else []
        rest = {"launch": ["true"], "exec": ["true"], "logs": ["no-job"]}.get(command, [])
        assert cli.run([command, *needed, option, value, *rest]) == 2, (command, option)
        err = capfd.readouterr().err
        assert re.search(r"%s: expected a (whole number|time in seconds).* \d.*, found '" % option, err), err
        assert len(err) < 300
        assert err.count("\n") == 1


@pytest.mark.slow
def test_a_number_at_the_end_of_its_range_is_taken(distrun: Distrun) -> None:
    year = "31536000"
    times = [word for name in ("grace", "timeout", "start-timeout", "op-timeout", "suspect-after", "lost-after")
             for word in ("--" + name, year)]  # fmt: skip
    result = distrun.launch("-n", "2", "-s", "1", *times, "sh", "-c", "echo $DISTRUN_OP_TIMEOUT")
    assert (result.returncode, result.stdout.count(b" | 31536000\n")) == (0, 2), result.stderr
    result = distrun.run("launch", "-n", "65536", "-s", "0", "--dry-run", "--hosts", "h1,h2", "true")
    assert result.returncode == 0
    assert b"\nworker-[0-65535]@h[1-2]: 65536 tasks" in result.stdout
    result = distrun.run("launch", "-n", "1", "-s", "1", "--op-timeout", "1234567.25", "--dry-run", "true")
    assert b"DISTRUN_OP_TIMEOUT=1234567.25\n" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "-n", "9", "--placement", "pack", "true"),
        ("launch", "-n", "1", "--python", "~/x", "--scheduler-host", "mars", "true"),
        ("launch", "-n", "1", "--env", "RANK=3", "true"),
        ("launch", "-n", "1", "--sync-dst-dir", "job", "--sync-extra", "/nowhere/x", "true"),
        ("sync", "--sync-dst-dir", "job", "--sync-extra", "/nowhere/x"),
    ],
)
def test_what_is_odd_in_the_hosts_file_is_said_even_if_something_else_is_wrong(
    words: tuple[str, ...], distrun: Distrun
) -> None:
    (distrun.home / "hosts").write_text("d1\nd2\nd1\n")
    text = error(distrun.answer(words[0], "-H", str(distrun.home / "hosts"), *words[1:]))
    assert "hosts:3:1: W120: duplicate host 'd1' (line 1): slots added, now 2\n" in text
    if "pack" in words:
        assert "no slots= for d2: taken as 1" in text


def test_a_usage_error_is_all_that_is_said(distrun: Distrun) -> None:
    result = distrun.run("launch", "-n", "0", "true")
    assert result.stderr.startswith(b"distrun: error: ")


def test_the_help_lists_the_launchers_there_are(distrun: Distrun) -> None:
    site = distrun.home / "site" / "mine-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (site / "entry_points.txt").write_text("[distrun.backends]\nmine = distrun.backends.local:Local\n")
    shown = distrun.run("launch", "-h", env={"PYTHONPATH": str(site.parent)}).stdout
    assert b"How tasks are started: local, ssh, kubernetes, mpi, sge, slurm, yarn, mine." in b" ".join(shown.split())


def test_logs_have_the_same_coloured_prefixes_as_the_launch(distrun: Distrun) -> None:
    env = {"FORCE_COLOR": "1"}
    launched = distrun.launch("-q", "-n", "2", "-s", "0", "--name", "one", "sh", "-c", "echo $RANK", env=env).stdout
    lines = sorted(launched.splitlines())
    assert len({line.partition(b"w")[0] for line in lines}) == 2
    assert all(line.startswith(b"\x1b[38;5;") for line in lines)
    assert sorted(distrun.run("logs", "one", env=env).stdout.splitlines()) == lines
    assert b"\x1b" not in distrun.run("logs", "one").stdout
    assert b"\x1b" not in distrun.run("logs", "one", env={**env, "NO_COLOR": "1"}).stdout


def test_of_several_jobs_of_a_name_the_newest_is_shown_and_named(distrun: Distrun) -> None:
    for word in ("first", "second"):
        assert distrun.launch("-q", "-n", "1", "-s", "0", "--name", "again", "echo", word).returncode == 0
    newest = json.loads(distrun.run("status", "--json").stdout)["jobs"][0]["id"]
    for command, text in (("status", newest.encode()), ("logs", b"second\n")):
        result = distrun.run(command, "again")
        assert result.returncode == 0
        assert text in result.stdout
        assert result.stderr.decode() == "distrun: again: the newest of 2 jobs of that name, %s\n" % newest


def test_a_list_that_is_watched_without_a_terminal_is_shown_once(distrun: Distrun) -> None:
    assert distrun.run("status", "-w").stdout == distrun.run("status").stdout


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "many", "integer, at least 1"),
        ("PS_VERBOSE", "3", "integer from 0 to 2"),
        ("PS_RESEND", "yes", "0 or 1"),
        ("PS_HEARTBEAT_TIMEOUT", "0", "number from 0.5 to 86400"),
    ],
)
@pytest.mark.parametrize("way", ["outside", "given"])
def test_a_wrong_tuning_variable_is_named_with_value_host_and_what_is_right(
    way: str, name: str, value: str, right: str, distrun: Distrun
) -> None:
    if way == "outside":
        result = distrun.answer("launch", "--launcher", "local", "-n", "1", "true", env={name: value})
    else:
        result = distrun.answer("launch", "--launcher", "local", "-n", "1", "--env", "%s=%s" % (name, value), "true")
    text = error(result)
    assert "%s=%r on host %s: expected %s" % (name, value, socket.gethostname(), right) in text


@pytest.mark.parametrize("words", [("--stale", "-y", ""), ("--stale", "-y", "some-job", " "), ("",)])
def test_an_empty_word_for_a_job_is_refused(distrun: Distrun, words: tuple[str, ...]) -> None:
    assert "no job" in error(distrun.run("kill", *words))


@pytest.mark.parametrize(
    "words", ["doctor", "sync --hosts h1 --sync-dst-dir /tmp/x", "launch --launcher local -n 1 -s 0 true"]
)
def test_a_current_directory_that_is_gone_is_told(distrun: Distrun, words: str) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$@"'
    argv = ["sh", "-c", script, *distrun.argv(*words.split())]
    done = subprocess.run(argv, env=distrun.env, cwd=distrun.work, capture_output=True, timeout=scaled(60), check=False)
    assert "the current directory does not exist any more" in error(done)


def test_several_jobs_are_not_killed_unasked(distrun: Distrun) -> None:
    for name in ("one", "two"):
        assert distrun.launch("-q", "-n", "1", "-s", "0", "--name", name, "true").returncode == 0
    assert "-y answers yes" in error(distrun.run("kill", "one", "two"))
    done = distrun.run("kill", "-y", "one", "two")
    assert done.returncode == 0
    assert re.fullmatch(r"(one|two)-\w+: is over already: succeeded", done.stdout.decode().splitlines()[0])
    assert done.stdout.count(b"is over already") == 2


def test_watching_a_job_that_is_over_shows_it_once(distrun: Distrun) -> None:
    assert distrun.launch("-q", "-n", "1", "-s", "0", "--name", "one", "true").returncode == 0
    assert distrun.run("status", "-w", "one").stdout == distrun.run("status", "one").stdout


def test_no_words_is_the_help_on_stderr(distrun: Distrun) -> None:
    result = distrun.run()
    assert result.returncode == 2
    assert result.stdout == b""
    assert b"Usage: distrun" in result.stderr


def test_the_version_is_told(distrun: Distrun) -> None:
    from distrun import __version__

    assert distrun.run("--version").stdout.decode() == "distrun %s\n" % __version__


def test_our_own_fault_ends_with_8_and_a_traceback_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(**more: Any) -> None:
        raise RuntimeError("oh dear")

    monkeypatch.setattr("distrun.requesting.launcher_of", lambda *more: broken())
    assert cli.run(["launch", "-n", "1", "true"]) == 8
    text = capfd.readouterr().err
    assert "distrun: error: internal error: RuntimeError: oh dear" in text
    assert "Traceback" not in text
    assert cli.run(["launch", "-vv", "-n", "1", "true"]) == 8
    assert "Traceback" in capfd.readouterr().err


def test_a_watched_list_says_how_it_ends_and_leaves_the_screen_clean(distrun: Distrun) -> None:
    assert distrun.launch("-q", "-n", "1", "-s", "0", "--name", "one", "true").returncode == 0
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    # The terminal is the controlling one, so that the ^C typed into it interrupts.
    child = distrun.start(
        "status", "-w", env={"TERM": "xterm"}, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **streams
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while data := os.read(ours, 65536):
            if b"ends this view" in shown + data and b"\x03" not in shown:
                os.write(ours, b"\x03")
                data += b"\x03"
            shown += data
    os.close(ours)
    assert child.wait(scaled(60)) == 0
    _, _, after = shown.partition(b"\x1b[?1049l")  # back from the second screen
    assert b"^C" not in after
    assert b"ends this" not in after
    assert after.count(b"JOB") == 1
    assert b"CREATED" not in after
    assert b"true" in after


def test_files_of_secrets_are_not_copied_to_hosts(distrun: Distrun, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text("pass\n")
    (job / "keys.env").write_text("API_KEY=s3cret\n")
    words = ("--hosts", "d1", "--sync-dst-dir", "/x", "--dry-run", "--json", "-n", "1")
    both = json.loads(distrun.run("launch", *words, "true", cwd=job).stdout)["sync"]
    assert both["files"] == 2
    less = json.loads(distrun.run("launch", "--env-file", "keys.env", *words, "true", cwd=job).stdout)["sync"]
    assert less["files"] == 1
