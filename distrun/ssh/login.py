"""Logging in by paramiko: keys of files and of the ssh-agent, then a password that the user is asked for."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from distrun.ssh import failure
from distrun.ssh.ask import Abort, Asker
from distrun.ssh.failure import SshFailure
from distrun.ssh.resolve import Resolved

AGENT = "agent"
FILE = "file"
LOCKED = "locked"
"""A key file whose passphrase has to be asked for."""

AGENT_S = 10.0
"""How long an ssh-agent may take for an answer."""
_MAGIC = b"openssh-key-v1\0"
_UNREADABLE = (OSError, ValueError, TypeError, SSHException, UnknownKeyType)


class TooManyTries(Exception):
    """The host ended the connection after too many keys; there are more to offer over another one."""


class KeyCache:
    """Keys that were read from files, for all connections of a launch."""

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
                secret = None if passphrase is None else passphrase.encode()
                self._keys[path, passphrase] = paramiko.PKey.from_path(path, secret)
            return self._keys[path, passphrase]


class SshAgent(AgentSSH):  # type: ignore[misc]  # paramiko has no types
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

    def __init__(self, resolved: Resolved, key_cache: KeyCache, asker: Asker, abort: Abort) -> None:
        self._resolved = resolved
        self._key_cache = key_cache
        self._asker = asker
        self._abort = abort
        self._tried: set[Choice] = set()
        self._notes: list[str] = []
        self._fix = ""
        self._offered = 0

    def authenticate(self, transport: Any) -> None:
        """Log in.

        Raises:
            SshFailure: the host does not let this user in.
            TooManyTries: it may, over another connection.
            Aborted: it was given up.
        """
        with contextlib.ExitStack() as stack:
            if self._offer_none(transport):
                return
            accepted = self._accepted
            agent = self._open_agent(stack)
            held = self._held(agent) if agent is not None else {}
            files = [read_key_file(path) for path in self._resolved.identities]
            if self._resolved.is_explicit:
                self._notes += [f"{each.path} does not exist" for each in files if not each.is_there]
                self._notes += [f"{each.path} cannot be read" for each in files if each.is_unreadable]
            choices = order_keys(files, held, self._resolved.is_explicit, self._resolved.identities_only)
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

    def _open_agent(self, stack: contextlib.ExitStack) -> SshAgent | None:
        if not self._resolved.agent:
            return None
        try:
            agent = SshAgent(self._resolved.agent)
        except (OSError, SSHException) as err:
            self._note(f"the ssh-agent at {self._resolved.agent} does not answer ({err})")
            return None
        stack.callback(agent.close)
        return agent

    def _held(self, agent: SshAgent) -> dict[bytes, Any]:
        held = {bytes(key.blob): key for key in agent.get_keys()}
        if any(key.get_name().startswith("sk-") for key in held.values()):
            self._note("security keys of the ssh-agent need --transport openssh")
        return {blob: key for blob, key in held.items() if not key.get_name().startswith("sk-")}

    def _offer(self, transport: Any, choice: Choice, held: dict[bytes, Any]) -> bool:
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
                raise TooManyTries from err
            return False
        return self._go_on(transport, more)

    def _key(self, choice: Choice, held: dict[bytes, Any]) -> Any:
        if choice.source == AGENT:
            return held.get(choice.public)
        try:
            if choice.source == FILE:
                return self._certified(self._key_cache.load(choice.path))
            return self._unlock(choice.path)
        except _UNREADABLE as err:
            self._note(f"{choice.path} cannot be used ({str(err) or type(err).__name__})")
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
            passphrase = None
            if self._resolved.asks_passphrases:
                passphrase = self._asker.ask("key " + path, f"Passphrase of {path}: ", self._abort, wrong)
            if passphrase is None:
                self._note(f"{path} has a passphrase")
                self._fix = self._fix or f"ssh-add {path}"
                return None
            try:
                return self._certified(self._key_cache.load(path, passphrase))
            except _UNREADABLE:
                wrong = passphrase

    def _offer_password(self, transport: Any) -> bool:
        if not self._resolved.asks_passwords or not {"password", "keyboard-interactive"} & set(self._accepted):
            return False
        wrong: str | None = None
        while True:
            prompt = f"Password of {self._resolved.where.login}: "
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
                    raise TooManyTries from err
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
            others = f"{held} of the ssh-agent" if held else ""
            offered = ", ".join([*names, others] if others else names) or "none"
            tried = f"{self._offered} key{'' if self._offered == 1 else 's'} cannot be used ({offered})"
        tried = "; ".join([tried, *dict.fromkeys(self._notes)])
        return failure.no_auth(resolved.where, tried, accepted, fix)


def strategy(login: Login) -> Any:
    """Return `login` as fabric's setting `authentication.strategy_class`: what it calls to make an AuthStrategy."""

    def make(ssh_config: Any = None, fabric_config: Any = None, username: str = "") -> Login:
        return login

    return functools.wraps(strategy)(make)


