"""Examines hosts: asks each what it has, and has them connect to each other; `checks` judges the answers."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrun import __version__
from distrun.doctor import checks
from distrun.doctor.checks import BAD, HERE, OK, WARN, DoctorRequest, ExaminedHost, Row
from distrun.fleet import Answer, Fleet, Problem
from distrun.hosts import fold
from distrun_runtime.contract.plan import ACTIVATE_S

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun_runtime.contract.plan import Host

PROBE_S = 60.0
"""A probe runs a few programs that may each take up to ten seconds."""
LISTEN_S = 20.0
CONNECT_S = 5.0
"""How long connections to all peers together may take."""
PROGRAM_S = 5.0
ALL_UP_TO = 16
"""So many hosts are tried each with each; more in a ring, and each with the first."""

Pair = tuple[str, str]
"""From, to."""


@dataclass(frozen=True)
class DoctorReport:
    """What was found."""

    rows: tuple[Row, ...]
    facts: Mapping[str, Mapping[str, Any]]
    """By host, as its agent told them."""
    examined: tuple[ExaminedHost, ...] = ()


def examine(backend: Backend, hosts: Sequence[Host], request: DoctorRequest) -> DoctorReport:
    """Examine all hosts at once. Nothing on them is changed."""
    limit_s = PROBE_S + (ACTIVATE_S if request.activate else 0.0)
    with Fleet(backend, hosts) as fleet:
        probed = fleet.ask("probe", lambda name: questions(name, hosts, request), limit_s)
        examined = [_examined(fleet, name, each, request) for name, each in probed.items()]
        ports = _ports(fleet, hosts, examined, request)
    rows = this_machine(backend.needs_hosts)
    for host in examined:
        rows += checks.check(host, request)
    rows += ports + checks.between(examined, request)
    return DoctorReport(tuple(rows), {host.name: host.facts for host in examined}, tuple(examined))


def questions(name: str, hosts: Sequence[Host], request: DoctorRequest) -> dict[str, str]:
    """Return what a host's agent is asked to look at: what a launch would make of it. Pure."""
    host = next(each for each in hosts if each.name == name)
    others = [each.address or each.name for each in hosts if each.name != name]
    interface = host.interface or request.interface
    asked = {
        "python": request.pythons.get(name, ""),
        "activate": request.activate,
        "cwd": request.workdirs.get(name, "") or request.cwd,
        "dst": request.dst,
        "address": host.address,
        "interface": interface,
        "subnet": "" if interface else request.subnet,
        "toward": others[0] if others else "",
    }
    return {key: value for key, value in asked.items() if value}


def _examined(fleet: Fleet, name: str, answer: Answer | Problem, request: DoctorRequest) -> ExaminedHost:
    hello = fleet.hellos.get(name)
    offset = None if hello is None else float(hello.facts.get("time", hello.arrived)) - hello.arrived
    return ExaminedHost(
        name,
        facts=answer.value if isinstance(answer, Answer) else {},
        problem=answer if isinstance(answer, Problem) else None,
        is_met=hello is not None,
        noise=" ".join(each.text for each in fleet.warnings if each.host == name),
        offset_s=offset,
        workdir=request.workdirs.get(name, ""),
    )


def _ports(fleet: Fleet, hosts: Sequence[Host], examined: Sequence[ExaminedHost], request: DoctorRequest) -> list[Row]:
    """Have the hosts listen and connect to each other; return what came of it."""
    addresses = {each.name: str(each.facts["network"]["address"]) for each in examined if each.facts}
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
    nonces = {pair: secrets.token_hex(16) for pair in pairs(names) if pair[1] in listening}

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
    return rows + port_rows(nonces, results, arrived, places)


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def this_machine(uses_ssh: bool) -> list[Row]:
    """Return the rows of this machine. Runs `ssh -V` and `rsync --version`."""
    text = f"distrun {__version__}, python {platform.python_version()} {sys.executable}"
    found = [Row(HERE, "this machine", OK, text)]
    if uses_ssh:
        sudo = "" if os.geteuid() == 0 else "sudo "
        install = f"{sudo}apt-get update && {sudo}apt-get install -y %s"
        for name, argv, need in (
            ("ssh", ["ssh", "-V"], "rsync, --transport openssh and parts of the ssh configuration need it"),
            ("rsync", ["rsync", "--version"], "--sync-dst-dir needs it"),
        ):
            version = first_line(argv)
            package = "openssh-client" if name == "ssh" else name
            if not version:
                found.append(Row(HERE, "this machine", WARN, f"no {name}: {need}", install % package))
            elif version.startswith("openrsync"):
                fix = "brew install rsync"
                found.append(Row(HERE, "this machine", WARN, version + " lacks what --sync-dst-dir needs", fix))
            else:
                found.append(Row(HERE, "this machine", OK, version))
    return found


def first_line(argv: Sequence[str]) -> str:
    """Return the first line that a program prints, empty if there is none, or no such program."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return " ".join(lines[0].split()) if lines and done.returncode == 0 else ""


def pairs(names: Sequence[str]) -> list[Pair]:
    """Return who connects to whom, both ways, each pair once."""
    if len(names) <= ALL_UP_TO:
        return [(one, other) for one in names for other in names if one != other]
    first = names[0]
    ring = zip(names, [*names[1:], first], strict=True)
    star = [pair for name in names[1:] for pair in ((first, name), (name, first))]
    return list(dict.fromkeys([*ring, *star]))


def port_rows(
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
            text = "; ".join(f"{fold(who)} cannot reach {places[name]}: {why}" for why, who in wrong.items())
            fix = "open the data ports between the hosts (a firewall?), name open ones by --port-range A-B, or choose "
            rows.append(Row(name, "data ports", BAD, text, fix + "another network by --interface or --subnet"))
        elif count:
            peers = f"all {count} asked" if count > 1 else "its peer"
            rows.append(Row(name, "data ports", OK, f"reached by {peers}"))
    return rows
