"""Logging in by paramiko: keys of files and of the ssh-agent, then a password that the user is asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from distrun.ssh import failure, keys
from distrun.ssh.abort import Abort
from distrun.ssh.ask import Asker
from distrun.ssh.failure import SshFailure
from distrun.ssh.resolve import Resolved

AGENT_S = 10.0
"""How long an ssh-agent may take for an answer."""
_UNREADABLE = (OSError, ValueError, TypeError, SSHException, UnknownKeyType)


class ThrownOut(Exception):
    """The host ended the connection after too many keys; there are more to offer over another one."""


class KeyRing:
    """Key files that were read, for all connections of a launch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, str | None], Any] = {}

    def load(self, path: str, passphrase: str | None = None) -> Any:
        """Return the key of a file.

        Raises:
            OSError, ValueError, TypeError, SSHException, UnknownKeyType: it cannot be read, or not so.
        """
        with self._lock:
            if (path, passphrase) not in self._keys:
                self._keys[path, passphrase] = _load(path, passphrase)
            return self._keys[path, passphrase]


def _load(path: str, passphrase: str | None) -> Any:
    return paramiko.PKey.from_path(path, passphrase.encode() if passphrase is not None else None)


class Agent(AgentSSH):  # type: ignore[misc]  # paramiko has no types
    """The ssh-agent behind a socket, which may be another one than SSH_AUTH_SOCK names."""

    def __init__(self, path: str) -> None:
        super().__init__()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(AGENT_S)
            sock.connect(path)
            self._connect(sock)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        """Leave the agent."""
        self._close()


