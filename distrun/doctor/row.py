"""One finding of the doctor, and what to type about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distrun.hosts import fold
from distrun.shell import quote
from distrun_runtime.contract.plan import Host

OK = "ok"
WARN = "warn"
BAD = "bad"

HERE = "this machine"
ON = "{on}"


@dataclass(frozen=True)
class Ways:
    """How a user runs a command on hosts."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """By name; one that is missing is reached by `ssh NAME`."""
    every: str = ""
    """What runs a command on all of `hosts`: `distrun exec -H hosts`."""

    def typed(self, names: Sequence[str], script: str, asks: bool = False) -> str:
        """Return what to type to run shell text on these hosts. `asks`: it may ask for a password, as sudo does."""
        hosts = [self.hosts.get(name) or Host(name, login="ssh %s" % quote(name)) for name in names]
        if len(hosts) == 1 or not all(host.login for host in hosts):
            return hosts[0].typed(script, asks)
        is_plain = all(host.login == "ssh %s" % quote(host.name) for host in hosts)
        if not asks and self.every and set(names) == set(self.hosts):
            return "%s %s" % (self.every, quote(script))
        if not asks and is_plain:
            return "distrun exec --hosts %s %s" % (quote(fold(names)), quote(script))
        if is_plain:  # `distrun exec` gives its command no terminal to ask on
            return "for host in %s; do ssh -t $host %s; done" % (" ".join(map(quote, names)), quote(script))
        return "; ".join(host.typed(script, asks) for host in hosts)


@dataclass(frozen=True)
class Row:
    """What was found on one host in one respect."""

    host: str
    """Its name; `HERE` for the machine where the command was typed, empty where all hosts together are meant."""
    check: str
    mark: str
    """OK, WARN or BAD."""
    text: str
    fix: str = ""
    """What to do about it, a line each; never empty for BAD. ON stands for what runs `script` on the host."""
    script: str = ""
    """Shell text for the host."""

    def fix_text(self, ways: Ways, hosts: Sequence[str] = ()) -> str:
        """Return what to do, with what is to be typed, for several hosts at once if it says the same of them."""
        if ON not in self.fix:
            return self.fix
        asks = "sudo " in self.script or self.script.startswith("bash -l")
        return self.fix.replace(ON, ways.typed(list(hosts) or [self.host], self.script, asks))


def folded(rows: Iterable[Row]) -> list[tuple[Row, list[str]]]:
    """Return rows that say the same of several hosts once, with these hosts, in the order of the checks. Pure."""
    rows = list(rows)
    order = {check: index for index, check in reversed(list(enumerate(row.check for row in rows)))}
    groups: dict[tuple[str, ...], tuple[Row, list[str]]] = {}
    for row in rows:
        key = row.check, row.mark, row.text, row.fix, row.script
        groups.setdefault(key, (row, []))[1].append(row.host)
    return sorted(groups.values(), key=lambda group: order[group[0].check])
