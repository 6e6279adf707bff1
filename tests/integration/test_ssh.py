"""Connections to real sshds: configurations, keys, host keys, and everything that can be wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import scaled
from sshd import USER, Deaf, Hole, Meeting, Sshd, key, meet, running

from distrun.ssh.resolve import FABRIC, OPENSSH, Target
from distrun_runtime.contract import agent_messages

both = pytest.mark.parametrize("transport", [FABRIC, OPENSSH])


@pytest.fixture(name="sshd")
def running_sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running(tmp_path / "sshd") as server:
        yield server


def is_in(event: object) -> bool:
    assert isinstance(event, agent_messages.AgentHello), event
    return True


@contextlib.contextmanager
def ssh_agent(folder: Path, *keys: Path) -> Iterator[str]:
    """Give the socket of an ssh-agent that holds `keys`."""
    path = str(folder / "agent.sock")
    child = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + scaled(60)
        with socket.socket(socket.AF_UNIX) as probe:  # the file is there a moment before somebody listens
            while probe.connect_ex(path) != 0 and time.monotonic() < until:
                time.sleep(0.01)
        env = {**os.environ, "SSH_AUTH_SOCK": path}
        for each in keys:
            subprocess.run(["ssh-add", "-q", each], check=True, env=env, stderr=subprocess.DEVNULL)
        yield path
    finally:
        child.kill()
        child.wait()


@both
def test_a_configuration_with_port_user_identity_file_and_identities_only_works(sshd: Sshd, transport: str) -> None:
    config = sshd.folder / "config"
    config.write_text(
        "Host d1\n    port %d\n    user %s\n    IdentityFile %s\n    IdentitiesOnly yes\n\n"
        "Host *\n    HostName 127.0.0.1\n    UserKnownHostsFile %s\n" % (sshd.port, USER, sshd.id, sshd.known_hosts)
    )
    assert is_in(meet(Target("d1", config=str(config), transport=transport)))


@both
def test_a_key_may_be_in_the_agent_only(
    sshd: Sshd, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssh_agent(tmp_path, sshd.id) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        sshd.id.unlink()
        assert is_in(meet(Target("d1", config=sshd.config(identity=False), transport=transport)))
        # Named by its public half, so that nothing else is offered.
        assert is_in(meet(Target("d1", config=sshd.config(), transport=transport)))
        # By another socket than the environment names.
        monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
        named = sshd.config("IdentityAgent %s" % path, identity=False)
        assert is_in(meet(Target("d1", config=named, transport=transport)))


def test_an_agent_full_of_wrong_keys_does_not_keep_the_right_one_out(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [key(tmp_path / ("wrong%d" % number)) for number in range(8)]
    with ssh_agent(tmp_path, *wrong) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        assert is_in(meet(Target("d1", config=sshd.config())))
        # Not even if more keys may be offered than those that are named ...
        assert is_in(meet(Target("d1", config=sshd.config("IdentityFile %s" % sshd.id, identity=False))))
        # ... or if the right one is the last of the agent, past what the host lets one try over one connection.
        subprocess.run(["ssh-add", "-q", sshd.id], check=True, env={**os.environ}, stderr=subprocess.DEVNULL)
        assert is_in(meet(Target("d1", config=sshd.config(identity=False))))


@both
def test_with_the_wrong_key_the_problem_says_what_to_do(sshd: Sshd, tmp_path: Path, transport: str) -> None:
    wrong = key(tmp_path / "wrong")
    config = sshd.config("IdentityFile %s" % wrong, "IdentitiesOnly yes", "User me", identity=False)
    event = meet(Target("d1", config=config, transport=transport))
    assert isinstance(event, agent_messages.StartFailed)
    assert event.kind == "auth"
    assert "127.0.0.1 port %d does not let user me in" % sshd.port in event.reason
    # The host accepts no password, so that ssh-copy-id could not log in either.
    assert event.fix.startswith("have your public key (%s.pub) added to ~/.ssh/authorized_keys of user me" % wrong)


@both
def test_without_any_key_the_first_thing_to_do_is_to_make_one(
    sshd: Sshd, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    new = tmp_path / "new"
    config = sshd.config("IdentityFile %s" % new, "IdentitiesOnly yes", "User me", identity=False)
    event = meet(Target("d1", config=config, transport=transport))
    assert event.kind == "auth"
    assert "there was no key to offer" in event.reason
    first, then = event.fix.splitlines()
    assert first == "first: ssh-keygen -t ed25519 -f %s" % new
    assert then.startswith("then: have your public key (%s.pub) added" % new)


def test_a_key_file_that_is_not_there_is_named(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    event = meet(Target("d1", config=sshd.config("IdentityFile /nowhere/key", "IdentitiesOnly yes", identity=False)))
    assert event.kind == "auth"
    assert "/nowhere/key does not exist" in event.reason
    assert "it accepts publickey" in event.reason


def test_a_locked_key_without_a_terminal_is_a_problem_that_says_ssh_add(sshd: Sshd, tmp_path: Path) -> None:
    locked = key(tmp_path / "locked", "-N", "secret")
    sshd.authorized.write_text((tmp_path / "locked.pub").read_text())
    config = sshd.config("IdentityFile %s" % locked, "IdentitiesOnly yes", identity=False)
    event = meet(Target("d1", config=config))
    assert event.kind == "auth"
    assert "has a passphrase" in event.reason
    assert event.fix == "ssh-add %s" % locked


@both
def test_an_unknown_host_key_is_accepted_and_recorded_once(sshd: Sshd, transport: str) -> None:
    target = Target("d1", config=sshd.config("HostKeyAlias lab-d1"), transport=transport)
    assert is_in(meet(target))
    assert is_in(meet(target))
    lines = sshd.known_hosts.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].split()[:2] == ["lab-d1", "ssh-ed25519"]


def test_a_host_key_that_cannot_be_recorded_is_a_warning(sshd: Sshd) -> None:
    sshd.known_hosts.mkdir()
    with Meeting(Target("d1", config=sshd.config())) as meeting:
        assert is_in(meeting.wait()["d1"])
        (warned,) = (event for event in meeting.events["d1"] if isinstance(event, agent_messages.Warned))
    assert "cannot be recorded in %s" % sshd.known_hosts in warned.text


def test_many_first_connections_record_a_key_once_hashed_if_the_user_wants(sshd: Sshd) -> None:
    config = sshd.config("HashKnownHosts yes")
    with Meeting(*(Target("d%d" % number, config=config) for number in range(8))) as meeting:
        assert all(map(is_in, meeting.wait().values()))
    lines = sshd.known_hosts.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("|1|")
    found = subprocess.run(
        ["ssh-keygen", "-F", "[127.0.0.1]:%d" % sshd.port, "-f", sshd.known_hosts], capture_output=True, check=False
    )
    assert found.returncode == 0


@both
def test_a_changed_host_key_is_refused_with_the_command_that_forgets_the_old_one(sshd: Sshd, transport: str) -> None:
    target = Target("d1", config=sshd.config(), transport=transport)
    name = "[127.0.0.1]:%d" % sshd.port
    other = key(sshd.folder / "other")
    old = "%s %s\n" % (name, " ".join(Path(str(other) + ".pub").read_text().split()[:2]))
    sshd.known_hosts.write_text("# mine\n" + old)
    event = meet(target)
    assert event.kind == "hostkey"
    assert "known_hosts line 2" in event.reason
    assert "ssh-keygen -f %s -R '%s'" % (sshd.known_hosts, name) in event.fix
    assert sshd.known_hosts.read_text() == "# mine\n" + old
    assert subprocess.run(event.fix.partition(": ")[2], shell=True, capture_output=True, check=False).returncode == 0
    assert is_in(meet(target))


@both
def test_strict_checking_refuses_unknown_host_keys(sshd: Sshd, transport: str) -> None:
    by_option = meet(Target("d1", config=sshd.config(), transport=transport, strict=True))
    by_config = meet(Target("d1", config=sshd.config("StrictHostKeyChecking yes"), transport=transport))
    for event in (by_option, by_config):
        assert event.kind == "hostkey"
        assert "is not known" in event.reason
        assert "ssh" in event.fix
    assert not sshd.known_hosts.exists() or sshd.known_hosts.read_text() == ""


@both
def test_host_keys_are_checked_even_if_the_configuration_says_not_to(sshd: Sshd, transport: str) -> None:
    other = key(sshd.folder / "other")
    sshd.known_hosts.write_text("d1 %s" % Path(str(other) + ".pub").read_text())
    config = sshd.config("StrictHostKeyChecking no", "HostKeyAlias d1")
    assert meet(Target("d1", config=config, transport=transport)).kind == "hostkey"


@both
def test_a_host_that_answers_nothing_at_all_is_a_timeout(tmp_path: Path, transport: str) -> None:
    hole = Hole()
    (tmp_path / "config").write_text("")
    target = Target("127.0.0.1", port=hole.port, config=str(tmp_path / "config"), transport=transport, connect_s=1.0)
    event = meet(target)
    hole.close()
    assert event.kind == "timeout"
    assert "127.0.0.1 port %d" % hole.port in event.reason


@both
def test_a_host_that_takes_the_connection_and_says_nothing_is_a_timeout(transport: str, tmp_path: Path) -> None:
    deaf = Deaf()
    (tmp_path / "config").write_text("")
    target = Target("127.0.0.1", port=deaf.port, config=str(tmp_path / "config"), transport=transport, connect_s=1.0)
    event = meet(target)
    deaf.close()
    assert event.kind == "timeout"
    assert "within 1 s" in event.reason


@both
def test_what_the_shell_prints_first_is_a_warning_and_no_harm(sshd: Sshd, transport: str) -> None:
    sshd.authorized.write_text(
        'command="echo hello from rc; echo more; eval \\"$SSH_ORIGINAL_COMMAND\\"" ' + sshd.authorized.read_text()
    )
    with Meeting(Target("d1", config=sshd.config(), transport=transport)) as meeting:
        assert is_in(meeting.wait()["d1"])
        warned = [event for event in meeting.events["d1"] if isinstance(event, agent_messages.Warned)]
    assert len(warned) == 1
    assert "hello from rc | more" in warned[0].text


@both
def test_the_agent_does_without_an_interpreter_that_only_the_servers_may_have(sshd: Sshd, transport: str) -> None:
    event = meet(Target("d1", config=sshd.config(), transport=transport, python="/nowhere/python3"))
    assert isinstance(event, agent_messages.AgentHello)


@pytest.mark.ssh
@both
def test_connections_that_a_busy_sshd_drops_are_made_again(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distrun.ssh.connector.RETRIES", 7)  # it may be busy for longer than a real one
    with running(tmp_path / "sshd", MaxStartups="2:100:2") as server:
        targets = [Target("d%d" % number, config=server.config(), transport=transport) for number in range(6)]
        with Meeting(*targets) as meeting:
            found = meeting.wait()
        assert all(map(is_in, found.values()))


@both
def test_hosts_behind_another_one_share_the_connection_to_it(sshd: Sshd, tmp_path: Path, transport: str) -> None:
    with running(tmp_path / "jump") as jump:
        lines = "Host jump\n    HostName 127.0.0.1\n    Port %d\n    IdentityFile %s\n    UserKnownHostsFile %s\n" % (
            jump.port,
            jump.id,
            jump.known_hosts,
        )
        config = sshd.config("ProxyJump jump", hosts="d*")
        Path(config).write_text(lines + Path(config).read_text())
        targets = [Target("d%d" % number, config=config, transport=transport) for number in range(3)]
        with Meeting(*targets) as meeting:
            assert all(map(is_in, meeting.wait().values()))
        if transport == "fabric":
            assert jump.log.read_text().count("Accepted publickey") == 1
        jump.stop()
        event = meet(targets[0])
        assert event.kind in ("refused", "busy", "other")
        assert "jump" in event.reason or transport == "openssh"


@both
def test_a_proxy_command_is_run_and_what_it_says_is_told(sshd: Sshd, transport: str) -> None:
    script = sshd.folder / "bridge.py"
    script.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    good = sshd.config("ProxyCommand python3 %s %%h %%p" % script)
    assert is_in(meet(Target("d1", config=good, transport=transport)))
    bad = sshd.config("ProxyCommand sh -c 'echo no way >&2; exit 3'")
    event = meet(Target("d1", config=bad, transport=transport, connect_s=2.0))
    assert isinstance(event, agent_messages.StartFailed)


@both
def test_an_agent_is_forwarded_where_the_configuration_says_so(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The keys of a forwarded agent open further hosts: over there it is an agent like any other."""
    with ssh_agent(tmp_path, sshd.id) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        command = "ssh-add -L >&2; exit 1"
        config = sshd.config("ForwardAgent yes", identity=False)
        event = meet(Target("d1", config=config, transport=transport), command=command)
        assert sshd.id.with_suffix(".pub").read_text().split()[1] in event.reason
        event = meet(Target("d1", config=sshd.config(identity=False), transport=transport), command=command)
        assert "ssh-ed25519" not in event.reason


