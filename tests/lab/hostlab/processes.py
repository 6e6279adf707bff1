"""The processes of a lab as the machine sees them, through /proc: nothing in the lab has to answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A living process of a lab. `pid` and `parent` are the machine's numbers, `inner` its own host's."""

    host: str
    pid: int
    inner: int
    parent: int
    name: str
    command: bytes

    def __str__(self) -> str:
        words = self.command.replace(b"\0", b" ").strip().decode("utf-8", "replace")
        return "%s: %d %s" % (self.host, self.inner, words[:100] or "[%s]" % self.name)

    def environ(self) -> Mapping[bytes, bytes]:
        """Return its environment as it was at its start; empty if it has ended."""
        try:
            with open("/proc/%d/environ" % self.pid, "rb") as file:
                parts = file.read().split(b"\0")
        except OSError:
            return {}
        return dict(part.split(b"=", 1) for part in parts if b"=" in part)


def of_namespaces(spaces: Mapping[str, str]) -> Iterator[Process]:
    """Give the living processes of pid namespaces, given as {"pid:[4026532000]": host}."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        base = "/proc/" + entry
        try:
            host = spaces.get(os.readlink(base + "/ns/pid"))
            if host is None:
                continue
            with open(base + "/status", encoding="utf-8", errors="replace") as file:
                status = dict(line.split(":", 1) for line in file if ":" in line)
            if status["State"].split()[0] in "ZX":
                continue
            with open(base + "/cmdline", "rb") as raw:
                command = raw.read()
        except OSError:
            continue
        inner = int(status["NSpid"].split()[-1])
        yield Process(host, int(entry), inner, int(status["PPid"]), status["Name"].strip(), command)
