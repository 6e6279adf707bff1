"""Requests that are made in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distrun import Request, UsageError
from distrun.request import JobRequest, Needs, given


def resolved(*command: str, **options: object) -> JobRequest:
    return Request(command, **options).resolve(lambda text, level: None)  # type: ignore[arg-type]


def test_a_request_takes_every_option_by_its_key_in_job_files(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("d1\nd2\n")
    found = resolved(
        *("python", "train.py"),
        workers=2,
        hostfile=tmp_path / "hosts",
        timeout=60,
        label=("a=b",),
        worker={"cores": 2, "env": {"A_B": 1}},
        env={"C": "2"},
    )
    assert (found.command, found.workers, found.servers) == (("python", "train.py"), 2, 2)
    assert found.hosts is not None
    assert (found.launcher, found.hosts.names, found.labels) == ("ssh", ("d1", "d2"), ("a=b",))
    assert (found.limits.timeout_s, found.engine.worker) == (60.0, Needs(cores=2))
    assert {name: each.value for name, each in given(found.settings, "worker").items()}.items() >= {
        ("A_B", "1"),
        ("C", "2"),
    }
    assert found.given["workers"] == "2"


def test_all_mistakes_of_a_request_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Request(["true"], wrokers=2, timeout="soon", worker={"core": 1})
    assert str(caught.value).splitlines() == [
        "Request: unknown key 'wrokers': did you mean workers?",
        'Request: timeout: expected a number of seconds without quotes, found "soon"',
        "Request: unknown key 'core' in [worker]: did you mean cores?",
    ]


def test_a_request_takes_what_it_is_not_given_from_a_job_file_and_its_profile(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('workers = 4\nservers = 0\nrun = "true\\nfalse"\n[profile.small]\nservers = 3\n')
    found = resolved(file=file, profile="small")
    assert (found.workers, found.servers, found.command, found.shell) == (4, 3, ("true\nfalse",), True)
    assert resolved("true", file=file, workers=1).command == ("true",)
    with pytest.raises(UsageError, match="there is no profile 'big'; the files have small"):
        Request(file=file, profile="big")
    file.write_text('hosts = "d1 d2"\ncommand = "true"\n')
    with pytest.raises(UsageError, match=r"job\.toml:1:10: E102: invalid host name 'd1 d2'"):
        resolved(file=file)


def test_importing_distrun_loads_none_of_its_modules_but_its_version() -> None:
    code = "import sys, distrun; print(sorted(name for name in sys.modules if name.startswith('distrun')))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"['distrun', 'distrun.version']\n"
