"""`distrun logs` on real jobs: what was printed is printed again, while the job runs, later, and after a crash."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, leaving_nothing, wait_until
from slowness import scaled

LIMIT_S = 60.0

# Lines on both streams, in pieces that end anywhere, and a last line without its end.
PROGRAM = """\
import os, random, sys, time
rank = int(os.environ["RANK"])
rng = random.Random(rank)
for number in range(int(sys.argv[1])):
    stream = rng.choice([1, 2])
    text = b"line %d of %d on %d\\n" % (number, rank, stream)
    cut = rng.randrange(len(text) + 1)
    for part in (text[:cut], text[cut:]):
        if part:
            os.write(stream, part)
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.02)
if len(sys.argv) > 2:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
os.write(1, b"out without end of %d" % rank)
os.write(2, b"err without end of %d" % rank)
"""


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    with leaving_nothing(tmp_path) as made:
        (made.work / "lines.py").write_text(PROGRAM)
        yield made


def launch_to_file(distrun: Distrun, *words: str) -> bytes:
    """Run a job with stdout and stderr in one file; return what is in it, without distrun's own words."""
    path = distrun.home / "both"
    with path.open("wb") as file:
        child = distrun.begin("-q", *words, stdout=file, stderr=file)
        assert child.wait(scaled(LIMIT_S)) == 0
    return path.read_bytes()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("worker-0",), "worker-0"),
        (("worker-1", "--since", "1h"), "worker-1"),
        ((), "worker-0, worker-1"),
    ],
)
def test_logs_of_what_was_not_started_say_so_and_why_and_what_to_type(
    words: tuple[str, ...], what: str, distrun: Distrun
) -> None:
    failed = distrun.launch("-n", "2", "-s", "0", "no-such-program")
    why = failed.stderr.decode().splitlines()[-1].removeprefix("distrun: error: ")
    job = distrun.job.name
    shown = distrun.run("logs", job, *words)
    assert (shown.returncode, shown.stdout) == (0, b"")
    assert shown.stderr.decode().splitlines() == [
        f"distrun: not started: {what}; {why}",
        "distrun: hint: install it there, give its path, or put its folder on PATH by --activate",
        f"distrun: hint: to launch it again: distrun rerun {job}",
    ]


def test_logs_of_a_job_whose_tasks_all_ran_say_nothing_else(distrun: Distrun) -> None:
    distrun.launch("-n", "1", "-s", "0", "echo up; exit 3")
    assert distrun.run("logs", distrun.job.name).stderr == b""


def test_merged_logs_are_what_launch_printed_byte_for_byte(distrun: Distrun) -> None:
    shown = launch_to_file(distrun, "-n", "3", "-s", "0", "python3", "lines.py", "300")
    assert shown.count(b"\n") == 3 * 302
    job = distrun.job.name
    assert distrun.run("logs", job, "--merge").stdout == shown
    assert distrun.run("logs", job, "--merge", "-f").stdout == shown
    assert distrun.run("logs", job, "--since", "1h").stdout == shown
    assert distrun.run("logs", job, "--merge", "-n", "50").stdout == b"".join(shown.splitlines(keepends=True)[-50:])
    assert distrun.run("logs", job, "--since", "1h", "-n", "0").stdout == b""
    one = [line for line in shown.splitlines(keepends=True) if line.startswith(b"worker-1@")]
    assert distrun.run("logs", job, "--merge", "worker-1").stdout == b"".join(one)
    assert distrun.run("logs", job, "--since", "1h", "worker-1").stdout == distrun.log("worker-1")
    assert distrun.run("logs", job, "--since", "0s").stdout == b""


def test_lines_are_found_and_given_as_json(distrun: Distrun) -> None:
    shown = launch_to_file(distrun, "-n", "2", "-s", "0", "python3", "lines.py", "50").decode().splitlines()
    job = distrun.job.name
    wanted = "line 4[0-9] of"
    found = distrun.run("logs", job, "--merge", "--grep", wanted).stdout.decode().splitlines()
    assert found == [line for line in shown if "| line 4" in line and "line 4 " not in line]
    assert len(found) == 20
    alone = distrun.run("logs", job, "worker-0", "--grep", wanted).stdout.decode().splitlines()
    assert sorted(alone) == sorted(line.partition(" | ")[2] for line in found if line.startswith("worker-0@"))
    lines = [json.loads(line) for line in distrun.run("logs", job, "--json").stdout.splitlines()]
    assert ["{task}@{host} | {text}".format(**line) for line in lines] == shown
    assert all(line["text"].endswith(" on 1") is (line["stream"] == "out") for line in lines if "line" in line["text"])
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert {(line["schema"], line["attempt"]) for line in lines} == {("distrun.log/1", 0)}


