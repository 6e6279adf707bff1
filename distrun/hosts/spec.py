"""Host specifications, one for each host that the user named, and the inventory of a job. No side effects."""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distrun_runtime.contract import gpus


@dataclass(frozen=True)
class HostSpec:
    """One host, as the user described it. Empty members were not given."""

    name: str
    """As typed, without user, port and brackets: an ssh alias, a host name or an address."""
    user: str = ""
    port: int | None = None
    """The port of its sshd."""
    slots: int | None = None
    """How many tasks fit."""
    max_slots: int | None = None
    """How many may be put there at most, oversubscribed."""
    addr: str = ""
    """The IP address that other hosts use for data."""
    iface: str = ""
    """The network interface that has this address."""
    gpus: str = ""
    """How many (`4`), or which (`0,2`; `GPU-8f6d...`)."""
    role: str = ""
    """The only role that it takes; empty: any."""
    labels: tuple[str, ...] = ()
    python: str = ""
    workdir: str = ""
    identity: str = ""
    """File of the private key."""
    jump: str = ""
    """Host through which it is reached."""

    @property
    def gpu_count(self) -> int | None:
        """How many GPUs it has; None if nothing is said."""
        return len(gpus.listed(self.gpus)) if self.gpus else None


@dataclass(frozen=True)
class Inventory:
    """All hosts of a job, and the order in which they were named."""

    source: str
    """Where they were named, in words: a path, `--hosts`, `$SLURM_JOB_NODELIST`."""
    specs: tuple[HostSpec, ...]
    """Each host once, in order of first appearance, slots added up."""
    order: tuple[str, ...]
    """Names in the order of the file; a host that stands twice is here twice."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    where: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The line of each host, `hosts:3`, by name; only of those that a file or a list names."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the hosts' names, each once."""
        return tuple(spec.name for spec in self.specs)

    def spec(self, name: str) -> HostSpec:
        """Return the host of that name.

        Raises:
            KeyError: there is none.
        """
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, HostSpec]:
        return {spec.name: spec for spec in self.specs}


def named(names: Iterable[str], source: str = "names") -> Inventory:
    """Return an inventory of hosts of which nothing but the names is known. Pure."""
    order = tuple(names)
    return Inventory(source, tuple(HostSpec(name) for name in dict.fromkeys(order)), order)


def local(name: str) -> Inventory:
    """Return the inventory of a job on this machine, which is called `name`. Pure."""
    return named([name], "this machine")


def key_of(name: str) -> str:
    """Return what two spellings of one host have in common: IPv6 addresses are written in several ways. Pure."""
    if ":" in name:
        try:
            return str(ipaddress.IPv6Address(name))
        except ValueError:
            return name
    return name


def is_loopback(name: str) -> bool:
    """Return whether a name means the machine that looks it up, so that no other host can use it. Pure."""
    if name.lower() in ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def write(inventory: Inventory) -> str:
    """Return a hosts file that says the same: `parse(write(x), x.source) == x`. Pure."""
    turns = Counter(inventory.order)
    lines: list[str] = []
    seen: set[str] = set()
    for name in inventory.order:
        spec = inventory.spec(name)
        if turns[name] > 1:
            # The slots of lines with the same name are added up, one where nothing is said.
            rest = (spec.slots or turns[name]) - (turns[name] - 1)
            spec = dataclasses.replace(spec, slots=1 if name in seen else rest)
        seen.add(name)
        lines.append(line_of(spec) + "\n")
    return "".join(lines)


def line_of(spec: HostSpec) -> str:
    """Return the line of a hosts file that describes this host. Pure."""
    words = [f"[{spec.name}]" if ":" in spec.name else spec.name]
    for each in dataclasses.fields(spec)[1:]:
        value = getattr(spec, each.name)
        if value not in ("", None, ()):
            words.append("{}={}".format(each.name, _quoted(",".join(value) if each.name == "labels" else str(value))))
    return " ".join(words)


def _quoted(value: str) -> str:
    if not any(char in value for char in ' \t"'):
        return value
    return '"{}"'.format(value.replace("\\", "\\\\").replace('"', '\\"'))
