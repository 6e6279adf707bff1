"""Which keys are offered to a host, and in which order. No key is sent anywhere from here."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AGENT = "agent"
FILE = "file"
LOCKED = "locked"
"""A key file whose passphrase has to be asked for."""

_MAGIC = b"openssh-key-v1\0"


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


@dataclass(frozen=True)
class Choice:
    """One key to offer."""

    source: str
    """AGENT, FILE or LOCKED."""
    public: bytes = b""
    path: str = ""


def order(files: Sequence[KeyFile], held: Iterable[bytes], explicit: bool, only: bool) -> list[Choice]:
    """Return what to offer, best first. Pure.

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


def look(path: str) -> KeyFile:
    """Return what the files `path` and `path.pub` tell without a passphrase. Nothing there is no error."""
    public = public_of(_text(path if path.endswith(".pub") else path + ".pub"))
    text = "" if path.endswith(".pub") else _text(path)
    if "PRIVATE KEY" not in text:
        return KeyFile(path, public or public_of(text))
    inner, is_locked = inside(text)
    return KeyFile(path, inner or public, True, is_locked)


def public_of(text: str) -> bytes:
    """Return the key in a line of a .pub file; empty if there is none. Pure."""
    words = text.split()
    if len(words) < 2:
        return b""
    try:
        return base64.b64decode(words[1], validate=True)
    except (ValueError, binascii.Error):
        return b""


def inside(text: str) -> tuple[bytes, bool]:
    """Return the public half of a private key's file, if that is readable, and whether it is locked. Pure."""
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


def missing(files: Iterable[KeyFile]) -> list[str]:
    """Return the paths under which there is nothing."""
    return [key.path for key in files if not key.is_there]


def exists(path: str) -> bool:
    """Return whether there is a file that this user may not even read."""
    return os.path.exists(path) and not os.access(path, os.R_OK)
