"""What backends share whose agents dial back."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrun.backends.base import Listening
from distrun.backends.queue import Callers
from distrun_runtime.contract import address
from distrun_runtime.contract.address import Interface
from distrun_runtime.contract.plan import Host, Plan

PLAN = Plan("calm-otter-7f3", "", "fake", ("true",), "/", (Host("d1"), Host("d2")), ())


@pytest.fixture
def callers() -> Iterator[Callers]:
    found = Callers(PLAN.job, 120.0, Listening(("head", "fd00::1")))
    yield found
    found.agents.close()


def test_agents_are_told_the_users_addresses_with_the_port_that_was_bound(callers: Callers) -> None:
    port = callers.agents.port
    assert callers.addresses == (f"head:{port}", f"[fd00::1]:{port}")
    argv = callers.bootstrap.command("python3", "env:RANK", "/shared/secret")
    assert argv[4:] == (callers.agents.pin, PLAN.job, "env:RANK", "/shared/secret", "120", *callers.addresses)
    assert callers.secret not in " ".join(argv)


def test_by_default_all_addresses_of_this_machine_are_tried_and_loopback_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Interface("lo", "127.0.0.1", 8),
        Interface("lo", "::1", 128),
        Interface("eth0", "10.0.0.7", 24),
        Interface("eth0", "fe80::1", 64),
        Interface("ib0", "fd00::7", 64),
        Interface("eth0", "10.0.0.7", 24),
    ]
    monkeypatch.setattr(address, "interfaces", lambda: rows)
    assert address.own() == ["10.0.0.7", "fd00::7", "127.0.0.1", "::1"]
    monkeypatch.setattr(address, "interfaces", list)
    assert address.own() == ["127.0.0.1"]


def test_each_place_has_a_channel_of_its_name(callers: Callers) -> None:
    assert callers.agents.channels == ()
    assert [channel.host for channel in callers.expect(PLAN)] == ["d1", "d2"]


def test_the_secret_is_in_a_file_of_its_own_that_only_the_user_reads(callers: Callers, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        callers.write_secret(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == callers.secret + "\n"
    with pytest.raises(FileExistsError):
        callers.write_secret(path)
