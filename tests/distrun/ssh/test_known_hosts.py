"""Recorded host keys: found as ssh finds them, and recorded so that ssh finds them."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from distrun.ssh import known_hosts
from distrun.ssh.known_hosts import entries, line_of, look_up, matches, record

ED = "ssh-ed25519"
HASHED = line_of("d1", ED, "AAAA", True, b"0123456789abcdefghij").split()[0]


@pytest.mark.parametrize(
    ("names", "name", "want"),
    [
        ("d1", "d1", True),
        ("D1,10.0.0.1", "10.0.0.1", True),
        ("d1", "d11", False),
        ("d?,!d2", "d1", True),
        ("d?,!d2", "d2", False),
        ("*.lan", "a.b.lan", True),
        ("[d1]:2222", "[d1]:2222", True),
        ("[d1]:2222", "d1", False),
        ("[d*]:2222", "[d7]:2222", True),
        (HASHED, "d1", True),
        (HASHED, "d2", False),
        ("|1|broken", "d1", False),
        ("|1|!!|!!", "d1", False),
    ],
)
def test_names_mean_hosts_as_ssh_reads_them(names: str, name: str, want: bool) -> None:
    assert matches(names, name) is want


@pytest.mark.parametrize(
    ("lines", "name", "state"),
    [
        (["d1 ssh-ed25519 AAAA"], "d1", known_hosts.KNOWN),
        (["d1 ssh-ed25519 BBBB"], "d1", known_hosts.CHANGED),
        (["d1 ssh-ed25519 BBBB", "d1 ssh-ed25519 AAAA"], "d1", known_hosts.KNOWN),
        (["d1 ssh-rsa CCCC"], "d1", known_hosts.CHANGED),
        (["d2 ssh-ed25519 AAAA"], "d1", known_hosts.UNKNOWN),
        (["@revoked * ssh-ed25519 AAAA", "d1 ssh-ed25519 AAAA"], "d1", known_hosts.REVOKED),
        (["@cert-authority * ssh-ed25519 CA"], "d1", known_hosts.SIGNED),
        (["@cert-authority * ssh-ed25519 CA", "d1 ssh-ed25519 AAAA"], "d1", known_hosts.KNOWN),
        (["d1 ssh-ed25519 AAAA"], "[d1]:2222", known_hosts.KNOWN),
        (["d1 ssh-ed25519 BBBB"], "[d1]:2222", known_hosts.UNKNOWN),
        (["# d1 ssh-ed25519 AAAA", "", "d1", "rubbish"], "d1", known_hosts.UNKNOWN),
    ],
)
def test_a_key_is_judged_by_what_is_recorded(lines: list[str], name: str, state: str) -> None:
    for found in (entries(lines, "/kh"), known_hosts.KnownHosts(entries(lines, "/kh"))):
        assert look_up(found, name, ED, "AAAA").state == state


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("d1,d3 ssh-ed25519 AAAA\n*.x ssh-ed25519 AAAA\n")
    first = known_hosts.read([str(path), str(tmp_path / "none")])
    assert known_hosts.read([str(path)]) is first
    assert [entry.names for entry in known_hosts.of_host(first, "D3")] == ["d1,d3"]
    assert [entry.names for entry in known_hosts.of_host(first, "a.x")] == ["*.x"]
    known_hosts.record(str(path), "d2", ED, "BBBB")
    assert look_up(known_hosts.read([str(path)]), "d2", ED, "BBBB").state == known_hosts.KNOWN


def test_the_line_that_says_otherwise_is_named() -> None:
    verdict = look_up(entries(["# mine", "d1 ssh-ed25519 BBBB"], "/kh"), "d1", ED, "AAAA")
    assert verdict.entry.place == "/kh line 2"


def test_a_host_is_asked_for_the_kinds_of_key_that_are_known_of_it() -> None:
    found = entries(["d1 ssh-rsa R", "d1 ecdsa-sha2-nistp256 E", "d1 ssh-rsa S", "@revoked d1 ssh-dss D"])
    assert known_hosts.recorded_kinds(found, "d1") == ["ssh-rsa", "ecdsa-sha2-nistp256"]


def test_a_key_is_recorded_once_however_many_see_it_first(tmp_path: Path) -> None:
    path = tmp_path / "ssh" / "known_hosts"
    threads = [threading.Thread(target=record, args=(str(path), "d1", ED, "AAAA")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "d1 ssh-ed25519 AAAA\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_last_line_without_its_end_is_not_spoilt(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("d2 ssh-ed25519 BBBB")
    record(str(path), "d1", ED, "AAAA")
    assert path.read_text() == "d2 ssh-ed25519 BBBB\nd1 ssh-ed25519 AAAA\n"


def test_recording_does_not_overrule_what_another_recorded_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("d1 ssh-ed25519 BBBB\n")
    assert record(str(path), "d1", ED, "AAAA").state == known_hosts.CHANGED
    assert path.read_text() == "d1 ssh-ed25519 BBBB\n"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@pytest.mark.parametrize("hashed", [False, True])
def test_ssh_finds_what_was_recorded(tmp_path: Path, hashed: bool) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "k"], check=True)
    kind, key = (tmp_path / "k.pub").read_text().split()[:2]
    record(str(tmp_path / "kh"), "[d1]:2222", kind, key, hashed)
    done = subprocess.run(["ssh-keygen", "-F", "[d1]:2222", "-f", tmp_path / "kh"], capture_output=True, check=True)
    assert key.encode() in done.stdout
    shown = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "k.pub"], capture_output=True, check=True).stdout
    from distrun.ssh.login import public_of

    assert known_hosts.fingerprint(public_of((tmp_path / "k.pub").read_text())).encode() in shown
