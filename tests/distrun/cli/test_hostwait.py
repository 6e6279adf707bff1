"""--wait-for-hosts: hosts that are not up yet are asked again, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakessh import FakeSsh

from distrun.cli import hostwait
from distrun.errors import PreflightError
from distrun.hosts import named
from distrun.options import HOSTS

REFUSED = "ssh: connect to host d1 port 22: Connection refused"
OPTIONS = {**{row.key: row.default for row in HOSTS}, "hosts": "d1", "transport": "openssh"}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    monkeypatch.setattr(hostwait, "RETRY_S", 0.01)
    return FakeSsh(tmp_path, monkeypatch)


def wait(limit_s: float) -> list[str]:
    said: list[str] = []
    hostwait.wait(["d1"], hostwait.question(OPTIONS, named(["d1"]), {}), limit_s, said.append)
    return said


def test_a_host_that_comes_up_is_waited_for_and_named_once(ssh: FakeSsh) -> None:
    ssh.fails(1, REFUSED)
    assert [line.partition(":")[0] for line in wait(60)] == ["waiting for d1"]


def test_a_host_that_stays_down_ends_the_wait(ssh: FakeSsh) -> None:
    ssh.fails(10_000, REFUSED)
    with pytest.raises(PreflightError, match=r"not up after .*: d1 "):
        wait(0.01)


def test_a_host_that_refuses_the_login_is_not_waited_for(ssh: FakeSsh) -> None:
    ssh.fails(10_000, "me@d1: Permission denied (publickey).")
    assert wait(60) == []


def test_hosts_that_the_environment_names_are_asked_by_their_file_or_their_names() -> None:
    bare = {**OPTIONS, "hosts": None}
    assert hostwait.question(bare, named(["a1", "a2"]), {})[-4:] == ["--hosts", "a[1-2]", "--transport", "openssh"]
    assert hostwait.question(bare, named(["a1"]), {"DISTRUN_HOSTFILE": "h"})[-4:-2] == ["-H", "h"]
