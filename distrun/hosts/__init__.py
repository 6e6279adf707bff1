"""The hosts of a job as values: what the user said of each (`HostSpec`), and all of them in order (`Inventory`).

Hosts files, in one grammar for all launchers' files, lists, and what queue systems say are read by `parse.find`, with
`grammar` and `ranges` (node lists). A job on this machine needs neither. No side effects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import field

from distrun_runtime.contract import gpus
from distrun_runtime.contract.dataclass import dataclass


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

    def as_list(self) -> str:
        """Return the hosts as `--hosts` names them; empty: something is said of one that no list can say."""
        from distrun.hosts.ranges import expand, fold  # not for every launch

        words = []
        for spec in self.specs:
            if spec != HostSpec(spec.name, spec.user, spec.port, spec.slots):
                return ""
            user = f"{spec.user}@" if spec.user else ""
            port = "" if spec.port is None else f":{spec.port}"
            slots = "" if spec.slots is None else f"*{spec.slots}"
            words.append(user + (f"[{spec.name}]" if ":" in spec.name else spec.name) + port + slots)
        folded = fold(self.names)
        return folded if words == expand(folded) else ",".join(words)

    def as_file(self) -> str:
        """Return the hosts as a hosts file has them."""
        lines = []
        for spec in self.specs:
            words = [f"[{spec.name}]" if ":" in spec.name else spec.name]
            for name, value in list(vars(spec).items())[1:]:
                if value:
                    text = ",".join(value) if isinstance(value, tuple) else str(value)
                    words.append(name + '="' + text.replace("\\", r"\\").replace('"', r"\"") + '"')
            lines.append(" ".join(words) + "\n")
        return "".join(lines)

    @functools.cached_property
    def _by_name(self) -> dict[str, HostSpec]:
        return {spec.name: spec for spec in self.specs}


def named(names: Iterable[str], source: str = "names") -> Inventory:
    """Return an inventory of hosts of which nothing but the names is known. No side effects."""
    order = tuple(names)
    return Inventory(source, tuple(map(HostSpec, dict.fromkeys(order))), order)