def test_a_running_job_is_followed_in_its_order(distrun: Distrun) -> None:
    path, ours = distrun.home / "both", distrun.home / "ours"
    with path.open("wb") as file, ours.open("wb") as followed:
        words = ("-q", "-n", "2", "-s", "0", "python3", "lines.py", "200", "done")
        child = distrun.begin(*words, stdout=file, stderr=file)
        wait_until(lambda: distrun.jobs and list(distrun.job.glob("logs/index")), LIMIT_S, "the job prints")
        follower = distrun.start("logs", distrun.job.name, "--merge", "-f", stdout=followed)
        wait_until(lambda: ours.read_bytes().count(b"\n") == 400, LIMIT_S, "all lines are followed")
        assert follower.poll() is None
        (distrun.work / "done").touch()
        assert child.wait(scaled(LIMIT_S)) == 0
        assert follower.wait(scaled(LIMIT_S)) == 0
    assert ours.read_bytes() == path.read_bytes()


def test_what_was_printed_is_known_when_the_coordinator_was_killed(distrun: Distrun) -> None:
    child = distrun.begin("-q", "-n", "2", "-s", "0", "python3", "lines.py", "100", "never")
    wait_until(lambda: distrun.jobs and (distrun.job / "logs").is_dir(), LIMIT_S, "there is a job")
    job = distrun.job.name
    wait_until(lambda: distrun.run("logs", job, "--merge").stdout.count(b"\n") == 200, LIMIT_S, "all lines are there")
    os.kill(distrun.coordinator(), signal.SIGKILL)
    child.wait(scaled(LIMIT_S))
    wait_until(lambda: not distrun.left(), LIMIT_S, "the tasks have ended")
    assert distrun.run("logs", job, "--merge", "-f").stdout.count(b"\n") == 200
    # Bytes of the log whose record was not written are shown last, and it is said.
    with (distrun.job / "logs" / "worker-1.log").open("ab") as file:
        file.write(b"the last\n")
    merged = distrun.run("logs", job, "--merge")
    host = distrun.job_host().encode()
    assert merged.stdout.splitlines()[-1] == b"worker-1@" + host + b" | the last"
    assert b"distrun: the order of the last lines is not known" in merged.stderr


def test_with_a_limit_the_beginning_and_the_newest_part_of_a_log_are_kept(distrun: Distrun) -> None:
    words = ("-n", "2", "-s", "0", "--log-limit", "1M", "seq -f '%09g' 300000")
    shown = launch_to_file(distrun, *words)
    assert shown.count(b"\n") == 600_000
    job, host = distrun.job.name, distrun.job_host().encode()
    logs = [path for path in (distrun.job / "logs").iterdir() if path.name.startswith("worker-0.log")]
    assert len(logs) == 3
    assert 500_000 <= sum(path.stat().st_size for path in logs) <= 1_048_576
    merged = distrun.run("logs", job, "--merge").stdout.splitlines()
    own = [line for line in merged if line.startswith(b"worker-0@" + host)]
    (gap,) = [at for at, line in enumerate(own) if line.endswith(b" MiB before this are gone: --log-limit]")]
    first = [int(line.rpartition(b" ")[2]) for line in own[: gap - 1]]  # own[gap - 1] may be a part of a line
    assert first == list(range(1, len(first) + 1))
    assert len(first) >= 20_000
    numbers = [int(line.rpartition(b" ")[2]) for line in own[gap + 2 :]]
    assert numbers == list(range(numbers[0], 300_001))
    assert len(numbers) >= 40_000
    alone = distrun.run("logs", job, "worker-0").stdout.splitlines()
    (gap,) = [at for at, line in enumerate(alone) if line.endswith(b" MiB before this are gone: --log-limit]")]
    assert [int(line) for line in alone[: gap - 1]] == first
    assert [int(line) for line in alone[gap + 2 :]] == numbers
    assert distrun.run("logs", job, "worker-0", "-n", "2").stdout == b"000299999\n000300000\n"
    tail = distrun.run("logs", job, "worker-0", "-n", "40000").stdout.splitlines()
    assert [int(line) for line in tail] == list(range(260_001, 300_001))


def test_the_beginning_of_a_line_before_since_is_shown_with_its_end(distrun: Distrun) -> None:
    script = "printf 'begin '; echo other >&2; until [ -e go ]; do sleep 0.05; done; echo end"
    child = distrun.begin("-q", "-n", "1", "-s", "0", script)
    wait_until(lambda: distrun.jobs and list(distrun.job.glob("logs/index")), LIMIT_S, "the job prints")
    wait_until(lambda: b"other" in distrun.run("logs", distrun.job.name).stdout, LIMIT_S, "it has printed")
    time.sleep(0.3)  # `since` lies between
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + ".%03dZ" % (time.time() % 1 * 1000)
    (distrun.work / "go").touch()
    assert child.wait(scaled(LIMIT_S)) == 0
    shown = distrun.run("logs", distrun.job.name, "--merge", "--since", since).stdout
    assert shown == f"worker-0@{distrun.job_host()} | begin end\n".encode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "soon"), "--since: expected a duration (10m, 1h30m), a time (10:00) or a date"),
        (("--grep", "("), "--grep: '(' is no regular expression of Python"),
        (("worker-0", "worker-9"), "no task 'worker-9' in this job; there is: worker-0"),
    ],
)
def test_wrong_words_are_told(words: tuple[str, ...], said: str, distrun: Distrun) -> None:
    assert distrun.launch("-q", "-n", "1", "-s", "0", "true").returncode == 0
    done = distrun.run("logs", distrun.job.name, *words)
    assert done.returncode == 2
    assert said in done.stderr.decode()
