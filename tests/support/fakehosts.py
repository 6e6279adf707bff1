"""Hosts that are folders: a remote shell for rsync that runs its command on this machine, in the host's own home."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distrun.ssh.resolve import Target

_SHELL = """#!/bin/sh
# $1 is the name of the host; the rest is its command line, which ssh would hand to the login shell as one text.
host=$1; shift
HOME={root}/$host; export HOME
cd "$HOME" 2>/dev/null || {{ echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255; }}
if [ -e "$HOME/.before" ]; then . "$HOME/.before"; fi
exec {login} -c "$*"
"""


@dataclass
class Sink:
    """Keeps what was said."""

    said: list[tuple[str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def say(self, text: str, level: str, progress: object = None) -> None:
        with self.changed:
            self.said.append((level, text))
            self.changed.notify_all()

    def texts(self, level: str = "info") -> list[str]:
        return [text for found, text in self.said if found == level]


class FakeHosts:
    """Makes hosts below `root`. `before(host, text)`: shell text that its login runs first."""

    def __init__(self, root: Path, login: str = "sh") -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.program = root / "a remote shell"
        self.program.write_text(_SHELL.format(root=shlex.quote(str(root)), login=login))
        self.program.chmod(0o755)

    def add(self, *names: str) -> dict[str, Target]:
        for name in names:
            (self.root / name).mkdir()
        return {name: Target(name) for name in names}

    def home(self, name: str) -> Path:
        return self.root / name

    def before(self, name: str, text: str) -> None:
        (self.root / name / ".before").write_text(text)

    def shell(self, target: Target) -> Sequence[str]:
        return [str(self.program)]

    @staticmethod
    def identity(target: Target) -> str:
        return target.host


def tree(folder: Path) -> dict[str, str]:
    """Return the files of a folder: path -> content (links: where they lead), without distrun's marker."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        elif path.is_file() and path.name != ".distrun-sync":
            found[name] = path.read_text("utf-8", "replace")
    return found


def write(folder: Path, **files: str) -> Path:
    """Write files, whose names may hold slashes, and return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def living(mark: str) -> list[str]:
    """Return the command lines of living processes that hold `mark`, but this one's and its parents'."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            try:
                words = entry.joinpath("cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words:
                found.append(words.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found
