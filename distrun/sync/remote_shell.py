"""The remote shell of rsync: how its ssh logs in on a host, and which names mean the same host.

rsync's ssh logs in as our own connections do: with the same parameters, keys and passwords.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrun.errors import DistrunError, SyncError
from distrun.ssh.abort import Abort, Aborted
from distrun.sync import askpass
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.ssh.ask import Asker
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import Resolved
    from distrun.ssh.target import Target

AUTH = "auth"
"""Kind of the failure of a user whom a host does not let in."""
WORKERS = 16
LOOK_S = 5.0
"""How long after the last answer the others are waited for. A resolver without a name server takes 25 s for a name."""
_POLL_S = 0.1

_ASKS = ("BatchMode=no", "NumberOfPasswordPrompts=1")
_KEYS = ("PasswordAuthentication=no", "KbdInteractiveAuthentication=no")
_PASSWORD = ("PubkeyAuthentication=no",)
_ACCEPTED = ("password", "keyboard-interactive")


@dataclass(frozen=True)
class RemoteShell:
    """The command of a remote shell, without the host, and what is added to its environment."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


Attempts = Generator[RemoteShell, "SshFailure | None", None]
"""Yields remote shells for a host. The next one is tried if the last was not let in; then it is sent that failure."""
Shells = Callable[["Target"], Attempts]
Identity = Callable[["Target"], Hashable]


def single(argv: Sequence[str]) -> Attempts:
    """Yield a single remote shell."""
    yield RemoteShell(argv)


class SshShells:
    """Remote shells by the ssh program, with the parameters of our own connections. Called from any thread.

    Our connections offer the keys that the user named, then the other keys of the ssh-agent, then a password. The ssh
    program offers the agent's keys first, and a host hangs up after a few wrong ones; so the first attempt names only
    the user's. `asker` knows what the user typed to log in (None: nothing, and the user is not asked). With `may_ask`
    the user is asked for a password if nothing else works.
    """

    def __init__(self, asker: Asker | None, helpers: askpass.Helpers, abort: Abort, may_ask: bool = False) -> None:
        self._asker = asker
        self._helpers = helpers
        self._abort = abort
        self._may_ask = may_ask

    def __call__(self, target: Target) -> Attempts:
        """Return the attempts for a host.

        Raises:
            SyncError: there is no ssh program, or its configuration cannot be read.
        """
        from distrun.ssh.failure import SshFailure
        from distrun.ssh.resolve import resolve, shell

        if shutil.which("ssh") is None:
            text = "there is no program ssh on this machine, which rsync needs to reach a host"
            raise SyncError(text, "install OpenSSH")
        try:
            found = resolve(target)
            named, plain = shell(found, named=True), shell(found, named=False)
        except SshFailure as err:
            raise SyncError(err.text, err.fix) from err
        return self._attempts(found, named, plain)

    def _attempts(self, found: Resolved, named: Sequence[str], plain: Sequence[str]) -> Attempts:
        asker = self._asker
        env: Mapping[str, str] = {}
        options: Sequence[str] = ()
        # The connections to our own jump hosts ask nothing; a ProxyCommand of the user's may, for any host.
        is_ours = bool(found.jump) or not found.proxy_command
        if asker is not None and is_ours and any(asker.recall("key " + path) for path in found.identities):
            env, options = self._env(askpass.passphrases(asker.recall)), (*_ASKS, *_KEYS)
        failure = None
        for argv in [named, plain] if named != plain else [plain]:
            failure = yield RemoteShell(_with(argv, *options), env)
        if asker is None or not found.asks_passwords:
            return
        is_asked = self._may_ask and failure is not None and any(each in failure.text for each in _ACCEPTED)
        about, refused = "password of " + found.user, None
        prompt = f"Password of {found.where.login}: "
        while True:
            answer = asker.recall(about)
            if (answer is None or answer == refused) and is_asked:
                try:
                    answer = asker.ask(about, prompt, self._abort, refused)
                except Aborted:
                    return
            if answer is None or answer == refused:
                return
            names = (found.target.host, found.hostname, found.host_key_alias or found.hostname)
            rule = askpass.passwords(asker.recall, found.user, names, is_ours)
            yield RemoteShell(_with(plain, *_ASKS, *_PASSWORD), self._env(rule))
            refused = answer

    def _env(self, rule: askpass.Rule) -> dict[str, str]:
        try:
            return self._helpers.env(rule, environ.snapshot())
        except OSError as err:
            raise SyncError(f"rsync's ssh cannot be told what you typed: {err}") from err


def _with(argv: Sequence[str], *options: str) -> list[str]:
    """Return a command with options that override its own: ssh uses the first value that it is given."""
    program, *rest = argv
    return [program, *(word for each in options for word in ("-o", each)), *rest]


def login_failure(target: Target, words: Sequence[str]) -> SshFailure:
    """Return why ssh did not reach a host, from its last messages. May run `ssh -G`."""
    from distrun.ssh.failure import SshFailure, classify
    from distrun.ssh.resolve import resolve

    try:
        return classify("\n".join(words), resolve(target).where)
    except SshFailure as err:
        return err


def distinct_hosts(
    targets: Mapping[str, Target],
    identity: Identity,
    limit_s: float = LOOK_S,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[tuple[str, ...]]:
    """Return the names of each distinct host, in the order of `targets`.

    A name about which nothing is known in time counts as its own host: a second copy into one folder does no harm.
    """
    waiting = deque(targets)
    found: dict[str, Hashable] = {}
    changed = threading.Condition()

    def ask() -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                key = identity(targets[name])
            except (DistrunError, OSError, ValueError):
                key = ("name", name)  # rsync's attempt will say what is wrong with it
            with changed:
                found[name] = key
                changed.notify()

    # Daemons: a resolver cannot be interrupted, and neither Ctrl-C nor the end of the program waits for one.
    for _ in range(min(WORKERS, len(targets))):
        threading.Thread(target=ask, name="look up hosts", daemon=True).start()
    with changed:
        answered, until = 0, time.monotonic() + limit_s
        while len(found) < len(targets) and time.monotonic() < until and not is_cancelled():
            changed.wait(_POLL_S)
            if len(found) > answered:
                answered, until = len(found), time.monotonic() + limit_s
        known = dict(found)
    waiting.clear()
    named: dict[Hashable, list[str]] = {}
    for name in targets:
        named.setdefault(known.get(name, ("name", name)), []).append(name)
    return [tuple(names) for names in named.values()]


def ssh_identity(target: Target) -> Hashable:
    """Return user, addresses, port and proxy from the user's ssh configuration: equal for two names of one host.

    Raises:
        OSError: the name has no address.
        SyncError: the ssh configuration cannot be read.
    """
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import resolve

    try:
        found = resolve(target)
    except SshFailure as err:
        raise SyncError(err.text, err.fix) from err
    if found.jump or found.proxy_command:
        # What a name means on the other side of a jump is not known here.
        return (found.user, found.hostname, found.port, found.jump, found.proxy_command)
    addresses = socket.getaddrinfo(found.hostname, found.port, type=socket.SOCK_STREAM)
    return (found.user, tuple(sorted({str(each[4][0]) for each in addresses})), found.port)
