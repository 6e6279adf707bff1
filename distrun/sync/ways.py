"""The ways by which rsync's ssh gets into a host: as our own connections do, one tried after the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrun.errors import SyncError
from distrun.ssh.abort import Abort, Aborted
from distrun.sync import askpass
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.ssh.ask import Asker
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import Resolved
    from distrun.ssh.target import Target

_ASKS = ("BatchMode=no", "NumberOfPasswordPrompts=1")
_KEYS = ("PasswordAuthentication=no", "KbdInteractiveAuthentication=no")
_PASSWORD = ("PubkeyAuthentication=no",)
_ACCEPTED = ("password", "keyboard-interactive")


@dataclass(frozen=True)
class Way:
    """A remote shell for rsync, without the host, and what is added to its environment."""

    shell: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


Tried = Generator[Way, "SshFailure | None", None]
"""Gives ways to a host, each to be tried if the one before was not let in: then it is sent why."""
Ways = Callable[["Target"], Tried]


def one(shell: Sequence[str]) -> Tried:
    """Give a single way."""
    yield Way(shell)


class SshWays:
    """Ways by the ssh program, with the parameters of our own connections. Called from any thread.

    Those offer the keys that the user named, then all others of the ssh-agent, then a password. The program offers the
    agent's first, and a host hangs up after a few wrong ones; so it is first told of the named ones only. What the user
    typed to get in is asked of `asker` (None: nothing was, and nobody is asked). With `may_ask` the user is asked for
    a password if nothing else will do.
    """

    def __init__(self, asker: Asker | None, helpers: askpass.Helpers, abort: Abort, may_ask: bool = False) -> None:
        self._asker = asker
        self._helpers = helpers
        self._abort = abort
        self._may_ask = may_ask

    def __call__(self, target: Target) -> Tried:
        """Give the ways.

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
        return self._give(found, named, plain)

    def _give(self, found: Resolved, named: Sequence[str], plain: Sequence[str]) -> Tried:
        asker = self._asker
        env: Mapping[str, str]
        options: Sequence[str]
        shells = [named, plain] if named != plain else [plain]
        # In our own way to a host in between nothing is asked; in one of the user's it may be, by whomever.
        is_ours = bool(found.jump) or not found.proxy_command
        if asker is not None and is_ours and any(asker.recall("key " + path) for path in found.identities):
            env, options = self._env(askpass.passphrases(asker.recall)), (*_ASKS, *_KEYS)
        else:
            env, options = {}, ()
        failure = None
        for each in shells:
            failure = yield Way(_with(each, *options), env)
        if asker is None or not found.asks_passwords:
            return
        is_asked = self._may_ask and failure is not None and any(each in failure.text for each in _ACCEPTED)
        about, refused = "password of " + found.user, None
        prompt = "Password of %s: " % found.where.login
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
            yield Way(_with(plain, *_ASKS, *_PASSWORD), self._env(rule))
            refused = answer

    def _env(self, rule: askpass.Rule) -> dict[str, str]:
        try:
            return self._helpers.env(rule, environ.snapshot())
        except OSError as err:
            raise SyncError("rsync's ssh cannot be told what you typed: %s" % err) from err


def _with(shell: Sequence[str], *options: str) -> list[str]:
    """Return a shell with options that win over its own: ssh takes what it is told first."""
    program, *rest = shell
    return [program, *(word for each in options for word in ("-o", each)), *rest]