@dataclass(frozen=True)
class KeyFile:
    """What is to be known of a key file before it is used."""

    path: str
    public: bytes = b""
    """Its public half, as it crosses the wire; empty: not known without the passphrase."""
    has_private: bool = False
    is_locked: bool = False

    @property
    def is_there(self) -> bool:
        """Whether there is anything under that name."""
        return self.has_private or bool(self.public)

    @property
    def is_unreadable(self) -> bool:
        """Whether there is a file that this user may not even read."""
        return os.path.exists(self.path) and not os.access(self.path, os.R_OK)


@dataclass(frozen=True)
class Choice:
    """One key to offer."""

    source: str
    """AGENT, FILE or LOCKED."""
    public: bytes = b""
    path: str = ""


def order_keys(files: Sequence[KeyFile], held: Iterable[bytes], explicit: bool, only: bool) -> list[Choice]:
    """Return what to offer, best first. No side effects.

    Servers turn one out after a few wrong keys (MaxAuthTries, usually 6). So the keys that the user named come
    before whatever else an agent holds; without such names the agent's come first, as with ssh itself.

    Args:
        files: the identities, in order.
        held: public keys in the agent, in its order.
        explicit: the user named the identities.
        only: nothing but the identities may be offered (IdentitiesOnly).
    """
    held = list(held)
    in_agent = [Choice(AGENT, key.public, key.path) for key in files if key.public in held]
    known = {choice.public for choice in in_agent}
    rest = [] if only else [Choice(AGENT, public) for public in held if public not in known]
    plain = [Choice(FILE, key.public, key.path) for key in files if _is_usable(key, known) and not key.is_locked]
    locked = [Choice(LOCKED, key.public, key.path) for key in files if _is_usable(key, known) and key.is_locked]
    if not explicit:
        return [*in_agent, *rest, *plain, *locked]
    places = {key.path: place for place, key in enumerate(files)}
    return [*sorted(in_agent + plain, key=lambda choice: places[choice.path]), *rest, *locked]


def _is_usable(key: KeyFile, known: set[bytes]) -> bool:
    return key.has_private and (not key.public or key.public not in known)


def read_key_file(path: str) -> KeyFile:
    """Return what the files `path` and `path.pub` tell without a passphrase. Nothing there is no error."""
    public = public_of(_text(path if path.endswith(".pub") else path + ".pub"))
    text = "" if path.endswith(".pub") else _text(path)
    if "PRIVATE KEY" not in text:
        return KeyFile(path, public or public_of(text))
    inner, is_locked = read_private(text)
    return KeyFile(path, inner or public, True, is_locked)


def public_of(text: str) -> bytes:
    """Return the key in a line of a .pub file; empty if there is none. No side effects."""
    words = text.split()
    if len(words) < 2:
        return b""
    try:
        return base64.b64decode(words[1], validate=True)
    except (ValueError, binascii.Error):
        return b""


def read_private(text: str) -> tuple[bytes, bool]:
    """Return the public half of a private key's file, if that is readable, and whether it is locked."""
    if "BEGIN OPENSSH PRIVATE KEY" not in text:
        return b"", "ENCRYPTED" in text
    try:
        body = base64.b64decode("".join(line for line in text.split("\n") if not line.startswith("-----")))
    except (ValueError, binascii.Error):
        return b"", False
    if not body.startswith(_MAGIC):
        return b"", False
    cipher, rest = _string(body[len(_MAGIC) :])
    _, rest = _string(rest)
    _, rest = _string(rest)
    public, _ = _string(rest[4:])
    return public, cipher != b"none"


def _string(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:4], "big")
    return data[4 : 4 + size], data[4 + size :]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""
