"""--wait-for-hosts: hosts that are not up yet are asked again, and named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from distrun_cli import wait_until
from fakessh import FakeSsh

from distrun import Jobs, Request, hostwait
from distrun.errors import PreflightError
from distrun.hosts import named
from distrun.hosts.parse import parse
from distrun.request import JobRequest
from distrun_runtime.coordinator.jobstore import JobStore

REFUSED = "ssh: connect to host d1 port 22: Connection refused"


def request(*names: str, limit_s: float = 0.0, outer: Mapping[str, str] = {}, **given: str) -> JobRequest:
    asked = {"hosts": named(names), "launcher": "ssh", "wait_for_hosts_s": limit_s, "outer": outer}
    return JobRequest(("true",), 1, 0, "/", given={"transport": "openssh", **given}, **asked)  # type: ignore[arg-type]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    monkeypatch.setattr(hostwait, "RETRY_S", 0.01)
    return FakeSsh(tmp_path, monkeypatch)


def wait(limit_s: float) -> list[str]:
    said: list[str] = []
    hostwait.wait(request("d1", limit_s=limit_s, hosts="d1"), ["d1"], lambda text, level: said.append(text))
    return said


def test_a_host_that_comes_up_is_waited_for_and_named_once(ssh: FakeSsh) -> None:
    ssh.fails(1, REFUSED)
    assert [line.partition(":")[0] for line in wait(60)] == ["waiting for d1"]


def test_hosts_that_are_up_are_found_up_however_short_the_wait_is(ssh: FakeSsh) -> None:
    ssh.does()
    assert wait(0.001) == []


def test_a_host_that_stays_down_ends_the_wait(ssh: FakeSsh) -> None:
    ssh.fails(10_000, REFUSED)
    with pytest.raises(PreflightError, match=r"not up after .*: d1 "):
        wait(0.01)


def test_a_job_of_python_waits_for_its_hosts_before_it_has_a_folder(ssh: FakeSsh, tmp_path: Path) -> None:
    ssh.fails(10_000, REFUSED)
    jobs = Jobs(JobStore(tmp_path / "state"))
    asked = Request(["true"], servers=0, hosts=["d1"], transport="openssh", wait_for_hosts=0.01)
    with pytest.raises(PreflightError, match=r"not up after .*: d1 "):
        jobs.launch(asked)
    assert not jobs.list()


def test_a_host_that_refuses_the_login_is_not_waited_for(ssh: FakeSsh) -> None:
    ssh.fails(10_000, "me@d1: Permission denied (publickey).")
    assert wait(60) == []


def test_a_look_that_the_time_ends_counts_as_no_answer_and_leaves_nothing(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostwait, "FIRST_S", 3.0)
    ssh.does(f"echo $$ >>{tmp_path}/pids; exec sleep 1000")
    with pytest.raises(PreflightError, match=r"not up after 3 s: d1 \(no answer\)"):
        wait(3.0)
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids), 60, "its ssh has ended")


def test_hosts_from_standard_input_are_asked_with_all_that_was_said_of_them() -> None:
    text = 'me@[fe80::1]:2222 slots="2" identity="a \\\\ \\"b" jump="gate,x:22" labels="u,v"\nd2\n'
    found = parse(text, "<stdin>")
    argv, given = hostwait.question(replace(request("d2", hostfile="-"), hosts=found))
    assert argv[-4:-2] == ["-H", "/dev/stdin"]
    assert parse(given, "<stdin>") == found


def test_hosts_that_the_environment_names_are_asked_by_their_file_or_their_names() -> None:
    assert hostwait.question(request("a1", "a2"))[0][-4:] == ["--hosts", "a[1-2]", "--transport", "openssh"]
    assert hostwait.question(request("a1", outer={"DISTRUN_HOSTFILE": "h"}))[0][-4:-2] == ["-H", "h"]
