"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distrun.hosts import fold
from distrun.shell import quote

OK = "ok"
WARN = "warn"
BAD = "bad"

HERE = "this machine"
ON = "{on}"


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
    """What to type to mend it; never empty for BAD. ON stands for what runs the rest on the host: see `mend`."""

    def mend(self, hosts: Sequence[str] = ()) -> str:
        """Return what to type, for several hosts at once if it says the same of them."""
        names = list(hosts) or [self.host]
        start = "ssh " + quote(names[0]) if len(names) == 1 else "distrun exec --hosts %s" % quote(fold(names))
        return self.fix.replace(ON, start)


def folded(rows: Iterable[Row]) -> list[tuple[Row, list[str]]]:
    """Return rows that say the same of several hosts once, with these hosts, in the order of the checks. Pure."""
    rows = list(rows)
    order = {check: index for index, check in reversed(list(enumerate(row.check for row in rows)))}
    groups: dict[tuple[str, str, str, str], tuple[Row, list[str]]] = {}
    for row in rows:
        key = row.check, row.mark, row.text, row.fix
        groups.setdefault(key, (row, []))[1].append(row.host)
    return sorted(groups.values(), key=lambda group: order[group[0].check])
