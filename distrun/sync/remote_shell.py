"""The remote shell of rsync: how its ssh logs in on a host, and which names mean the same host.

rsync's ssh logs in as our own connections do: with the same parameters, keys and passwords.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrun.errors import SyncError
from distrun.formats import grouped
from distrun.ssh.ask import Abort, Aborted
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.ssh.ask import Asker
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import Resolved, Target


# Answers the prompts of rsync's ssh with the passwords and passphrases that the user typed for this command.
#
# ssh runs a helper for an answer (SSH_ASKPASS). The helper gets the answer over a socket, in a folder that only this
# user may enter and that is removed after the copy. So no answer is ever on a command line, in an environment or on a
# disk. Each remote shell has a helper of its own with a rule of its own; a host gets only what was typed for it.


LIMIT_S = 10.0
"""How long a helper may take to send its prompt."""
PROMPT_BYTES = 4096
PATH_BYTES = 100
"""About the longest name that a socket may have."""

_HELPER = (
    f"import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout({LIMIT_S:g}); s.connect(sys.argv[1]); "
    "s.sendall((sys.argv[2] + chr(0) + sys.argv[3]).encode('utf-8', 'surrogateescape')); s.shutdown(1); "
    "got = s.makefile('rb').read(); sys.stdout.buffer.write(got); sys.exit(not got)"
)
_PASSPHRASE = re.compile(r"Enter passphrase for key '(.*)': ")
_LOGIN = re.compile(r"(?:\((.+?@.+?)\) .*|(.+@.+)'s password: )", re.DOTALL)

Rule = Callable[[str], "str | None"]
"""Returns the answer to a prompt, or None."""


def passphrases(recall: Rule) -> Rule:
    """Return the rule of an ssh that may only unlock keys: it answers prompts for a key file, no others."""

    def answer(prompt: str) -> str | None:
        found = _PASSPHRASE.fullmatch(prompt)
        return recall("key " + found[1]) if found else None

    return answer


def passwords(recall: Rule, user: str, names: tuple[str, ...], is_direct: bool) -> Rule:
    """Return the rule of an ssh of which the host may ask the user's password.

    A prompt of ssh names user and host; only an old ssh passes the host's own prompt on (keyboard-interactive). That
    is answered only if no other ssh, a ProxyCommand of the user's, may be asking for another host (`is_direct`).
    `names`: what ssh may call the host.
    """
    logins = {f"{who}@{name.lower()}" for who in (user, user[:30]) for name in names}

    def answer(prompt: str) -> str | None:
        if _PASSPHRASE.fullmatch(prompt) or "(yes/no" in prompt:
            return None
        found = _LOGIN.fullmatch(prompt)
        who, _, name = (found[1] or found[2]).rpartition("@") if found else ("", "", "")
        is_ours = f"{who}@{name.lower()}" in logins if found else is_direct
        return recall("password of " + user) if is_ours else None

    return answer


class Helpers(contextlib.AbstractContextManager["Helpers"]):
    """Makes helpers for ssh and answers them until it is closed. `env` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._folder = ""
        self._server: socket.socket | None = None
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_closed = True
            self._rules.clear()
            if self._server is not None:
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
                self._server.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def env(self, rule: Rule, outer: Mapping[str, str]) -> dict[str, str]:
        """Return what to add to the environment `outer` of an ssh whose prompts `rule` answers.

        Raises:
            OSError: there is no place for a helper.
        """
        with self._lock:
            if self._is_closed:
                raise OSError("the copy is over")
            if self._server is None:
                self._open()
            number = len(self._rules)
            self._rules.append(rule)
            path = os.path.join(self._folder, f"ask{number}")
            words = [sys.executable, "-I", "-S", "-c", _HELPER, self._place, str(number)]
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nexec {shlex.join(words)} "$1"\n')
        # Before 8.4, OpenSSH runs a helper only if there is a display and no terminal.
        return {"SSH_ASKPASS": path, "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": outer.get("DISPLAY") or ":0"}

    @property
    def _place(self) -> str:
        return os.path.join(self._folder, "socket")

    def _open(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="distrun-ask-")
        if len(os.fsencode(self._place)) > PATH_BYTES:
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="distrun-ask-", dir="/tmp")
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._place)
        server.listen(64)
        self._server = server
        threading.Thread(target=self._serve, args=(server,), name="answer ssh", daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking, _ = server.accept()
                with contextlib.suppress(OSError, ValueError, IndexError), asking:
                    asking.settimeout(LIMIT_S)
                    asking.sendall(self._answer(asking))

    def _answer(self, asking: socket.socket) -> bytes:
        asked = b""
        while piece := asking.recv(PROMPT_BYTES):
            asked += piece
            if len(asked) > PROMPT_BYTES:
                return b""
        number, _, prompt = asked.decode("utf-8", "surrogateescape").partition("\0")
        found = self._rules[int(number)](prompt)
        return b"" if found is None else found.encode() + b"\n"


AUTH = "auth"
"""Kind of the failure of a user whom a host does not let in."""
WORKERS = 16
LOOK_S = 5.0
"""How long after the last answer the others are waited for. A resolver without a name server takes 25 s for a name."""
_POLL_S = 0.1

_ASKS = ("BatchMode=no", "NumberOfPasswordPrompts=1")
_KEYS = ("PasswordAuthentication=no", "KbdInteractiveAuthentication=no")
_PASSWORD = ("PubkeyAuthentication=no",)


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

    def __init__(self, asker: Asker | None, helpers: Helpers, abort: Abort, may_ask: bool = False) -> None:
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
            env, options = self._env(passphrases(asker.recall)), (*_ASKS, *_KEYS)
        failure = None
        for argv in [named, plain] if named != plain else [plain]:
            failure = yield RemoteShell(_with(argv, *options), env)
        if asker is None or not found.asks_passwords:
            return
        is_asked = self._may_ask and failure is not None and failure.takes_password
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
            rule = passwords(asker.recall, found.user, names, is_ours)
            yield RemoteShell(_with(plain, *_ASKS, *_PASSWORD), self._env(rule))
            refused = answer

    def _env(self, rule: Rule) -> dict[str, str]:
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
            except Exception:  # rsync's attempt will say what is wrong with it
                key = ("name", name)
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
    named = grouped((known.get(name, ("name", name)), name) for name in targets)
    return [tuple(names) for names in named.values()]


def ssh_identity(target: Target) -> Hashable:
    """Return user, addresses, port and proxy from the user's ssh configuration: equal for two names of one host.

    Raises:
        OSError: the name has no address.
        SshFailure: the ssh configuration cannot be read.
    """
    from distrun.ssh.resolve import resolve

    found = resolve(target)
    if found.jump or found.proxy_command:
        # What a name means on the other side of a jump is not known here.
        return (found.user, found.hostname, found.port, found.jump, found.proxy_command)
    addresses = socket.getaddrinfo(found.hostname, found.port, type=socket.SOCK_STREAM)
    return (found.user, tuple(sorted({str(each[4][0]) for each in addresses})), found.port)
