"""What the user's configuration says, by `ssh -G` and by fabric's reading."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distrun.ssh import resolve
from distrun.ssh.failure import SshFailure
from distrun.ssh.resolve import Target, digest, hop, parse, shell, ssh_arguments

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh program")

# What `ssh -G d1` says (OpenSSH 9.2) with the configuration of a tutorial: port, user, IdentityFile, IdentitiesOnly.
TUTORIAL = """\
host d1
user ubuntu
hostname d1
port 22
addressfamily any
batchmode no
clearallforwardings no
hashknownhosts yes
identitiesonly yes
kbdinteractiveauthentication yes
passwordauthentication yes
stricthostkeychecking ask
serveralivecountmax 3
serveraliveinterval 0
loglevel INFO
identityfile /home/ubuntu/my_key.pem
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile /users/me/.ssh/known_hosts /users/me/.ssh/known_hosts2
forwardagent no
connecttimeout none
"""
BARE = TUTORIAL.replace("identitiesonly yes", "identitiesonly no").replace(
    "identityfile /home/ubuntu/my_key.pem\n", "".join("identityfile %s\n" % each for each in resolve.DEFAULT_IDENTITIES)
)
HOME = os.path.expanduser("~")


def test_the_configuration_of_the_tutorials_is_understood() -> None:
    found = digest(Target("d1"), parse(TUTORIAL), {"SSH_AUTH_SOCK": "/agent"})
    assert (found.hostname, found.port, found.user) == ("d1", 22, "ubuntu")
    assert found.identities == ("/home/ubuntu/my_key.pem",)
    assert found.is_explicit
    assert found.identities_only
    assert found.agent == "/agent"
    assert found.user_known_hosts == ("/users/me/.ssh/known_hosts", "/users/me/.ssh/known_hosts2")
    assert found.hash_known_hosts
    assert not found.is_strict
    assert not found.forward_agent
    assert found.connect_s == 10.0
    assert found.known_name == "d1"


def test_identities_that_nobody_named_are_no_explicit_ones() -> None:
    found = digest(Target("d1"), parse(BARE), {})
    assert not found.is_explicit
    assert not found.identities_only
    assert found.identities[0] == HOME + "/.ssh/id_rsa"
    assert found.agent == ""
    one = parse(TUTORIAL.replace("/home/ubuntu/my_key.pem", "~/.ssh/id_rsa"))
    assert digest(Target("d1"), one, {}).is_explicit


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("connecttimeout 3", "connect_s", 3.0),
        ("stricthostkeychecking true", "is_strict", True),
        ("stricthostkeychecking accept-new", "is_strict", False),
        ("stricthostkeychecking false", "is_strict", False),
        ("forwardagent yes", "forward_agent", True),
        ("identityagent none", "agent", ""),
        ("identityagent ~/agent", "agent", HOME + "/agent"),
        ("identityagent $MINE", "agent", "/mine"),
        ("identityagent ${MINE}/%n", "agent", "/mine/d1"),
        ("proxyjump a,b", "jump", "a,b"),
        ("proxyjump d1", "jump", ""),
        ("proxycommand nc %h %p", "proxy_command", "nc d1 22"),
        ("proxycommand none", "proxy_command", ""),
        ("certificatefile ~/c.pub", "certificates", (HOME + "/c.pub",)),
        ("identityfile ~/%r@%h.key", "identities", (HOME + "/ubuntu@d1.key",)),
        ("hostkeyalias web", "known_name", "web"),
        ("port 2222", "known_name", "[d1]:2222"),
        ("passwordauthentication no\nkbdinteractiveauthentication no", "asks_passwords", False),
        ("batchmode yes", "asks_passwords", False),
        ("batchmode yes", "asks_passphrases", False),
        ("addressfamily inet6", "family", "inet6"),
    ],
)
def test_each_option_reaches_its_member(line: str, name: str, value: object) -> None:
    keys = {each.split()[0] for each in line.splitlines()}
    rest = [each for each in TUTORIAL.splitlines() if each.split()[0] not in keys]
    options = parse("\n".join([*rest, line]))
    assert getattr(digest(Target("d1"), options, {"MINE": "/mine"}), name) == value


def test_the_command_line_wins_over_the_configuration() -> None:
    target = Target("d1", strict=True, connect_s=2.0)
    found = digest(target, parse(TUTORIAL + "connecttimeout 30\n"), {})
    assert found.is_strict
    assert found.connect_s == 2.0


@pytest.mark.parametrize(
    ("jump", "want"),
    [
        ("j", Target("j", config="/c", strict=True)),
        ("me@j:2200", Target("j", "me", 2200, config="/c", strict=True)),
        ("a,ssh://me@[::1]:22", Target("::1", "me", 22, jump="a", config="/c", strict=True)),
        ("fe80::1", Target("fe80::1", config="/c", strict=True)),
    ],
)
def test_the_way_to_a_host_in_between_is_a_target_too(jump: str, want: Target) -> None:
    target = Target("d1", "you", 9, identity="/key", config="/c", strict=True, python="/py")
    assert hop(digest(target, {"proxyjump": [jump]}, {})) == want


def test_the_program_is_told_what_keeps_it_from_asking_or_hanging() -> None:
    assert ssh_arguments(Target("d1", "me", 2222, "/k", "j", "/c"), parse(TUTORIAL), 10.0) == [
        *("ssh", "-F", "/c", "-p", "2222", "-l", "me", "-i", "/k", "-J", "j", "-T"),
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
        *("-o", "StrictHostKeyChecking=accept-new", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes"),
        *("-o", "LogLevel=ERROR"),
    ]


def test_what_the_user_configured_is_not_said_again_to_the_program() -> None:
    mine = "connecttimeout 3\nserveraliveinterval 60\nstricthostkeychecking accept-new\nloglevel VERBOSE\n"
    options = {**parse(TUTORIAL), **parse(mine)}
    said = " ".join(ssh_arguments(Target("d1"), options, 3.0))
    assert "ServerAlive" not in said
    assert "StrictHostKeyChecking" not in said
    assert "LogLevel" not in said
    assert "StrictHostKeyChecking=yes" in " ".join(ssh_arguments(Target("d1", strict=True), options, 3.0))
    never = {**options, "stricthostkeychecking": ["false"]}
    assert "StrictHostKeyChecking=accept-new" in ssh_arguments(Target("d1"), never, 3.0)


@needs_ssh
def test_includes_and_matches_are_followed(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host d*\n    HostName %h.lan\n    User more\n")
    (tmp_path / "config").write_text("Include %s/more\nMatch host d2\n    Port 77\n" % tmp_path)
    found = resolve.resolve(Target("d1", config=str(tmp_path / "config")))
    assert (found.hostname, found.user) == ("d1.lan", "more")
    assert resolve.resolve(Target("d1", "me", 5, config=str(tmp_path / "config"))).port == 5


@needs_ssh
def test_a_configuration_with_an_error_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host d1\n    Prot 22\n")
    with pytest.raises(SshFailure, match="config: line 2: Bad configuration option: prot") as caught:
        resolve.resolve(Target("d1", config=str(tmp_path / "config")))
    assert caught.value.kind == "other"


@needs_ssh
def test_a_host_that_looks_like_an_option_is_none(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    with pytest.raises(SshFailure):
        resolve.resolve(Target("-oProxyCommand=touch %s/bad" % tmp_path, config=str(tmp_path / "config")))
    assert not (tmp_path / "bad").exists()


def test_without_the_program_the_configuration_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "config").write_text(
        "Host d1\n  HostName 10.0.0.1\n  Port 77\n  User ubuntu\n  IdentityFile ~/k.pem\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking yes\n  ProxyJump j\n  UserKnownHostsFile %s/kh\n" % tmp_path
    )
    found = resolve.resolve(Target("d1", config=str(tmp_path / "config")))
    assert (found.hostname, found.port, found.user, found.jump) == ("10.0.0.1", 77, "ubuntu", "j")
    assert found.identities == (HOME + "/k.pem",)
    assert found.is_explicit
    assert found.identities_only
    assert found.is_strict
    assert found.user_known_hosts == ("%s/kh" % tmp_path,)
    mine = resolve.resolve(Target("d1", "me", 5, "/k", config=str(tmp_path / "config")))
    assert (mine.port, mine.user, mine.identities) == (5, "me", ("/k",))
    with pytest.raises(SshFailure, match="cannot be read"):
        resolve.resolve(Target("d1", config=str(tmp_path / "none")))


@needs_ssh
def test_rsync_takes_the_same_way_with_our_options_for_hosts_in_between(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host d1\n  HostName 10.0.0.1\n  ProxyJump a,b\nHost b\n  Port 77\n")
    words = shell(resolve.resolve(Target("d1", "me", 2222, "/k", config=str(tmp_path / "config"))))
    assert words[:8] == ["ssh", "-F", str(tmp_path / "config"), "-p", "2222", "-l", "me", "-i"]
    assert words[-2] == "-o"
    assert words[-1].startswith("ProxyCommand=ssh -F ")
    assert words[-1].endswith("-W '[%h]:%p' -- b")
    assert words[-1].count("StrictHostKeyChecking=accept-new") == 2  # b's, and inside it a's
    assert "[%%h]:%%p" in words[-1]
    # The program takes all of it.
    said = subprocess.run([*words, "-G", "d1"], capture_output=True, check=True).stdout.decode()
    assert "\nport 2222\n" in said
    assert "-W '[%h]:%p' -- b" in said


def test_a_key_of_the_hosts_file_comes_first_even_if_it_is_not_there() -> None:
    """`ssh -G -i FILE` forgets a file that is not there, and lists the usual ones instead."""
    found = digest(Target("d1", identity="~/mistyped"), parse(BARE), {})
    assert (found.identities, found.is_explicit) == ((HOME + "/mistyped",), True)
    found = digest(Target("d1", identity="/k"), parse(TUTORIAL), {})
    assert found.identities == ("/k", "/home/ubuntu/my_key.pem")


def test_a_named_key_is_the_only_one_that_the_program_offers(tmp_path: Path) -> None:
    """It would offer those of the ssh-agent before, and a host hangs up after a few."""
    only = "IdentitiesOnly=yes"
    assert only in ssh_arguments(Target("d1", identity="/k"), parse(BARE), 10.0)
    assert only not in ssh_arguments(Target("d1"), parse(BARE), 10.0)
    there = digest(Target("d1"), {"identityfile": [str(tmp_path / "k")]}, {})
    assert only not in shell(there, named=True)
    (tmp_path / "k.pub").write_text("")  # the key itself is in the agent
    assert only in shell(there, named=True)
    assert only not in shell(there, named=False)
    assert only not in shell(there)
    assert only not in shell(digest(Target("d1"), parse(BARE), {}), named=True)


def test_the_last_words_of_an_agent_arrive_by_a_relay_although_more_is_sent_to_it(tmp_path: Path) -> None:
    last = b"x" * 1_000_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "c.s"))
        listener.listen()
        argv = [sys.executable, "-I", "-c", resolve.RELAY, str(tmp_path / "c.s")]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
            assert relay.stdin is not None
            assert relay.stdout is not None
            connection, _ = listener.accept()
            sending = threading.Thread(target=connection.sendall, args=(last,))
            sending.start()
            first = relay.stdout.read(500_000)
            connection.shutdown(socket.SHUT_RD)
            relay.stdin.write(b"too late")
            relay.stdin.flush()
            time.sleep(0.3)  # a relay that would end ends now
            rest = relay.stdout.read(500_000)
            sending.join()
            connection.close()
            assert first + rest == last