class Login:
    """How one user gets into one host. Used for one connection after another until it is in.

    It has the form of paramiko's AuthStrategy, and fabric takes it as one.
    """

    def __init__(self, resolved: Resolved, ring: KeyRing, asker: Asker, abort: Abort) -> None:
        self._resolved = resolved
        self._ring = ring
        self._asker = asker
        self._abort = abort
        self._tried: set[keys.Choice] = set()
        self._notes: list[str] = []
        self._fix = ""
        self._offered = 0

    def authenticate(self, transport: Any) -> None:
        """Log in.

        Raises:
            SshFailure: the host does not let this user in.
            ThrownOut: it may, over another connection.
            Aborted: it was given up.
        """
        with contextlib.ExitStack() as stack:
            if self._offer_none(transport):
                return
            accepted = self._accepted
            agent = self._open_agent(stack)
            held = self._held(agent) if agent is not None else {}
            files = [keys.look(path) for path in self._resolved.identities]
            if self._resolved.is_explicit:
                self._notes += ["%s does not exist" % path for path in keys.missing(files)]
                self._notes += ["%s cannot be read" % each.path for each in files if keys.exists(each.path)]
            choices = keys.order(files, held, self._resolved.is_explicit, self._resolved.identities_only)
            if "publickey" in accepted:
                for choice in choices:
                    if choice not in self._tried and self._offer(transport, choice, held):
                        return
            if self._offer_password(transport):
                return
        raise self._refusal(len(held))

    def _offer_none(self, transport: Any) -> bool:
        """Ask what the host accepts, as ssh does; a few let one in just so."""
        self._accepted: list[str] = []
        try:
            transport.auth_none(self._resolved.user)
        except BadAuthenticationType as err:
            self._accepted = list(err.allowed_types)
            return False
        except AuthenticationException:
            if not transport.is_active():
                raise
            self._accepted = ["publickey", "password"]
            return False
        return True

    def _open_agent(self, stack: contextlib.ExitStack) -> Agent | None:
        if not self._resolved.agent:
            return None
        try:
            agent = Agent(self._resolved.agent)
        except (OSError, SSHException) as err:
            self._note("the ssh-agent at %s does not answer (%s)" % (self._resolved.agent, err))
            return None
        stack.callback(agent.close)
        return agent

    def _held(self, agent: Agent) -> dict[bytes, Any]:
        held = {bytes(key.blob): key for key in agent.get_keys()}
        if any(key.get_name().startswith("sk-") for key in held.values()):
            self._note("security keys of the ssh-agent need --transport openssh")
        return {blob: key for blob, key in held.items() if not key.get_name().startswith("sk-")}

    def _offer(self, transport: Any, choice: keys.Choice, held: dict[bytes, Any]) -> bool:
        self._abort.check()
        key = self._key(choice, held)
        self._tried.add(choice)
        if key is None:
            return False
        self._offered += 1
        try:
            more = transport.auth_publickey(self._resolved.user, key)
        except (SSHException, OSError, ValueError) as err:
            self._abort.check()
            if not transport.is_active():
                raise ThrownOut from err
            return False
        return self._go_on(transport, more)

    def _key(self, choice: keys.Choice, held: dict[bytes, Any]) -> Any:
        if choice.source == keys.AGENT:
            return held.get(choice.public)
        try:
            if choice.source == keys.FILE:
                return self._certified(self._ring.load(choice.path))
            return self._unlock(choice.path)
        except _UNREADABLE as err:
            self._note("%s cannot be used (%s)" % (choice.path, str(err) or type(err).__name__))
            return None

    def _certified(self, key: Any) -> Any:
        for path in self._resolved.certificates:
            if key.public_blob is None and os.path.isfile(path):
                with contextlib.suppress(*_UNREADABLE):
                    key.load_certificate(path)
        return key

    def _unlock(self, path: str) -> Any:
        wrong: str | None = None
        while True:
            passphrase = self._asker.ask("key " + path, "Passphrase of %s: " % path, self._abort, wrong)
            if passphrase is None:
                self._note("%s has a passphrase" % path)
                self._fix = self._fix or "ssh-add %s" % path
                return None
            try:
                return self._certified(self._ring.load(path, passphrase))
            except _UNREADABLE:
                wrong = passphrase

    def _offer_password(self, transport: Any) -> bool:
        if not self._resolved.asks_passwords or not {"password", "keyboard-interactive"} & set(self._accepted):
            return False
        wrong: str | None = None
        while True:
            prompt = "Password of %s: " % self._resolved.where.login
            password = self._asker.ask("password of " + self._resolved.user, prompt, self._abort, wrong)
            if password is None:
                if wrong is not None:
                    raise failure.wrong_password(self._resolved.where)
                return False
            try:
                more = transport.auth_password(self._resolved.user, password)
            except BadAuthenticationType:
                return False
            except (SSHException, OSError) as err:
                self._abort.check()
                if not transport.is_active():
                    raise ThrownOut from err
                wrong = password
                continue
            return self._go_on(transport, more, has_password=True)

    def _go_on(self, transport: Any, more: list[str], has_password: bool = False) -> bool:
        """Return True; if the host wants a second proof, give it a password or say that it is beyond us."""
        if not more:
            return True
        self._accepted = list(more)
        if not has_password and self._offer_password(transport):
            return True
        fix = "log in by hand once with ControlMaster and ControlPersist set, and use --transport openssh"
        raise failure.no_auth(self._resolved.where, "it asks for another proof of identity", " or ".join(more), fix)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _refusal(self, held: int) -> SshFailure:
        resolved, accepted = self._resolved, ", ".join(self._accepted)
        fix = self._fix
        if self._accepted and "publickey" not in self._accepted:
            tried = "it accepts no keys"
            fix = fix or "type the same on a terminal, where distrun can ask for the password"
        elif not self._offered:
            tried = "there was no key to offer"
            if not held and not any(os.path.exists(path) for path in resolved.identities):
                fix = fix or failure.new_key(resolved.where, accepted)
        else:
            names = [path for path in resolved.identities if any(path == each.path for each in self._tried)]
            others = "%d of the ssh-agent" % held if held else ""
            tried = "%d key%s cannot be used (%s)" % (
                self._offered,
                "" if self._offered == 1 else "s",
                ", ".join([*names, others] if others else names) or "none",
            )
        tried = "; ".join([tried, *dict.fromkeys(self._notes)])
        return failure.no_auth(resolved.where, tried, accepted, fix)


def strategy(login: Login) -> Any:
    """Return `login` as fabric's setting `authentication.strategy_class`: what it calls to make an AuthStrategy."""

    def make(ssh_config: Any = None, fabric_config: Any = None, username: str = "") -> Login:
        return login

    return functools.wraps(strategy)(make)
