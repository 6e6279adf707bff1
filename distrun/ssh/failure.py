"""Why a host cannot be reached: the kind, what was found, and how to fix it. Pure."""

from __future__ import annotations

import errno
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass

DNS = "dns"
REFUSED = "refused"
TIMEOUT = "timeout"
UNREACHABLE = "unreachable"
HOSTKEY = "hostkey"
AUTH = "auth"
PASSWORD = "password"
PYTHON = "python"
OTHER = "other"

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)

_OWN_LINE = re.compile(r"kex_exchange_identification|Connection (?:closed|reset)|ssh: |banner exchange")


class SshFailure(Exception):
    """A host cannot be reached, or has nothing to run the agent with."""

    def __init__(self, kind: str, text: str, fix: str = "", *, is_passing: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.fix = fix
        self.is_passing = is_passing
        """It may be over in a moment: the host drops new connections because it has too many."""

    def __repr__(self) -> str:
        return "SshFailure(%r, %r, %r)" % (self.kind, self.text, self.fix)


@dataclass(frozen=True)
class Where:
    """Whom a failure is about."""

    host: str
    """As the user types it."""
    address: str = ""
    """Name or address that the configuration makes of it; empty: the same."""
    port: int = 22
    user: str = ""
    limit_s: float = 10.0
    """How long an answer was waited for."""
    config: str = ""
    """ssh -F."""
    identity: str = ""
    """Key file that the user named (ssh -i)."""
    jump: str = ""
    """ssh -J."""
    has_key: bool = True
    """There is a key file, or an ssh-agent that may hold a key."""

    @property
    def place(self) -> str:
        """The address and port."""
        return "%s port %d" % (self.address or self.host, self.port)

    @property
    def login(self) -> str:
        """What one types after ssh-like commands."""
        return "%s@%s" % (self.user, self.host) if self.user else self.host

    def command(self, *words: str) -> str:
        """Return a command of the ssh family for this host, with all that leads there."""
        found = ["-F", self.config] if self.config else []
        found += ["-p", str(self.port)] if self.port != 22 else []
        found += ["-i", self.identity] if self.identity else []
        if self.jump:
            found += ["-J", self.jump] if words[0] == "ssh" else ["-o", "ProxyJump=" + self.jump]
        return shlex.join((words[0], *found, *words[1:], self.login))


def classify(found: BaseException | str, where: Where) -> SshFailure:
    """Return the failure behind an exception of a connection, or behind what the `ssh` program wrote to stderr."""
    if isinstance(found, SshFailure):
        return found
    if isinstance(found, str):
        return _of_stderr(found, where)
    return _of_exception(found, where)


def dns(where: Where, why: str = "") -> SshFailure:
    """Return the failure of a name that has no address."""
    name = where.address or where.host
    text = "no address is known for the name %s%s" % (name, " (%s)" % why if why else "")
    return SshFailure(DNS, text, "correct the name, or give it a HostName in ~/.ssh/config")


def refused(where: Where) -> SshFailure:
    """Return the failure of a port on which nothing listens."""
    text = "%s refuses connections: nothing listens there" % where.place
    return SshFailure(REFUSED, text, "start sshd there, or name its port: %s:PORT in the hosts file" % where.host)


def timeout(where: Where, doing: str = "answer") -> SshFailure:
    """Return the failure of a host that is silent."""
    text = "%s did not %s within %g s" % (where.place, doing, where.limit_s)
    fix = "is it up, and may this machine connect to it? try: %s" % where.command("ssh", "-v")
    return SshFailure(TIMEOUT, text, fix)


def unreachable(where: Where, why: str) -> SshFailure:
    """Return the failure of an address that no route leads to."""
    return SshFailure(UNREACHABLE, "%s cannot be reached: %s" % (where.place, why), "check the network and the address")


def overrun(where: Where) -> SshFailure:
    """Return the failure of a host that closed the connection before it had shown its key."""
    text = "%s closed the connection before the key exchange: too many at a time, or it does not want this machine"
    fix = "raise MaxStartups in its sshd_config, or look into its log (journalctl -u ssh)"
    return SshFailure(OTHER, text % where.place, fix, is_passing=True)


def proxy_failed(where: Where, words: str) -> SshFailure:
    """Return the failure of a ProxyCommand that did not lead to the host. `words`: its stderr."""
    theirs = [line.strip() for line in words.splitlines() if line.strip() and not _OWN_LINE.match(line)]
    told = theirs[-1] if theirs else "nothing"
    return SshFailure(OTHER, "the ProxyCommand did not lead to %s; it said: %s" % (where.place, told))


def host_key_changed(where: Where, shown: str, recorded: str, fix: str) -> SshFailure:
    """Return the failure of a host that shows another key than the recorded one.

    Args:
        where: whom it is about.
        shown: kind and fingerprint of the key.
        recorded: where the one is that it should be.
        fix: the command that forgets that one (`forget`).
    """
    text = "%s shows another host key than %s: %s. Someone may intercept this, or the host was reinstalled"
    return SshFailure(
        HOSTKEY, text % (where.place, recorded, shown), "if the host was reinstalled, remove the old key: %s" % fix
    )


def host_key_unknown(where: Where, kind: str, fingerprint: str) -> SshFailure:
    """Return the failure of a host whose key is not recorded, where only recorded ones will do."""
    text = "the host key of %s is not known (%s %s), and unknown ones are to be refused" % (
        where.place,
        kind,
        fingerprint,
    )
    return SshFailure(HOSTKEY, text, "compare it and accept it once: %s" % where.command("ssh"))


def host_key_revoked(where: Where, recorded: str) -> SshFailure:
    """Return the failure of a host whose key is marked as revoked."""
    text = "the host key of %s is revoked by %s" % (where.place, recorded)
    return SshFailure(HOSTKEY, text, "give the host a new key")


def host_key_signed(where: Where, recorded: str) -> SshFailure:
    """Return the failure of a host whose key is to be vouched for by an authority, which only the program checks."""
    text = "%s has %s vouch for the host key of %s" % (recorded, "an authority (@cert-authority)", where.place)
    return SshFailure(HOSTKEY, text, "use --transport openssh, which checks host certificates")


def forget(name: str, path: str = "") -> str:
    """Return the command that removes a host's recorded keys."""
    return shlex.join(["ssh-keygen", *(["-f", path] if path else []), "-R", name])


def no_auth(where: Where, tried: str, accepted: str = "", fix: str = "") -> SshFailure:
    """Return the failure of a user who was not let in. `tried` says what was offered."""
    text = "%s does not let user %s in: %s" % (where.place, where.user or "?", tried)
    if accepted:
        text += "; it accepts %s" % accepted
    return SshFailure(AUTH, text, fix or let_in(where, accepted))


def _denied(where: Where, accepted: str) -> SshFailure:
    if not where.has_key:
        return no_auth(where, "there was no key to offer", accepted, new_key(where, accepted))
    return no_auth(where, "it accepts none of the keys that ssh offered, if any", accepted)


def too_many_keys(where: Where) -> SshFailure:
    """Return the failure of a user whose right key, if there is one, comes too late."""
    fix = "name the right one: IdentityFile and IdentitiesOnly yes in ~/.ssh/config, or identity=KEY in the hosts file"
    return no_auth(where, "it disconnects before all keys are tried", fix=fix)


def copy_id(where: Where) -> str:
    """Return the command that makes a host accept this user's key."""
    return where.command("ssh-copy-id")


def new_key(where: Where, accepted: str) -> str:
    """Return what a user does who has no key yet, a line each."""
    named = ["-f", where.identity] if where.identity else []
    return "first: %s\nthen: %s" % (shlex.join(["ssh-keygen", "-t", "ed25519", *named]), let_in(where, accepted))


def let_in(where: Where, accepted: str) -> str:
    """Return what makes a host accept this user's key. `accepted`: what it lets users in by; empty: not known."""
    if not accepted or "password" in accepted or "keyboard-interactive" in accepted:
        return copy_id(where)
    return (
        "have your public key (%s.pub) added to ~/.ssh/authorized_keys of user %s there: it takes no password, so"
        " ssh-copy-id cannot do it" % (where.identity or "~/.ssh/id_ed25519", where.user or "?")
    )


def wrong_password(where: Where) -> SshFailure:
    """Return the failure of a password that was typed and not accepted."""
    text = "%s does not accept the password of user %s" % (where.place, where.user)
    return SshFailure(PASSWORD, text, "type it again, or use a key: %s" % copy_id(where))


def no_python(where: Where, words: str) -> SshFailure:
    """Return the failure of a host without a Python that could run the agent; `words`: what it said itself."""
    fix = "install python3 (3.8 or newer) there, or name one: python=/path/to/python3 in the hosts file"
    return SshFailure(PYTHON, words.replace("distrun: ", "", 1), fix)


def no_agent(where: Where, words: str, noise: str) -> SshFailure:
    """Return the failure of a host that let us in and started no agent. `words`: its stderr; `noise`: its stdout."""
    for line in words.splitlines():
        if line.startswith("distrun: ") and "python" in line.lower():
            return no_python(where, line)
    told = " | ".join(line.strip() for line in words.splitlines() if line.strip()) or noise
    text = "%s let user %s in, but the agent did not start" % (where.place, where.user or "?")
    if told:
        text += "; it said: %s" % (told if len(told) < 400 else "..." + told[-400:])
    return SshFailure(OTHER, text, "does this print ok? %s true && echo ok" % where.command("ssh"))


def unforeseen(err: BaseException) -> SshFailure:
    """Return the failure of this program itself."""
    return SshFailure(OTHER, "distrun itself failed: %s: %s" % (type(err).__name__, err))


def _of_exception(err: BaseException, where: Where) -> SshFailure:
    name = type(err).__name__
    several = getattr(err, "errors", None)
    if name == "NoValidConnectionsError" and isinstance(several, dict) and several:
        return _of_exception(next(iter(several.values())), where)
    if isinstance(err, socket.gaierror):
        return dns(where, str(err.strerror or err).lower())
    if isinstance(err, ConnectionRefusedError):
        return refused(where)
    if isinstance(err, TimeoutError):
        return timeout(where)
    if isinstance(err, OSError) and err.errno in _UNREACHABLE:
        return unreachable(where, (err.strerror or str(err)).lower())
    if isinstance(err, (ConnectionResetError, BrokenPipeError, EOFError)):
        return overrun(where)
    text = str(err)
    if name == "IncompatiblePeer":
        fix = "use --transport openssh, or allow a newer algorithm on the host"
        return SshFailure(OTHER, "%s and this program share no algorithm: %s" % (where.place, text), fix)
    if name == "ChannelException":
        told = getattr(err, "text", text)
        return SshFailure(OTHER, "%s does not let user %s run commands: %s" % (where.place, where.user, told))
    if "banner" in text and isinstance(err.__context__, TimeoutError):
        return timeout(where, "say a word of ssh")
    if "banner" in text or "Negotiation failed" in text or text in ("", "EOFError"):
        return overrun(where)
    if "Timeout" in text or "timed out" in text or "No existing session" in text:
        return timeout(where, "finish the key exchange")
    if isinstance(err, OSError):
        return SshFailure(OTHER, "%s: %s" % (where.place, err.strerror or text))
    return SshFailure(OTHER, "%s: %s" % (where.place, text or name), "try: %s" % where.command("ssh", "-v"))


def _of_stderr(text: str, where: Where) -> SshFailure:
    for pattern, make in _STDERR:
        found = re.search(pattern, text)
        if found is not None:
            return make(where, found)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "the ssh program ended without a message"
    return SshFailure(OTHER, "%s: %s" % (where.place, last), "try: %s" % where.command("ssh", "-v"))


def _changed(where: Where, found: re.Match[str]) -> SshFailure:
    text = found.string
    offending = re.search(r"Offending \S+ key in (\S+?)(?::(\d+))?\s*$", text, re.MULTILINE)
    path = offending[1] if offending else ""
    recorded = "%s line %s" % (path, offending[2]) if offending and offending[2] else path or "the recorded one"
    kind = re.search(r"for the (\S+) key sent by the remote host", text)
    print_ = re.search(r"SHA256:[^\s.]+", text)
    name = re.search(r'-R "?([^"\s]+)"?', text) or re.search(r"[Hh]ost key for (\S+) has", text)
    shown = "%s %s" % (kind[1] if kind else "a key", print_[0] if print_ else "that is not known")
    return host_key_changed(where, shown, recorded, forget(name[1] if name else known_name(where), path))


def _unverified(where: Where, found: re.Match[str]) -> SshFailure:
    kind = re.search(r"No (\S+) host key is known for", found.string)
    return host_key_unknown(where, kind[1] if kind else "a key", "that it showed")


_STDERR: tuple[tuple[str, Callable[[Where, re.Match[str]], SshFailure]], ...] = (
    (r"Could not resolve hostname [^:]*: (.*)", lambda where, found: dns(where, found[1].strip().lower())),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for \S+ has changed", _changed),
    (r"Host key verification failed", _unverified),
    (r"Connection refused", lambda where, found: refused(where)),
    (r"timed out during banner exchange", lambda where, found: timeout(where, "say a word of ssh")),
    (r"(?:Connection|Operation) timed out", lambda where, found: timeout(where)),
    (r"(No route to host|Network is unreachable)", lambda where, found: unreachable(where, found[1].lower())),
    (r"Too many authentication failures", lambda where, found: too_many_keys(where)),
    (
        r"Permission denied \(([^)]*)\)",
        lambda where, found: _denied(where, found[1]),
    ),
    (
        r"kex_exchange_identification|Connection (?:closed|reset) by .* port|Connection reset by peer",
        lambda where, found: overrun(where),
    ),
)
"""What the `ssh` program says, and what it means; the first that is found counts."""


def known_name(where: Where) -> str:
    """Return what a known_hosts file calls a host."""
    name = where.address or where.host
    return name if where.port == 22 else "[%s]:%d" % (name, where.port)
