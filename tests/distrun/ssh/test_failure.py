"""Each way to fail to reach a host has a kind, words, and a command that mends it."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace

import pytest
from paramiko.ssh_exception import ChannelException, IncompatiblePeer, NoValidConnectionsError, SSHException

from distrun.ssh import failure
from distrun.ssh.failure import Where, classify

WHERE = Where("d2", "10.0.0.3", 2222, "ubuntu", 10.0)


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def banner(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception:
            raise SSHException("Error reading SSH protocol banner")
    except SSHException as err:
        return err


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "dns", "10.0.0.3"),
        (os_error(errno.ECONNREFUSED), "refused", "10.0.0.3 port 2222 refuses connections"),
        (NoValidConnectionsError({("10.0.0.3", 2222): os_error(errno.ECONNREFUSED)}), "refused", "port 2222"),
        (os_error(errno.ETIMEDOUT), "timeout", "within 10 s"),
        (os_error(errno.EHOSTUNREACH), "unreachable", "no route to host"),
        (os_error(errno.ENETUNREACH), "unreachable", "network is unreachable"),
        (os_error(errno.ECONNRESET), "busy", "before the key exchange"),
        (banner(TimeoutError()), "timeout", "did not say a word of ssh within 10 s"),
        (banner(EOFError()), "busy", "too many at a time"),
        (banner(os_error(errno.ECONNRESET)), "busy", "too many at a time"),
        (SSHException("Negotiation failed."), "busy", "before the key exchange"),
        (SSHException("No existing session"), "timeout", "finish the key exchange"),
        (SSHException("Timeout opening channel."), "timeout", "10.0.0.3"),
        (EOFError(), "busy", "before the key exchange"),
        (IncompatiblePeer("no acceptable host key"), "other", "share no algorithm: no acceptable host key"),
        (ChannelException(1, "Administratively prohibited"), "other", "does not let user ubuntu run commands"),
        (OSError(errno.EMFILE, "Too many open files"), "other", "Too many open files"),
        (SSHException("something else"), "other", "something else"),
    ],
)
def test_exceptions_of_a_connection_are_told_apart(found: BaseException, kind: str, text: str) -> None:
    known = classify(found, WHERE)
    assert known.kind == kind
    assert text in known.text
    assert known.fix


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:5bFlNn9RkbjpRRRCFjf0KwXQvqMZ3bXzTJ5N7wAi4bk.
Please contact your system administrator.
Add correct host key in /users/me/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /users/me/.ssh/known_hosts:7
  remove with:
  ssh-keygen -f "/users/me/.ssh/known_hosts" -R "[10.0.0.3]:2222"
Host key for [10.0.0.3]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("words", "kind", "text", "fix"),
    [
        ("ssh: Could not resolve hostname d2: Name or service not known\n", "dns", "name or service not", "HostName"),
        ("ssh: connect to host 10.0.0.3 port 2222: Connection refused\n", "refused", "10.0.0.3 port 2222", "d2:PORT"),
        ("ssh: connect to host 10.0.0.3 port 2222: Connection timed out\n", "timeout", "10 s", "ssh -p 2222 -v"),
        ("Connection timed out during banner exchange\n", "timeout", "a word of ssh", "ssh"),
        ("ssh: connect to host 10.0.0.3 port 2222: No route to host\n", "unreachable", "no route", "network"),
        ("ssh: connect to host 10.0.0.3 port 2222: Network is unreachable\n", "unreachable", "network is", "network"),
        (CHANGED, "hostkey", "known_hosts line 7", "ssh-keygen -f /users/me/.ssh/known_hosts -R '[10.0.0.3]:2222'"),
        (
            "No ED25519 host key is known for d2 and you have requested strict checking.\n"
            "Host key verification failed.\n",
            "hostkey",
            "is not known (ED25519",
            "ssh -p 2222 ubuntu@d2",
        ),
        (
            "ubuntu@10.0.0.3: Permission denied (publickey,password).\n",
            "auth",
            "it accepts publickey,password",
            "ssh-copy-id -p 2222 ubuntu@d2",
        ),
        (
            "Received disconnect from 10.0.0.3 port 2222:2: Too many authentication failures\n",
            "auth",
            "before all keys are tried",
            "IdentitiesOnly",
        ),
        ("kex_exchange_identification: Connection closed by remote host\n", "busy", "too many at a time", "MaxStart"),
        ("kex_exchange_identification: read: Connection reset by peer\n", "busy", "too many at a time", "MaxStart"),
        ("Connection closed by 10.0.0.3 port 2222\n", "busy", "closed the connection", "MaxStartups"),
        ("/cfg: line 2: Bad configuration option: prot\n", "other", "Bad configuration option", "ssh -p 2222 -v"),
        ("", "other", "without a message", "ssh -p 2222 -v ubuntu@d2"),
    ],
)
def test_the_words_of_the_ssh_program_are_told_apart(words: str, kind: str, text: str, fix: str) -> None:
    known = classify(words, WHERE)
    assert known.kind == kind
    assert text in known.text
    assert fix in known.fix


def test_a_failure_that_is_known_stays_what_it_is() -> None:
    known = failure.refused(WHERE)
    assert classify(known, WHERE) is known


def test_a_host_without_an_agent_says_why_in_its_own_words() -> None:
    old = "distrun: this host's /usr/bin/python3 is Python 3.6.9; the agent needs 3.8 or newer, name one that is"
    for words in (old, "rc noise\n" + old):
        found = failure.no_agent(WHERE, words, "")
        assert found.kind == "python"
        assert found.text.startswith("this host's /usr/bin/python3 is Python 3.6.9")
        assert "python=" in found.fix
    found = failure.no_agent(WHERE, "This account is currently not available.", "")
    assert found.kind == "other"
    assert "This account is currently not available." in found.text
    assert "menu> " in failure.no_agent(WHERE, "", "menu> ").text


def test_commands_name_the_port_only_if_it_is_another_one_and_are_quoted() -> None:
    assert failure.copy_id(WHERE) == "ssh-copy-id -p 2222 ubuntu@d2"
    assert failure.copy_id(Where("d2", user="me")) == "ssh-copy-id me@d2"
    assert failure.forget("d 2", "/a b") == "ssh-keygen -f '/a b' -R 'd 2'"


def test_commands_go_the_same_way_to_a_host() -> None:
    where = Where("d2", user="me", config="my/config", identity="/k", jump="gate")
    assert where.command("ssh", "-v") == "ssh -F my/config -i /k -J gate -v me@d2"
    assert failure.copy_id(where) == "ssh-copy-id -F my/config -i /k -o ProxyJump=gate me@d2"


def test_a_user_without_a_key_makes_one_first() -> None:
    denied = "ubuntu@10.0.0.3: Permission denied (publickey,password).\n"
    assert classify(denied, WHERE).takes_password
    assert not classify(denied.replace(",password", ""), WHERE).takes_password
    known = classify(denied, replace(WHERE, has_key=False))
    assert "there was no key to offer" in known.text
    assert known.fix.splitlines() == ["first: ssh-keygen -t ed25519", "then: ssh-copy-id -p 2222 ubuntu@d2"]
    assert "ssh-keygen" not in classify(denied, WHERE).fix


def test_a_host_that_takes_no_password_cannot_be_given_a_key_by_ssh_copy_id() -> None:
    fix = classify("ubuntu@10.0.0.3: Permission denied (publickey).\n", WHERE).fix
    assert fix.startswith("have your public key (~/.ssh/id_ed25519.pub) added to ~/.ssh/authorized_keys of user ubuntu")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_who_means_this_machine_and_has_no_sshd_is_told_to_leave_the_hosts_out(name: str) -> None:
    fix = failure.refused(Where(name)).fix
    assert fix.splitlines()[0] == "to run on this machine without ssh, leave -H and --hosts out"
    assert "leave" not in failure.refused(Where("d2")).fix
