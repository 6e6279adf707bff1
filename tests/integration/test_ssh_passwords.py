"""Passwords and passphrases: asked once on the terminal, never waited for for ever, never shown."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from slowness import scaled
from sshd import Meeting, PasswordServer, key, meet, running
from terminal import Terminal

from distrun.ssh.ask import Abort, Aborted, Asker, read_secret
from distrun.ssh.resolve import Target
from distrun_runtime.contract import agent_messages

WAIT_S = 60.0


def targets(ssh_config: str, server: PasswordServer, count: int) -> list[Target]:
    return [Target("d%d" % number, "me", server.port, config=ssh_config) for number in range(count)]


@pytest.mark.parametrize("interactive", [False, True])
def test_a_password_is_asked_once_for_all_hosts_of_a_user(
    tmp_path: Path, ssh_config: str, terminal: Terminal, interactive: bool
) -> None:
    server = PasswordServer(tmp_path, "secret word", interactive)
    with Meeting(*targets(ssh_config, server, 4), asker=Asker(terminal.path)) as meeting:
        terminal.expect("Password of me@d")
        terminal.type("secret word\n")
        assert all(isinstance(event, agent_messages.AgentHello) for event in meeting.wait().values())
    server.close()
    assert terminal.read_rest().count("Password of") == 1
    assert "secret" not in terminal.shown
    assert server.tries == ["secret word"] * 4


def test_who_mistypes_is_asked_again_and_at_last_told(tmp_path: Path, ssh_config: str, terminal: Terminal) -> None:
    server = PasswordServer(tmp_path, "secret")
    with Meeting(*targets(ssh_config, server, 2), asker=Asker(terminal.path)) as meeting:
        for number in range(1, 4):
            terminal.expect("Password of me@d", number)
            terminal.type("wrong%d\n" % number)
        found = meeting.wait().values()
    server.close()
    assert [event.kind for event in found] == ["password", "password"]
    assert all("does not accept the password of user me" in event.reason for event in found)
    assert all("ssh-copy-id" in event.fix for event in found)
    rest = terminal.read_rest()
    assert (rest.count("Password of"), rest.count("Not accepted; please try again.")) == (3, 2)


def test_without_a_terminal_a_password_is_no_way_in(tmp_path: Path, ssh_config: str) -> None:
    server = PasswordServer(tmp_path, "secret")
    event = meet(targets(ssh_config, server, 1)[0], asker=Asker("/nowhere/tty"))
    server.close()
    assert event.kind == "auth"
    assert "it accepts password" in event.reason
    assert "it accepts no keys" in event.reason
    assert event.fix == "type the same on a terminal, where distrun can ask for the password"


def test_nobody_at_the_terminal_is_not_waited_for_for_ever(tmp_path: Path, ssh_config: str, terminal: Terminal) -> None:
    server = PasswordServer(tmp_path, "secret")
    with Meeting(*targets(ssh_config, server, 3), asker=Asker(terminal.path, limit_s=0.5)) as meeting:
        found = meeting.wait().values()
    server.close()
    assert [event.kind for event in found] == ["auth"] * 3
    assert terminal.read_rest().count("Password of") == 1


def test_a_question_ends_at_once_when_it_is_given_up_and_the_terminal_echoes_again(terminal: Terminal) -> None:
    abort, ended = Abort(), []

    def ask() -> None:
        try:
            read_secret(terminal.path, "Password: ", WAIT_S, abort.check)
        except Aborted:
            ended.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    terminal.expect("Password: ")
    abort.now()
    thread.join(scaled(WAIT_S))
    assert ended == [True]
    terminal.type("shown\n")
    terminal.expect("shown")


@pytest.mark.ssh
def test_a_locked_key_is_unlocked_by_a_passphrase_that_is_asked_once(tmp_path: Path, terminal: Terminal) -> None:
    with running(tmp_path / "sshd") as server:
        locked = key(tmp_path / "locked", "-N", "open sesame")
        server.authorized.write_text((tmp_path / "locked.pub").read_text())
        path = server.config("IdentityFile %s" % locked, "IdentitiesOnly yes", identity=False)
        wanted = [Target("d%d" % number, config=path) for number in range(3)]
        with Meeting(*wanted, asker=Asker(terminal.path)) as meeting:
            terminal.expect("Passphrase of %s: " % locked)
            terminal.type("open\n")
            terminal.expect("Passphrase of %s: " % locked, 2)
            terminal.type("open sesame\n")
            assert all(isinstance(event, agent_messages.AgentHello) for event in meeting.wait().values())
    assert terminal.read_rest().count("Passphrase of") == 2
    assert "sesame" not in terminal.shown
