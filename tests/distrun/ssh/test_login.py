"""Which keys are offered, and in which order."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distrun.ssh import login
from distrun.ssh.login import AGENT, FILE, LOCKED, Choice, KeyFile, order_keys

IN_AGENT = KeyFile("/in-agent", b"A", True)
ON_DISK = KeyFile("/on-disk", b"D", True)
SHUT = KeyFile("/locked", b"L", True, True)
PUBLIC_ONLY = KeyFile("/public", b"P")
NOTHING = KeyFile("/nothing")
HELD = [b"x", b"y", b"A", b"P"]


def short(choices: list[Choice]) -> list[str]:
    return ["%s:%s" % (choice.source, choice.path or choice.public.decode()) for choice in choices]


def test_keys_that_the_user_named_come_before_what_else_an_agent_holds() -> None:
    found = order_keys([ON_DISK, SHUT, IN_AGENT, PUBLIC_ONLY, NOTHING], HELD, explicit=True, only=False)
    assert short(found) == [
        *("file:/on-disk", "agent:/in-agent", "agent:/public", "agent:x", "agent:y", "locked:/locked")
    ]


def test_identities_only_means_only_those() -> None:
    found = order_keys([IN_AGENT, ON_DISK, SHUT], HELD, explicit=True, only=True)
    assert short(found) == ["agent:/in-agent", "file:/on-disk", "locked:/locked"]


def test_where_no_key_is_named_the_agents_come_first_as_with_ssh() -> None:
    found = order_keys([ON_DISK, IN_AGENT, SHUT], HELD, explicit=False, only=False)
    assert short(found) == ["agent:/in-agent", "agent:x", "agent:y", "agent:P", "file:/on-disk", "locked:/locked"]


def test_a_locked_key_that_the_agent_holds_needs_no_passphrase() -> None:
    found = order_keys([KeyFile("/k", b"A", True, True)], HELD, explicit=True, only=True)
    assert found == [Choice(AGENT, b"A", "/k")]


def test_without_an_agent_files_are_all_there_is() -> None:
    assert order_keys([ON_DISK, SHUT], [], explicit=True, only=False) == [
        Choice(FILE, b"D", "/on-disk"),
        Choice(LOCKED, b"L", "/locked"),
    ]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@pytest.mark.parametrize("kind", [("ed25519",), ("ecdsa",), ("rsa", "-b", "2048")])
@pytest.mark.parametrize("form", [(), ("-m", "PEM")])
@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_key_files_public_half_is_known_without_its_passphrase(
    tmp_path: Path, kind: tuple[str, ...], form: tuple[str, ...], passphrase: str
) -> None:
    path = tmp_path / "k"
    subprocess.run(["ssh-keygen", "-q", "-t", *kind, *form, "-N", passphrase, "-f", path], check=True)
    public = login.public_of((tmp_path / "k.pub").read_text())
    assert public
    found = login.read_key_file(str(path))
    assert found == KeyFile(str(path), public, True, bool(passphrase))
    (tmp_path / "k.pub").unlink()
    alone = login.read_key_file(str(path))
    assert alone.has_private
    assert alone.is_locked == bool(passphrase)
    assert alone.public == (public if not form or kind == ("ed25519",) else b"")


def test_a_public_file_may_stand_for_a_key_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "k.pub").write_text("ssh-ed25519 QUJD me@here\n")
    assert login.read_key_file(str(tmp_path / "k")) == KeyFile(str(tmp_path / "k"), b"ABC")
    assert login.read_key_file(str(tmp_path / "k.pub")) == KeyFile(str(tmp_path / "k.pub"), b"ABC")
    assert not login.read_key_file(str(tmp_path / "other")).is_there


@pytest.mark.parametrize(
    "text", ["", "rubbish", "ssh-ed25519 ***", "-----BEGIN OPENSSH PRIVATE KEY-----\n!!!\n", "\0\1\2"]
)
def test_rubbish_is_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    assert login.read_key_file(str(tmp_path / "k")).public == b""
