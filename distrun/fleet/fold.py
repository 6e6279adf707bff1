"""What many hosts said, in few words: equal outputs under one heading. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

RULE = b"-" * 15 + b"\n"


def groups(said: Mapping[str, bytes]) -> list[tuple[list[str], bytes]]:
    """Return the hosts that said the same, and what; by first appearance. Who said nothing is left out."""
    found: dict[bytes, list[str]] = {}
    for host, data in said.items():
        if data:
            found.setdefault(data, []).append(host)
    return [(hosts, data) for data, hosts in found.items()]


def text(said: Mapping[str, bytes], name: Callable[[Iterable[str]], str], what: str = "") -> bytes:
    """Return what was said, each once, under the names of its hosts.

    Args:
        said: by host.
        name: how hosts are written in short (`distrun.hosts.fold`).
        what: added to each heading.
    """
    parts = []
    for hosts, data in groups(said):
        count = " (%d)" % len(hosts) if len(hosts) > 1 else ""
        heading = "%s%s%s\n" % (name(hosts), count, ", " + what if what else "")
        parts += [RULE, heading.encode("utf-8", "surrogateescape"), RULE, data, b"" if data.endswith(b"\n") else b"\n"]
    return b"".join(parts)


class Lines:
    """Cuts a stream into whole lines, each with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode("utf-8", "surrogateescape")
        self._rest: list[bytes] = []
        """Pieces of the line that has not ended: adding to one long piece again and again would copy it each time."""

    def feed(self, data: bytes) -> bytes:
        """Add bytes and return the lines that are whole now."""
        if b"\n" not in data:
            self._rest.append(data)
            return b""
        *lines, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [rest]
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def end(self) -> bytes:
        """Return the line that was not ended."""
        rest, self._rest = b"".join(self._rest), []
        return self._prefix + rest + b"\n" if rest else b""
