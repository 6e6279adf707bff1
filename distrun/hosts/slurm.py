"""What Slurm says of an allocation: `n[01-04],x1` and `2(x3),1`. Pure."""

from __future__ import annotations

import re

from distrun.errors import HostsError
from distrun.hosts import grammar, ranges
from distrun.hosts.findings import Finding
from distrun.hosts.spec import HostSpec, Inventory

NODES = "SLURM_JOB_NODELIST"
TASKS = "SLURM_TASKS_PER_NODE"

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def parse(nodes: str, tasks: str) -> Inventory:
    """Return the hosts of an allocation. `tasks`: how many fit on each, in the same order; may be empty.

    Raises:
        HostsError: the node list is none.
    """
    try:
        names = list(dict.fromkeys(ranges.expand(nodes)))
    except HostsError as err:
        raise HostsError(str(err).replace(ranges.SOURCE + ":", "$%s:" % NODES), count=err.count) from None
    counts = per_node(tasks)
    warnings: tuple[str, ...] = ()
    if tasks.strip() and len(counts) != len(names):
        text = "%d values in %s for %d nodes: ignored" % (len(counts), grammar.quote(tasks), len(names))
        warnings = (Finding("$" + TASKS, 1, 1, "W121", text).head,)
    slots = dict(zip(names, counts, strict=True)) if len(counts) == len(names) else {}
    specs = tuple(HostSpec(name, slots=slots.get(name)) for name in names)
    return Inventory("$" + NODES, specs, tuple(names), warnings)


def per_node(text: str) -> list[int]:
    """Return the counts of `2(x3),1`: 2, 2, 2, 1. Empty, if it is something else. Pure."""
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item)
        if match is None or not int(match[1]) or len(counts) + int(match[2] or 1) > ranges.LIMIT:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
