"""Judges hosts beside each other: different versions, one address twice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distrun.doctor.checks import Patient, Wish
from distrun.doctor.row import WARN, Row
from distrun.hosts import fold


def together(patients: Sequence[Patient], wish: Wish) -> list[Row]:
    """Return what is wrong only between hosts: different versions, one address twice."""
    known = [each for each in patients if each.facts]
    rows = []
    asked = ["version", "numpy", "zmq"] if wish.needs_servers else []
    for name in asked:
        found = _by({each.name: str(each.facts["python"].get(name) or "") for each in known})
        if len(found) > 1:
            what = "python" if name == "version" else name
            text = "%s differs: %s" % (what, "; ".join("%s on %s" % (v, fold(h)) for v, h in found.items()))
            rows.append(Row("", "versions", WARN, text, "--python PATH, or --activate, of the same on all hosts"))
    drivers = _by({each.name: _drivers(each.facts["gpus"]["gpus"]) for each in known})
    if len(drivers) > 1:
        text = "GPU drivers differ: %s" % "; ".join("%s on %s" % (v, fold(h)) for v, h in drivers.items())
        rows.append(Row("", "versions", WARN, text))
    for address, names in _by({each.name: str(each.facts["network"]["address"]) for each in known}).items():
        if len(names) > 1:
            text = "%s is the address of %s: are they one machine?" % (address, fold(names))
            rows.append(Row("", "address", WARN, text, "name each machine once in the hosts file"))
    return rows


def _by(values: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            found.setdefault(value, []).append(name)
    return found


def _drivers(rows: Sequence[Sequence[str]]) -> str:
    return ", ".join(sorted({cells[1] for cells in rows if len(cells) > 1}))
