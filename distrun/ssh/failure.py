"""Failures to reach a host: their kind, what was found, and how to fix it. No side effects."""

from __future__ import annotations

import errno
import re
import shlex
import socket
from collections import deque
from collections.abc import Callable

from distrun.hosts.grammar import is_loopback
from distrun_runtime.contract.dataclass import dataclass

DNS = "dns"
REFUSED = "refused"
TIMEOUT = "timeout"
UNREACHABLE = "unreachable"
HOSTKEY = "hostkey"
AUTH = "auth"
PASSWORD = "password"
PYTHON = "python"
BUSY = "busy"
"""The host drops new connections because it has too many: it may take the next one in a moment."""
OTHER = "other"

LINES = 20
"""Lines of stderr that are kept for a report."""
LINE_BYTES = 16 * 1024
"""Of a line that does not end."""

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)

_OWN_LINE = r"kex_exchange_identification|Connection (?:closed|reset)|ssh: |banner exchange"


class SshFailure(Exception):
    """A host cannot be reached, or has nothing to run the agent with."""

    def __init__(self, kind: str, text: str, fix: str = "", *, takes_password: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.fix = fix
        self.takes_password = takes_password
        """The host has said that it lets users in by a password."""

    def __repr__(self) -> str:
        return f"SshFailure({self.kind!r}, {self.text!r}, {self.fix!r})"


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
        return f"{self.address or self.host} port {self.port}"

    @property
    def login(self) -> str:
        """What one types after ssh-like commands."""
        return f"{self.user}@{self.host}" if self.user else self.host

    def command(self, *words: str) -> str:
        """Return a command of the ssh family for this host, with all that leads there."""
        found = ["-F", self.config] if self.config else []
        found += ["-p", str(self.port)] if self.port != 22 else []
        found += ["-i", self.identity] if self.identity else []
        if self.jump:
            found += ["-J", self.jump] if words[0] == "ssh" else ["-o", "ProxyJump=" + self.jump]
        return shlex.join((words[0], *found, *words[1:], self.login))


class LastLines:
    """Keeps the last lines of a stream."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._open = b""

    def feed(self, data: bytes) -> None:
        """Add what came."""
        *lines, self._open = (self._open + data).split(b"\n")
        self._lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in lines)
        self._open = self._open[-LINE_BYTES:]

    @property
    def text(self) -> str:
        """The lines."""
        last = self._open.decode("utf-8", "replace").rstrip("\r")
        return "\n".join([*self._lines, *([last] if last else [])])


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
    text = f"no address is known for the name {name}" + (f" ({why})" if why else "")
    return SshFailure(DNS, text, "correct the name, or give it a HostName in ~/.ssh/config")


def refused(where: Where) -> SshFailure:
    """Return the failure of a port on which nothing listens."""
    text = f"{where.place} refuses connections: nothing listens there"
    fix = f"start sshd there, or name its port: {where.host}:PORT in the hosts file"
    here = "to run on this machine without ssh, leave -H and --hosts out\n" if is_loopback(where.host) else ""
    return SshFailure(REFUSED, text, here + fix)


def timeout(where: Where, doing: str = "answer") -> SshFailure:
    """Return the failure of a host that is silent."""
    text = f"{where.place} did not {doing} within {where.limit_s:g} s"
    fix = f"is it up, and may this machine connect to it? try: {where.command('ssh', '-v')}"
    return SshFailure(TIMEOUT, text, fix)


def unreachable(where: Where, why: str) -> SshFailure:
    """Return the failure of an address that no route leads to."""
    return SshFailure(UNREACHABLE, f"{where.place} cannot be reached: {why}", "check the network and the address")


def overrun(where: Where) -> SshFailure:
    """Return the failure of a host that closed the connection before it had shown its key."""
    why = "too many at a time, or it does not want this machine"
    fix = "raise MaxStartups in its sshd_config, or look into its log (journalctl -u ssh)"
    return SshFailure(BUSY, f"{where.place} closed the connection before the key exchange: {why}", fix)


def too_many_jumps(host: str, most: int) -> SshFailure:
    """Return the failure of a host that is behind more than `most` others."""
    text = f"more than {most} hosts in between (ProxyJump in a circle?)"
    return SshFailure(OTHER, text, f"this shows the next one: ssh -G {host} | grep -i proxyjump")


def proxy_failed(where: Where, stderr: str) -> SshFailure:
    """Return the failure of a ProxyCommand that did not lead to the host."""
    theirs = [line.strip() for line in stderr.splitlines() if line.strip() and not re.match(_OWN_LINE, line)]
    told = theirs[-1] if theirs else "nothing"
    fix = f"run that command by hand, or try: {where.command('ssh', '-v')}"
    return SshFailure(OTHER, f"the ProxyCommand did not lead to {where.place}; it said: {told}", fix)


def host_key_changed(where: Where, shown: str, recorded: str, fix: str) -> SshFailure:
    """Return the failure of a host that shows another key than the recorded one.

    Args:
        where: whom it is about.
        shown: kind and fingerprint of the key.
        recorded: where the one is that it should be.
        fix: the command that forgets that one (`forget`).
    """
    told = f"{where.place} shows another host key than {recorded}: {shown}"
    text = f"{told}. Someone may intercept this, or the host was reinstalled"
    return SshFailure(HOSTKEY, text, f"if the host was reinstalled, remove the old key: {fix}")


def host_key_unknown(where: Where, kind: str, fingerprint: str) -> SshFailure:
    """Return the failure of a host whose key is not recorded, where only recorded ones will do."""
    text = f"the host key of {where.place} is not known ({kind} {fingerprint}), and unknown ones are to be refused"
    return SshFailure(HOSTKEY, text, f"compare it and accept it once: {where.command('ssh')}")


def host_key_revoked(where: Where, recorded: str) -> SshFailure:
    """Return the failure of a host whose key is marked as revoked."""
    text = f"the host key of {where.place} is revoked by {recorded}"
    return SshFailure(HOSTKEY, text, "give the host a new key")


def host_key_signed(where: Where, recorded: str) -> SshFailure:
    """Return the failure of a host whose key is to be vouched for by an authority, which only the program checks."""
    text = f"{recorded} has an authority (@cert-authority) vouch for the host key of {where.place}"
    return SshFailure(HOSTKEY, text, "use --transport openssh, which checks host certificates")


def forget(name: str, path: str = "") -> str:
    """Return the command that removes a host's recorded keys."""
    return shlex.join(["ssh-keygen", *(["-f", path] if path else []), "-R", name])


def no_auth(where: Where, tried: str, accepted: str = "", fix: str = "") -> SshFailure:
    """Return the failure of a user who was not let in. `tried` says what was offered."""
    text = f"{where.place} does not let user {where.user or '?'} in: {tried}"
    if accepted:
        text += f"; it accepts {accepted}"
    return SshFailure(AUTH, text, fix or let_in(where, accepted), takes_password=_takes_password(accepted))


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
    make = shlex.join(["ssh-keygen", "-t", "ed25519", *named])
    return f"first: {make}\nthen: {let_in(where, accepted)}"


def let_in(where: Where, accepted: str) -> str:
    """Return what makes a host accept this user's key. `accepted`: what it lets users in by; empty: not known."""
    if not accepted or _takes_password(accepted):
        return copy_id(where)
    key, user = where.identity or "~/.ssh/id_ed25519", where.user or "?"
    return (
        f"have your public key ({key}.pub) added to ~/.ssh/authorized_keys of user {user} there: it takes no password,"
        " so ssh-copy-id cannot do it"
    )


def _takes_password(accepted: str) -> bool:
    return "password" in accepted or "keyboard-interactive" in accepted


def wrong_password(where: Where) -> SshFailure:
    """Return the failure of a password that was typed and not accepted."""
    text = f"{where.place} does not accept the password of user {where.user}"
    return SshFailure(PASSWORD, text, f"type it again, or use a key: {copy_id(where)}")


def no_python(where: Where, message: str) -> SshFailure:
    """Return the failure of a host without a Python that could run the agent; `message`: what it said itself."""
    fix = "install python3 (3.8 or newer) there, or name one: python=/path/to/python3 in the hosts file"
    return SshFailure(PYTHON, message.replace("distrun: ", "", 1), fix)


def no_agent(where: Where, stderr: str, stdout: str) -> SshFailure:
    """Return the failure of a host that let us in and started no agent, by what it wrote."""
    for line in stderr.splitlines():
        if line.startswith("distrun: ") and "python" in line.lower():
            return no_python(where, line)
    told = " | ".join(line.strip() for line in stderr.splitlines() if line.strip()) or stdout
    text = f"{where.place} let user {where.user or '?'} in, but the agent did not start"
    if told:
        text += "; it said: " + (told if len(told) < 400 else "..." + told[-400:])
    return SshFailure(OTHER, text, f"does this print ok? {where.command('ssh')} true && echo ok")


def unforeseen(err: BaseException) -> SshFailure:
    """Return the failure of this program itself."""
    return SshFailure(
        OTHER, f"distrun itself failed: {type(err).__name__}: {err}", "please report it, with what -vv prints"
    )


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
        return SshFailure(OTHER, f"{where.place} and this program share no algorithm: {text}", fix)
    if name == "ChannelException":
        told = getattr(err, "text", text)
        text = f"{where.place} does not let user {where.user} run commands: {told}"
        return SshFailure(OTHER, text, f"does this print ok? {where.command('ssh')} echo ok")
    if "banner" in text and isinstance(err.__context__, TimeoutError):
        return timeout(where, "say a word of ssh")
    if "banner" in text or "Negotiation failed" in text or text in ("", "EOFError"):
        return overrun(where)
    if "Timeout" in text or "timed out" in text or "No existing session" in text:
        return timeout(where, "finish the key exchange")
    if isinstance(err, OSError):
        text = err.strerror or text
    fix = f"try: {where.command('ssh', '-v')}"
    if isinstance(err, OSError) and err.errno == errno.EMFILE:
        fix = "raise the limit of this shell: ulimit -n 65536"
    return SshFailure(OTHER, f"{where.place}: {text or name}", fix)


def _of_stderr(text: str, where: Where) -> SshFailure:
    for pattern, make in _STDERR:
        found = re.search(pattern, text)
        if found is not None:
            return make(where, found)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "the ssh program ended without a message"
    return SshFailure(OTHER, f"{where.place}: {last}", f"try: {where.command('ssh', '-v')}")


def _changed(where: Where, found: re.Match[str]) -> SshFailure:
    text = found.string
    offending = re.search(r"Offending \S+ key in (\S+?)(?::(\d+))?\s*$", text, re.MULTILINE)
    path = offending[1] if offending else ""
    recorded = f"{path} line {offending[2]}" if offending and offending[2] else path or "the recorded one"
    kind = re.search(r"for the (\S+) key sent by the remote host", text)
    print_ = re.search(r"SHA256:[^\s.]+", text)
    name = re.search(r'-R "?([^"\s]+)"?', text) or re.search(r"[Hh]ost key for (\S+) has", text)
    shown = f"{kind[1] if kind else 'a key'} {print_[0] if print_ else 'that is not known'}"
    called = name[1] if name else known_name(where.address or where.host, where.port)
    return host_key_changed(where, shown, recorded, forget(called, path))


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
    (r"Permission denied \(([^)]*)\)", lambda where, found: _denied(where, found[1])),
    (
        r"kex_exchange_identification|Connection (?:closed|reset) by .* port|Connection reset by peer",
        lambda where, found: overrun(where),
    ),
)
"""What the `ssh` program says, and what it means; the first that is found counts."""


def known_name(name: str, port: int) -> str:
    """Return what a known_hosts file calls a host."""
    return name if port == 22 else f"[{name}]:{port}"
