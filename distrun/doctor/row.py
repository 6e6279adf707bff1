"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK = "ok"
WARN = "warn"
BAD = "bad"

HERE = "this machine"


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
    """What to type to mend it; never empty for BAD."""


def folded(rows: Iterable[Row]) -> list[tuple[Row, list[str]]]:
    """Return rows that say the same of several hosts once, with these hosts, in the order of the checks. Pure."""
    rows = list(rows)
    order = {check: index for index, check in reversed(list(enumerate(row.check for row in rows)))}
    groups: dict[tuple[str, str, str, str], tuple[Row, list[str]]] = {}
    for row in rows:
        key = row.check, row.mark, row.text, row.fix
        groups.setdefault(key, (row, []))[1].append(row.host)
    return sorted(groups.values(), key=lambda group: order[group[0].check])
