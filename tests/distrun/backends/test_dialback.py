"""What backends share whose agents dial back."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from distrun.backends.queue import listen, write_new
from distrun_runtime.contract import address
from distrun_runtime.contract.address import Interface

JOB = "calm-otter-7f3"


def test_agents_are_told_the_users_addresses_with_the_port_that_was_bound() -> None:
    agents, bootstrap = listen(JOB, "5e" * 32, 120.0, ("head", "fd00::1"))
    told = (f"head:{agents.port}", f"[fd00::1]:{agents.port}")
    agents.close()
    argv = bootstrap.command("python3", "env:RANK", "/shared/secret")
    assert argv[4:] == (agents.pin, JOB, "env:RANK", "/shared/secret", "120", *told)
    assert "5e" * 32 not in " ".join(argv)


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


def test_the_secret_is_in_a_file_of_its_own_that_only_the_user_reads(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        write_new(path, "5e5e\n", 0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_new(path, "5e5e\n", 0o600)
    assert path.read_text() == "5e5e\n"
