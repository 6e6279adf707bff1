"""Who has to reach whom on the data ports, and what came of it. Pure.

Each host listens; each of its peers leaves a nonce there that nobody else knows. What has arrived proves that it was
that very host that was reached, whatever stands between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distrun.doctor.row import BAD, OK, Row
from distrun.hosts import fold

ALL_UP_TO = 16
"""So many hosts are tried each with each; more in a ring, and each with the first."""

Pair = tuple[str, str]
"""From, to."""


def pairs(names: Sequence[str]) -> list[Pair]:
    """Return who connects to whom, both ways, each pair once."""
    if len(names) <= ALL_UP_TO:
        return [(one, other) for one in names for other in names if one != other]
    first = names[0]
    ring = zip(names, [*names[1:], first], strict=True)
    star = [pair for name in names[1:] for pair in ((first, name), (name, first))]
    return list(dict.fromkeys([*ring, *star]))


def verdict(
    nonces: Mapping[Pair, str],
    results: Mapping[Pair, str],
    arrived: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
) -> list[Row]:
    """Return a row for each host that was to be reached.

    Args:
        nonces: what each pair's first was to leave with its second.
        results: why it could not, "" if it could, by pair; a pair that is missing was not tried.
        arrived: the nonces that each host found.
        places: `address:port` where each host listened; rows come in this order.
    """
    rows = []
    for name in places:
        wrong: dict[str, list[str]] = {}
        count = 0
        for (source, to), nonce in nonces.items():
            if to != name or (source, to) not in results:
                continue
            count += 1
            reason = results[source, to]
            if not reason and nonce not in arrived.get(name, ()):
                reason = "something else answered there"
            if reason:
                wrong.setdefault(reason, []).append(source)
        if wrong:
            text = "; ".join("%s cannot reach %s: %s" % (fold(who), places[name], why) for why, who in wrong.items())
            fix = "open the data ports between the hosts (a firewall?), name open ones by --port-range A-B, or choose "
            rows.append(Row(name, "data ports", BAD, text, fix + "another network by --interface or --subnet"))
        elif count:
            rows.append(
                Row(name, "data ports", OK, "reached by %s" % ("all %d asked" % count if count > 1 else "its peer"))
            )
    return rows
