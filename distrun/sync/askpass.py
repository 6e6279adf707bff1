"""Passwords and passphrases for rsync's ssh: what the user typed for the connections of this launch.

ssh runs a helper for an answer (SSH_ASKPASS), and the helper gets it over a socket in a folder that only this user may
enter and that lives as long as the copy. So no answer is ever on a command line, in an environment or on a disk. Each
way to a host has a helper of its own, which says for what it asks; a host gets only what was typed for it.
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
from collections.abc import Callable, Mapping
from types import TracebackType

LIMIT_S = 10.0
"""How long a helper may take to say what it is asked."""
PROMPT_BYTES = 4096
PATH_BYTES = 100
"""Names of sockets may not be longer, about."""

_HELPER = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(%g); s.connect(sys.argv[1]); "
    "s.sendall((sys.argv[2] + chr(0) + sys.argv[3]).encode('utf-8', 'surrogateescape')); s.shutdown(1); "
    "got = s.makefile('rb').read(); sys.stdout.buffer.write(got); sys.exit(not got)"
) % LIMIT_S
_PASSPHRASE = re.compile(r"Enter passphrase for key '(.*)': ")
_LOGIN = re.compile(r"(?:\((.+?@.+?)\) .*|(.+@.+)'s password: )", re.DOTALL)

Rule = Callable[[str], "str | None"]
"""Gives the answer to a prompt, or None."""


def passphrases(recall: Rule) -> Rule:
    """Return the rule of a way on which ssh may only unlock keys: of all prompts, those for a file. Pure."""

    def answer(prompt: str) -> str | None:
        found = _PASSPHRASE.fullmatch(prompt)
        return recall("key " + found[1]) if found else None

    return answer


def passwords(recall: Rule, user: str, names: tuple[str, ...], is_direct: bool) -> Rule:
    """Return the rule of a way on which the host may ask for the user's password. Pure.

    ssh says for whom it asks, but what an old one passes on from the host (keyboard-interactive). That is answered only
    where no other ssh, a ProxyCommand of the user's, may be asking for another host. `names`: what ssh may call it.
    """
    logins = {"%s@%s" % (who, name.lower()) for who in (user, user[:30]) for name in names}

    def answer(prompt: str) -> str | None:
        if _PASSPHRASE.fullmatch(prompt) or "(yes/no" in prompt:
            return None
        found = _LOGIN.fullmatch(prompt)
        who, _, name = (found[1] or found[2]).rpartition("@") if found else ("", "", "")
        is_ours = "%s@%s" % (who, name.lower()) in logins if found else is_direct
        return recall("password of " + user) if is_ours else None

    return answer


class Helpers:
    """Helpers for ssh, and who answers them, until it is closed. `env` is for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._folder = ""
        self._server: socket.socket | None = None
        self._is_closed = False

    def __enter__(self) -> Helpers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closed = True
            self._rules.clear()
            if self._server is not None:
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
                self._server.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def env(self, rule: Rule, outer: Mapping[str, str]) -> dict[str, str]:
        """Return what to add to the environment `outer` of an ssh whose questions `rule` answers.

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
            path = os.path.join(self._folder, "ask%d" % number)
            words = [sys.executable, "-I", "-S", "-c", _HELPER, self._place, str(number)]
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\nexec %s "$1"\n' % shlex.join(words))
        # Before OpenSSH 8.4 it runs a helper only if it has a display, and no terminal.
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