@both
def test_giving_up_while_connecting_is_immediate_and_leaves_no_thread(transport: str, tmp_path: Path) -> None:
    deaf = Deaf()
    (tmp_path / "config").write_text("")
    before = set(threading.enumerate())
    target = Target("127.0.0.1", port=deaf.port, config=str(tmp_path / "config"), transport=transport, connect_s=60.0)
    with Meeting(target) as meeting:
        assert deaf.arrived.wait(scaled(60))
        for channel in meeting.channels.values():
            channel.kill()
            assert channel.join(scaled(60))
        assert isinstance(meeting.wait()["127.0.0.1"], agent_messages.StartFailed)
    deaf.close()
    until = time.monotonic() + scaled(60)
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before


@both
def test_an_agent_that_was_given_no_work_leaves_nothing_when_its_connection_is_cut(sshd: Sshd, transport: str) -> None:
    with Meeting(Target("d1", config=sshd.config(), transport=transport)) as meeting:
        hello = meeting.wait()["d1"]
        assert is_in(hello)
        channel = meeting.channels["d1"]
        channel.kill()
        assert channel.join(scaled(60))
        assert channel.ended_well


@pytest.mark.ssh
@both
def test_hosts_may_be_ipv6_addresses(tmp_path: Path, transport: str) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as err:
        pytest.skip("no IPv6 here: %s" % err)
    with running(tmp_path / "sshd", ListenAddress="::1") as server:
        (tmp_path / "config").write_text(
            "Host *\n    UserKnownHostsFile %s\n    GlobalKnownHostsFile none\n" % server.known_hosts
        )
        target = Target("::1", USER, server.port, str(server.id), config=str(tmp_path / "config"), transport=transport)
        assert is_in(meet(target))
        assert server.known_hosts.read_text().startswith("[::1]:%d " % server.port)
        assert is_in(meet(target))
