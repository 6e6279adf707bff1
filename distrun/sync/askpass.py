"""Answers the prompts of rsync's ssh with the passwords and passphrases that the user typed for this command.

ssh runs a helper for an answer (SSH_ASKPASS). The helper gets the answer over a socket, in a folder that only this user
may enter and that is removed after the copy. So no answer is ever on a command line, in an environment or on a disk.
Each remote shell has a helper of its own with a rule of its own; a host gets only what was typed for it.
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
"""How long a helper may take to send its prompt."""
PROMPT_BYTES = 4096
PATH_BYTES = 100
"""About the longest name that a socket may have."""

_HELPER = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(%g); s.connect(sys.argv[1]); "
    "s.sendall((sys.argv[2] + chr(0) + sys.argv[3]).encode('utf-8', 'surrogateescape')); s.shutdown(1); "
    "got = s.makefile('rb').read(); sys.stdout.buffer.write(got); sys.exit(not got)"
) % LIMIT_S
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


class Helpers:
    """Makes helpers for ssh and answers them until it is closed. `env` may be called from any thread."""

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
