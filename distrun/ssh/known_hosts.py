"""Host keys: looked up, accepted or refused, and recorded, in the files that the `ssh` program uses."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distrun.ssh import failure
from distrun.ssh.resolve import Resolved

KNOWN = "known"
UNKNOWN = "unknown"
CHANGED = "changed"
REVOKED = "revoked"
SIGNED = "signed"
"""No key of it is recorded, but an authority that vouches for it is."""

_HASHED = "|1|"
_LITERAL = re.compile(r"[^*?!|]+\Z")
_WILD = re.compile(r"[*?]")
_BRACKETS = re.compile(r"^\[(.*)\]:\d+$")


@dataclass(frozen=True)
class KnownHost:
    """One line of a file."""

    place: str
    """`FILE line N`."""
    path: str
    marker: str
    names: str
    kind: str
    key: str
    """base64."""


@dataclass(frozen=True)
class KeyStatus:
    """What the files say about a key."""

    state: str
    entry: KnownHost | None = None
    """The line that decided it."""


class KnownHosts(list[KnownHost]):
    """The entries of some files, and which of them name a host literally: thousands are not gone through for each."""

    def __init__(self, found: Iterable[KnownHost]) -> None:
        super().__init__(found)
        self._named: dict[str, list[int]] = {}
        self._other: list[int] = []
        for index, entry in enumerate(self):
            if _LITERAL.match(entry.names):
                for name in set(entry.names.lower().split(",")):
                    self._named.setdefault(name, []).append(index)
            else:
                self._other.append(index)

    def candidates(self, name: str) -> list[KnownHost]:
        """Return the entries that could mean a host, in order: those by its name, with patterns, and hashed ones."""
        return [self[index] for index in sorted([*self._named.get(name.lower(), ()), *self._other])]


def check_host_key(resolved: Resolved, kind: str, raw: bytes, key: str, warn: Callable[[str], None]) -> None:
    """Accept a host key, recording one that is new; where that cannot be written, warn, as ssh does.

    Raises:
        SshFailure: it is not the one that is known, or not known where only known ones will do.
    """
    name, where = resolved.known_name, resolved.where
    found = read([*resolved.user_known_hosts, *resolved.global_known_hosts])
    status = look_up(found, name, kind, key)
    shown = f"{kind} {fingerprint(raw)}"
    if status.state == UNKNOWN and resolved.is_strict:
        raise failure.host_key_unknown(where, kind, fingerprint(raw))
    if status.state == UNKNOWN and resolved.user_known_hosts:
        path = resolved.user_known_hosts[0]
        try:
            status = record(path, name, kind, key, resolved.hash_known_hosts)
        except OSError as err:
            text = f"its host key ({shown}) cannot be recorded in {path}: {err.strerror}"
            warn(f"{text}; it will be as unknown the next time")
    if status.entry is None or status.state == KNOWN:
        return
    if status.state == REVOKED:
        raise failure.host_key_revoked(where, status.entry.place)
    if status.state == SIGNED:
        raise failure.host_key_signed(where, status.entry.place)
    path = "" if status.entry.path.endswith("/.ssh/known_hosts") else status.entry.path
    raise failure.host_key_changed(where, shown, status.entry.place, failure.forget(name, path))


def read(paths: Iterable[str]) -> KnownHosts:
    """Return the entries of all files that can be read, in order. Do not change it: who asks next gets the same."""
    versions = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            continue
        versions.append((path, found.st_ino, found.st_size, found.st_mtime_ns))
    return _read(tuple(versions))


@functools.lru_cache(maxsize=4)
def _read(versions: tuple[tuple[str, int, int, int], ...]) -> KnownHosts:
    found: list[KnownHost] = []
    for path, *_ in versions:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.readlines()
        except OSError:
            continue
        found += entries(lines, path)
    return KnownHosts(found)


def entries(lines: Iterable[str], path: str = "") -> list[KnownHost]:
    """Return the entries of one file; lines that are none are passed over, as ssh does. No side effects."""
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            found.append(KnownHost(f"{path} line {number}", path, marker, words[0], words[1], words[2]))
    return found


def matches(names: str, name: str) -> bool:
    """Return whether the first field of a line means `name`: patterns, negated ones, or a hash. No side effects."""
    name = name.lower()
    if names.startswith(_HASHED):
        try:
            salt, digest = (base64.b64decode(part) for part in names[len(_HASHED) :].split("|")[:2])
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    found = False
    for pattern in names.lower().split(","):
        # Most are plain names: a regular expression for each would cost more than the key exchange. Only * and ? are
        # special for ssh.
        plain = pattern.lstrip("!")
        if name == plain or (_WILD.search(plain) and fnmatch.fnmatchcase(name, plain.replace("[", "[[]"))):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def of_host(found: Sequence[KnownHost], name: str) -> list[KnownHost]:
    """Return the entries of one host. No side effects."""
    candidates = found.candidates(name) if isinstance(found, KnownHosts) else found
    return [entry for entry in candidates if matches(entry.names, name)]


def look_up(found: Sequence[KnownHost], name: str, kind: str, key: str) -> KeyStatus:
    """Return what is known about the key that `name` showed. No side effects.

    A host of which only keys of other kinds are recorded counts as changed: its kinds were asked for first, so
    that one that still has them would have shown one.
    """
    mine = of_host(found, name)
    for entry in mine:
        if entry.marker == "@revoked" and entry.key == key:
            return KeyStatus(REVOKED, entry)
    plain = [entry for entry in mine if not entry.marker]
    for entry in plain:
        if entry.key == key:
            return KeyStatus(KNOWN, entry)
    bare = _BRACKETS.match(name)
    if bare is not None:  # recorded without its port, by an older program
        for entry in of_host(found, bare[1]):
            if entry.key == key and not entry.marker:
                return KeyStatus(KNOWN, entry)
    for entry in sorted(plain, key=lambda each: each.kind != kind):
        return KeyStatus(CHANGED, entry)
    for entry in mine:
        if entry.marker == "@cert-authority":
            return KeyStatus(SIGNED, entry)
    return KeyStatus(UNKNOWN)


def recorded_kinds(found: Sequence[KnownHost], name: str) -> list[str]:
    """Return the kinds of key that are recorded for a host, so that it can be asked for one of those."""
    return list(dict.fromkeys(entry.kind for entry in of_host(found, name) if not entry.marker))


def fingerprint(key: bytes) -> str:
    """Return what ssh shows of a key. No side effects."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def line_of(name: str, kind: str, key: str, hashed: bool, salt: bytes = b"") -> str:
    """Return the line that records a key. Pure if `salt` is given."""
    if hashed:
        salt = salt or os.urandom(20)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = _HASHED + "|".join(base64.b64encode(part).decode() for part in (salt, digest))
    return f"{name} {kind} {key}\n"


def record(path: str, name: str, kind: str, key: str, hashed: bool = False) -> KeyStatus:
    """Record a key unless a line is there by now; return the result (KNOWN if there was no such line).

    The file is locked meanwhile, so that connections that see the host for the first time at once agree.

    Raises:
        OSError: the file cannot be written.
    """
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(fd, "r+", encoding="utf-8", errors="replace") as file:
        fcntl.flock(fd, fcntl.LOCK_EX)
        lines = file.readlines()
        status = look_up(entries(lines, path), name, kind, key)
        if status.state not in (UNKNOWN, SIGNED):
            return status
        file.write(("" if not lines or lines[-1].endswith("\n") else "\n") + line_of(name, kind, key, hashed))
    return KeyStatus(KNOWN)
