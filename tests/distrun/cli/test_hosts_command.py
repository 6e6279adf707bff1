from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from distrun_cli import Distrun

from distrun.cli import hosts as command

FILE = "d1 slots=2\nubuntu@gpu[01-02]:2222 gpus=4 labels=a,b role=worker\nd1 # again\n"


@pytest.fixture
def distrun(tmp_path: Path) -> Distrun:
    made = Distrun(tmp_path)
    (made.work / "hosts").write_text(FILE)
    for name in ("PE_HOSTFILE", "SLURM_JOB_NODELIST"):
        made.env.pop(name, None)
    return made


def test_a_file_is_shown_as_it_was_understood(distrun: Distrun) -> None:
    result = distrun.run("hosts", "hosts")
    assert result.returncode == 0
    assert result.stdout.decode().splitlines() == [
        "HOST   USER    PORT  SLOTS  GPUS  ROLE    MORE",
        "d1                   3            any",
        "gpu01  ubuntu  2222         4     worker  labels=a,b",
        "gpu02  ubuntu  2222         4     worker  labels=a,b",
        "",
        "from      hosts",
        "folded    d1,gpu[01-02]",
        "expanded  d1 gpu01 gpu02",
        "cycle     d1 gpu01 gpu02 d1",
    ]
    assert result.stderr.decode() == (
        "distrun: warning: hosts:3:1: W120: duplicate host 'd1' (line 1): slots added, now 3\n"
    )


def test_json_has_everything_that_is_known(distrun: Distrun) -> None:
    result = distrun.run("hosts", "--json", "hosts")
    shown = json.loads(result.stdout)
    assert result.stderr == b""
    assert (shown["schema"], shown["source"]) == (command.SCHEMA, "hosts")
    assert shown["order"] == ["d1", "gpu01", "gpu02", "d1"]
    assert shown["folded"] == "d1,gpu[01-02]"
    assert len(shown["warnings"]) == 1
    assert shown["hosts"][1] == {
        **{"name": "gpu01", "user": "ubuntu", "port": 2222, "slots": None, "max_slots": None, "addr": "", "iface": ""},
        **{
            "gpus": "4",
            "role": "worker",
            "labels": ["a", "b"],
            "python": "",
            "workdir": "",
            "identity": "",
            "jump": "",
        },
    }


def test_all_errors_are_shown_with_lines_and_carets_and_the_code_is_2(distrun: Distrun) -> None:
    (distrun.work / "hosts").write_text("node1:4\n\nd2 slot=1\n")
    result = distrun.run("hosts", "hosts")
    assert result.returncode == 2
    assert result.stdout == b""
    lines = result.stderr.decode().splitlines()
    assert lines[0].startswith("hosts:1:6: E105: 'node1:4' is ambiguous")
    assert lines[1:3] == ["  node1:4", "       ^"]
    assert lines[3].startswith("hosts:3:4: E107: unknown attribute 'slot'. Did you mean 'slots'?")
    assert lines[-1] == "distrun: error: 2 errors in the hosts given"


def test_without_a_file_the_environment_is_asked(distrun: Distrun) -> None:
    shown = distrun.run("hosts", "--json", env={"DISTRUN_HOSTFILE": "hosts"}).stdout
    assert json.loads(shown)["source"] == "hosts"
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert json.loads(distrun.run("hosts", "--json", env=env).stdout)["hosts"][1]["slots"] == 4
    result = distrun.run("hosts")
    assert result.returncode == 2
    assert b"no hosts are given" in result.stderr
    assert b"--hosts A,B, or set DEEPLEARNING_WORKERS_PATH, DISTRUN_HOSTFILE" in result.stderr


def test_lists_and_foreign_formats_are_taken(distrun: Distrun) -> None:
    found = json.loads(distrun.run("hosts", "--json", "--hosts", "a*2,b:4", "--hostfile-format", "horovod").stdout)
    assert [host["slots"] for host in found["hosts"]] == [2, 4]


def piped(distrun: Distrun, data: bytes, *words: str) -> bytes:
    return subprocess.run(distrun.argv(*words), env=distrun.env, input=data, capture_output=True, check=True).stdout


def test_stdin_is_a_file_too(distrun: Distrun) -> None:
    done = subprocess.run(
        distrun.argv("hosts", "-"), env=distrun.env, input=b"d1\nd2\n", capture_output=True, check=True
    )
    assert b"folded    d[1-2]\n" in done.stdout


def test_node_lists_are_folded_and_expanded(distrun: Distrun) -> None:
    assert distrun.run("hosts", "--expand", "gpu[01-02],x").stdout == b"gpu01\ngpu02\nx\n"
    assert distrun.run("hosts", "--fold", "gpu01,gpu02", "x").stdout == b"gpu[01-02],x\n"
    names = b"".join(b"n%d\n" % index for index in range(8))
    done = subprocess.run(
        distrun.argv("hosts", "--fold", "-"), env=distrun.env, input=names, capture_output=True, check=True
    )
    assert done.stdout == b"n[0-7]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "b"), "expected one hosts file, found 2: a, b"),
        (("--fold",), "--fold takes node lists"),
        (("--expand", "--json", "a"), "--expand takes node lists"),
        (("--expand", "a[1"), "node list:1:2: E109: unclosed '['"),
        (("--hostfile-format", "xml", "hosts"), "expected one of auto, dmlc"),
        (("nowhere",), "nowhere: E100: hosts file not found: 'nowhere'"),
        (("--hosts", "a", "hosts"), "contradict"),
    ],
)
def test_bad_use_ends_with_2_and_words(words: tuple[str, ...], message: str, distrun: Distrun) -> None:
    result = distrun.answer("hosts", *words)
    assert result.returncode == 2
    assert message in result.stderr.decode()
