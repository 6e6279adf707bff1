"""Asks the hosts what each has and whether they reach each other; the rest of the doctor judges the answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrun.doctor import checks, here, pairs, together
from distrun.doctor.checks import Patient, Wish
from distrun.doctor.pairs import Pair
from distrun.doctor.row import BAD, Row
from distrun.fleet import Answer, Fleet, Problem
from distrun_runtime.contract.plan import ACTIVATE_S

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun_runtime.contract.plan import Host

PROBE_S = 60.0
"""A probe runs a few programs that may each take up to ten seconds."""
LISTEN_S = 20.0
CONNECT_S = 5.0
"""How long connections to all peers together may take."""


@dataclass(frozen=True)
class Request:
    """What to look at."""

    wish: Wish
    cwd: str = ""
    interface: str = ""
    subnet: str = ""
    port_range: str = ""
    pythons: Mapping[str, str] | None = None
    """Interpreters of servers, by host; python3 for the others."""
    workdirs: Mapping[str, str] = field(default_factory=dict)
    """`workdir=` of the hosts file, by host: tasks start there, wherever files are copied."""


@dataclass(frozen=True)
class Report:
    """What was found."""

    rows: tuple[Row, ...]
    facts: Mapping[str, Mapping[str, Any]]
    """By host, as its agent told them."""
    patients: tuple[Patient, ...] = ()


def examine(backend: Backend, hosts: Sequence[Host], request: Request) -> Report:
    """Examine all hosts at once. Nothing on them is changed."""
    limit_s = PROBE_S + (ACTIVATE_S if request.wish.activate else 0.0)
    with Fleet(backend, hosts) as fleet:
        probed = fleet.ask("probe", lambda name: questions(name, hosts, request), limit_s)
        patients = [_patient(fleet, name, each, request) for name, each in probed.items()]
        ports = _ports(fleet, hosts, patients, request)
    rows = here.rows(backend.needs_hosts)
    for patient in patients:
        rows += checks.check(patient, request.wish)
    rows += ports + together.together(patients, request.wish)
    return Report(tuple(rows), {patient.name: patient.facts for patient in patients}, tuple(patients))


def questions(name: str, hosts: Sequence[Host], request: Request) -> dict[str, str]:
    """Return what a host's agent is asked to look at: what a launch would make of it. Pure."""
    host = next(each for each in hosts if each.name == name)
    others = [each.address or each.name for each in hosts if each.name != name]
    interface = host.interface or request.interface
    asked = {
        "python": (request.pythons or {}).get(name, ""),
        "activate": request.wish.activate,
        "cwd": request.workdirs.get(name, "") or request.cwd,
        "dst": request.wish.dst,
        "address": host.address,
        "interface": interface,
        "subnet": "" if interface else request.subnet,
        "toward": others[0] if others else "",
    }
    return {key: value for key, value in asked.items() if value}


def _patient(fleet: Fleet, name: str, answer: Answer | Problem, request: Request) -> Patient:
    hello = fleet.hellos.get(name)
    offset = None if hello is None else float(hello.facts.get("time", hello.arrived)) - hello.arrived
    return Patient(
        name,
        facts=answer.value if isinstance(answer, Answer) else {},
        problem=answer if isinstance(answer, Problem) else None,
        is_met=hello is not None,
        noise=" ".join(each.text for each in fleet.warnings if each.host == name),
        offset_s=offset,
        workdir=request.workdirs.get(name, ""),
    )


def _ports(fleet: Fleet, hosts: Sequence[Host], patients: Sequence[Patient], request: Request) -> list[Row]:
    """Have the hosts listen and connect to each other; return what came of it."""
    addresses = {each.name: str(each.facts["network"]["address"]) for each in patients if each.facts}
    names = [name for name, address in addresses.items() if address]
    if len(names) < 2:
        return []
    opened = fleet.ask(
        "listen", lambda name: {"address": addresses[name], "port_range": request.port_range}, LISTEN_S, names
    )
    rows = [
        Row(name, "data ports", BAD, each.text, "--port-range A-B with free ports, or another --interface")
        for name, each in opened.items()
        if isinstance(each, Problem)
    ]
    listening = {name: int(each.value["port"]) for name, each in opened.items() if isinstance(each, Answer)}
    nonces = {pair: secrets.token_hex(16) for pair in pairs.pairs(names) if pair[1] in listening}

    def targets(name: str) -> dict[str, Any]:
        each = [
            {"host": to, "address": addresses[to], "port": listening[to], "nonce": nonce}
            for (source, to), nonce in nonces.items()
            if source == name
        ]
        return {"targets": each, "limit_s": CONNECT_S}

    connected = fleet.ask("connect", targets, CONNECT_S + LISTEN_S, names)
    closed = fleet.ask("close", {}, LISTEN_S, names)
    results: dict[Pair, str] = {}
    for source, to in nonces:
        told = connected[source]
        if isinstance(told, Answer) and isinstance(closed[to], Answer):
            results[source, to] = str(told.value["results"].get(to, "was not tried"))
    arrived = {name: each.value["nonces"] for name, each in closed.items() if isinstance(each, Answer)}
    places = {name: _endpoint(addresses[name], port) for name, port in listening.items()}
    return rows + pairs.verdict(nonces, results, arrived, places)


def _endpoint(address: str, port: int) -> str:
    return "[%s]:%d" % (address, port) if ":" in address else "%s:%d" % (address, port)
